"""Checkpoints to resume from, and the run's own model folder.

    <run>/checkpoints/step-000100/model/            a whole model folder (or adapter folder)
    <run>/checkpoints/step-000100/resume/           fp32 weights and optimiser moments, by parameter (`state.py`)
    <run>/checkpoints/step-000100/checkpoint.json   the marker, written last: counters and what must not change
    <run>/model/                                    the best by validation, or the last

Everything is written beside its final name and renamed, so a kill at any moment leaves the former state whole. This
file knows folders and markers, and what may change between two sessions of a run; how tensors are stored is the
business of `state.py`, and where they lie in memory the strategy's.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.checkpoint.atomic import remove_folder, remove_leftovers, whole_folder
from llmtrain.training import state as training_state
from llmtrain.training.state import failing_together

if TYPE_CHECKING:
    import lightning.pytorch as pl  # takes seconds, and whether a run can go on is to be said at once

log = logging.getLogger(__name__)

MARKER = "checkpoint.json"
FOLDER = "checkpoints"
VERSION = 2
_NAME = re.compile(r"step-(\d{6,})$")


@dataclass
class RunState:
    """What a checkpoint says about its run: counters, and the facts that a resumed run must share.

    Attributes:
        step: optimiser steps taken.
        tokens: trained tokens seen, over all ranks.
        train_seconds: time of training alone, over all sessions.
        best: step, val_loss and val_bpb of the best validation so far, if there was one.
        owes_validation: a signal stopped the run at a step that was due to be validated.
        fixed: facts that may not change on resume, by the name a user knows them under.
        free: settings that may change; a change is reported.
        skipped_steps: steps among them that were skipped, as they were not finite.
        skipped_in_a_row: how many of those were the last ones.
    """

    step: int
    tokens: int
    train_seconds: float
    best: dict[str, Any] | None = None
    owes_validation: bool = False
    fixed: dict[str, Any] = field(default_factory=dict)
    free: dict[str, Any] = field(default_factory=dict)
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    version: int = VERSION


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint folder."""

    path: Path
    step: int

    def state(self) -> RunState:
        """Reads the marker."""
        values = json.loads((self.path / MARKER).read_text(encoding="utf-8"))
        if values.get("version") != VERSION:
            raise ValueError(
                f"{self.path} was written in version {values.get('version')} of the checkpoint layout and this "
                f"program reads version {VERSION}; use its model/ folder with init=… instead."
            )
        return RunState(**values)


@dataclass(frozen=True)
class Resumed:
    """A checkpoint to continue from, and its state."""

    checkpoint: Checkpoint
    state: RunState

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.checkpoint.step


def list_checkpoints(run_dir: Path) -> list[Checkpoint]:
    """The whole checkpoints of a run, oldest first. Half-written and foreign folders are not among them."""
    folder = run_dir / FOLDER
    if not folder.is_dir():
        return []
    found = [
        Checkpoint(path, int(match[1]))
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name)) and (path / MARKER).is_file()
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def find_checkpoint(resume: str | Path | None, run_dir: Path) -> Checkpoint | None:
    """What `resume=` means.

    Args:
        resume: `None` for a fresh start, `auto` for this run's newest checkpoint if there is one, else the path of a
            checkpoint folder or of a run folder (its newest).
        run_dir: this run's folder.

    Raises:
        ValueError: if a path holds no whole checkpoint.
    """
    if resume is None:
        return None
    if str(resume) == "auto":
        checkpoints = list_checkpoints(run_dir)
        return checkpoints[-1] if checkpoints else None
    path = Path(resume).expanduser()
    if not path.exists():
        raise ValueError(f"resume={resume} does not exist; give a run folder, a checkpoint, or auto.")
    if path.name in ("model", "resume") and (path.parent / MARKER).is_file():
        path = path.parent
    if (path / MARKER).is_file() and (match := _NAME.fullmatch(path.resolve().name)):
        return Checkpoint(path, int(match[1]))
    checkpoints = list_checkpoints(path)
    if not checkpoints:
        known = [str(checkpoint.path) for checkpoint in list_checkpoints(run_dir)]
        there = f"this run has {', '.join(known)}" if known else "this run has none"
        raise ValueError(f"resume={resume}: no whole checkpoint there (a folder step-… with {MARKER}); {there}.")
    return checkpoints[-1]


