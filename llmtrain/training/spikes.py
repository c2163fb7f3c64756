"""The alarm for a loss that jumps: Lightning's `SpikeDetection`, told the losses of whole optimiser steps.

Lightning's callback looks at what each micro-batch returns, which here is a share of the step's loss and compares with
nothing; and it ends the run. So it is given the step's exact loss once per step instead, and only warns. The window of
the mean begins anew after a resume.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.spike import SpikeDetection as StepSpikeDetection
from lightning.pytorch.callbacks import SpikeDetection

from llmtrain.training.control import RunControl
from llmtrain.training.module import LanguageModule

log = logging.getLogger(__name__)

WINDOW = 20  # steps whose mean loss is what a jump is measured against


class SpikeAlarm(SpikeDetection):
    """Warns when a step's loss exceeds the mean of the last steps by more than a share of it.

    Costs a synchronisation per step, as every step's loss is read.

    Args:
        control: the run's timetable.
        run_dir: the run folder, for what the warning tells to do next.
        share: 0.5 warns from one and a half times the mean on.

    Raises:
        ValueError: `share` is not above 0, or torchmetrics, which Lightning's callback is built on, is missing.
    """

    def __init__(self, control: RunControl, run_dir: Path, *, share: float) -> None:
        if not share > 0:
            raise ValueError(f"trainer.spike_alarm={share} must be above 0, or null for no alarm.")
        try:
            super().__init__(window=WINDOW, warmup=WINDOW, rtol=share, finite_only=True)
        except (RuntimeError, ImportError) as error:
            raise ValueError("trainer.spike_alarm needs torchmetrics: pip install torchmetrics.") from error
        self._control, self._run_dir = control, run_dir
        self._steps = 0  # looked at in this session
        self._step = 0

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Looks at the loss of the step just taken, unless it was skipped: that is reported already."""
        if not self._control.ends_step(batch_idx) or trainer.strategy.last_step_skipped:  # type: ignore[attr-defined]
            return
        assert isinstance(pl_module, LanguageModule)
        self._step = trainer.global_step
        loss = torch.tensor(pl_module.step_loss(), device=pl_module.device)
        StepSpikeDetection.on_train_batch_end(self, trainer, loss, batch, self._steps)  # type: ignore[arg-type]
        self._steps += 1

    def _handle_spike(self, fabric: Any, batch_idx: int) -> None:
        """Says so; the loss of the spike itself stays out of the mean."""
        if fabric.is_global_zero:
            log.warning(
                "the loss of step %d is more than %g times the mean of the last %d steps; its texts: "
                "llmtrain show-batch run=%s step=%d",
                self._step,
                1 + (self.rtol or 0.0),
                WINDOW,
                self._run_dir,
                self._step,
            )
