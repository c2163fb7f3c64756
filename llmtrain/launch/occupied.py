"""One process writes into a run folder: the first one there holds a lock until it ends, however it ends.

The lock is POSIX's on a file of its own: the system releases it with the process that took it, processes that were
forked do not hold it on, and NFS carries it to other machines. (`flock` would do neither of the last two.) Knows
folders and processes; nothing of runs.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


def occupy(folder: Path) -> int:
    """Makes the folder unless it is there, and takes its lock for this process.

    Returns:
        The descriptor of the lock's file. Another one of that file, when closed, would give the lock up.

    Raises:
        ValueError: Another process has it.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # its holder has just taken the folder back
            continue
        _take(descriptor, folder)
        try:
            if os.path.samestat(os.fstat(descriptor), (folder / LOCK_FILE).stat()):
                break
        except FileNotFoundError:
            pass
        os.close(descriptor)  # that file was removed before it could be locked
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return descriptor


def leave(folder: Path) -> None:
    """Removes the lock's file; who has opened it meanwhile notices, and makes a new one."""
    (folder / LOCK_FILE).unlink(missing_ok=True)


def _take(descriptor: int, folder: Path) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            logger.warning("the disk of %s keeps no locks: see to it that no other process writes there", folder)
            return
        holder = os.pread(descriptor, 200, 0).decode(errors="replace")
        os.close(descriptor)
        if error.errno not in _HELD:
            raise
        raise ValueError(
            f"another process{f' ({holder})' if holder else ''} is writing into {folder}: wait until it has ended, or "
            "give another name=… or paths.run_dir=…"
        ) from error
