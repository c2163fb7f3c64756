"""Starts the ranks of a small job on this machine and waits for them. Knows nothing of what they compute."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from llmtrain.training import placement

_OTHERS_SECONDS = 10.0  # for the other ranks to say what they saw of the one that failed
_TAIL = 4000  # characters of a rank's standard error, for a message
NO_COMPILER = {"PATH": "/nowhere", "CXX": "none"}
"""For ranks that need no compiler: DeepSpeed would spend a minute on an op that nothing here uses."""


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Ranks:
    """A command as one process for each rank, which meet at a free port of this machine; left, all have ended.

    Args:
        command: What each runs; its `LOCAL_RANK` tells it which it is.
        processes: How many.
        folder: Where they run.
        variables: Further ones for all, beside this process's own but for those that say where this one stands.
    """

    def __init__(
        self, command: Sequence[str], processes: int, folder: Path, *, variables: Mapping[str, str] | None = None
    ) -> None:
        inherited = placement.unplaced(os.environ)
        inherited.pop("DS_ACCELERATOR", None)  # which this process settled on
        package = str(Path(__file__).resolve().parents[2])  # a checkout may not be installed
        path = os.pathsep.join(filter(None, [package, inherited.get("PYTHONPATH")]))
        meeting = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self._environment = inherited | meeting | {"PYTHONPATH": path} | dict(variables or {})
        # Files and not pipes: nobody reads while they run, and a full pipe stops who writes.
        self._logs = tempfile.TemporaryDirectory(prefix="llmtrain-ranks-")
        self._started = [self._start(command, rank, folder) for rank in range(processes)]

    def _start(self, command: Sequence[str], rank: int, folder: Path) -> subprocess.Popen[bytes]:
        with self._log("out", rank).open("wb") as out, self._log("err", rank).open("wb") as err:
            environment = self._environment | {"LOCAL_RANK": str(rank)}
            return subprocess.Popen(
                list(command), env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=folder
            )

    def _log(self, stream: str, rank: int) -> Path:
        return Path(self._logs.name) / f"{stream}-{rank}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()
        self._logs.cleanup()

    def _end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()

    def written(self, stream: str) -> str:
        """What all ranks have written to `out` or `err`, one after the other."""
        logs = (self._log(stream, rank) for rank in range(len(self._started)))
        return "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)

    def wait(self, seconds: float) -> None:
        """Until all have ended well. The first that fails ends the others, soon.

        Raises:
            RuntimeError: One failed, or they took longer than `seconds` in all.
        """
        count, end = len(self._started), time.monotonic() + seconds
        failed: tuple[int, int] | None = None  # the first one, and its exit code
        while any(process.poll() is None for process in self._started) and time.monotonic() < end:
            if failed is None and (failed := self._failed()) is not None:
                end = min(end, time.monotonic() + _OTHERS_SECONDS)
            time.sleep(0.05)
        failed = failed or self._failed()
        late = any(process.poll() is None for process in self._started)
        self._end()
        if failed is not None:
            rank, code = failed
            raise RuntimeError(f"rank {rank} of {count} ended with code {code}:\n{self._tail(rank)}")
        if late:
            raise RuntimeError(f"{count} ranks took more than {seconds:.0f} s:\n{self._tail(0)}")

    def _failed(self) -> tuple[int, int] | None:
        codes = ((rank, process.poll()) for rank, process in enumerate(self._started))
        return next(((rank, code) for rank, code in codes if code), None)

    def _tail(self, rank: int) -> str:
        return self._log("err", rank).read_text(encoding="utf-8", errors="replace")[-_TAIL:]


def launch(
    command: Sequence[str],
    processes: int,
    folder: Path,
    seconds: float,
    *,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Runs a command once for each rank, in `folder`, and waits for all of them; see `Ranks`.

    Returns:
        What the ranks wrote to standard error.

    Raises:
        RuntimeError: A rank failed or they took too long.
    """
    with Ranks(command, processes, folder, variables={"OMP_NUM_THREADS": "1"} | dict(variables or {})) as ranks:
        ranks.wait(seconds)
        return ranks.written("err")
