"""The probe of a plan: ten real steps on this machine, put beside what was planned.

The steps are a trial of `llmtrain.bench.trials`: the settings' own model and processes, through `fit`. Text matters to
neither speed nor memory, so the tokens are random and nothing is prepared.
"""

from __future__ import annotations

import logging
import statistics
from typing import TYPE_CHECKING, Any

from llmtrain.launch.forecast import size

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.launch.plan import Plan

logger = logging.getLogger(__name__)

STEPS = 10
_SETTLING = 2  # steps that allocate and load what later ones have


def probe(settings: DictConfig, plan: Plan, *, steps: int = STEPS) -> dict[str, Any]:
    """A few real steps.

    Args:
        settings: those of the plan.
        plan: what they are compared with.
        steps: at least three.

    Returns:
        `step_seconds` (the median of the later steps), `tokens_per_second`, `mfu`, `memory` (peak growth of the process
        that grew most), `memory_ratio` to the prediction, `seconds` of the whole run at this speed, and `cost`.

    Raises:
        ValueError: More machines than one.
        RuntimeError: A process of the probe ended badly.
    """
    from llmtrain.bench.trials import Trial, run_trial

    target, batch = plan.target, plan.batch
    if target.num_nodes > 1:
        raise ValueError(
            f"plan.probe=true runs on this machine alone, and trainer.num_nodes={target.num_nodes}; leave one out."
        )
    trial = Trial(
        model=plan.config.to_dict(),
        fit=_fit_options(settings, plan),
        processes=target.devices,
        micro_batch_size=batch.micro_batch_size,
        sequence_length=plan.workload.sequence_length,
        accumulation=batch.accumulation,
        steps=steps,
    )
    logger.info("probing: %d steps of the real thing", steps)
    outcome = run_trial(trial)
    step_seconds = statistics.median(outcome.step_seconds[_SETTLING - 1 :])
    seconds = None if plan.length is None else plan.length.steps * step_seconds
    peak = max(outcome.growth)
    return {
        "step_seconds": step_seconds,
        "tokens_per_second": batch.rows * plan.workload.sequence_length / step_seconds,
        "mfu": statistics.median(outcome.mfu[_SETTLING - 1 :]) if outcome.mfu else None,
        "memory": peak,
        "memory_ratio": peak / plan.memory.total,
        "seconds": seconds,
        "cost": plan.cost(seconds),
    }


def _fit_options(settings: DictConfig, plan: Plan) -> dict[str, Any]:
    """What `pretrain` hands to `fit`, as plain values, without what is a trial's own or writes and reads files."""
    from omegaconf import OmegaConf, open_dict

    from llmtrain.launch.fitting import fit_arguments

    settings = settings.copy()
    with open_dict(settings):
        settings.resume = None
        settings.logger = {"kind": "csv"}
    left_out = {"devices", "num_nodes", "log_every", "val_every", "checkpoint_every", "keep_last", "wandb", "resume"}
    values = {key: value for key, value in fit_arguments(settings, STEPS).items() if key not in left_out}
    values["warmup_steps"] = min(values["warmup_steps"], 1)  # a toy takes two steps before
    values["accelerator"] = "cpu" if plan.target.on_cpu else "gpu"
    plain: dict[str, Any] = OmegaConf.to_container(OmegaConf.create(values), resolve=True)  # type: ignore[assignment]
    return plain


def describe_probe(plan: Plan, found: dict[str, Any]) -> list[str]:
    """The probe for the reader, each figure beside what was planned."""
    from llmtrain.training.progress import compact, duration

    predicted = plan.memory.total
    mfu = "" if found["mfu"] is None else f", MFU {found['mfu']:.1%} (planned {plan.mfu:.0%})"
    lines = [
        f"probe: {compact(found['tokens_per_second'])} tokens/s, {found['step_seconds']:.3g} s a step{mfu}",
        f"probe: memory grew by {size(found['memory'])} at its peak, planned {size(predicted)}: "
        f"ratio {found['memory_ratio']:.2f}",
    ]
    if found["seconds"] is not None:
        cost = "" if found["cost"] is None else f", cost {found['cost']:,.2f}"
        lines.append(f"probe: at this speed the steps take {duration(found['seconds'])}{cost}")
    return lines
