"""Learning-rate schedules as pure functions of the step.

A schedule returns a factor; `LanguageModule` multiplies the initial learning rate of every parameter group by it
before each step. Nothing here holds state, so a resumed run needs only its step.
"""

import math

from llmtrain.training.ranges import check_whole, is_number, shown

AUTO_WARMUP = 50
"""Steps of warm-up where the settings do not say, in a run of at least ten times as many."""
SCHEDULES = ("cosine", "wsd", "constant")


def schedule(
    name: str,
    *,
    step: int,
    total_steps: int,
    warmup_steps: int = 0,
    min_lr_ratio: float = 0.0,
    decay_fraction: float = 0.2,
) -> float:
    """Returns the factor on the initial learning rate for one optimiser step.

    All schedules begin with a linear warm-up: step 0 has 1/warmup_steps, step warmup_steps-1 has 1.
    Then ``cosine`` falls along half a cosine, ``wsd`` (warm-up, stable, decay) stays at 1 and falls
    linearly over the last ``decay_fraction`` of the run, and ``constant`` stays at 1. Both falling
    ones reach ``min_lr_ratio`` exactly at the last step, ``total_steps - 1``, and keep it afterwards.

    Args:
        name: ``cosine``, ``wsd`` or ``constant``.
        step: optimiser step, from 0.
        total_steps: optimiser steps of the whole run.
        warmup_steps: steps of linear warm-up.
        min_lr_ratio: the factor of the last step, 0 to 1 (``cosine``, ``wsd``).
        decay_fraction: share of ``total_steps`` in which ``wsd`` decays, above 0 and at most 1.

    Raises:
        ValueError: an unknown name or a value outside its range.
    """
    decay_steps = _check(name, total_steps, warmup_steps, min_lr_ratio, decay_fraction)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if name == "constant":
        return 1.0
    start = total_steps - decay_steps
    if step < start:
        return 1.0
    progress = min(1.0, (step - start + 1) / decay_steps) if decay_steps else 1.0
    shape = 0.5 * (1.0 + math.cos(math.pi * progress)) if name == "cosine" else 1.0 - progress
    return min_lr_ratio + (1.0 - min_lr_ratio) * shape


def resolve_warmup(warmup_steps: int | str, total_steps: int) -> int:
    """Steps of warm-up: the number given, or for `auto` `AUTO_WARMUP`, but at most a tenth of the run."""
    return min(AUTO_WARMUP, total_steps // 10) if isinstance(warmup_steps, str) else warmup_steps


def _check(name: str, total_steps: int, warmup_steps: int, min_lr_ratio: float, decay_fraction: float) -> int:
    """Validates the settings; returns how many last steps the learning rate falls."""
    if name not in SCHEDULES:
        raise ValueError(f"optim.schedule={shown(name)} is unknown; choose one of {', '.join(SCHEDULES)}.")
    check_whole("optim.warmup_steps", warmup_steps, least=0)
    if warmup_steps > total_steps:
        raise ValueError(
            f"optim.warmup_steps={warmup_steps} must be between 0 and the run's {total_steps} steps; for so short a "
            "run give optim.warmup_steps=auto, a tenth of it."
        )
    if not is_number(min_lr_ratio) or not 0.0 <= min_lr_ratio <= 1.0:
        raise ValueError(f"optim.min_lr_ratio={shown(min_lr_ratio)} must be between 0 and 1.")
    if not is_number(decay_fraction) or not 0.0 < decay_fraction <= 1.0:
        raise ValueError(f"optim.decay_fraction={shown(decay_fraction)} must be above 0 and at most 1.")
    if name == "constant":
        return 0
    if name == "cosine":
        return total_steps - warmup_steps
    decay_steps = max(1, round(decay_fraction * total_steps))
    if warmup_steps + decay_steps > total_steps:
        raise ValueError(
            f"optim.warmup_steps={warmup_steps} and the {decay_steps} decay steps"
            f" (optim.decay_fraction={decay_fraction}) do not fit into {total_steps} steps; lower one of them."
        )
    return decay_steps
