"""Starts the ranks of a small job on this machine and waits for them. Knows nothing of what they compute."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

# What says where this process stands among the processes of a run of its own, and which accelerator it settled on.
_OF_THIS_PROCESS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LLMTRAIN_RUN_DIR", "DS_ACCELERATOR")


def rank_environment() -> dict[str, str]:
    """The variables of ranks that meet at a free port of this machine; each still needs its `LOCAL_RANK`."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_THIS_PROCESS}
    package = str(Path(__file__).resolve().parents[2])  # a checkout may not be installed
    path = os.pathsep.join(filter(None, [package, inherited.get("PYTHONPATH")]))
    where = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": path}
    return inherited | where


def launch(command: Sequence[str], processes: int, folder: Path, seconds: float) -> str:
    """Runs a command once for each rank, in `folder`, and waits for all of them.

    Returns:
        What the ranks wrote to standard error.

    Raises:
        RuntimeError: A rank failed or took too long.
    """
    settings = {"OMP_NUM_THREADS": "1", "PATH": str(folder / "nothing")}  # without a compiler: its op takes a minute
    environment = {name: value for name, value in rank_environment().items() if name != "CXX"} | settings
    ranks = [
        subprocess.Popen(
            list(command),
            env=environment | {"LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
        )
        for rank in range(processes)
    ]
    try:
        written = [rank.communicate(timeout=seconds)[1] for rank in ranks]
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{processes} ranks took more than {seconds:.0f} s in {folder}") from None
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    for rank, text in zip(ranks, written, strict=True):
        if rank.returncode:
            raise RuntimeError(f"a rank of {processes} ended with {rank.returncode}:\n{text[-4000:]}")
    return "".join(written)
