"""The private parts of Lightning's loops that `training.loops` sets are still where it thinks they are."""

import lightning.pytorch as pl

from llmtrain.training import loops


def test_counters_go_on_from_the_given_step():
    trainer = pl.Trainer(accelerator="cpu", max_steps=20, accumulate_grad_batches=2, logger=False, barebones=True)
    loops.restore_counters(trainer, step=7, accumulation=2)
    assert trainer.global_step == 7
    assert trainer.fit_loop.total_batch_idx == 13  # the next one is micro-batch number 14
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 7


def test_the_names_exist_before_we_set_them():
    trainer = pl.Trainer(accelerator="cpu", max_steps=20, logger=False, barebones=True)
    epoch_loop = trainer.fit_loop.epoch_loop
    assert callable(epoch_loop._broadcast_sigterm_tensor)
    assert epoch_loop._skip_next_val is False
    loops.stop_after_this_step(trainer, validate=False)
    assert trainer.should_stop
    assert epoch_loop._skip_next_val
