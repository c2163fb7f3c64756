"""The first difference between two runs that should be one: samples, figures, checkpoints, weights, training state.

Reads what runs leave in their folders. Knows file names and steps; not how a run was interrupted, nor what trains it.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CLOCKED = ("seconds", "train/tokens_per_second", "train/mfu", "train/memory_bytes")
"""Columns of `metrics.csv` that no two runs share."""
_CLOCKED_COUNTERS = ("train_seconds",)
"""Fields of `checkpoint.json` likewise."""


@dataclass(frozen=True)
class Difference:
    """Where two runs part.

    Attributes:
        step: The optimiser step; None for what belongs to the whole run.
        name: Of the figure, tensor or file.
        straight, resumed: Its two values; None where there is none.
    """

    step: int | None
    name: str
    straight: Any
    resumed: Any

    def __str__(self) -> str:
        where = f"step {self.step}: " if self.step is not None else ""
        return f"{where}{self.name} is {_shown(self.straight)} straight and {_shown(self.resumed)} resumed"


@dataclass
class Comparison:
    """What was compared, and the first difference.

    Attributes:
        first: The first difference; None if the runs are one.
        counts: How many of each kind were compared and equal.
    """

    first: Difference | None = None
    counts: dict[str, int] = field(default_factory=dict)


def compare_runs(straight: Path, resumed: Path, *, extra: Collection[int] = (), tolerance: float = 0.0) -> Comparison:
    """Compares two run folders, in the order in which a fault would show.

    Args:
        straight: The run that went through.
        resumed: The run that was interrupted.
        extra: Steps at which only `resumed` has a checkpoint, since it was stopped there.
        tolerance: Largest relative difference of figures and tensors; samples are always compared as they are.
    """
    result = Comparison()
    parts: dict[str, Callable[[], Iterator[Difference | None]]] = {
        "steps_with_samples": lambda: _sample_ids(straight, resumed),
        "figures": lambda: _figures(straight, resumed, tolerance),
        "checkpoints": lambda: _checkpoints(straight, resumed, extra),
        "counters": lambda: _counters(straight, resumed, extra, tolerance),
        "weights": lambda: _tensors(_model_files(straight), _model_files(resumed), straight, resumed, tolerance),
        "optimizer_tensors": lambda: _tensors(
            _state_files(straight), _state_files(resumed), straight, resumed, tolerance
        ),
        "optimizer_scalars": lambda: _scalars(straight, resumed, tolerance),
    }
    for name, part in parts.items():
        result.counts[name] = 0
        for difference in part():
            if difference is not None:
                result.first = difference
                return result
            result.counts[name] += 1
    return result


def _sample_ids(straight: Path, resumed: Path) -> Iterator[Difference | None]:
    def read(folder: Path) -> dict[int, str]:
        path = folder / "sample_ids.csv"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return {int(step): ids for step, _, ids in (line.partition(",") for line in lines)}

    left, right = read(straight), read(resumed)
    for step in sorted(left.keys() | right.keys()):
        same = left.get(step) == right.get(step)
        yield None if same else Difference(step, "sample ids", left.get(step), right.get(step))


def _figures(straight: Path, resumed: Path, tolerance: float) -> Iterator[Difference | None]:
    def read(folder: Path) -> dict[int, dict[str, str]]:
        with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        steps = [int(row["step"]) for row in rows]
        assert len(set(steps)) == len(steps), f"{folder}/metrics.csv has a step twice"
        return {step: {k: v for k, v in row.items() if k not in CLOCKED} for step, row in zip(steps, rows, strict=True)}

    left, right = read(straight), read(resumed)
    for step in sorted(left.keys() | right.keys()):
        ours, theirs = left.get(step, {}), right.get(step, {})
        for name in dict.fromkeys([*ours, *theirs]):
            a, b = ours.get(name) or None, theirs.get(name) or None
            yield None if a == b or _near(a, b, tolerance) else Difference(step, name, a, b)


def _near(a: str | None, b: str | None, tolerance: float) -> bool:
    if a is None or b is None or tolerance == 0:
        return False
    left, right = float(a), float(b)
    return abs(left - right) <= tolerance * max(abs(left), abs(right))


def _checkpoint_steps(folder: Path) -> list[int]:
    return sorted(
        int(path.parent.name.removeprefix("step-")) for path in folder.glob("checkpoints/step-*/checkpoint.json")
    )


def _checkpoints(straight: Path, resumed: Path, extra: Collection[int]) -> Iterator[Difference | None]:
    left, right = _checkpoint_steps(straight), _checkpoint_steps(resumed)
    for step in sorted({*left, *right}):
        if step in left and step in right:
            yield None
        elif step in left or step not in extra:
            yield Difference(step, "a checkpoint", step in left, step in right)


def _counters(straight: Path, resumed: Path, extra: Collection[int], tolerance: float) -> Iterator[Difference | None]:
    """What the checkpoints of both say of their run, settings included, but for the clock.

    Where a signal stopped the run its checkpoint came before a validation that was due, so it knows less.
    """
    both = {*_checkpoint_steps(straight)} & {*_checkpoint_steps(resumed)}
    for step in sorted(both - {*extra}):
        name = f"checkpoints/step-{step:06d}/checkpoint.json"
        ours, theirs = (
            {key: value for key, value in _flat(folder / name) if key not in _CLOCKED_COUNTERS}
            for folder in (straight, resumed)
        )
        yield from _values(step, "checkpoint.json", ours, theirs, tolerance)


def _scalars(straight: Path, resumed: Path, tolerance: float) -> Iterator[Difference | None]:
    """The single numbers that the optimiser keeps, such as its step count, in the last checkpoint of each."""
    found: list[dict[str, Any]] = []
    for folder in (straight, resumed):
        files = [folder / f"checkpoints/step-{step:06d}/resume/state.json" for step in _checkpoint_steps(folder)[-1:]]
        flat = [pair for file in files if file.is_file() for pair in _flat(file)]
        found.append({key: value for key, value in flat if ".scalars." in key})
    yield from _values(None, "state.json", found[0], found[1], tolerance)


def _flat(path: Path) -> Iterator[tuple[str, Any]]:
    """The leaves of a JSON file, each under the keys that lead to it."""

    def walk(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
        if not isinstance(value, dict) or not value:
            yield prefix, value
            return
        for key, inner in value.items():
            yield from walk(f"{prefix}.{key}" if prefix else key, inner)

    return walk("", json.loads(path.read_text(encoding="utf-8")))


def _values(
    step: int | None, file: str, ours: dict[str, Any], theirs: dict[str, Any], tolerance: float
) -> Iterator[Difference | None]:
    for key in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(key), theirs.get(key)
        numbers = isinstance(a, float) and isinstance(b, float)
        same = a == b or (numbers and _near(str(a), str(b), tolerance))
        yield None if same and (key in ours) == (key in theirs) else Difference(step, f"{file}: {key}", a, b)


def _model_files(folder: Path) -> list[Path]:
    last = [
        f"checkpoints/step-{step:06d}/{name}"
        for step in _checkpoint_steps(folder)[-1:]
        for name in ("model", "adapter")
    ]
    return [path for name in ("model", "adapter", *last) for path in sorted((folder / name).glob("*.safetensors"))]


def _state_files(folder: Path) -> list[Path]:
    steps = _checkpoint_steps(folder)[-1:]
    return [
        path
        for step in steps
        for path in sorted((folder / f"checkpoints/step-{step:06d}/resume").rglob("*.safetensors"))
    ]


def _tensors(
    left: Sequence[Path], right: Sequence[Path], straight: Path, resumed: Path, tolerance: float
) -> Iterator[Difference | None]:
    from safetensors import safe_open

    ours = {path.relative_to(straight).as_posix(): path for path in left}
    theirs = {path.relative_to(resumed).as_posix(): path for path in right}
    for name in sorted(ours.keys() ^ theirs.keys()):
        yield Difference(None, name, name in ours, name in theirs)
    for name in ours:
        with safe_open(ours[name], "pt") as first, safe_open(theirs[name], "pt") as second:
            known, others = set(first.keys()), set(second.keys())
            for key in sorted(known | others):
                if key not in known or key not in others:
                    yield Difference(None, f"{name}: {key}", key in known, key in others)
                else:
                    yield _tensor_difference(f"{name}: {key}", first.get_tensor(key), second.get_tensor(key), tolerance)


def _tensor_difference(name: str, left: Any, right: Any, tolerance: float) -> Difference | None:
    """The numbers at the place where two tensors differ most; None if they are equal, bit for bit or nearly."""
    import torch

    if left.shape != right.shape or left.dtype != right.dtype:
        return Difference(None, name, f"{left.dtype} {list(left.shape)}", f"{right.dtype} {list(right.shape)}")
    a, b = left.flatten(), right.flatten()
    if torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return None
    gap = (a.double() - b.double()).abs().nan_to_num(float("inf"))
    if float(gap.max()) <= tolerance * float(torch.maximum(a.double().abs().max(), b.double().abs().max())):
        return None
    worst = int(gap.argmax())
    return Difference(None, f"{name}[{worst}]", float(a[worst]), float(b[worst]))


def _shown(value: Any) -> str:
    if value is None:
        return "missing"
    if isinstance(value, bool):
        return "there" if value else "missing"
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "…"
