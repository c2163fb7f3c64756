"""Folders that appear whole or not at all: written beside their final name, then exchanged with it; and read whole.

Knows files, folders and free space; deliberately knows nothing of models, tensors or what the files mean.
"""

import ctypes
import errno
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from llmtrain.checkpoint.errors import ModelFolderError

# What a file system needs besides the bytes themselves: tables, journals, the small text files of a folder.
_FREE_SPACE_MARGIN = 16 * 2**20
# A process on another machine cannot be asked whether it lives: what it has not touched for so long is given up.
_ABANDONED_AFTER = 3600.0  # seconds
_UNFINISHED = re.compile(r"\.(?P<name>.+)\.(?P<doing>writing|old|removing)-(?P<host>.+)-(?P<process>\d+)")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# A folder that a run exchanges every few seconds is read in far less time; what changes so often is no such folder.
_READINGS = 5
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


Result = TypeVar("Result")


@contextmanager
def whole_folder(folder: str | Path, *, marker: str, needed_bytes: int = 0) -> Iterator[Path]:
    """Yield an empty folder to write into; on leaving, it takes the place of `folder` in one step.

    Each file that a reader opens is the old folder's or the new one's; who opens several reads through `read_whole`, or
    may get some of each. A kill at any moment leaves the old folder. If the body raises, nothing changes and what was
    written is removed.

    Args:
        folder: The final place. Links are followed, parents are created.
        marker: Name of a file that shows that an existing folder was written here and may be replaced.
        needed_bytes: Size of what will be written; checked against the free space before anything else.

    Raises:
        ModelFolderError: `folder` is a file or somebody else's folder, or the disk is too full.
    """
    final = Path(os.path.realpath(folder))
    _refuse_foreign(final, marker)
    final.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(final.parent, of=final.name)
    check_free_space(final.parent, needed_bytes)
    beside = _aside(final, "writing")
    beside.mkdir()
    try:
        yield beside
        _flush(beside)
        _put_in_place(beside, final)
    except Exception as error:
        if not _ran_full(error):
            raise
        raise ModelFolderError(
            f"The disk ran full while writing {final}; the former state is untouched: free some space and run again."
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def read_whole(folder: Path, read: Callable[[], Result]) -> Result:
    """Call `read` until the folder was one and the same before and after: what it returns is then of one folder.

    Args:
        folder: The folder that `read` opens files of, by their paths. It may be exchanged meanwhile.
        read: Called again, after a short wait, when the folder was exchanged; what it raised then counts for nothing.

    Raises:
        ModelFolderError: The folder is exchanged every time.
        Exception: Whatever `read` raises of a folder that stays.
    """
    for _ in range(_READINGS):
        before = _identity(folder)
        try:
            result = read()
        except (OSError, ValueError):
            if _identity(folder) == before:
                raise
        else:
            if _identity(folder) == before:
                return result
            del result  # a model, as a rule: one at a time
        time.sleep(0.1)
    raise ModelFolderError(
        f"{folder} was exchanged for another {_READINGS} times while it was read; wait until what writes it is done, "
        "or give a folder that stays, such as a checkpoint."
    )


def _identity(folder: Path) -> tuple[int, ...] | None:
    """What tells a folder from one that takes its place; the number of a removed one may be given out again."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _ran_full(error: Exception) -> bool:
    """Whether the disk was full. Libraries written in Rust raise errors of their own that quote the system's number."""
    if isinstance(error, ModelFolderError) and isinstance(error.__cause__, Exception):
        return _ran_full(error.__cause__)  # of a folder inside this one: the outer name says more
    if isinstance(error, OSError):
        return error.errno in _DISK_FULL
    return any(f"(os error {number})" in str(error) for number in _DISK_FULL)


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Raise `ModelFolderError` if the file system of the existing `folder` has no room for `needed_bytes`."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + _FREE_SPACE_MARGIN:
        raise ModelFolderError(
            f"No disk space: {(needed_bytes + _FREE_SPACE_MARGIN) / 1e6:,.0f} MB are needed in {folder} and "
            f"{free / 1e6:,.0f} MB are free; free some space or choose another folder with paths.run_dir=…"
        )


def _refuse_foreign(final: Path, marker: str) -> None:
    if not final.exists():
        return
    if not final.is_dir():
        raise ModelFolderError(f"{final} is a file where a folder is to be written; choose another place.")
    if any(final.iterdir()) and not (final / marker).is_file():
        raise ModelFolderError(
            f"{final} holds files that llmtrain did not write (no {marker}); it will not be replaced: "
            "choose another folder or empty this one."
        )


def remove_folder(folder: Path) -> None:
    """Removes a folder so that its name is gone at once: a kill half-way leaves nothing under it."""
    aside = _aside(folder, "removing")
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(folder: Path, *, of: str | None = None) -> None:
    """Removes what killed processes left half-written or half-removed in a folder; that of live ones is left alone.

    Args:
        folder: Where to look; it need not exist.
        of: Only what was to become, or had been, the folder of this name.
    """
    if not folder.is_dir():
        return
    for left in sorted(folder.iterdir()):
        match = _UNFINISHED.fullmatch(left.name)
        if not match or of not in (None, match["name"]) or not _is_abandoned(left, match["host"], match["process"]):
            continue
        final = folder / match["name"]
        if match["doing"] == "old" and not final.exists():
            left.rename(final)  # killed in the instant between two renames
        else:
            shutil.rmtree(left, ignore_errors=True)


def _aside(final: Path, doing: str) -> Path:
    """A name beside the final one that says who is doing what with it."""
    return final.with_name(f".{final.name}.{doing}-{socket.gethostname()}-{os.getpid()}")


def _is_abandoned(left: Path, host: str, process: str) -> bool:
    if host == socket.gethostname():
        return int(process) == os.getpid() or not _is_alive(int(process))
    times = [path.lstat().st_mtime for path in [left, *left.rglob("*")]]
    return time.time() - max(times) > _ABANDONED_AFTER


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _flush(folder: Path) -> None:
    """Force every file below `folder`, and the folders themselves, to the disk."""
    for path in [folder, *folder.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _put_in_place(beside: Path, final: Path) -> None:
    if not final.exists():
        beside.rename(final)
    elif not _exchange(beside, final):
        # Without an atomic exchange (some network file systems, not Linux) the name is missing for an instant.
        old = _aside(final, "old")
        final.rename(old)
        beside.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    descriptor = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step (Linux `renameat2`); False where the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    return renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0
