"""How the processes of one run come to the same run folder, whoever started them.

Our own processes inherit it from the first one. torchrun has a key-value store that every process reaches: rank 0
leaves the folder there. Slurm has the job's number. Variables set by hand say nothing, so the user names the folder.
Knows launchers and paths; nothing of what a run is.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from llmtrain.training.placement import BY_HAND, NONE, SLURM, TORCHRUN, Placement

LONG_WAIT = 10.0  # seconds of waiting for the folder until it is said what for
LONGEST_WAIT = 300.0  # seconds until a folder that does not appear is taken for one on another disk


def job_name(place: Placement, environment: Mapping[str, str]) -> str | None:
    """The name of a run that Slurm started: a job that is queued again finds its folder under the same one."""
    if place.launcher != SLURM or not environment.get("SLURM_JOB_ID"):
        return None
    step = environment.get("SLURM_STEP_ID", "0")
    return f"slurm-{environment['SLURM_JOB_ID']}" + ("" if step == "0" else f"-{step}")


def check_tellable(place: Placement, environment: Mapping[str, str]) -> None:
    """On rank 0, where the settings do not name the folder: the others must have a way to learn it.

    Raises:
        ValueError: They have not; so they refuse as well, and nobody waits for them.
    """
    if place.launcher != NONE and place.world_size not in (None, 1) and not _has_store(place, environment):
        raise ValueError(
            f"the other ranks cannot know the run folder, since {_launcher(place)}: give all ranks the same one with "
            "paths.run_dir=… or name=…"
        )


def tell(place: Placement, folder: Path, environment: Mapping[str, str]) -> None:
    """On rank 0: leaves the folder where torchrun's other processes find it."""
    if _has_store(place, environment):
        _store(environment, place, 60.0).set(_key(environment), str(folder))


def former(place: Placement, environment: Mapping[str, str]) -> Path | None:
    """On rank 0: the folder of the attempt that torchrun has just started anew, if it did."""
    count = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not count or not _has_store(place, environment):
        return None
    store, key = _store(environment, place, 60.0), _key(environment, count - 1)
    return Path(store.get(key).decode()) if store.check([key]) else None


def learn(place: Placement, environment: Mapping[str, str], *, rank: int, timeout: float) -> Path:
    """On the other ranks: the folder that rank 0 has chosen.

    Raises:
        ValueError: The launcher has no way to tell, or rank 0 does not.
    """
    if not _has_store(place, environment):
        raise ValueError(
            f"rank {rank} does not know the run folder, since {_launcher(place)}: give all ranks the same one with "
            "paths.run_dir=… or name=…"
        )
    store = _store(environment, place, timeout)
    try:
        return Path(store.get(_key(environment)).decode())
    except RuntimeError as error:
        raise ValueError(
            f"rank 0 has not said within {timeout:g} s where the run folder is; look at its log"
        ) from error


def wait_for(folder: Path, *, rank: int, timeout: float) -> None:
    """Until the folder that rank 0 makes is there.

    Raises:
        ValueError: It is not; most likely this machine has another disk.
    """
    seconds = min(timeout, LONGEST_WAIT)
    start, told = time.monotonic(), False
    while not folder.is_dir():
        waited = time.monotonic() - start
        if waited > LONG_WAIT and not told:
            told = True
            print(
                f"[rank {rank}] waits for rank 0 to make {folder}; if nobody started a rank 0, stop this and unset the "
                f"variables that call it rank {rank} (RANK and the like)",
                file=sys.stderr,
                flush=True,
            )
        if waited > seconds:
            raise ValueError(
                f"rank {rank} on {socket.gethostname()} does not see the run folder {folder} of rank 0 after "
                f"{seconds:g} s: all machines need paths.runs_dir (or paths.run_dir) on a disk that they share"
            )
        time.sleep(0.1)


def _launcher(place: Placement) -> str:
    if place.launcher == TORCHRUN:
        return "torchrun shares no store here"
    return "its launcher is not ours" if place.launcher in (BY_HAND, NONE) else "the job has no number"


def _has_store(place: Placement, environment: Mapping[str, str]) -> bool:
    return place.launcher == TORCHRUN and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(environment: Mapping[str, str], place: Placement, timeout: float) -> Any:
    from torch.distributed import TCPStore

    assert place.main_address is not None
    assert place.main_port is not None
    return TCPStore(place.main_address, place.main_port, is_master=False, timeout=timedelta(seconds=timeout))


def _key(environment: Mapping[str, str], attempt: int | None = None) -> str:
    count = environment.get("TORCHELASTIC_RESTART_COUNT", "0") if attempt is None else attempt
    return f"llmtrain/run_dir/{count}"
