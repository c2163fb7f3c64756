"""Starts the other processes of this machine, tells Lightning where this one stands, and notices when one has died.

In the place of Lightning's own environments and launcher: those kill all processes without a word when one has died,
and under Slurm they catch signals and queue the job again by themselves. Knows processes; nothing of models or folders.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from llmtrain.training import early
from llmtrain.training.lost import POLL_SECONDS
from llmtrain.training.placement import Placement

log = logging.getLogger(__name__)

GRACE_SECONDS = 8.0
"""How long this process may take to end by itself, with its own words, after another one has died."""


class Cluster(LightningEnvironment):
    """What a placement says, in the form that Lightning asks for.

    Args:
        place: This process's placement.
        local_size: Processes on each machine.
    """

    def __init__(self, place: Placement, local_size: int) -> None:
        super().__init__()
        self._place = place
        self._main_port = place.main_port or -1
        _, self._local_rank, self._node_rank = place.ranks(local_size)

    @property
    def creates_processes_externally(self) -> bool:
        """Whether all processes are there already."""
        return self._place.starts_all

    @property
    def main_address(self) -> str:
        """Where rank 0 is."""
        return self._place.main_address or "127.0.0.1"

    def local_rank(self) -> int:
        """This process's number on its machine."""
        return self._local_rank

    def node_rank(self) -> int:
        """This machine's number."""
        return self._node_rank


@contextmanager
def _local_world_size(processes: int) -> Iterator[None]:
    """While inside, processes that are started learn, as torchrun would say it, how many each machine has.

    Not longer: what this process starts afterwards (a worker of a test, another run) is no part of this run.
    """
    former = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = str(processes)
    try:
        yield
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE")
        if former is not None:
            os.environ["LOCAL_WORLD_SIZE"] = former


class Launcher(_SubprocessScriptLauncher):
    """Starts the other processes of this machine by the command line of this one, and watches them while they train.

    Once this process has left the training, by an error of its own too, it ends by itself and with its own exit code.

    Attributes:
        lost: What became of the first one that ended badly, as a clause with its rank; None while all is well.
        explained: Set once somebody has told the user.
    """

    def __init__(self, cluster: Cluster, num_processes: int, num_nodes: int) -> None:
        super().__init__(cluster, num_processes, num_nodes)
        self.lost: str | None = None
        self.explained = False
        self._lost_code = 0  # its exit code
        self._first_rank = cluster.node_rank() * num_processes
        self._over = threading.Event()

    def launch(self, function: Callable, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Starts the processes, unless somebody else has, and calls the function."""
        if not self.cluster_environment.creates_processes_externally:
            with _local_world_size(self.num_processes):
                self._call_children_scripts()
            early.before_end(lambda: self.kill(signal.SIGKILL))
            threading.Thread(target=self._watch, name="watch-other-ranks", daemon=True).start()
        try:
            return function(*args, **kwargs)
        finally:
            self._over.set()  # from now on nothing waits inside a collective

    def find_lost(self, seconds: float) -> str | None:
        """What became of a process that ended badly, waiting a little for one to end."""
        end = time.monotonic() + seconds
        while self.procs and not self._look() and time.monotonic() < end:
            time.sleep(POLL_SECONDS / 5)
        return self.lost

    def _look(self) -> bool:
        """Whether a process has ended badly; `lost` then says which."""
        for number, process in enumerate(self.procs):
            if self.lost is None and (code := process.poll()):
                self._lost_code = code
                self.lost = f"rank {self._first_rank + 1 + number} {describe_exit(code)}"
        return self.lost is not None

    def _watch(self) -> None:
        """Until a process ends badly: then this one has a while to end by itself, unless it waits for the dead."""
        while not self._look():
            if self._over.wait(POLL_SECONDS):
                return
        if early.is_armed() and self._lost_code in (early.REQUEUE_EXIT_CODE, *(-number for number in early.SIGNALS)):
            early.end(f"a signal to another process ({self.lost})")
        if self._over.wait(GRACE_SECONDS):
            return
        if not self.explained:
            log.error("%s, and the others cannot go on without it", self.lost)
        self.kill(signal.SIGKILL)
        os._exit(1)  # the main thread may wait inside a collective, where no exception reaches it


def describe_exit(code: int) -> str:
    """How a process ended, for a sentence about it."""
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name
    hint = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
