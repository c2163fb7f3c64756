"""The few private parts of Lightning's loops that this project sets; nothing else touches them.

Written for lightning 2.6; `tests/training/test_loops.py` fails if a later version moves them.

To Lightning a run is one epoch: the loader yields exactly the micro-batches that are left, so the counters *within* the
epoch start at nought after a resume and only the totals continue. They are rebuilt from (step, accumulation), because a
checkpoint exists only at a step's end; Lightning's own saved ones are off by one around validation (#19367, #19403).
"""

from __future__ import annotations

import lightning.pytorch as pl


def restore_counters(trainer: pl.Trainer, *, step: int, accumulation: int) -> None:
    """Makes a trainer that has done nothing believe that it has taken `step` optimiser steps.

    Call after the strategy is set up and before the loop runs (`on_fit_start`). Afterwards `global_step`, the
    validation interval and the loggers' step continue from there.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    optimizer = epoch_loop.automatic_optimization.optim_progress.optimizer
    optimizer.step.total.increment_by(step)
    optimizer.zero_grad.total.increment_by(step)
    epoch_loop.batch_progress.total.increment_by(step * accumulation)
    epoch_loop._batches_that_stepped = step


def stop_after_this_step(trainer: pl.Trainer, *, validate: bool) -> None:
    """Ends the run at the step that has just been taken, with or without a last validation.

    Call in `on_train_batch_end`. Lightning validates once more whenever it is asked to stop.
    """
    trainer.should_stop = True
    if not validate:
        trainer.fit_loop.epoch_loop._skip_next_val = True


def validate_now(trainer: pl.Trainer) -> None:
    """Validates before the first step of a session. Call in `on_train_start`; a collective."""
    trainer.validating = True
    trainer.fit_loop.epoch_loop.val_loop.run()
    trainer.training = True


def silence_signal_broadcast(trainer: pl.Trainer) -> None:
    """Removes the collective by which Lightning asks for SIGTERM before every micro-batch, and reads back at once.

    `callbacks.StopOnSignal` agrees once per step instead, without waiting.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