def check_resumable(checkpoint: Checkpoint, saved: RunState, now: RunState) -> None:
    """Compares a checkpoint's run with the one that wants to continue it, and says everything that has changed.

    Raises:
        ValueError: facts differ that may not; names all of them, then the changes that would be allowed.
    """
    refused, allowed = _changes(saved.fixed, now.fixed), _changes(saved.free, now.free)
    if refused:
        also = f" (also changed, which is allowed: {'; '.join(allowed)})" if allowed else ""
        raise ValueError(
            f"cannot resume from {checkpoint.path}: {'; '.join(refused)}; "
            f"restore {'it' if len(refused) == 1 else 'them'}, or start a new run with init=<its model folder>{also}."
        )
    if allowed:
        log.warning("Resuming with changed settings: %s.", "; ".join(allowed))


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs among the facts that both know."""
    plain = {name: _plain(value) for name, value in now.items() if name in before}
    return [f"{name} was {before[name]} and is {value}" for name, value in plain.items() if before[name] != value]


def prune(run_dir: Path, *, keep_last: int | None, keep: Checkpoint | None = None) -> None:
    """Removes the oldest checkpoints beyond `keep_last` (`None` keeps all), never the one resumed from."""
    if keep_last is None:
        return
    checkpoints = list_checkpoints(run_dir)
    for checkpoint in checkpoints[: max(0, len(checkpoints) - keep_last)]:
        if keep is None or checkpoint.path.resolve() != keep.path.resolve():
            remove_folder(checkpoint.path)


def tidy(run_dir: Path) -> None:
    """Removes what killed sessions left half-written or half-removed in the run folder."""
    for folder in (run_dir, run_dir / FOLDER):
        remove_leftovers(folder)


def set_aside_later(run_dir: Path, step: int) -> None:
    """Renames this run's checkpoints after `step`: an older one is being resumed, and they are of another future."""
    for checkpoint in list_checkpoints(run_dir):
        if checkpoint.step > step:
            aside = checkpoint.path.with_name(f"{checkpoint.path.name}.superseded")
            shutil.rmtree(aside, ignore_errors=True)
            checkpoint.path.rename(aside)
            log.warning("Resuming at step %d: %s is of another future and now called %s.", step, checkpoint.path, aside)


def write_checkpoint(
    trainer: pl.Trainer, run_dir: Path, state: RunState, write_model: Callable[[Path], Any]
) -> Checkpoint:
    """Saves the run at its present step. A collective: every rank calls it.

    Args:
        trainer: the trainer, between two optimiser steps.
        run_dir: the run folder, shared by the ranks.
        state: what goes into the marker.
        write_model: called on every rank with the checkpoint folder; collective, rank 0 writes the model into it.

    Raises:
        ValueError: the disk is full; the former checkpoints are untouched.
    """
    final = run_dir / FOLDER / f"step-{state.step:06d}"
    strategy = trainer.strategy
    shard = strategy.shard(trainer.lightning_module.model)  # type: ignore[attr-defined]
    plan = training_state.plan(shard)
    with failing_together(), ExitStack() as stack:
        place = ""
        with failing_together():
            if trainer.is_global_zero:
                # And the model in fp32; of one with an adapter only the adapter is written, which is what is trained.
                needed = training_state.stored_bytes(plan) + training_state.weight_bytes(plan)
                place = str(stack.enter_context(whole_folder(final, marker=MARKER, needed_bytes=needed)))
        beside = Path(strategy.broadcast(place))
        with failing_together():
            training_state.save(shard, plan, beside / "resume")
        with failing_together():
            write_model(beside)
        if trainer.is_global_zero:
            text = json.dumps(asdict(state), ensure_ascii=False, indent=1, default=str)
            (beside / MARKER).write_text(text + "\n", encoding="utf-8")
    return Checkpoint(final, state.step)


def load_training_state(trainer: pl.Trainer, checkpoint: Checkpoint) -> None:
    """Puts a checkpoint's weights and optimiser moments into the set-up strategy. A collective.

    Raises:
        ValueError: its files are damaged, or of another model.
    """
    strategy: Any = trainer.strategy
    with failing_together():
        training_state.load(strategy.shard(trainer.lightning_module.model), checkpoint.path / "resume")
    strategy.publish_weights()


def _plain(value: Any) -> Any:
    """A value as it looks after a trip through JSON."""
    return json.loads(json.dumps(value, default=str))
