"""Memory that does not suffice is noticed in the first minute, and the message says what to do about it.

Before the first step the largest micro-batch there is goes forward and backward once, without a step. It leaves no
trace: gradients are taken beside the model's own and dropped, no hook of the strategy's sees them, random state is put
back. Does not know which batch that is (the data module), nor how much memory there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from llmtrain.training.module import LanguageModule


class Rehearsal(Callback):
    """Runs the data module's `largest_batch` once, if it has one that the first step may not show."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The strategy is set up and a resumed run's weights are loaded."""
        assert isinstance(pl_module, LanguageModule)
        batch = trainer.datamodule.largest_batch()  # type: ignore[attr-defined]
        if batch is None:
            return
        batch = pl_module.transfer_batch_to_device(batch, pl_module.device, 0)
        trained = [parameter for parameter in pl_module.model.parameters() if parameter.requires_grad]
        devices = [pl_module.device] if pl_module.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), trainer.precision_plugin.train_step_context():
            total = pl_module.batch_loss(batch)
            # Not `backward`: DeepSpeed hangs its reductions on the parameters' own gradients.
            torch.autograd.grad(total, trained, allow_unused=True)


@contextmanager
def memory_errors_explained(data: Any) -> Iterator[None]:
    """Turns an out-of-memory error of the body into a sentence.

    Args:
        data: the data module, for the size of its micro-batches.

    Raises:
        ValueError: with what to change.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        raise ValueError(
            f"out of memory with {data.micro_batch_size} rows in a micro-batch: lower trainer.micro_batch_size, or set "
            "trainer.gradient_checkpointing=true, which keeps fewer activations."
        ) from error


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return "DefaultCPUAllocator" in str(error)  # the CPU's has no class of its own
