"""Several processes for one evaluation: this one starts the others, or a launcher has started them all.

Each has the whole model; results come together through torch's gloo group. Knows placements and processes; not what is
measured.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.bench.ranks import free_port
from llmtrain.launch import children
from llmtrain.training import placement
from llmtrain.training.lost import LostProcessError
from llmtrain.training.placement import NONE, TORCHRUN, Placement

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.evaluation import Team

logger = logging.getLogger(__name__)

TIMEOUT = timedelta(hours=12)  # one process may have the longest items of a long evaluation
_LAST_WORDS = 5.0  # seconds in which the others end after this one


def check_team(settings: DictConfig) -> Placement:
    """This process's place, and whether as many processes as the settings ask for can be had.

    Raises:
        ValueError: A launcher started another number of them, or not all.
    """
    place = placement.here()
    if place.launcher == NONE:
        return place
    if not place.starts_all or place.world_size is None:
        raise ValueError(
            f"{place.launcher} has not started all processes of this evaluation: start them with torchrun or srun, or "
            "unset NODE_RANK and the like and give devices=… on one machine"
        )
    if settings.devices not in ("auto", place.world_size):
        raise ValueError(
            f"devices={settings.devices} does not fit what {place.launcher} says: {place.world_size} processes; give "
            "devices=auto"
        )
    return place


@contextmanager
def working_together(settings: DictConfig, run_dir: Path) -> Iterator[Team]:
    """The team of this evaluation; the others, if this process starts them, run the same command.

    Raises:
        LostProcessError: Another process ended before its part was done.
    """
    from llmtrain.evaluation import ALONE, Team

    place = check_team(settings)
    size = place.world_size or (1 if settings.devices == "auto" else settings.devices)
    if size == 1:
        yield ALONE
        return
    here, others = place.rank or 0, []
    port = place.main_port
    if place.launcher == NONE:
        port = free_port()
        others = [_start(rank, size, port, run_dir) for rank in range(1, size)]
    _share_cores(place.local_size or size)
    meeting = "env://" if place.launcher == TORCHRUN else f"tcp://{place.main_address or '127.0.0.1'}:{port}"
    try:
        _join(meeting, here, size)
        yield Team(here, size)
        _leave()
    except RuntimeError as error:
        raise _named(others, error) from error
    finally:
        _end(others)


def _start(rank: int, size: int, port: int, run_dir: Path) -> subprocess.Popen[bytes]:
    arguments = sys.argv[1:]
    if arguments[:1] == ["evaluate"]:  # the console command; the script is called without it
        arguments = arguments[1:]
    placed = placement.variables(rank, size, port) | {placement.RUN_DIR_VARIABLE: str(run_dir)}
    environment = children.environment() | placed
    return subprocess.Popen(children.command_line("evaluate", arguments), env=environment, stdin=subprocess.DEVNULL)


def _share_cores(processes: int) -> None:
    """Threads of many processes that want every core would wait for each other."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // processes))


def _join(meeting: str, rank: int, size: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=TIMEOUT)
    logger.info("%d processes share the items", size)


def _leave() -> None:
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def _named(others: list[subprocess.Popen[bytes]], error: RuntimeError) -> RuntimeError:
    """The error of a collective, as what became of the process that broke it, if one of ours has."""
    end = time.monotonic() + _LAST_WORDS
    while time.monotonic() < end:
        for rank, process in enumerate(others, start=1):
            code = process.poll()
            if code:
                how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}, and says why above"
                return LostProcessError(f"process {rank} of the evaluation {how}")
        if not others:
            break
        time.sleep(0.1)
    return error


def _end(others: list[subprocess.Popen[bytes]]) -> None:
    for process in others:
        try:
            process.wait(_LAST_WORDS if sys.exc_info()[0] is None else 0.1)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
