"""How sure a score is, and whether two models differ: bootstrap over items, McNemar's test. Numbers in, numbers out.

Knows nothing of what the items are. All draws come from a seed: the same items give the same interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 2000
_AT_ONCE = 1 << 22  # drawn indices in memory

Interval = tuple[float, float]
Pairs = Sequence[tuple[float, float]]
"""(points, possible points) of every item."""


def score_interval(pairs: Pairs, *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """The percentile bootstrap interval of sum of points / sum of possible points, items drawn with replacement."""
    points, possible = _columns(pairs)
    return _interval(_ratios([points], [possible], seed, resamples)[0])


def paired_difference(
    first: Pairs, second: Pairs, *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[Interval, float]:
    """The interval of the second's score less the first's on the same items, and how easily chance gives such a one.

    Returns:
        The interval, and the two-sided p-value: twice the smaller share of resamples on either side of 0 (one is
        counted in addition on both, so that it is never 0).
    """
    columns = [_columns(first), _columns(second)]
    before, after = _ratios([each[0] for each in columns], [each[1] for each in columns], seed, resamples)
    differences = after - before
    tail = min(int((differences <= 0).sum()), int((differences >= 0).sum())) + 1
    return _interval(differences), min(1.0, 2 * tail / (resamples + 1))


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p-value of items that one model alone has right falling to either like coins (McNemar 1947).

    Args:
        only_first, only_second: Items that the first model alone, and the second alone, has right.
    """
    total, smaller = only_first + only_second, min(only_first, only_second)
    term = ways = 1
    for chosen in range(1, smaller + 1):
        term = term * (total - chosen + 1) // chosen
        ways += term
    return min(1.0, 2 * ways / (1 << total))  # whole numbers: exact for any number of items


def _columns(pairs: Pairs) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    table = np.asarray(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _ratios(
    points: list[NDArray[np.float64]], possible: list[NDArray[np.float64]], seed: int, resamples: int
) -> list[NDArray[np.float64]]:
    """Per column of points its ratio in every resample; all columns see the same items drawn."""
    count = len(points[0])
    draw = np.random.default_rng(seed)
    found: list[list[NDArray[np.float64]]] = [[] for _ in points]
    rows = max(1, _AT_ONCE // max(1, count))
    for start in range(0, resamples, rows):
        chosen = draw.integers(0, count, size=(min(rows, resamples - start), count))
        for ratios, gained, could in zip(found, points, possible, strict=True):
            totals = could[chosen].sum(axis=1)
            ratios.append(np.divide(gained[chosen].sum(axis=1), totals, out=np.zeros_like(totals), where=totals > 0))
    return [np.concatenate(ratios) for ratios in found]


def _interval(values: NDArray[np.float64]) -> Interval:
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    assert math.isfinite(low + high)
    return float(low), float(high)
