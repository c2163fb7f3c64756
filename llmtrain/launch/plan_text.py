"""A plan for the reader: the whole of it for `plan`, two or three lines for the start of `pretrain`.

Knows how figures are written; the figures are those of `plan` and `forecast`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmtrain.launch import forecast
from llmtrain.launch.forecast import size

if TYPE_CHECKING:
    from llmtrain.launch.plan import Plan
    from llmtrain.training.memory import TrainingMemory

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "allocator", "saving")


def describe(plan: Plan) -> list[str]:
    """The plan for the reader."""
    from llmtrain.model import kv_cache_bytes_per_token

    target, config = plan.target, plan.config
    where = f"{target.world_size} × {target.name}" + (
        f" ({target.num_nodes} machines × {target.devices})" if target.num_nodes > 1 else ""
    )
    lines = [*summary(plan), f"on {where}, {target.precision}", "", *_memory_table(plan), ""]
    kept = "all of them" if plan.keep_last is None else f"{plan.keep_last} of them"
    files = plan.files()
    if plan.saves:
        lines.append(
            f"a checkpoint takes {size(files['total'])} (model {size(files['model'])}, to resume "
            f"{size(files['resume'])}); trainer.keep_last={'null' if plan.keep_last is None else plan.keep_last} keeps "
            f"{kept}"
            + ("" if plan.keep_last is None else f", {size(plan.keep_last * files['total'])}")
            + ", and one more while it is written"
        )
    lines += _time_lines(plan)
    each = ", ".join(f"{size(kv_cache_bytes_per_token(config, dtype))} in {dtype}" for dtype in ("bf16", "fp32"))
    return [*lines, f"generating, the cache takes {each} for each token of a text"]


def summary(plan: Plan) -> list[str]:
    """Parameters, steps and FLOPs: what `pretrain` shows, too."""
    from llmtrain.model import parameter_count

    sequence = plan.workload.sequence_length
    parameters = (
        f"{parameter_count(plan.config) / 1e6:,.2f} M parameters "
        f"({parameter_count(plan.config, embeddings=False) / 1e6:,.2f} M without embeddings)"
    )
    if plan.length is None or plan.tokens is None or plan.flops is None:
        steps = "steps, tokens, FLOPs: unknown, as the corpus is not prepared yet (llmtrain prepare)"
        return [parameters, f"{plan.batch} of {sequence} tokens", steps]
    epochs = "epochs unknown: the corpus is not prepared yet"
    if plan.epoch_tokens:
        epochs = f"{plan.tokens / plan.epoch_tokens:.2f} epochs"
    return [
        f"{parameters}; {plan.length.steps:,} steps ({plan.length.decided_by})",
        f"{plan.batch} of {sequence} tokens: {plan.tokens / 1e6:,.2f} M tokens, {epochs}, {plan.flops:.2g} FLOPs",
    ]


def short_form(plan: Plan) -> list[str]:
    """Two or three lines for the start of a run; the time only where the device's peak is known without measuring."""
    memory = plan.memory
    parts = ", ".join(f"{part} {size(getattr(memory, part))}" for part in PARTS[:-2])
    lines = [*summary(plan), f"memory: about {size(memory.total)} for each process at its peak ({parts})"]
    return lines if plan.seconds is None else [*lines, *_time_lines(plan)]


def shortage(plan: Plan) -> str | None:
    """One sentence if a process is planned to need more than its device has."""
    memory, device = plan.memory, plan.target.memory
    if device is None or memory.total <= device - forecast.RESERVED:
        return None
    return (
        f"the plan needs {size(memory.total)} for each process, and a device has {size(device)}, of which "
        f"{size(forecast.RESERVED)} are for the process itself; lower trainer.micro_batch_size, set "
        "trainer.gradient_checkpointing=true, or take another strategy or more devices."
    )


def _memory_table(plan: Plan) -> list[str]:
    memory = "unknown" if plan.target.memory is None else size(plan.target.memory)
    rows = [["memory of one process", *PARTS, "total", "rows that fit"]]
    for stage in plan.stages:
        rows.append(_memory_row(plan, stage, plan.memory_at(stage)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    rows_now = plan.workload.micro_batch_size
    lines.append(
        f"* this run's strategy; {rows_now} rows of {plan.workload.sequence_length} tokens at a time; "
        f"a device has {memory}, of which {size(forecast.RESERVED)} are for the process itself"
    )
    if plan.stage:
        lines.append(_offload_line(plan))
    lines += filter(None, [shortage(plan)])
    return lines


def _memory_row(plan: Plan, stage: int, memory: TrainingMemory) -> list[str]:
    name = ("* " if stage == plan.stage else "  ") + (f"ZeRO {stage}" if stage else "single")
    largest = plan.largest_micro_batch(stage)
    parts = [size(getattr(memory, part)) for part in PARTS]
    return [name, *parts, size(memory.total), "unknown" if largest is None else f"{largest:,}"]


def _offload_line(plan: Plan) -> str:
    """What offloading the optimiser costs, or would cost, the host; the rows above are already of the settings."""
    setting = "strategy.offload_optimizer=true"
    if plan.workload.optimizer == "muon":
        return f"{setting}: not with optim=muon"
    if plan.target.on_cpu:
        return f"{setting}: saves nothing on a CPU, where it is the same memory"
    kept = replace(plan, workload=replace(plan.workload, offload_optimizer=False, offload_parameters=False))
    offloaded = plan if _offloads(plan) else replace(kept, workload=replace(kept.workload, offload_optimizer=True))
    host = f"{size(offloaded.memory.host - kept.memory.host)} in the host's memory for each process"
    if plan is offloaded:
        return f"offloaded, beside the above: {host}"
    rows = offloaded.largest_micro_batch(plan.stage)
    return f"{setting}: {size(offloaded.memory.total)} on the device, {host}; {rows} rows fit"


def _offloads(plan: Plan) -> bool:
    return plan.workload.offload_optimizer or plan.workload.offload_parameters


def _time_lines(plan: Plan) -> list[str]:
    from llmtrain.training.progress import duration

    if plan.seconds is None:
        missing = "the number of steps" if plan.flops is None else "the device's peak"
        return [f"time: unknown, as {missing} is"]
    assert plan.target.peak_flops is not None
    peak = f"{plan.target.peak_flops / 1e12:,.3g} TFLOP/s of each {plan.target.name}"
    line = f"time of the steps alone: {duration(plan.seconds)} at {plan.mfu:.0%} of {peak} (plan.mfu={plan.mfu:g})"
    cost = plan.cost(plan.seconds)
    return [line] if cost is None else [line, f"cost: {cost:,.2f} at {plan.price_per_hour:g} per device and hour"]
