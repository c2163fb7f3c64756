"""The starter of local ranks: what they wrote, how they end, and what they know of the process that starts them."""

from __future__ import annotations

import sys
import time

import pytest

from llmtrain.bench.ranks import launch
from llmtrain.training import placement

SETTINGS = """
import os, sys, time
from pathlib import Path
rank = int(os.environ["LOCAL_RANK"])
"""


def ranks(program: str, count: int, folder, seconds: float = 60) -> str:
    return launch([sys.executable, "-c", SETTINGS + program], count, folder, seconds)


def test_a_rank_that_fails_is_told_with_what_it_wrote(tmp_path):
    program = "print('rank', rank, file=sys.stderr); sys.exit(3 * rank)"
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 ended with code 3:\nrank 1\n$"):
        ranks(program, 2, tmp_path)
    assert ranks(program, 1, tmp_path) == "rank 0\n"


def test_ranks_that_take_too_long_are_ended(tmp_path):
    with pytest.raises(RuntimeError, match=r"2 ranks took more than 1 s:\nasleep"):
        ranks("print('asleep', file=sys.stderr, flush=True); time.sleep(60)", 2, tmp_path, 1)


def test_a_rank_may_write_much_while_another_waits_for_it(tmp_path):
    program = """
if rank:
    sys.stderr.write("x" * 300_000)
    Path("done").touch()
while not Path("done").exists():
    time.sleep(0.05)
"""
    assert len(ranks(program, 2, tmp_path, 30)) == 300_000


def test_the_first_rank_that_fails_ends_the_others(tmp_path, monkeypatch):
    """And is the one that is told, though the first in number ends badly a little later."""
    monkeypatch.setattr("llmtrain.bench.ranks._OTHERS_SECONDS", 1.0)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 of 3 ended with code 5:\nthe reason"):
        ranks(
            "print('the reason', file=sys.stderr, flush=True)\nif rank == 1: sys.exit(5)\ntime.sleep(60)", 3, tmp_path
        )
    assert time.monotonic() - began < 30


def test_ranks_know_nothing_of_the_run_that_this_process_is_a_part_of(tmp_path, monkeypatch):
    """Here a step of srun's, inside which torchrun was started."""
    for name in placement.VARIABLES:
        monkeypatch.setenv(name, "7")
    program = """
from llmtrain.training.placement import VARIABLES, here
place = here()
print(place.launcher, place.ranks(2), sorted(set(VARIABLES) & set(os.environ)), file=sys.stderr)
"""
    names = ["LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"]
    expected = "".join(f"the environment ({rank}, {rank}, 0) {names}\n" for rank in range(2))
    assert ranks(program, 2, tmp_path) == expected
