"""Two models on the same items: where they agree, where they differ, and whether that is more than luck.

Items are matched by prompt and reference. Knows items as `tasks` writes them; not models, files or runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from llmtrain.evaluation.intervals import Interval, mcnemar, paired_difference
from llmtrain.evaluation.metrics import METRICS, share

Item = Mapping[str, Any]


class Comparison(TypedDict):
    """`difference` is B's score less A's, with its interval; `p_value` is of `test`: `mcnemar` where each item is right
    or wrong, `bootstrap` where it may be partly right. The four counts are of items; `unmatched` items were not
    compared. `differ_most` are pairs of items (A's, B's)."""

    metric: str
    n: int
    score_a: float
    score_b: float
    difference: float
    interval: Interval
    both_right: int
    only_a: int
    only_b: int
    both_wrong: int
    test: str
    p_value: float
    unmatched_a: int
    unmatched_b: int
    differ_most: list[tuple[Item, Item]]


def compare_items(first: Sequence[Item], second: Sequence[Item], *, most: int = 10) -> Comparison:
    """Compare two models item by item.

    Args:
        first, second: The items of A and of B, each with `prompt`, `reference`, `metric`, `points` and `possible`; of
            items with the same prompt and reference the first is matched with the first.
        most: How many of the items on which they differ most to give.

    Raises:
        ValueError: No item of A is among B's, or they were scored by different metrics.
    """
    pairs = _matched(first, second)
    if not pairs:
        raise ValueError(
            f"none of the {len(first)} items of the first has its prompt and reference among the {len(second)} of the "
            "second: compare two evaluations of the same items"
        )
    metrics = {item["metric"] for pair in pairs for item in pair}
    if len(metrics) > 1:
        raise ValueError(f"the items were scored by {' and '.join(sorted(metrics))}: evaluate both by the same metric")
    metric = metrics.pop()
    points = [[(item["points"], item["possible"]) for item in side] for side in zip(*pairs, strict=True)]
    interval, p_value = paired_difference(*points)
    test = "bootstrap"
    counts = Counter((_is_right(a), _is_right(b)) for a, b in pairs)
    if _all_or_nothing(metric, pairs):
        test, p_value = "mcnemar", mcnemar(counts[True, False], counts[False, True])
    scores = [share(side) for side in points]
    return {
        "metric": metric,
        "n": len(pairs),
        "score_a": scores[0],
        "score_b": scores[1],
        "difference": scores[1] - scores[0],
        "interval": interval,
        "both_right": counts[True, True],
        "only_a": counts[True, False],
        "only_b": counts[False, True],
        "both_wrong": counts[False, False],
        "test": test,
        "p_value": p_value,
        "unmatched_a": len(first) - len(pairs),
        "unmatched_b": len(second) - len(pairs),
        "differ_most": _differ_most(pairs, most),
    }


def _matched(first: Sequence[Item], second: Sequence[Item]) -> list[tuple[Item, Item]]:
    others: dict[tuple[str, str], list[Item]] = {}
    for item in reversed(second):
        others.setdefault((item["prompt"], item["reference"]), []).append(item)
    found = ((item, others.get((item["prompt"], item["reference"]))) for item in first)
    return [(item, rest.pop()) for item, rest in found if rest]


def _all_or_nothing(metric: str, pairs: Sequence[tuple[Item, Item]]) -> bool:
    """Whether an item is right or wrong; of metrics that are not ours, as lm-eval's, the items say so."""
    if metric in METRICS:
        return not METRICS[metric].graded
    return all(item["points"] in (0, item["possible"]) for pair in pairs for item in pair)


def _is_right(item: Item) -> bool:
    """Whether it could not be better."""
    if item["metric"] in METRICS and METRICS[item["metric"]].lower_is_better:
        return item["points"] == 0
    return item["points"] >= item["possible"]


def _differ_most(pairs: Sequence[tuple[Item, Item]], most: int) -> list[tuple[Item, Item]]:
    def distance(pair: tuple[Item, Item]) -> float:
        before, after = (item["points"] / item["possible"] if item["possible"] else 0.0 for item in pair)
        return abs(after - before)

    differing = [pair for pair in pairs if distance(pair) > 0]
    return sorted(differing, key=distance, reverse=True)[:most]
