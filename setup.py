"""Puts `configs/`, which stands beside the package, into the wheel as `llmtrain/configs/`, and the pages.

The rest is in pyproject.toml, whose own syntax can either find packages or place one elsewhere, not both.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["llmtrain", "llmtrain.*"]), "llmtrain.configs"],
    package_dir={"llmtrain.configs": "configs"},
    package_data={
        "llmtrain.configs": ["**/*.yaml"],
        "llmtrain.inspector.page": ["*.html", "*.css", "*.js"],
        "llmtrain.serve.page": ["*.html", "*.css", "*.js"],
    },
)
