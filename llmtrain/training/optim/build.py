"""Builds the optimiser that a run's settings ask for."""

from collections.abc import Sequence

import torch
from torch import nn

from llmtrain.training.optim.groups import parameter_groups
from llmtrain.training.optim.muon import Muon
from llmtrain.training.ranges import check_whole, is_number, shown

OPTIMIZERS = ("adamw", "muon")


def build_optimizer(
    model: nn.Module,
    *,
    name: str,
    lr: float,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    muon_lr: float = 0.02,
    muon_momentum: float = 0.95,
    muon_steps: int = 5,
    muon_dtype: torch.dtype = torch.float32,
) -> torch.optim.Optimizer:
    """Builds AdamW (fused), or Muon for the hidden matrices with fused AdamW for the rest.

    Each group carries its own learning rate, so that one factor of the schedule scales all of them alike.

    Args:
        model: the model; its trainable parameters are split by `parameter_groups`.
        name: `adamw` or `muon`.
        lr: learning rate of AdamW's groups.
        weight_decay: decoupled weight decay of the matrices.
        betas: AdamW's decay rates of the first and second moment.
        eps: AdamW's term in the denominator.
        muon_lr: learning rate of the hidden matrices (`muon`).
        muon_momentum: Nesterov momentum of the hidden matrices (`muon`).
        muon_steps: Newton–Schulz steps (`muon`).
        muon_dtype: dtype of the Newton–Schulz products (`muon`): float32, or bfloat16 in a bf16 run.

    Raises:
        ValueError: an unknown name, or a value outside its range.
    """
    check_optimizer(
        name=name, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps, muon_lr=muon_lr,
        muon_momentum=muon_momentum, muon_steps=muon_steps,
    )  # fmt: skip
    muon = name == "muon"
    groups = parameter_groups(model, lr=lr, weight_decay=weight_decay, muon=muon, muon_lr=muon_lr)
    betas = (float(betas[0]), float(betas[1]))  # Hydra hands over a list
    if not muon:
        for group in groups:
            del group["muon"]
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    return Muon(groups, lr=lr, betas=betas, eps=eps, momentum=muon_momentum, ns_steps=muon_steps, ns_dtype=muon_dtype)


def check_optimizer(
    *,
    name: str,
    lr: float,
    weight_decay: float = 0.1,
    betas: Sequence[float] = (0.9, 0.95),
    eps: float = 1e-8,
    muon_lr: float = 0.02,
    muon_momentum: float = 0.95,
    muon_steps: int = 5,
) -> None:
    """Refuses what `build_optimizer` would, before there is a model. The arguments are its own.

    Raises:
        ValueError: an unknown name, or a value outside its range.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optim.name={shown(name)} is unknown; choose one of {', '.join(OPTIMIZERS)}.")
    for key, value in (("lr", lr), ("muon_lr", muon_lr)):
        if not is_number(value) or not value > 0:
            raise ValueError(f"optim.{key}={shown(value)} must be above 0 and finite.")
    for key, value in (("weight_decay", weight_decay), ("eps", eps)):
        if not is_number(value) or not value >= 0:
            raise ValueError(f"optim.{key}={shown(value)} must not be negative, and finite.")
    several = isinstance(betas, Sequence) and not isinstance(betas, str)
    if not several or len(betas) != 2 or not all(is_number(beta) and 0.0 <= beta < 1.0 for beta in betas):
        given = list(betas) if several else shown(betas)
        raise ValueError(f"optim.betas={given} must be two numbers, each at least 0 and below 1.")
    if not is_number(muon_momentum) or not 0.0 <= muon_momentum < 1.0:
        raise ValueError(f"optim.muon_momentum={shown(muon_momentum)} must be at least 0 and below 1.")
    check_whole("optim.muon_steps", muon_steps, least=1)


def check_grad_clip(grad_clip: float | None) -> None:
    """Refuses a largest norm of the gradient that is none.

    Raises:
        ValueError: it is not above 0, or no finite number.
    """
    if grad_clip is not None and (not is_number(grad_clip) or not grad_clip > 0):
        raise ValueError(f"optim.grad_clip={grad_clip} must be above 0 and finite; null does not clip.")
