"""Checkpoints to resume from, and the run's own model folder.

    <run>/checkpoints/step-000100/model/            a whole model folder (or adapter folder)
    <run>/checkpoints/step-000100/resume/           the strategy's files: optimiser moments, master weights
    <run>/checkpoints/step-000100/checkpoint.json   the marker, written last: counters and what must not change
    <run>/model/                                    the best by validation, or the last

Everything is written beside its final name and renamed, so a kill at any moment leaves the former state whole. This
file knows folders and markers; how weights are gathered and moments are stored is the strategy's business.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from llmtrain.checkpoint.atomic import whole_folder

log = logging.getLogger(__name__)

MARKER = "checkpoint.json"
FOLDER = "checkpoints"
VERSION = 1
_NAME = re.compile(r"step-(\d{6,})$")
_SINGLE_FILE = "state.pt"


@dataclass
class RunState:
    """What a checkpoint says about its run: counters, and the facts that a resumed run must share.

    Attributes:
        step: optimiser steps taken.
        tokens: trained tokens seen, over all ranks.
        train_seconds: time of training alone, over all sessions.
        best: step, val_loss and val_bpb of the best validation so far, if there was one.
        fixed: facts that may not change on resume, by the name a user knows them under.
        free: settings that may change; a change is reported.
        skipped_steps: steps among them that were skipped, as they were not finite.
        skipped_in_a_row: how many of those were the last ones.
    """

    step: int
    tokens: int
    train_seconds: float
    best: dict[str, Any] | None = None
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
    """Compares a checkpoint's run with the one that wants to continue it.

    Raises:
        ValueError: names the first fact that differs and may not.
    """
    for name, value in now.fixed.items():
        if name in saved.fixed and saved.fixed[name] != _plain(value):
            raise ValueError(
                f"cannot resume from {checkpoint.path}: {name} was {saved.fixed[name]} and is {value}; "
                "restore it, or start a new run with init=<its model folder>."
            )
    for name, value in now.free.items():
        if name in saved.free and saved.free[name] != _plain(value):
            log.warning("Resuming with a changed setting: %s was %s and is %s.", name, saved.free[name], value)


def prune(run_dir: Path, *, keep_last: int | None, keep: Checkpoint | None = None) -> None:
    """Removes the oldest checkpoints beyond `keep_last` (`None` keeps all), never the one resumed from."""
    if keep_last is None:
        return
    checkpoints = list_checkpoints(run_dir)
    for checkpoint in checkpoints[: max(0, len(checkpoints) - keep_last)]:
        if keep is not None and checkpoint.path.resolve() == keep.path.resolve():
            continue
        # Without its marker a folder no longer counts, so a kill half-way leaves nothing that looks whole.
        (checkpoint.path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(checkpoint.path, ignore_errors=True)


def set_aside_later(run_dir: Path, step: int) -> None:
    """Renames this run's checkpoints after `step`: an older one is being resumed, and they are of another future."""
    for checkpoint in list_checkpoints(run_dir):
        if checkpoint.step > step:
            aside = checkpoint.path.with_name(f"{checkpoint.path.name}.superseded")
            shutil.rmtree(aside, ignore_errors=True)
            checkpoint.path.rename(aside)
            log.warning("Resuming at step %d: %s is of another future and now called %s.", step, checkpoint.path, aside)


def write_checkpoint(
    trainer: pl.Trainer, run_dir: Path, state: RunState, write_model: Any, *, needed_bytes: int
) -> Checkpoint:
    """Saves the run at its present step. A collective: every rank calls it.

    Args:
        trainer: the trainer, between two optimiser steps.
        run_dir: the run folder, shared by the ranks.
        state: what goes into the marker.
        write_model: called on every rank with the checkpoint folder; collective, rank 0 writes the model into it.
        needed_bytes: estimated size, checked against the free space first.
    """
    final = run_dir / FOLDER / f"step-{state.step:06d}"
    strategy = trainer.strategy
    with ExitStack() as stack:
        place = ""
        if trainer.is_global_zero:
            place = str(stack.enter_context(whole_folder(final, marker=MARKER, needed_bytes=needed_bytes)))
        beside = Path(strategy.broadcast(place))
        save_training_state(trainer, beside / "resume", state)
        write_model(beside)
        strategy.barrier("checkpoint")
        if trainer.is_global_zero:
            text = json.dumps(asdict(state), ensure_ascii=False, indent=1, default=str)
            (beside / MARKER).write_text(text + "\n", encoding="utf-8")
    strategy.barrier("checkpoint is in place")
    return Checkpoint(final, state.step)


def save_training_state(trainer: pl.Trainer, folder: Path, state: RunState) -> None:
    """Writes weights and optimiser moments in the strategy's own format. A collective."""
    strategy, module = trainer.strategy, trainer.lightning_module
    if not strategy.lightning_restore_optimizer:  # DeepSpeed stores both itself
        strategy.save_checkpoint({"step": state.step, "tokens": state.tokens}, folder)
        return
    folder.mkdir(parents=True)
    trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    weights = {name: value for name, value in module.state_dict().items() if name in trainable}
    moments = strategy.optimizer_state(strategy.optimizers[0])
    torch.save({"weights": weights, "optimizer": moments, "step": state.step}, folder / _SINGLE_FILE)


def load_training_state(trainer: pl.Trainer, folder: Path) -> None:
    """Reads what `save_training_state` wrote, into the set-up strategy. A collective."""
    strategy, module = trainer.strategy, trainer.lightning_module
    single = folder / _SINGLE_FILE
    if not strategy.lightning_restore_optimizer:
        if single.exists():
            raise ValueError(f"{folder} was written with strategy=single; resume with that strategy.")
        strategy.load_checkpoint(folder)
        return
    if not single.exists():
        raise ValueError(f"{folder} was written by DeepSpeed; resume with the strategy that wrote it.")
    saved = torch.load(single, map_location="cpu", weights_only=True)
    missing, unexpected = module.load_state_dict(saved["weights"], strict=False)
    trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    if unexpected or trainable & set(missing):
        raise ValueError(f"{folder} belongs to another model: {sorted([*unexpected, *missing])[0]} differs.")
    strategy.optimizers[0].load_state_dict(saved["optimizer"])


def _plain(value: Any) -> Any:
    """A value as it looks after a trip through JSON."""
    return json.loads(json.dumps(value, default=str))
