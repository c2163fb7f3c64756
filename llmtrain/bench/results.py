"""The results: named comparisons with their marks, as a table and as plain data.

Knows how a result is shown and when a mark is met. Does not know how it was measured.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from llmtrain.bench.rounds import Ratio
from llmtrain.training.progress import compact

NOISY = 1.25  # highest over lowest per-round ratio from which a result is called noisy
_LIBRARIES = ("torch", "lightning", "deepspeed", "transformers", "tokenizers")


@dataclass(frozen=True)
class Comparison:
    """One line of the table.

    Attributes:
        name: The key in the JSON.
        what: What was measured, for the reader.
        ratio: Ours over theirs.
        theirs: Who the other side is.
        unit: Of the rates.
        mark: What the median should reach; `None` for a figure without a mark.
        at_most: What the median should stay under: alone, or above `mark` for a figure that should be near the other's.
    """

    name: str
    what: str
    ratio: Ratio
    theirs: str
    unit: str
    mark: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the median lies within its limits; `None` without any."""
        if self.mark is None and self.at_most is None:
            return None
        low = self.mark is None or self.ratio.median >= self.mark
        return low and (self.at_most is None or self.ratio.median <= self.at_most)

    @property
    def limits(self) -> str:
        """The limits as they are shown: `≥ 0.90`, `≤ 1.15`, `0.85–1.15`."""
        if self.mark is None:
            return "" if self.at_most is None else f"≤ {self.at_most:.2f}"
        return f"≥ {self.mark:.2f}" if self.at_most is None else f"{self.mark:.2f}–{self.at_most:.2f}"

    @property
    def noisy(self) -> bool:
        """Whether the rounds differ so much that the median should not be trusted to the second digit."""
        return self.ratio.high > NOISY * self.ratio.low

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        ratio = self.ratio
        return {
            "median": round(ratio.median, 4),
            "min": round(ratio.low, 4),
            "max": round(ratio.high, 4),
            "mark": self.mark,
            "at_most": self.at_most,
            "met": self.met,
            "noisy": self.noisy,
            "per_round": [round(value, 4) for value in ratio.per_round],
            "what": self.what,
            "against": self.theirs,
            "unit": self.unit,
            "ours": [round(value, 1) for value in ratio.ours],
            "theirs": [round(value, 1) for value in ratio.theirs],
        }


def table(comparisons: Sequence[Comparison]) -> str:
    """The results for the terminal."""
    rows = [("", "ours", "theirs", "ratio", "min–max", "mark", "")]
    for each in comparisons:
        ratio = each.ratio
        verdict = {True: "met", False: "missed", None: ""}[each.met] + (", noisy" if each.noisy else "")
        rows.append(
            (
                f"{each.what} against {each.theirs}",
                f"{compact(statistics.median(ratio.ours))} {each.unit}",
                f"{compact(statistics.median(ratio.theirs))} {each.unit}",
                f"{ratio.median:.2f}",
                f"{ratio.low:.2f}–{ratio.high:.2f}",
                each.limits,
                verdict.removeprefix(", "),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)),
        ]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(lines)


def machine_facts(*, threads: int) -> dict[str, Any]:
    """What the figures were taken on: processor, cores, threads of every side, load at the start, versions.

    Args:
        threads: Threads of every side.
    """
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    return {
        "processor": _processor_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load_at_start": load,
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        **{name: _version(name) for name in _LIBRARIES},
    }


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _processor_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
