"""Muon for hidden matrices and AdamW for everything else, in one optimiser, whole or sharded.

Muon (Keller Jordan and others, https://kellerjordan.github.io/posts/muon) replaces the momentum of a
weight matrix by the nearest semi-orthogonal matrix, found by a few Newton–Schulz steps. That needs the
whole matrix, while ZeRO 1 and 2 leave each process only a slice. So this class records the shapes of its
matrices at construction and afterwards recognises from its parameters how it is being run:

* **whole**: its parameters are still those matrices;
* **sliced**: a group's parameters were replaced by one flat fp32 vector, this process's equal share of
  the group's matrices laid end to end in order (DeepSpeed's `bit16_groups` flattened in order, padded at
  the end). Momentum and weight decay are element-wise and stay sharded; only the momentum that is to be
  orthogonalised is gathered, and each process orthogonalises the matrices that its slice touches.

Both give the same numbers. Its `.grad` must be the reduced, clipped, true gradient. It does not know
DeepSpeed; it asks torch.distributed for nothing but the rank and the gather.

Shapes: N matrices of one shape, R rows, C columns.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

# Quintic iteration with the steepest slope at zero that still keeps singular values in about [0.7, 1.2];
# from Keller Jordan's post. Exact orthogonality is not needed: S' of U S' V^T may be uneven.
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalize(matrices: Tensor, *, steps: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """Newton–Schulz: maps each U S V^T to about U V^T.

    Args:
        matrices: (N, R, C).
        steps: iterations of the quintic.
        dtype: dtype of the products.

    Returns:
        (N, R, C) in `dtype`.
    """
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=torch.float32)  # (N, 1, 1)
    x = (matrices / norms.clamp(min=1e-7)).to(dtype)  # spectral norm at most 1
    tall = x.size(-2) > x.size(-1)
    if tall:  # the Gram matrix of the shorter side is cheaper
        x = x.mT
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if tall else x


def update_scale(rows: int, cols: int) -> float:
    """Factor on Muon's learning rate for one shape: sqrt(max(1, rows / cols)).

    Keller Jordan's rule (torch.optim.Muon's "original"): the spectral norm of the change suits a map from
    `cols` to `rows` dimensions, so one learning rate serves every shape and width.
    """
    return max(1.0, rows / cols) ** 0.5


@dataclass(frozen=True)
class _Run:
    """Neighbouring matrices of one shape which a slice touches; offsets in elements."""

    shape: tuple[int, ...]
    start: int  # of the first touched matrix in the whole flat vector
    stop: int  # behind the last touched matrix
    lo: int  # the slice's part of them, in the whole flat vector
    hi: int


@lru_cache(maxsize=64)
def _plan(shapes: tuple[tuple[int, ...], ...], lo: int, hi: int) -> tuple[_Run, ...]:
    """The matrices that intersect elements [lo, hi) of all matrices laid end to end."""
    runs = []
    offset = 0
    for shape, same in groupby(shapes):
        numel = torch.Size(shape).numel()
        end = offset + numel * len(list(same))
        start, stop = max(offset, lo), min(end, hi)
        if start < stop:
            first = offset + (start - offset) // numel * numel
            last = offset + -(-(stop - offset) // numel) * numel
            runs.append(_Run(shape, first, last, start, stop))
        offset = end
    return tuple(runs)


def _assert_slice(flat: Tensor, shapes: list[tuple[int, ...]], world: int) -> None:
    """Holds if `flat` is one of `world` equal shares of the matrices laid end to end.

    ZeRO 1 and 2 pad the whole to a multiple of 2 x world elements (`nccl_start_alignment_factor`) and
    nothing between the matrices. Another layout (padding per parameter, expert groups) has another size.
    """
    total = sum(torch.Size(shape).numel() for shape in shapes)
    padded = -(-total // (2 * world)) * 2 * world
    assert flat.ndim == 1
    assert flat.numel() * world == padded, (
        f"Muon cannot read a slice of {flat.numel()} elements on {world} processes: its matrices have"
        f" {total} elements, padded {padded}."
    )


class Muon(torch.optim.Optimizer):
    """Nesterov momentum orthogonalised for groups with `muon=True`; fused AdamW for the others.

    Args:
        params: groups from `parameter_groups(..., muon=True)`.
        lr: learning rate of groups that do not carry their own.
        betas: AdamW's decay rates.
        eps: AdamW's term in the denominator.
        momentum: Muon's momentum.
        ns_steps: Newton–Schulz steps.
        ns_dtype: dtype of the Newton–Schulz products. In bf16 the update carries a relative error of
            about 1 %, so fp32 runs, which promise equality between strategies, use float32.

    Raises:
        ValueError: a muon group holds a parameter of fewer than two dimensions.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.95,
        ns_steps: int = 5,
        ns_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "muon": False})
        self.ns_steps = ns_steps
        self.ns_dtype = ns_dtype
        for group in self.param_groups:
            if group["muon"]:
                group["momentum"] = momentum
                group["shapes"] = [tuple(p.shape) for p in group["params"]]
                for shape in group["shapes"]:
                    if len(shape) < 2:
                        raise ValueError(f"Muon updates matrices, not a parameter of shape {shape}.")
            else:
                # `fused` makes Optimizer.load_state_dict keep `step` on the parameter's device.
                group.update(betas=betas, eps=eps, fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every group that is in `param_groups` now (DeepSpeed steps them one by one)."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["muon"]:
                self._step_adamw(group)
            elif [tuple(p.shape) for p in group["params"]] == group["shapes"]:
                self._step_whole(group)
            else:
                self._step_slice(group)
        return loss

    def _step_adamw(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        for p in params:
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg_sq"] = torch.zeros_like(p)
        adamw(
            params,
            [p.grad for p in params if p.grad is not None],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            [self.state[p]["step"] for p in params],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _momentum_updates(self, params: list[Tensor], momentum: float) -> list[Tensor]:
        """Moves the momentum buffers on and returns the Nesterov updates (an average, not a sum)."""
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        grads = [p.grad for p in params if p.grad is not None]
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_lerp_(buffers, grads, 1.0 - momentum)
        return list(torch._foreach_lerp(grads, buffers, momentum))

    def _step_whole(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        updates = self._momentum_updates(params, group["momentum"])
        torch._foreach_mul_(params, 1.0 - group["lr"] * group["weight_decay"])
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for i, p in enumerate(params):
            by_shape.setdefault(tuple(p.shape), []).append(i)
        for shape, members in by_shape.items():
            batch = torch.cat([updates[i].reshape(-1, *shape[-2:]) for i in members])  # (N, R, C)
            changed = self._orthogonal(batch).reshape(len(members), *shape)
            torch._foreach_add_(
                [params[i] for i in members],
                list(changed.unbind(0)),
                alpha=-group["lr"] * update_scale(*shape[-2:]),
            )

    def _step_slice(self, group: dict[str, Any]) -> None:
        (flat,) = group["params"]
        size = flat.numel()
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        _assert_slice(flat, group["shapes"], world)
        if flat.grad is None:
            return
        (update,) = self._momentum_updates([flat], group["momentum"])
        lo, whole = rank * size, update
        if world > 1:
            # Rounding before the gather gives the same as after it, in half the bytes under bf16.
            local = update.to(self.ns_dtype)
            whole = local.new_empty(size * world)
            dist.all_gather_single(whole, local)
        flat.mul_(1.0 - group["lr"] * group["weight_decay"])
        for run in _plan(tuple(group["shapes"]), lo, lo + size):
            batch = whole[run.start : run.stop].view(-1, *run.shape[-2:])  # (N, R, C)
            changed = self._orthogonal(batch).reshape(-1)[run.lo - run.start : run.hi - run.start]
            flat[run.lo - lo : run.hi - lo].add_(changed, alpha=-group["lr"] * update_scale(*run.shape[-2:]))

    def _orthogonal(self, batch: Tensor) -> Tensor:
        return orthogonalize(batch, steps=self.ns_steps, dtype=self.ns_dtype).float()
