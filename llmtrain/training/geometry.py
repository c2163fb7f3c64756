"""How many rows, micro-batches and steps a run takes: pure arithmetic that is checked before anything is built.

Knows numbers only: nothing of torch, files, Lightning or where the rows come from.

Words: a *row* is one window or one padded example; a *micro-batch* is what one process runs forward and backward at a
time; a *step* is one optimiser step: `accumulation` micro-batches on each of `world_size` processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain.training.ranges import check_whole


@dataclass(frozen=True)
class BatchGeometry:
    """How the rows of one optimiser step are divided.

    Attributes:
        rows: Rows of one optimiser step, over all micro-batches and processes.
        micro_batch_size: Rows of one micro-batch of one process.
        accumulation: Micro-batches per step and process.
        world_size: Processes.
    """

    rows: int
    micro_batch_size: int
    accumulation: int
    world_size: int

    def __str__(self) -> str:
        parts = [f"{self.rows} rows per step = {self.micro_batch_size} per micro-batch"]
        parts += [f"{self.accumulation} accumulated"] if self.accumulation > 1 else []
        parts += [f"{self.world_size} processes"] if self.world_size > 1 else []
        return " × ".join(parts)


def rows_per_step(batch_tokens: int, sequence_length: int) -> int:
    """Rows of one step for a batch size given in tokens.

    Raises:
        ValueError: if the tokens are not a whole number of rows; names the nearest that are.
    """
    check_whole("trainer.batch_tokens", batch_tokens, least=1)
    check_whole("data.sequence_length", sequence_length, least=1)
    rows, rest = divmod(batch_tokens, sequence_length)
    if rest or rows == 0:
        near = _near_multiples(batch_tokens, sequence_length)
        raise ValueError(
            f"trainer.batch_tokens={batch_tokens} is not a multiple of data.sequence_length={sequence_length}; "
            f"the nearest that are: {near}."
        )
    return rows


def divide_batch(rows: int, *, micro_batch_size: int | None = None, world_size: int = 1) -> BatchGeometry:
    """Divides the rows of a step over processes and micro-batches.

    Args:
        rows: Rows of one optimiser step.
        micro_batch_size: Rows per micro-batch; `None` takes the whole share of a process at once.
        world_size: Processes.

    Raises:
        ValueError: if they do not divide without rest; names the numbers and the nearest valid ones.
    """
    check_whole("the number of processes", world_size, least=1)
    check_whole("the rows of a step", rows, least=1)
    share, rest = divmod(rows, world_size)
    if rest or share == 0:
        raise ValueError(
            f"{rows} rows per step do not divide over {world_size} processes; "
            f"the nearest that do: {_near_multiples(rows, world_size)} rows."
        )
    if micro_batch_size is None:
        return BatchGeometry(rows, share, 1, world_size)
    check_whole("trainer.micro_batch_size", micro_batch_size, least=1)
    accumulation, rest = divmod(share, micro_batch_size)
    if rest or accumulation == 0:
        divisors = [d for d in range(1, share + 1) if share % d == 0]
        near = sorted(sorted(divisors, key=lambda d: abs(d - micro_batch_size))[:3])
        whole = _near_multiples(rows, micro_batch_size * world_size)
        each = " of each process" if world_size > 1 else ""
        raise ValueError(
            f"trainer.micro_batch_size={micro_batch_size} does not divide the {share} rows per step{each}; "
            f"valid near it: {', '.join(map(str, near))}; or take {whole} rows per step."
        )
    return BatchGeometry(rows, micro_batch_size, accumulation, world_size)


@dataclass(frozen=True)
class RunLength:
    """How many optimiser steps a run takes, and which of the given limits decided it."""

    steps: int
    decided_by: str


def run_length(
    *,
    max_steps: int | None = None,
    max_tokens: int | None = None,
    max_epochs: float | None = None,
    rows: int,
    epoch_rows: int,
    row_tokens: int | None = None,
) -> RunLength:
    """The number of steps under every given limit: the smallest wins.

    Args:
        max_steps: Optimiser steps.
        max_tokens: Tokens; never exceeded, so the last incomplete step is not taken.
        max_epochs: Passes over the rows of the corpus; a fraction is allowed, and the last step is completed.
        rows: Rows of one step.
        epoch_rows: Rows of one epoch.
        row_tokens: Tokens of one row; needed with `max_tokens` only.

    Raises:
        ValueError: if no limit is given or one allows no step.
    """
    limits: dict[str, int] = {}
    if max_steps is not None:
        check_whole("trainer.max_steps", max_steps, least=1)
        limits[f"trainer.max_steps={max_steps}"] = max_steps
    if max_tokens is not None:
        if row_tokens is None:
            raise ValueError(
                "trainer.max_tokens counts tokens of equal rows, which this data does not have; "
                "give trainer.max_steps or trainer.max_epochs."
            )
        limits[f"trainer.max_tokens={max_tokens}"] = max_tokens // (rows * row_tokens)
        if max_tokens < rows * row_tokens:
            raise ValueError(
                f"trainer.max_tokens={max_tokens} is less than one step of {rows * row_tokens} tokens; "
                "raise it or lower trainer.batch_tokens."
            )
    if max_epochs is not None:
        if not max_epochs > 0:
            raise ValueError(f"trainer.max_epochs={max_epochs} must be above 0.")
        limits[f"trainer.max_epochs={max_epochs:g}"] = max(1, -(-round(max_epochs * epoch_rows) // rows))
    if not limits:
        raise ValueError("nothing says when to stop: give trainer.max_steps, trainer.max_tokens or trainer.max_epochs.")
    decided_by = min(limits, key=lambda name: limits[name])
    others = [name for name in limits if name != decided_by]
    if others:
        decided_by += f" (comes before {', '.join(others)})"
    return RunLength(steps=min(limits.values()), decided_by=decided_by)


def is_due(step: int, every: int | None) -> bool:
    """Whether something done every `every` steps (`None`: never) falls on this step."""
    return bool(every) and step > 0 and step % every == 0  # type: ignore[operator]


def check_intervals(*, log_every: int | None, **others: int | None) -> None:
    """Refuses numbers of steps that are never reached; of all but `log_every`, `None` means never.

    Raises:
        ValueError: if one is below 1; names the setting.
    """
    if log_every is None:
        raise ValueError("trainer.log_every=null must be a number of steps.")
    for name, value in {"log_every": log_every, **others}.items():
        if value is not None:
            check_whole(
                f"trainer.{name}", value, least=1, otherwise="" if name == "log_every" else ", or null for never"
            )


def _near_multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return " or ".join(str(n) for n in (below, below + unit) if n > 0)
