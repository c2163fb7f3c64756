"""What a run folder holds, read for a report. Knows file names and their shapes; not how any of it is shown.

Every file may be missing, or cut short by a kill: what cannot be read is noted by name and the rest stands.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

REPORT_FILE = "report.html"
FACTS_FILE = "facts.json"
_METRICS, _CONFIG, _RESULTS, _SAMPLES, _ANSWERS = (
    "metrics.csv",
    "config.yaml",
    "results.json",
    "samples.md",
    "answers.jsonl",
)
_WEIGHTS = ("model", "adapter")
_NOT_SETTINGS = ("paths", "name", "resume")
_LONGEST_HEADER = 100 << 20  # bytes, the limit of the safetensors format


@dataclass
class Run:
    """One run as its files tell it.

    Attributes:
        folder, name: where it lies, and the folder's name.
        config: the settings, flat, `optim.lr` → 0.003; without where it lies and what it is called.
        rows: the figures of `metrics.csv`, each row by column; a figure that is not there is left out.
        samples: by step, pairs of a prompt and what followed.
        answers: the items of a fine-tuning's `answers.jsonl`.
        results: those of a run that ended.
        facts: what the command wrote down when it began: `facts.json`.
        weights: of `model` and `adapter`, `parameters` and `bytes` of their files.
        missing: names of the files that are not there, or damaged, with the reason.
    """

    folder: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, float]] = field(default_factory=list)
    samples: list[tuple[int, list[tuple[str, str]]]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, dict[str, int]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @property
    def command(self) -> str:
        """`pretrain` or `finetune`."""
        known = self.facts.get("command") or self.results.get("command")
        return str(known or ("finetune" if "adapter.kind" in self.config else "pretrain"))

    def column(self, name: str, against: str) -> list[tuple[float, float]]:
        """The pairs of two columns; a validation's row that has no tokens of its own takes those of the row before."""
        pairs, place = [], 0.0
        for row in self.rows:
            place = row.get(against, place)
            if name in row:
                pairs.append((place, row[name]))
        return pairs

    def last(self, name: str) -> float | None:
        """The last figure of a column."""
        return next((row[name] for row in reversed(self.rows) if name in row), None)


def read_run(folder: str | Path) -> Run:
    """Reads a run folder.

    Raises:
        ValueError: It is no folder of a training run: it has neither settings nor figures.
    """
    given, folder = folder, Path(folder)
    if not (folder / _CONFIG).is_file() and not (folder / _METRICS).is_file():
        what = "does not exist" if not folder.exists() else f"holds neither {_METRICS} nor {_CONFIG}"
        raise ValueError(f"run={given} {what}: give the folder of a pretrain or finetune, such as runs/pretrain/latest")
    run = Run(folder, folder.resolve().name)
    run.config = dict(_flat(_read(run, _CONFIG, yaml.safe_load, dict) or {}))
    run.results = _read(run, _RESULTS, json.loads, dict) or {}
    run.facts = _read(run, FACTS_FILE, json.loads, dict) or {}
    run.rows = _read(run, _METRICS, _rows, list) or []
    if run.command == "finetune":
        run.answers = _read(run, _ANSWERS, _items, list) or []
    else:
        run.samples = _read(run, _SAMPLES, _samples, list) or []
    for name in _WEIGHTS:
        found = [_weights(file) for file in sorted((folder / name).glob("*.safetensors"))]
        if found:
            run.weights[name] = {key: sum(each[key] for each in found) for key in ("parameters", "bytes")}
    if not run.weights:
        run.missing.append("model")
    return run


def _read(run: Run, name: str, parse: Any, kind: type) -> Any:
    """What a file holds; None, and a line in `missing`, if it is not there or does not parse."""
    try:
        value = parse((run.folder / name).read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        run.missing.append(name)
        return None
    except (OSError, ValueError, yaml.YAMLError, csv.Error) as error:
        run.missing.append(f"{name} ({type(error).__name__})")
        return None
    if not isinstance(value, kind):
        run.missing.append(f"{name} (damaged)")
        return None
    return value


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if not prefix and key in _NOT_SETTINGS:
            continue
        if isinstance(inner, dict) and inner:
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner


def _rows(text: str) -> list[dict[str, float]]:
    """The whole lines: one that a kill cut short has no end."""
    rows = []
    for row in csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline="")):
        figures = {}
        for name, value in row.items():
            try:
                figures[name] = float(value)
            except (TypeError, ValueError):
                continue
        rows.append({name: value for name, value in figures.items() if name is not None})
    return rows


def _items(text: str) -> list[dict[str, Any]]:
    items = []
    for line in text[: text.rfind("\n") + 1].split("\n"):
        if line.strip():
            item = json.loads(line)
            if isinstance(item, dict):
                items.append(item)
    return items


def _samples(text: str) -> list[tuple[int, list[tuple[str, str]]]]:
    found = []
    for part in re.split(r"(?m)^(?=## step \d+$)", text):
        head = re.match(r"## step (\d+)\n", part)
        if head is None:
            continue
        entries = re.split(r"\n\n(?=\*\*)", "\n\n" + part[head.end() :].strip())
        pairs = [re.match(r"\*\*(.*?)\*\*(.*)", entry, re.DOTALL) for entry in entries]
        found.append((int(head[1]), [(pair[1], pair[2]) for pair in pairs if pair]))
    return found


def _weights(file: Path) -> dict[str, int]:
    """Parameters and bytes of a safetensors file, from its header."""
    parameters = 0
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length)) if length <= _LONGEST_HEADER else {}
        parameters = sum(math.prod(each["shape"]) for name, each in header.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return {"parameters": parameters, "bytes": file.stat().st_size}
