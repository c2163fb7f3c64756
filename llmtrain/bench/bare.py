"""The loop that anybody would write in a page of PyTorch: the yardstick for the framework's own path.

Forward, backward, clip, step; in bf16 with fp32 master weights. The same optimiser, clipping and precision as `fit`,
and nothing else: no logging, no schedule, no checkpoints, batches already in memory. Does not know whose model it is.

Shapes: B rows of a micro-batch, T time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llmtrain.training.hardware import DTYPES
from llmtrain.training.optim import build_optimizer

LossSum = Callable[[Any, Tensor, Tensor], Tensor]
"""(model, input ids (B, T), shifted labels (B, T)) → summed loss, an fp32 scalar in nats."""


class BareLoop:
    """Trains a model, one optimiser step at a time.

    Args:
        model: In fp32, on its device; turned into bf16 in place for that precision.
        loss_sum: The summed loss of a micro-batch.
        optimizer: Arguments of `build_optimizer`, `name` and `lr` among them.
        precision: `fp32`, or `bf16`: bf16 weights and products, fp32 master weights and accumulated gradients.
        grad_clip: Largest norm of the gradient; `None` or 0 does not clip.
        compile_model: Forward and backward through `torch.compile`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_sum: LossSum,
        *,
        optimizer: Mapping[str, Any],
        precision: str,
        grad_clip: float | None = 1.0,
        compile_model: bool = False,
    ) -> None:
        self.model = model.train()
        self.device = next(model.parameters()).device
        masters = copy.deepcopy(model) if precision == "bf16" else model
        for weight in model.parameters():  # not the buffers: rotary tables stay fp32
            weight.data = weight.data.to(DTYPES[precision])
        self._optimizer = build_optimizer(masters, **optimizer)
        # Of shared weights only one is listed, in both models the same.
        self._weights: list[Tensor] = list(model.parameters())
        self._masters: list[Tensor] = list(masters.parameters())
        self._grad_clip = grad_clip
        self._loss_sum = torch.compile(loss_sum) if compile_model else loss_sum
        self.loss = torch.zeros(())  # of the last step, mean over its trained tokens; reading it waits for the device

    def step(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> None:
        """One optimiser step.

        Args:
            micro_batches: `input_ids`, `labels` (B, T) and `step_tokens`, the trained tokens of all of them.
        """
        loss = torch.zeros((), device=self.device)
        for batch in micro_batches:
            inputs = batch["input_ids"].to(self.device, non_blocking=True)
            labels = batch["labels"].to(self.device, non_blocking=True)
            share = self._loss_sum(self.model, inputs, labels) / int(batch["step_tokens"])
            share.backward()
            loss += share.detach()
            self._gather_gradients()
        self.loss = loss
        if self._grad_clip:
            nn.utils.clip_grad_norm_(self._masters, self._grad_clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._masters[0] is not self._weights[0]:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, self._masters)

    def _gather_gradients(self) -> None:
        """Adds the weights' bf16 gradients to the masters' fp32 ones; in fp32 they are the same tensors."""
        if self._masters[0] is self._weights[0]:
            return
        for weight, master in zip(self._weights, self._masters, strict=True):
            if weight.grad is not None:
                gradient = weight.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                weight.grad = None


def our_loss_sum(model: Any, input_ids: Tensor, labels: Tensor) -> Tensor:
    """The summed loss as `fit` computes it."""
    from llmtrain.model import loss_sum

    return loss_sum(model, input_ids, labels)[0]
