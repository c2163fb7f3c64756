"""The wheel: holds the configs, and its console command works from any folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the contents of the wheel, as pip would lay them out."""
    source = tmp_path_factory.mktemp("source")
    for name in ("llmtrain", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    subprocess.run(build, cwd=source, check=True, timeout=200, capture_output=True)
    (wheel,) = (source / "dist").glob("*.whl")
    target = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


@pytest.mark.medium
def test_the_wheel_holds_every_module_and_every_config(installed):
    def listed(folder, pattern):
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob(pattern))

    assert listed(installed / "llmtrain", "*.py") == listed(ROOT / "llmtrain", "*.py")
    assert listed(installed / "llmtrain" / "configs", "*.yaml") == listed(ROOT / "configs", "*.yaml")
    assert listed(installed / "llmtrain", "*.html") == listed(ROOT / "llmtrain", "*.html") != []
    for pattern in ("*.css", "*.js"):
        assert listed(installed / "llmtrain", pattern) == listed(ROOT / "llmtrain", pattern) != []
    (information,) = installed.glob("llmtrain-*.dist-info")
    assert "llmtrain = llmtrain.launch.main:main" in (information / "entry_points.txt").read_text()
    assert {path.name for path in installed.iterdir()} == {"llmtrain", information.name}


@pytest.mark.medium
def test_the_console_command_works_from_any_folder(installed, tmp_path, fake_environment):
    """With the wheel alone on the path; the real command `prepare`, on text that is always there."""
    code = "import sys; from llmtrain.launch.main import main; sys.exit(main())"
    arguments = ["prepare", "data=python_docs", "tokenizer=byte", "paths.data_dir=数据 x", "name=a"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path,
        env=fake_environment | {"PYTHONPATH": str(installed)},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"command": "prepare"' in done.stdout
    assert (tmp_path / "数据 x" / "shards").is_dir()
    assert (tmp_path / "runs" / "prepare" / "a" / "results.json").is_file()
