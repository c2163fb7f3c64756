"""The callback that decides when a checkpoint or the run's best model is written, and puts a resumed run back in place.

It knows the order of events around a step: figures, then validation, then saving. What a checkpoint looks like is
`checkpointing.py`'s business; what a model folder looks like is the caller's (`write_model`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from llmtrain.checkpoint import read_info
from llmtrain.training import checkpointing, loops
from llmtrain.training.checkpointing import Resumed, RunState
from llmtrain.training.control import RunControl
from llmtrain.training.module import LanguageModule
from llmtrain.training.skipping import NonFiniteError
from llmtrain.training.state import failing_together

log = logging.getLogger(__name__)

Weights = Mapping[str, torch.Tensor]
WriteModel = Callable[[Path, Weights, Mapping[str, Any]], None]
"""(folder, fp32 weights of the plain model, what llmtrain.json remembers) → writes a model or adapter folder."""


class Checkpoints(Callback):
    """Writes checkpoints and the best model; on a resumed run, loads the checkpoint and rebuilds the counters.

    Args:
        control: the run's timetable.
        run_dir: the run folder.
        write_model: writes a model folder on rank 0.
        model_name: name of the model folder inside the run and the checkpoint folder.
        fixed: facts that a resumed run must share.
        free: settings whose change is reported on resume.
        keep_last: how many checkpoints stay; `None` keeps all.
        resumed: the checkpoint to continue from.
    """

    def __init__(
        self,
        control: RunControl,
        run_dir: Path,
        *,
        write_model: WriteModel,
        model_name: str = "model",
        fixed: Mapping[str, Any],
        free: Mapping[str, Any],
        keep_last: int | None,
        resumed: Resumed | None = None,
    ) -> None:
        self._control = control
        self._run_dir = run_dir
        self._write_model = write_model
        self._model_name = model_name
        self._fixed, self._free = dict(fixed), dict(free)
        self._keep_last = keep_last
        self._resumed = resumed
        self.best = resumed.state.best if resumed is not None else None

    @property
    def resumed_from(self) -> int:
        """The step that this session began at."""
        return self._resumed.step if self._resumed is not None else 0

    @property
    def model_dir(self) -> Path:
        """The run's own model folder: the best by validation, or the last."""
        return self._run_dir / self._model_name

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The strategy is set up and nothing has run yet: the place to load weights, moments and counters."""
        if self._resumed is None:
            return
        step = self._resumed.step
        checkpointing.load_training_state(trainer, self._resumed.checkpoint)
        loops.restore_counters(trainer, step=step, accumulation=self._control.accumulation)
        if trainer.is_global_zero:
            checkpointing.set_aside_later(self._run_dir, step)
        if not trainer.strategy.broadcast(self._best_is_there()):
            self.best = None

    def _best_is_there(self) -> bool:
        """Whether the model folder holds what the checkpoint calls the best.

        It does not in a new run folder, nor after a kill between the checkpoint and now: then the folder is of a later
        step, which is about to come again.
        """
        if self.best is None or not self.model_dir.is_dir():
            return False
        return read_info(self.model_dir).get("step") == self.best["step"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Makes up for a validation that a signal prevented, so that the figures are those of an unbroken run."""
        if self._resumed is not None and self._resumed.state.owes_validation and self._control.validates:
            loops.validate_now(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves after the steps that are due, unless their validation comes first."""
        assert isinstance(pl_module, LanguageModule)
        step = trainer.global_step
        if self._control.ends_step(batch_idx) and not self._control.validates_at(step):
            owed = self._control.validation_due(step)
            self._save_if_due(trainer, pl_module, step, tokens=pl_module.finished_tokens(), owes_validation=owed)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keeps the model if it is the best so far, then saves if a checkpoint is due at this step too."""
        assert isinstance(pl_module, LanguageModule)
        result = pl_module.last_validation
        step, tokens = trainer.global_step, pl_module.tokens_seen
        loss = result["val/loss"]
        better = math.isfinite(loss) and (self.best is None or loss < self.best["val_loss"])
        weights = None
        if better:
            self.best = {"step": step, "val_loss": result["val/loss"], "val_bpb": result.get("val/bpb")}
            weights = self._write(trainer, pl_module, self.model_dir, step, tokens)
        self._save_if_due(trainer, pl_module, step, tokens=tokens, weights=weights)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Without validation the last model is the run's model."""
        assert isinstance(pl_module, LanguageModule)
        if self.best is None:
            self._write(trainer, pl_module, self.model_dir, trainer.global_step, pl_module.tokens_seen)

    def _save_if_due(
        self,
        trainer: pl.Trainer,
        module: LanguageModule,
        step: int,
        *,
        tokens: int,
        weights: Weights | None = None,
        owes_validation: bool = False,
    ) -> None:
        if not self._control.saves_at(step):
            return
        with self._control.stopwatch.paused():
            for logger in trainer.loggers:
                logger.save()  # figures up to this step are on disk before the checkpoint that relies on them
            state = RunState(
                step=step,
                tokens=tokens,
                train_seconds=self._control.train_seconds,
                best=self.best,
                owes_validation=owes_validation,
                fixed=self._fixed,
                free=self._free,
                skipped_steps=self._control.skipped_steps,
                skipped_in_a_row=self._control.skipped_in_a_row,
            )
            checkpointing.write_checkpoint(
                trainer,
                self._run_dir,
                state,
                lambda folder: self._write(trainer, module, folder / self._model_name, step, tokens, weights),
            )
            if trainer.is_global_zero:
                keep = self._resumed.checkpoint if self._resumed is not None else None
                checkpointing.prune(self._run_dir, keep_last=self._keep_last, keep=keep)

    def _write(
        self,
        trainer: pl.Trainer,
        module: LanguageModule,
        folder: Path,
        step: int,
        tokens: int,
        weights: Weights | None = None,
    ) -> Weights:
        """Writes the model folder on rank 0, unless the weights are not finite. A collective.

        Args:
            trainer, module: the run.
            folder: where to.
            step, tokens: what `llmtrain.json` remembers.
            weights: this step's, if they were gathered before.

        Returns:
            The weights: on rank 0 all of them, on others none.
        """
        with self._control.stopwatch.paused():
            if weights is None:
                weights = trainer.strategy.fp32_state_dict(module.model) or {}  # type: ignore[attr-defined]
            wrong = next((name for name, value in weights.items() if not value.isfinite().all()), None)
            if (wrong := trainer.strategy.broadcast(wrong)) is not None:
                raise NonFiniteError(
                    f"after step {step} the weights themselves are not finite ({wrong}) and are not written; lower "
                    "optim.lr and resume from an earlier checkpoint."
                )
            with failing_together():
                if trainer.is_global_zero:
                    validated = self.best if self.best is not None and self.best["step"] == step else {}
                    info = {
                        "step": step,
                        "tokens": tokens,
                        "val_loss": validated.get("val_loss"),
                        "val_bpb": validated.get("val_bpb"),
                    }
                    self._write_model(folder, weights, info)
        return weights
