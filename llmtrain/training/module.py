"""The one LightningModule: next-token training of any plain model, pretraining and fine-tuning alike.

It knows the loss of an optimiser step, the learning rate of a step and the seed of a micro-batch's dropout. It does not
know how gradients are summed, clipped or sharded (the strategy), when something is logged or saved (the callbacks), nor
where batches come from.

Shapes: B rows of a micro-batch, T time.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from llmtrain.model import Transformer, loss_sum
from llmtrain.training.optim import build_optimizer, schedule


class LanguageModule(pl.LightningModule):
    """Trains the injected model.

    The loss of one optimiser step is (sum of token losses) / (trained tokens), both over all its micro-batches and
    ranks. Each micro-batch carries that number of trained tokens as `step_tokens`, so its share is known before the
    first backward: sum × accumulation × world size / step_tokens, because Lightning divides by the accumulation and the
    strategy averages over the ranks.

    Args:
        model: the plain transformer, adapters already attached in place if there are any.
        total_steps: optimiser steps of the whole run, for the schedule.
        optimizer: name for `build_optimizer`.
        lr: peak learning rate.
        optimizer_options: further keyword arguments of `build_optimizer` (weight_decay, betas, eps, …).
        schedule_name: `cosine`, `wsd` or `constant`.
        warmup_steps: steps of linear warm-up.
        min_lr_ratio: last learning rate as a share of the peak.
        decay_fraction: share of the run that `wsd` decays over.
        seed: of dropout.
        tokens_per_byte: validation targets per UTF-8 byte of validation text; `None` leaves bits per byte out.
        compile_model: run forward and backward through `torch.compile`.
        tokens_seen: trained tokens of the steps before a resume.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        total_steps: int,
        optimizer: str = "adamw",
        lr: float = 1e-3,
        optimizer_options: Mapping[str, Any] | None = None,
        schedule_name: str = "cosine",
        warmup_steps: int = 0,
        min_lr_ratio: float = 0.1,
        decay_fraction: float = 0.2,
        seed: int = 0,
        tokens_per_byte: float | None = None,
        compile_model: bool = False,
        tokens_seen: int = 0,
    ) -> None:
        super().__init__()
        self.model = model
        self.total_steps = total_steps
        self.seed = seed
        self.tokens_per_byte = tokens_per_byte
        self.tokens_seen = tokens_seen  # trained tokens of all finished steps, over all ranks
        self.positions_seen = 0  # input positions of this process in this session, trained or not
        self.last_lr = 0.0
        self.last_validation: dict[str, float] = {}  # of the newest validation
        self._optimizer = {"name": optimizer, "lr": lr, **(optimizer_options or {})}
        self._schedule: dict[str, Any] = {
            "total_steps": total_steps,
            "warmup_steps": warmup_steps,
            "min_lr_ratio": min_lr_ratio,
            "decay_fraction": decay_fraction,
        }
        self._schedule_name = schedule_name
        schedule(schedule_name, step=0, **self._schedule)  # refuses what cannot work now, not after the set-up
        self._base_lrs: list[float] = []
        self._has_dropout = has_dropout(model)
        self._loss_sum = torch.compile(loss_sum) if compile_model else loss_sum
        self._step_loss = torch.zeros(())  # summed loss of this rank's micro-batches of the current step
        self._step_tokens = 0
        self._val_totals = torch.zeros(2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimiser over everything that is trainable; the schedule is applied by `on_train_batch_start`."""
        optimizer = build_optimizer(self.model, **self._optimizer)
        self._base_lrs = [group["lr"] for group in optimizer.param_groups]
        return optimizer

    def transfer_batch_to_device(self, batch: dict, device: torch.device, dataloader_idx: int) -> dict:
        """Moves what the model reads; `step_tokens` and `sample_ids` stay on the host, where they are read."""
        if device.type == "cpu":
            return batch
        read = (name for name in ("input_ids", "labels", "document_ids") if name in batch)
        moved = {name: batch[name].to(device, non_blocking=True) for name in read}
        return {**batch, **moved}

    def on_train_batch_start(self, batch: dict, batch_idx: int) -> None:
        """Sets this step's learning rate and this micro-batch's dropout seed."""
        micro_batch = batch_idx % self.trainer.accumulate_grad_batches
        step = self.trainer.global_step
        if micro_batch == 0:
            factor = schedule(self._schedule_name, step=step, **self._schedule)
            for group, base in zip(self.trainer.optimizers[0].param_groups, self._base_lrs, strict=True):
                group["lr"] = base * factor
            self.last_lr = self._optimizer["lr"] * factor
        if self._has_dropout:
            torch.manual_seed(dropout_seed(self.seed, step, micro_batch, self.global_rank))

    def training_step(self, batch: dict, batch_idx: int) -> Tensor:
        """The micro-batch's share of the step's loss, before Lightning's and the strategy's own divisions."""
        trainer = self.trainer
        total = self.batch_loss(batch)
        first = batch_idx % trainer.accumulate_grad_batches == 0
        share = total.detach().double()
        self._step_loss = share if first else self._step_loss + share
        self._step_tokens = int(batch["step_tokens"])  # a host tensor: no device is waited for
        self.positions_seen += batch["input_ids"].numel()
        scale = trainer.accumulate_grad_batches * trainer.world_size / max(1, self._step_tokens)
        # A loss that is not finite can have a finite gradient. Made NaN, that shows in the gradient's norm, which all
        # ranks share and look at before they take the step: no synchronisation of its own.
        return total * torch.where(total.detach().isfinite(), scale, math.nan)

    def batch_loss(self, batch: dict) -> Tensor:
        """The summed loss of a micro-batch's trained tokens, an fp32 scalar in nats."""
        return self._loss_sum(self.model, batch["input_ids"], batch["labels"], document_ids=batch.get("document_ids"))[
            0
        ]

    def on_train_batch_end(self, outputs: Any, batch: dict, batch_idx: int) -> None:
        """Counts the step's tokens once it is complete. Callbacks run before this hook and use `finished_tokens`."""
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self.tokens_seen = self.finished_tokens()

    def finished_tokens(self) -> int:
        """Trained tokens up to and including the step that has just been taken."""
        return self.tokens_seen + self._step_tokens

    def step_loss(self) -> float:
        """The loss of the step just taken, over all micro-batches and ranks. A collective that waits for the device."""
        total = self.trainer.strategy.reduce(self._step_loss.clone(), reduce_op="sum")
        return float(total) / max(1, self._step_tokens)

    def on_validation_epoch_start(self) -> None:
        """Clears the totals of the last validation."""
        self._val_totals = torch.zeros(2, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        """Adds the batch's summed loss and its number of targets."""
        # Not through the compiled one: too short to repay it.
        documents = batch.get("document_ids")
        total, count = loss_sum(self.model, batch["input_ids"], batch["labels"], document_ids=documents)
        self._val_totals += torch.stack((total.double(), count.double()))

    def on_validation_epoch_end(self) -> None:
        """Puts `val/loss` and, for text, `val/bpb` into `last_validation`: token-weighted over all ranks."""
        total, count = self.trainer.strategy.reduce(self._val_totals.clone(), reduce_op="sum").tolist()
        loss = total / max(1.0, count)
        result = {"val/loss": loss}
        if self.tokens_per_byte is not None:
            result["val/bpb"] = loss * self.tokens_per_byte / math.log(2)
        self.last_validation = result


def dropout_seed(seed: int, step: int, micro_batch: int, rank: int) -> int:
    """A 63-bit seed that differs for every (seed, step, micro-batch, rank): no random state has to be saved."""
    digest = hashlib.blake2b(struct.pack("<4q", seed, step, micro_batch, rank), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def has_dropout(model: nn.Module) -> bool:
    """Whether training draws random numbers: the model's own dropout or an adapter's."""
    if getattr(getattr(model, "config", None), "dropout", 0.0):
        return True
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
