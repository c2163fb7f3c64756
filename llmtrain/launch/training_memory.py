"""The memory table of the bench: training processes at each ZeRO stage, measured beside what the plan says.

One process without DeepSpeed, then two under ZeRO 1, 2 and 3, in fp32 and in bf16. Composes the settings of `plan` for
each; the steps are those of its probe.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from llmtrain.launch.forecast import size

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.bench.results import Comparison

logger = logging.getLogger(__name__)

_STEPS = 3
_PRECISIONS = ("fp32", "bf16")
_STRATEGIES = (("single", 1), ("deepspeed_1", 2), ("deepspeed_2", 2), ("deepspeed_3", 2))
_LEAST_STATE = 100_000_000  # bytes: below, what libraries allocate is no longer small beside it
_WITHIN = 0.15  # of the prediction, either way: a plan of twice what is needed refuses runs that fit


@dataclass(frozen=True)
class Measured:
    """One line of the table; memory in bytes, of the process that grew most, above the idle process.

    Attributes:
        strategy: as in `strategy=`.
        processes: on this machine.
        precision: `fp32` or `bf16`.
        state: weights, gradients and optimiser, as predicted.
        predicted: the peak, as predicted.
        peak: as measured.
    """

    strategy: str
    processes: int
    precision: str
    state: int
    predicted: int
    peak: int

    def to_dict(self) -> dict[str, Any]:
        """All of it, and the ratio of measured to predicted."""
        return {**asdict(self), "ratio": round(self.peak / self.predicted, 4)}

    def comparison(self) -> Comparison:
        """The line for the bench's own table: measured over predicted."""
        from llmtrain.bench.results import Comparison
        from llmtrain.bench.rounds import Ratio

        what = f"memory, {self.strategy}, {self.processes} × {self.precision},"
        name = f"training_memory_{self.strategy}_{self.precision}"
        ratio = Ratio([self.peak / 1e6], [self.predicted / 1e6])
        return Comparison(name, what, ratio, "the plan", "MB", 1 - _WITHIN, 1 + _WITHIN)


def measure(overrides: Sequence[str], *, paths: DictConfig) -> list[Measured]:
    """Trains every case for a few steps.

    Args:
        overrides: settings of `plan`.
        paths: `runs_dir` and `data_dir`.

    Raises:
        ValueError: a setting that does not do, or a model too small to be measured.
    """
    from llmtrain.launch.composing import compose
    from llmtrain.launch.plan import plan_from
    from llmtrain.launch.probing import probe

    found = []
    for precision in _PRECISIONS:
        for strategy, processes in _STRATEGIES:
            case = [
                f"strategy={strategy}",
                f"trainer.devices={processes}",
                f"trainer.precision={precision}",
                "trainer.accelerator=cpu",
                *(f"paths.{name}={paths[name]}" for name in ("runs_dir", "data_dir")),
            ]
            settings = compose("plan", [*overrides, *case]).settings
            plan = plan_from(settings)
            memory = plan.memory
            if strategy == "single" and memory.state < _LEAST_STATE:
                raise ValueError(
                    f"training_memory={list(overrides)} has {size(memory.state)} of state; at least "
                    f"{size(_LEAST_STATE)} are needed to tell it from the rest: take a larger model."
                )
            peak = probe(settings, plan, steps=_STEPS)["memory"]
            found.append(Measured(strategy, processes, precision, memory.state, memory.total, peak))
            logger.info("%s, %s: measured %s, planned %s", strategy, precision, size(peak), size(memory.total))
    return found


def table(found: Sequence[Measured]) -> str:
    """The results for the reader; what a stage saves is told against ZeRO 1 in the same precision (below 0: more)."""
    whole = {each.precision: each.peak for each in found if each.strategy == "deepspeed_1"}
    rows = [("strategy", "processes", "precision", "state", "planned", "measured", "ratio", "below ZeRO 1")]
    for each in found:
        saved = whole[each.precision] - each.peak if each.processes > 1 and each.strategy != "deepspeed_1" else None
        rows.append(
            (
                each.strategy,
                str(each.processes),
                each.precision,
                size(each.state),
                size(each.predicted),
                size(each.peak),
                f"{each.peak / each.predicted:.2f}",
                "" if saved is None else size(saved),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in rows
    )
