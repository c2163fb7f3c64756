"""The probe of a plan: builds the model, runs ten real steps through `fit`, and puts them beside the figures.

Reads the settings of `pretrain`. Text matters to neither speed nor memory, so the tokens are random and nothing is
prepared.
"""

from __future__ import annotations

import csv
import logging
import shutil
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.launch.forecast import size

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.launch.plan import Plan

logger = logging.getLogger(__name__)

STEPS = 10
_SETTLING = 3  # the first steps allocate and load what later ones have


def probe(settings: DictConfig, run_dir: Path, plan: Plan) -> dict[str, Any]:
    """Ten real steps.

    Returns:
        `tokens_per_second`, `step_seconds` (the median of the later steps), `mfu`, `memory` (peak growth of the first
        process) and `memory_ratio` to the prediction, `seconds` of the whole run at this speed, and `cost`. Empty on
        other processes than the first.

    Raises:
        ValueError: More machines than one, or a setting that `fit` refuses.
    """
    from omegaconf import open_dict

    from llmtrain.training.deepspeed.environment import prepare_import
    from llmtrain.training.resident import Growth

    target, batch = plan.target, plan.batch
    if target.num_nodes > 1:
        raise ValueError(
            f"plan.probe=true runs on this machine alone, and trainer.num_nodes={target.num_nodes}; leave one of them out."
        )
    settings = settings.copy()
    with open_dict(settings):
        settings.resume = None
        settings.logger = {"kind": "csv"}
        settings.optim.warmup_steps = min(settings.optim.warmup_steps, STEPS)
        settings.trainer |= {"log_every": 1, "val_every": None, "checkpoint_every": None}
    if plan.stage:
        prepare_import("cpu" if target.on_cpu else "cuda")
    folder = run_dir / "probe"
    folder.mkdir(parents=True, exist_ok=True)
    logger.info("probing: %d steps of the real thing", STEPS)
    growth = Growth("cpu" if target.on_cpu else "cuda")
    try:
        result = _fit(settings, folder, plan)
        if not result.is_main:
            return {}
        if result.stopped_by is not None:
            raise KeyboardInterrupt
        peak = growth.peak()
        figures = _later_steps(folder / "metrics.csv")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not any(run_dir.iterdir()):
            run_dir.rmdir()
    tokens = batch.rows * plan.workload.sequence_length
    seconds = None if plan.length is None else plan.length.steps * figures["step_seconds"]
    return {
        **figures,
        "tokens_per_second": tokens / figures["step_seconds"],
        "memory": peak,
        "memory_ratio": peak / plan.workload.memory(target, plan.stage).total,
        "seconds": seconds,
        "cost": plan.cost(seconds),
    }


def _fit(settings: DictConfig, folder: Path, plan: Plan) -> Any:
    from llmtrain.bench.training_memory import RandomTokens
    from llmtrain.data.modules import PretrainDataModule
    from llmtrain.launch.fitting import fit_arguments
    from llmtrain.model import build_model, flops_per_token
    from llmtrain.tokenizer import byte_tokenizer
    from llmtrain.training.fit import fit

    sequence_length, batch = plan.workload.sequence_length, plan.batch
    tokenizer = byte_tokenizer()
    data = PretrainDataModule(
        [(RandomTokens(plan.config.vocab_size), 1.0)],
        None,
        eos_id=tokenizer.eos_id,
        sequence_length=sequence_length,
        micro_batch_size=batch.micro_batch_size,
        accumulation=batch.accumulation,
        total_steps=STEPS,
        seed=settings.seed,
    )
    return fit(
        model=build_model(plan.config, seed=settings.seed),
        data=data,
        tokenizer=tokenizer,
        run_dir=folder,
        total_steps=STEPS,
        accumulation=batch.accumulation,
        validates=False,
        flops_per_position=flops_per_token(plan.config, sequence_length),
        **fit_arguments(settings),
    )


def _later_steps(metrics: Path) -> dict[str, float]:
    """The median seconds of a step, and MFU at that speed, of the steps after the first few."""
    with metrics.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    seconds = [float(row["seconds"]) for row in rows]
    steps = [later - earlier for earlier, later in zip(seconds, seconds[1:], strict=False)][_SETTLING - 1 :]
    figures = {"step_seconds": statistics.median(steps)}
    shares = [float(row["train/mfu"]) for row in rows[_SETTLING:] if row.get("train/mfu")]
    return figures | ({"mfu": statistics.median(shares)} if shares else {})


def describe_probe(plan: Plan, found: dict[str, Any]) -> list[str]:
    """The probe for the reader, each figure beside what was planned."""
    from llmtrain.training.progress import compact, duration

    predicted = plan.workload.memory(plan.target, plan.stage).total
    mfu = f", MFU {found['mfu']:.1%} (planned {plan.mfu:.0%})" if "mfu" in found else ""
    lines = [
        f"probe: {compact(found['tokens_per_second'])} tokens/s, {found['step_seconds']:.3g} s a step{mfu}",
        f"probe: memory grew by {size(found['memory'])} at its peak, planned {size(predicted)}: "
        f"ratio {found['memory_ratio']:.2f}",
    ]
    if found["seconds"] is not None:
        cost = "" if found["cost"] is None else f", cost {found['cost']:,.2f}"
        lines.append(f"probe: at this speed the steps take {duration(found['seconds'])}{cost}")
    return lines
