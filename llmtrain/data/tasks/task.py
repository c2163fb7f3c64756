"""What a task is, and the numbers that say how well its answers are: pure functions of texts."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmtrain.data.records import Conversation, ExampleReport, normalise

Item = Mapping[str, Any] | Conversation


@dataclass(frozen=True)
class Task:
    """Text to train on and text to be tested on, without overlap.

    Attributes:
        name: As in the registry.
        train: Items of any form that `encode_examples` takes; built-in tasks give {"prompt", "completion"}.
        test: Held-out items of the same form.
        metric: Name of the metric, a key of `METRICS`.
        chance: Score of a constant answer, the most common training completion; by the task's own metric.
        baselines: Scores on the test items of simple methods without a model, by name.
        report: What reading the user's files had to leave out; empty for generated data.
        exercises: Makes further items to train on from {"prompt", "completion"} items that are trained on; None where
            there are none.
        open_ended: Many answers are right, so they are to be read; the metric says how often the reference was met.
    """

    name: str
    train: Sequence[Item]
    test: Sequence[Item]
    metric: str
    chance: float
    baselines: Mapping[str, float] = field(default_factory=dict)
    report: ExampleReport | None = None
    exercises: Callable[[Sequence[Mapping[str, str]]], Sequence[Item]] | None = None
    open_ended: bool = False


def exact_match(prediction: str, reference: str) -> tuple[int, int]:
    """(1, 1) if both texts are the same but for white space at their ends, else (0, 1)."""
    return int(prediction.strip() == reference.strip()), 1


def syllables(text: str) -> list[str]:
    """The syllables of a pinyin text, which separates them by white space: `nǐ hǎo` → [nǐ, hǎo]."""
    return text.split()


def syllable_accuracy(prediction: str, reference: str) -> tuple[int, int]:
    """Right syllables and syllables of the reference.

    Right is what remains of the reference's length after the fewest insertions, deletions and replacements
    that turn the prediction into it, not below 0; so a forgotten syllable costs one and not all that follow
    it.
    """
    wanted, given = syllables(reference), syllables(prediction)
    return max(0, len(wanted) - _edits(given, wanted)), len(wanted)


def _edits(given: Sequence[str], wanted: Sequence[str]) -> int:
    """Levenshtein distance, one row at a time."""
    row = list(range(len(wanted) + 1))
    for number, left in enumerate(given, start=1):
        diagonal, row[0] = row[0], number
        for column, right in enumerate(wanted, start=1):
            changed = min(row[column] + 1, row[column - 1] + 1, diagonal + (left != right))
            diagonal, row[column] = row[column], changed
    return row[-1]


METRICS: dict[str, Callable[[str, str], tuple[int, int]]] = {
    "exact_match": exact_match,
    "syllable_accuracy": syllable_accuracy,
}
"""Each gives (points, possible points) of one answer; a score is the sum of points / the sum of possible points."""


def score(metric: str, predictions: Sequence[str], references: Sequence[str]) -> float:
    """Score of many answers, 0 to 1.

    Raises:
        ValueError: The metric is unknown, or there is nothing to score.
    """
    if metric not in METRICS:
        raise ValueError(f"there is no metric {metric!r}: choose one of {', '.join(METRICS)}")
    pairs = [METRICS[metric](given, wanted) for given, wanted in zip(predictions, references, strict=True)]
    possible = sum(pair[1] for pair in pairs)
    if not possible:
        raise ValueError("there is nothing to score: the references are empty")
    return sum(pair[0] for pair in pairs) / possible


def completion(item: Item) -> str:
    """Text of an item's last answer."""
    messages = item.messages if isinstance(item, Conversation) else normalise(item)
    return messages[-1]["content"]


def chance_score(metric: str, train: Sequence[Item], test: Sequence[Item]) -> float:
    """Score of always answering the most common training completion (of several, the first met)."""
    answer = Counter(map(completion, train)).most_common(1)[0][0]
    return score(metric, [answer] * len(test), list(map(completion, test)))
