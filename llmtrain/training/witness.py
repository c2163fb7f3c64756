"""What `verify-resume` needs of a run: which samples each step trained on, and a signal at a chosen step.

Asked for by environment variables, so that the run's own settings stay as they are. Knows steps and sample ids; not
what is compared or why.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

SAMPLES_VARIABLE = "LLMTRAIN_SAMPLE_IDS"
"""Set to 1: the ids of every step's samples go to `sample_ids.csv` in the run folder."""
SIGNAL_VARIABLE = "LLMTRAIN_SIGNAL_AT"
"""`SIGKILL@7`: rank 0 sends itself this signal in the middle of step 7, counted from 1; `SIGKILL@7:1`: rank 1 does."""
SAMPLES_FILE = "sample_ids.csv"


def witnesses(run_dir: Path, *, resumed_step: int, environment: Mapping[str, str] = os.environ) -> list[Callback]:
    """The callbacks that the environment asks for; usually none.

    Raises:
        ValueError: The signal's variable cannot be read.
    """
    found: list[Callback] = []
    if environment.get(SAMPLES_VARIABLE) == "1":
        found.append(SampleIds(run_dir / SAMPLES_FILE, resumed_step=resumed_step))
    wanted = environment.get(SIGNAL_VARIABLE)
    if wanted:
        match = re.fullmatch(r"(SIG[A-Z0-9]+)@(\d+)(?::(\d+))?", wanted)
        if match is None or match[1] not in signal.Signals.__members__:
            raise ValueError(f"{SIGNAL_VARIABLE}={wanted} must be a signal and a step, such as SIGKILL@7.")
        found.append(SignalAt(signal.Signals[match[1]], int(match[2]), rank=int(match[3] or 0)))
    return found


class SampleIds(Callback):
    """One line for each step: its number and the ids of its samples, micro-batch by micro-batch, rank by rank.

    Args:
        path: The file; a resumed run keeps the lines up to its step.
        resumed_step: That step.
    """

    def __init__(self, path: Path, *, resumed_step: int) -> None:
        self._path = path
        self._resumed_step = resumed_step
        self._ids: list[torch.Tensor] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Drops the lines of steps that are about to come again."""
        if not trainer.is_global_zero:
            return
        kept = []
        if self._path.exists():
            lines = self._path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if int(line.partition(",")[0]) <= self._resumed_step]
        self._path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a whole step: gathers the ids of all ranks; rank 0 writes them."""
        self._ids.append(batch["sample_ids"].cpu())
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        mine = torch.stack(self._ids).tolist()  # (micro-batches, rows)
        self._ids = []
        ranks: list[Any] = [mine]
        if trainer.world_size > 1:
            ranks = [None] * trainer.world_size
            dist.all_gather_object(ranks, mine)
        if trainer.is_global_zero:
            in_order = [row for micro_batch in zip(*ranks, strict=True) for rows in micro_batch for row in rows]
            with self._path.open("a", encoding="utf-8") as file:
                file.write(",".join(map(str, [trainer.global_step, *in_order])) + "\n")


class SignalAt(Callback):
    """A rank sends itself a signal in the middle of a step, between its micro-batches if it has several.

    Args:
        number: The signal.
        step: The step, counted from 1.
        rank: The rank.
    """

    def __init__(self, number: signal.Signals, step: int, *, rank: int = 0) -> None:
        self._number, self._step, self._rank = number, step, rank

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Sends it."""
        middle = trainer.accumulate_grad_batches // 2
        here = batch_idx % trainer.accumulate_grad_batches == middle and trainer.global_step == self._step - 1
        if here and trainer.global_rank == self._rank:
            os.kill(os.getpid(), self._number)
