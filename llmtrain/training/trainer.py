"""Lightning's trainer as every run here uses it, and the libraries' talk that is kept from the user while it runs.

Knows Lightning's arguments; not what is trained, nor what the callbacks do.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger

from llmtrain.training import hardware, placement
from llmtrain.training.cluster import Cluster
from llmtrain.training.control import RunControl
from llmtrain.training.hardware import Machine


def build_trainer(
    strategy: Any,
    machine: Machine,
    control: RunControl,
    callbacks: Sequence[pl.Callback],
    loggers: list[Logger],
    *,
    grad_clip: float | None,
    run_dir: Path,
) -> pl.Trainer:
    """A trainer without anything that is not used: its default callbacks, logging and checks cost time per batch."""
    hardware.share_threads(machine.devices)  # before Lightning sets threads of its own
    return pl.Trainer(
        strategy=strategy,
        accelerator=machine.accelerator,
        devices=machine.devices,
        num_nodes=machine.num_nodes,
        callbacks=list(callbacks),
        logger=loggers,
        max_steps=control.total_steps,
        accumulate_grad_batches=control.accumulation,
        gradient_clip_val=grad_clip or None,
        # In micro-batches over the whole run; the last step validates through `should_stop` (see `StopOnSignal`).
        val_check_interval=(control.val_every or control.total_steps) * control.accumulation,
        check_val_every_n_epoch=None,
        limit_val_batches=None if control.validates else 0,
        num_sanity_val_steps=0,
        log_every_n_steps=0,  # nothing is logged through Lightning's result collection
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_autolog_hparams=False,
        use_distributed_sampler=False,
        default_root_dir=run_dir,
        plugins=[Cluster(placement.here(), machine.devices)],
    )


@contextmanager
def library_deprecations_ignored() -> Iterator[None]:
    """Silences what libraries deprecate in each other, which nobody here can mend, and advice that does not apply."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module=r"(lightning|deepspeed|torch)\.")
        # The hook belongs to the module: it knows which parts of a batch the device needs.
        warnings.filterwarnings("ignore", message=r"You have overridden `transfer_batch_to_device`")
        # Ours is a folder with a whole model folder beside the shards.
        warnings.filterwarnings("ignore", message=r"When saving the DeepSpeed Stage 3 checkpoint")
        yield
