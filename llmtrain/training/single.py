"""One process without DeepSpeed: fp32 weights, computed in fp32 or under bf16 autocast.

It offers what the DeepSpeed strategy offers: the true gradient norm, whether a step was skipped, the fp32 weights and
the training state.
"""

import math
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from llmtrain.training.state import Fragment, Shard


class _NormKeeper(Precision):
    """Measures the gradient's norm at every step and clips by it.

    Lightning refuses to clip under autocast with a fused optimiser, because such an optimiser may unscale
    the gradient itself. In bf16 nothing is scaled, so clipping is right.
    """

    norm: Tensor | None = None
    skipped = False

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Backward, then the step, unless the gradient is not finite: weights and moments stay untouched then.

        On a GPU this waits for the norm once per step, as DeepSpeed does.
        """
        loss = self._wrap_closure(model, optimizer, closure)
        self.skipped = self.norm is not None and not math.isfinite(self.norm)
        if not self.skipped:
            optimizer.step(**kwargs)
        return loss

    def clip_gradients(
        self, optimizer: Any, clip_val: float | None = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        parameters = [p for p in self.main_params(optimizer) if p.grad is not None]
        self.norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if clip_val and clip_val > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, self.norm)


class _BF16Precision(_NormKeeper, MixedPrecision):
    """bf16 autocast over fp32 weights."""


class SingleStrategy(SingleDeviceStrategy):
    """One process on one device.

    Args:
        accelerator: `cpu` or `cuda`.
        precision: `bf16` (fp32 weights, bf16 autocast) or `fp32`.
    """

    def __init__(self, *, accelerator: str, precision: str = "fp32") -> None:
        device = torch.device("cuda", 0) if accelerator == "cuda" else torch.device("cpu")
        self._norms = _BF16Precision("bf16-mixed", device.type) if precision == "bf16" else _NormKeeper()
        super().__init__(device=device, precision_plugin=self._norms)

    @property
    def last_grad_norm(self) -> float | None:
        """Norm of the last step's whole gradient before clipping; None before the first step.

        Reading it waits for the device.
        """
        return None if self._norms.norm is None else float(self._norms.norm)

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last step was left out because its gradient was not finite."""
        return self._norms.skipped

    def fp32_state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        """The module's state dict on the CPU, floating-point values in fp32, tied weights as one tensor."""
        copies: dict[int, Tensor] = {}
        state: dict[str, Tensor] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            if id(value) not in copies:
                kept = value.detach().to("cpu", copy=True)
                copies[id(value)] = kept.float() if kept.is_floating_point() else kept
            state[name] = copies[id(value)]
        return state

    def shard(self, module: nn.Module) -> Shard:
        """The training state of a module: every trained parameter whole, and updated as it is."""
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        return Shard(
            shapes={name: tuple(p.shape) for name, p in trained.items()},
            fragments=[Fragment(name, p, 0, 0, p.numel()) for name, p in trained.items()],
            optimizer_state=self.optimizers[0].state,
            device=self.root_device,
        )

    def publish_weights(self) -> None:
        """Nothing: the fp32 weights are those that are computed with."""
