"""Watching a request being answered: what its observer is told at every step.

The loop calls an observer where it works out what callers asked to be told of a step, so a request without one pays
nothing. Knows tensors; not what becomes of them.

Shapes: V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class StepObserver(Protocol):
    """Told of each step of one request after its token was chosen and before the request takes it."""

    def __call__(self, logits: Tensor, excluded: Tensor, uniform: float | None) -> None:
        """Takes one step; neither tensor may be changed or kept without a copy.

        Args:
            logits: (V,) fp32, the model's scores before anything was done to them.
            excluded: (V,) −inf for ids that are never chosen, else 0; added to the scores before all settings.
            uniform: The number in [0, 1) that decided, in fp32; None for a greedy request, which draws none.
        """
