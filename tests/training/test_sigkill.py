"""SIGKILL at any moment, before every change of the run folder and at random: the end is that of the straight run.

Each attempt is a forked process, so that dozens of them cost seconds.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from llmtrain.checkpoint import verify
from llmtrain.training.checkpointing import list_checkpoints
from tests.training.conftest import assert_equal, metrics, tensors

pytestmark = pytest.mark.medium

SETTINGS: dict[str, Any] = {"steps": 8, "checkpoint_every": 2, "val_every": 3, "keep_last": 1, "train_tokens": 1000}


@pytest.fixture(scope="module")
def straight(nursery: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    nursery.run(folder, **SETTINGS)
    return folder


def check_whole(run_dir: Path, former: int) -> int:
    """What counts as a checkpoint is whole, and the run has not gone back; returns the newest step."""
    checkpoints = list_checkpoints(run_dir)
    for checkpoint in checkpoints:
        verify(checkpoint.path / "model")
        assert tensors(checkpoint.path / "resume")
        assert checkpoint.state().step == checkpoint.step
    newest = checkpoints[-1].step if checkpoints else 0
    assert newest >= former
    return newest


def check_equals(run_dir: Path, straight: Path) -> None:
    assert metrics(run_dir) == metrics(straight)  # no gap, no repeat
    assert_equal(tensors(run_dir / "model"), tensors(straight / "model"))
    assert_equal(
        tensors(run_dir / "checkpoints/step-000008/resume"), tensors(straight / "checkpoints/step-000008/resume")
    )
    assert list(run_dir.glob(".*")) == []
    assert {each.path for each in list_checkpoints(run_dir)} == set((run_dir / "checkpoints").iterdir())


def test_a_kill_before_every_change_of_the_run_folder(nursery: Any, straight: Path, tmp_path: Path) -> None:
    """The first attempt dies before its first change of a file or folder, the second before its second, and so on.

    So every point of a session is hit: opening the figures, writing the best model and the checkpoint, exchanging
    folders, removing the oldest. As each attempt finds what the one before has left, the run gets ahead; once it is
    finished, it is compared, and the next begins.
    """
    finished, folder, newest = [], tmp_path / "0", 0
    for change in range(1, 71):
        result = nursery.run(folder, resume="auto", kill_at_change=change, fails=True, **SETTINGS)
        newest = check_whole(folder, newest)
        if result["codes"] == [0]:
            check_equals(folder, straight)
            finished.append(change)
            folder, newest = tmp_path / str(change), 0
        else:
            assert result["codes"] == [-9]
    assert len(finished) >= 3


@pytest.mark.parametrize(
    ("processes", "kills"),
    [(1, 12), pytest.param(2, 4, marks=pytest.mark.distributed), pytest.param(1, 200, marks=pytest.mark.slow)],
)
def test_kills_at_random_moments(nursery: Any, tmp_path: Path, processes: int, kills: int) -> None:
    """Seeded delays, spread evenly over the time that a whole run takes; a run that is finished is compared."""
    chance = random.Random(f"{processes} {kills}")
    settings = SETTINGS | ({"strategy": "deepspeed_2", "rows": 1} if processes > 1 else {})
    straight, folder, newest, killed = tmp_path / "straight", tmp_path / "0", 0, 0
    begin = time.monotonic()
    nursery.run(straight, processes=processes, **settings)
    seconds = time.monotonic() - begin
    while killed < kills:
        delay = chance.uniform(0.0, 1.0) * seconds
        result = nursery.run(folder, processes=processes, resume="auto", kill_after=delay, fails=True, **settings)
        newest = check_whole(folder, newest)
        if result["codes"] == [0] * processes:
            check_equals(folder, straight)
            folder, newest = folder.with_name(f"{folder.name}0"), 0
            seconds *= 0.9  # the machine was busy at first
        killed += result["codes"] != [0] * processes
    nursery.run(folder, processes=processes, resume="auto", **settings)
    check_equals(folder, straight)
