"""Steps that were not taken because their loss or gradient was not finite: counted, reported, and stopped in the end.

The strategy leaves such a step out, on all ranks alike, before it touches a weight or a moment. Here it is only
noticed, after the step. Learning rate and data go on as if it had been taken. Does not know how a strategy notices.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from llmtrain.training.checkpointing import list_checkpoints
from llmtrain.training.control import RunControl
from llmtrain.training.module import LanguageModule

log = logging.getLogger(__name__)

_SHOWN_IDS = 8


class NonFiniteError(ValueError):
    """Training cannot go on: its numbers are not finite. A `ValueError`, as data or settings are to be mended."""


class SkippedSteps(Callback):
    """Counts skipped steps into `train/skipped_steps`, warns of each, and ends the run after several in a row.

    Comes before the callbacks that log or save the step.

    Args:
        control: where the counts are kept.
        run_dir: the run folder, for what the messages tell to do next.
        most_in_a_row: this many in a row end the run; `None` goes on for ever.
    """

    def __init__(self, control: RunControl, run_dir: Path, *, most_in_a_row: int | None) -> None:
        self._control, self._run_dir, self._most = control, run_dir, most_in_a_row

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a whole step: counts it if it was skipped.

        Raises:
            NonFiniteError: on every rank, if it was one too many.
        """
        if not self._control.ends_step(batch_idx):
            return
        if not trainer.strategy.last_step_skipped:  # type: ignore[attr-defined]
            self._control.skipped_in_a_row = 0
            return
        self._control.skipped_steps += 1
        self._control.skipped_in_a_row += 1
        assert isinstance(pl_module, LanguageModule)
        step, loss = trainer.global_step, pl_module.step_loss()
        for logger in trainer.loggers:
            logger.log_metrics({"train/loss": loss, "train/skipped_steps": self._control.skipped_steps}, step=step)
        show = f"llmtrain show-batch run={self._run_dir} step={step}"
        if self._most is not None and self._control.skipped_in_a_row >= self._most:
            raise NonFiniteError(self._last_words(step, trainer.datamodule, show))  # type: ignore[attr-defined]
        if trainer.is_global_zero:
            log.warning(
                "step %d was skipped, as its loss (%g) or gradient is not finite; the weights stay as they were. "
                "Its texts: %s",
                step,
                loss,
                show,
            )

    def _last_words(self, step: int, data: Any, show: str) -> str:
        ids = data.step_sample_ids(step - 1).tolist()
        more = f" and {len(ids) - _SHOWN_IDS} more" if len(ids) > _SHOWN_IDS else ""
        saved = list_checkpoints(self._run_dir)
        return (
            f"step {step} was the {_ordinal(self._control.skipped_in_a_row)} in a row to be skipped "
            f"(trainer.max_skipped_steps={self._most}), as loss or gradient were not finite; its batch has the samples "
            f"{', '.join(map(str, ids[:_SHOWN_IDS]))}{more}, which `{show}` prints; "
            f"{f'the last checkpoint is {saved[-1].path}' if saved else 'there is no checkpoint'}."
        )


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{ending}"
