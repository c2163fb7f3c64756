"""`llmtrain verify-resume`: runs pretraining twice at small size, straight and interrupted, and compares the two.

The runs are processes of the real command with the user's own settings; only the number of steps and the intervals are
cut down. Knows exit codes and folders; what is compared is `differences`' affair.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.launch import children
from llmtrain.launch.differences import Comparison, compare_runs
from llmtrain.launch.ending import Ended
from llmtrain.training import placement
from llmtrain.training.early import REQUEUE_EXIT_CODE
from llmtrain.training.witness import SAMPLES_VARIABLE, SIGNAL_VARIABLE

if TYPE_CHECKING:
    from omegaconf import DictConfig

logger = logging.getLogger(__name__)

FEWEST_STEPS = 8
# What the two runs have of their own, whatever the user's settings say.
_OWN = ("verify.", "name=", "resume=", "paths.run_dir=", "logger=", "logger.")


def run(settings: DictConfig, run_dir: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Runs and compares.

    Args:
        settings: Those of pretrain, and `verify`.
        run_dir: The folder for both runs.
        overrides: The arguments as the user typed them.

    Returns:
        `equal`, `first_difference`, `steps`, `killed_at`, `stopped_at`, `compared`.

    Raises:
        ValueError: Settings that cannot be verified, or that the straight run refused.
        RuntimeError: A run ended otherwise than it should.
        Ended: The runs differ; with code 1.
    """
    steps = settings.verify.steps
    kill_at, stop_at = _check(settings)
    given = [*(each for each in overrides if not each.startswith(_OWN)), *_small(settings)]
    straight, interrupted = run_dir / "straight", run_dir / "interrupted"
    logger.info("%d steps straight", steps)
    _train(straight, given, {}, expected=0)
    logger.info("%d steps again, killed (SIGKILL) in step %d", steps, kill_at)
    _train(interrupted, given, {SIGNAL_VARIABLE: f"SIGKILL@{kill_at}"}, expected=-signal.SIGKILL)
    logger.info("resumed, and stopped (SIGTERM) in step %d", stop_at)
    again = [*given, "resume=auto"]
    stopped = _train(interrupted, again, {SIGNAL_VARIABLE: f"SIGTERM@{stop_at}"}, expected=REQUEUE_EXIT_CODE)
    logger.info("resumed after step %d, to the end", stopped["step"])
    _train(interrupted, again, {}, expected=0)
    found = compare_runs(straight, interrupted, extra=[stopped["step"]], tolerance=settings.verify.tolerance)
    _say(found, run_dir)
    results = {
        "command": "verify-resume",
        "run_dir": run_dir,
        "equal": found.first is None,
        "first_difference": None if found.first is None else asdict(found.first),
        "steps": steps,
        "killed_at": kill_at,
        "stopped_at": stopped["step"],
        "compared": found.counts,
    }
    if found.first is not None:
        raise Ended(results, 1)
    if not settings.verify.keep:
        for folder in (straight, interrupted):
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            shutil.rmtree(folder / "model", ignore_errors=True)
    return results


def _check(settings: DictConfig) -> tuple[int, int]:
    """The steps in which the run is killed and stopped, given or drawn."""
    verify = settings.verify
    if placement.here() != placement.Placement() or settings.trainer.num_nodes not in ("auto", 1):
        raise ValueError(
            "verify-resume starts and ends its runs itself, on this machine: leave launcher and trainer.num_nodes out"
        )
    if verify.steps < FEWEST_STEPS:
        raise ValueError(f"verify.steps={verify.steps} must be at least {FEWEST_STEPS}, to be interrupted twice.")
    if not 0 <= verify.tolerance < 1:
        raise ValueError(f"verify.tolerance={verify.tolerance} must lie between 0 and 1.")
    last = verify.steps - 2  # several processes agree on a signal one step later, and a step is left to resume for
    draw = random.SystemRandom()
    first = _checkpoint_every(verify.steps) + 1
    kill_at = draw.randint(first, last - 2) if verify.kill_at is None else verify.kill_at
    stop_at = draw.randint(min(kill_at + 1, last), last) if verify.stop_at is None else verify.stop_at
    if not 1 <= kill_at < stop_at <= last:
        raise ValueError(
            f"verify.kill_at={kill_at} must come before verify.stop_at={stop_at}, and that at {last} at the latest."
        )
    return kill_at, stop_at


def _checkpoint_every(steps: int) -> int:
    return max(1, steps // 4)


def _small(settings: DictConfig) -> list[str]:
    """Overrides that make the user's run a small one in which everything falls due."""
    steps = settings.verify.steps
    every, warmup = max(1, steps // 3), settings.optim.warmup_steps
    small = {
        "trainer.max_steps": steps,
        "trainer.max_tokens": "null",
        "trainer.max_epochs": "null",
        "trainer.log_every": 1,
        "trainer.val_every": every,
        "trainer.checkpoint_every": _checkpoint_every(steps),
        "trainer.keep_last": "null",
        "trainer.sample_every": every if settings.trainer.sample_every is not None else "null",
        "optim.warmup_steps": steps // 2 if warmup == "auto" else min(warmup, steps // 2),
    }
    return [f"{key}={value}" for key, value in small.items()]


def _train(folder: Path, overrides: list[str], more: Mapping[str, str], *, expected: int) -> dict[str, Any]:
    """One session of a run, to the end that is expected; returns its last line."""
    log = folder.with_name(f"{folder.name}.txt")
    with log.open("a", encoding="utf-8") as screen:
        process = subprocess.Popen(
            children.command_line("pretrain", [*overrides, f"paths.run_dir={folder}"]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=screen,
            env={**children.environment(), SAMPLES_VARIABLE: "1", **more},
            encoding="utf-8",
            process_group=0,
        )
        try:
            stdout, _ = process.communicate()
        except BaseException:
            _end_group(process.pid, patience=0.0)
            raise
    _end_group(process.pid, patience=60.0)
    if process.returncode != expected:
        lines = log.read_text(encoding="utf-8").splitlines()
        if process.returncode == 2:  # a mistake in the settings, said in one sentence
            raise ValueError(lines[-1].removeprefix("error: "))
        raise RuntimeError(f"the run ended with code {process.returncode}, not {expected}; its screen is in {log}")
    return children.split_output(stdout)[1] or {}


def _end_group(group: int, *, patience: float) -> None:
    """Waits until all processes of a run are gone; those of a killed one end by themselves when they notice."""
    end = time.monotonic() + patience
    with suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.killpg(group, 0)
            time.sleep(0.1)
        os.killpg(group, signal.SIGKILL)


def _say(found: Comparison, run_dir: Path) -> None:
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in found.counts.items())
    if found.first is None:
        logger.info("equal: the interrupted run is the straight one (%s)", counts)
    else:
        logger.error("different, from %s; both runs are in %s (equal before: %s)", found.first, run_dir, counts)
