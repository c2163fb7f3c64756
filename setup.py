"""Puts `configs/`, which stands beside the package, into the wheel as `llmtrain/configs/`, and the pages' files.

The rest is in pyproject.toml, whose own syntax can either find packages or place one elsewhere, not both.
"""

from setuptools import find_packages, setup

PAGE = ["*.html", "*.css", "*.js"]

setup(
    packages=[*find_packages(include=["llmtrain", "llmtrain.*"]), "llmtrain.configs"],
    package_dir={"llmtrain.configs": "configs"},
    package_data={
        "llmtrain.configs": ["**/*.yaml"],
        "llmtrain.inspector.page": PAGE,
        "llmtrain.report": PAGE,
        "llmtrain.serve.page": PAGE,
    },
)
