"""The report of a run while it goes on: a function is called every so often, and never costs the run its end.

Knows time and a function that writes; not what a report is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from llmtrain.training.control import RunControl

log = logging.getLogger(__name__)

_MOST_OF_THE_TIME = 0.01  # of a run may go into its report


class Report(Callback):
    """Calls a function after a step whose figures were logged, on rank 0, if the last call is long enough ago.

    Between two calls lie at least `every` seconds, and a hundred times as long as the last one took. An error is one
    warning, after which the run goes on without.

    Args:
        control: the run's timetable.
        write: writes the report.
        every: seconds, at least.
        clock: seconds, monotonic; replaced in tests.
    """

    def __init__(
        self,
        control: RunControl,
        write: Callable[[], Any],
        *,
        every: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control = control
        self._write: Callable[[], Any] | None = write
        self._every = every
        self._clock = clock
        self._due = clock() + every

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Writes if it is due."""
        if not trainer.is_global_zero or self._write is None or self._clock() < self._due:
            return
        if not self._control.ends_step(batch_idx) or not self._control.logs_at(trainer.global_step):
            return
        with self._control.stopwatch.paused():
            began = self._clock()
            try:
                self._write()
            except Exception as error:
                self._write = None
                log.warning("no report while this run goes on: %s: %s", type(error).__name__, error)
            took = self._clock() - began
        self._due = self._clock() + max(self._every, took / _MOST_OF_THE_TIME)
