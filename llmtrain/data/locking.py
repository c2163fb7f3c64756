"""One process at a time: a lock file that the system releases when its holder ends, however it ends."""

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


@contextmanager
def locked(path: Path, *, work: str) -> Iterator[None]:
    """Holds the lock at `path`, waiting for another process that holds it; `work` names what it does, for the log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is %s: waiting for it", work)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
