"""How an answer is compared with its reference: pure functions of two texts, by name.

Those that a task can be defined by live with the tasks (`llmtrain.data.tasks`); here are also those that only look at
how an answer begins, for models that were never taught to stop.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

from llmtrain.data.tasks import METRICS as TASK_METRICS

Metric = Callable[[str, str], tuple[int, int]]
"""(prediction, reference) → (points, possible points); a score is the sum of points / the sum of possible points."""


def prefix_match(prediction: str, reference: str) -> tuple[int, int]:
    """(1, 1) if the answer begins with the reference, whatever follows; white space in front does not count."""
    return int(prediction.strip().startswith(reference.strip())), 1


def shared_prefix(prediction: str, reference: str) -> tuple[int, int]:
    """How many characters of the reference the answer begins with, of how many."""
    prediction, reference = prediction.strip(), reference.strip()
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(prediction, reference, strict=False))
    return sum(1 for _ in shared), len(reference)


METRICS: dict[str, Metric] = {**TASK_METRICS, "prefix_match": prefix_match, "shared_prefix": shared_prefix}


def find_metric(name: str) -> Metric:
    """A metric by its name.

    Raises:
        ValueError: There is none of that name.
    """
    if name not in METRICS:
        raise ValueError(f"there is no metric {name!r}: choose one of {', '.join(METRICS)}")
    return METRICS[name]
