"""`llmtrain compare A B`: two evaluations of the same items, item by item, with a paired test.

Reads what `evaluate` left (`items-<task>.jsonl`) and prints the table; comparing is `llmtrain.evaluation`'s.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.evaluation import Comparison

logger = logging.getLogger(__name__)

_NEEDED = ("prompt", "reference", "metric", "points", "possible")
_PREFIX = "items-"
_WIDTH = 70


def run(settings: DictConfig, run_dir: Path) -> dict[str, Any]:
    """Compares every task that both have.

    Returns:
        `tasks`: per task the counts, the scores, the difference with its interval, the test and its p-value, and how
        many items were not matched.

    Raises:
        ValueError: A folder or file is no evaluation, or they have no task, or no item, in common.
    """
    missing = [key for key in ("a", "b") if settings[key] is None]
    if missing:
        raise ValueError(
            f"{missing[0]}=null, and compare takes two evaluations: llmtrain compare runs/evaluate/first "
            "runs/evaluate/second"
        )
    first, second = _tasks(Path(settings.a), "a"), _tasks(Path(settings.b), "b")
    if Path(settings.a).is_file() and Path(settings.b).is_file():
        first, second = {"items": next(iter(first.values()))}, {"items": next(iter(second.values()))}
    shared = [name for name in first if name in second]
    if not shared:
        raise ValueError(
            f"a={settings.a} has the tasks {', '.join(first)} and b={settings.b} has {', '.join(second)}: compare two "
            "evaluations on the same task"
        )
    alone = sorted(set(first) ^ set(second))
    if alone:
        logger.warning("only one of the two has %s, which is left out", ", ".join(alone))
    from llmtrain.evaluation import compare_items

    compared = {}
    for name in shared:
        found = compare_items(_read(first[name]), _read(second[name]), most=settings.shown)
        logger.info("%s", _table(name, found))
        compared[name] = {key: value for key, value in found.items() if key != "differ_most"}
    return {"command": "compare", "a": str(settings.a), "b": str(settings.b), "tasks": compared}


def _tasks(path: Path, key: str) -> dict[str, Path]:
    """The files of items by task: those of a run folder, or the one named."""
    if path.is_file():
        return {path.stem.removeprefix(_PREFIX): path}
    if not path.is_dir():
        raise ValueError(f"{key}={path} does not exist: give the folder of an `llmtrain evaluate`, or a file of items")
    files = {file.stem.removeprefix(_PREFIX): file for file in sorted(path.glob(f"{_PREFIX}*.jsonl"))}
    if not files:
        raise ValueError(
            f"{key}={path} holds no {_PREFIX}<task>.jsonl: give the folder of an `llmtrain evaluate` that scored tasks"
        )
    return files


def _read(file: Path) -> list[Mapping[str, Any]]:
    items = []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            missing = [name for name in _NEEDED if name not in item]
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file}, line {number} is no item of an evaluation: it does not parse as JSON") from error
        if missing:
            raise ValueError(f"{file}, line {number} is no item of an evaluation: it has no {missing[0]!r}")
        items.append(item)
    return items


def _table(name: str, found: Comparison) -> str:
    low, high = found["interval"]
    sure = "as a coin would" if found["p_value"] >= 0.05 else "more than chance explains"
    lines = [
        f"{name}: {found['metric'].replace('_', ' ')} on {found['n']} items that both were asked",
        f"  both right {found['both_right']}, only A {found['only_a']}, only B {found['only_b']}, both wrong "
        f"{found['both_wrong']}",
        f"  A {found['score_a']:.3f}, B {found['score_b']:.3f}, B − A {found['difference']:+.3f} "
        f"({low:+.3f} … {high:+.3f}), p = {found['p_value']:.3g} by {found['test']}: they differ {sure}",
    ]
    if found["unmatched_a"] or found["unmatched_b"]:
        lines.append(f"  not compared: {found['unmatched_a']} items of A alone, {found['unmatched_b']} of B alone")
    for before, after in found["differ_most"]:
        lines.append(f"  {_short(before['prompt'])} → wanted {_short(before['reference'])}")
        lines += [
            f"      {side} {item['points']:g}/{item['possible']:g}  {_short(item.get('prediction', ''))}"
            for side, item in (("A", before), ("B", after))
        ]
    return "\n".join(lines)


def _short(text: Any) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…"
