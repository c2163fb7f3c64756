"""How an answer is compared with its reference: pure functions of two texts, by name. The only ones in the project.

Knows no items, models or tokenizers. Accuracy by likelihood, which compares no texts, is `choices`'.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

_HAN = "\u2e80-\u2fdf\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_HANS = re.compile(rf"[{_HAN}]")
_WORDS = re.compile(rf"[{_HAN}]|(?:(?![{_HAN}])\w)+")


@dataclass(frozen=True)
class Metric:
    """One way to compare texts.

    Attributes:
        measure: (prediction, reference) → (points, possible points); a score is the sum of points / the sum of possible
            points over all items.
        graded: Whether an answer can be partly right; else it has no point or one.
        lower_is_better: Points are errors: none is right.
    """

    measure: Callable[[str, str], tuple[float, float]]
    graded: bool = False
    lower_is_better: bool = False

    def __call__(self, prediction: str, reference: str) -> tuple[float, float]:
        return self.measure(prediction, reference)


def exact_match(prediction: str, reference: str) -> tuple[int, int]:
    """(1, 1) if both texts are the same but for white space at their ends, else (0, 1)."""
    return int(prediction.strip() == reference.strip()), 1


def prefix_match(prediction: str, reference: str) -> tuple[int, int]:
    """(1, 1) if the answer begins with the reference, whatever follows; white space in front does not count."""
    return int(prediction.strip().startswith(reference.strip())), 1


def shared_prefix(prediction: str, reference: str) -> tuple[int, int]:
    """How many characters of the reference the answer begins with, of how many."""
    prediction, reference = prediction.strip(), reference.strip()
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(prediction, reference, strict=False))
    return sum(1 for _ in shared), len(reference)


def words(text: str) -> list[str]:
    """The tokens of `token_f1`: NFKC, case folded, each Chinese or kana character, runs of other letters and digits.

    Punctuation is left out: `GPT-4 很好！` → [gpt, 4, 很, 好].
    """
    return _WORDS.findall(unicodedata.normalize("NFKC", text).casefold())


def token_f1(prediction: str, reference: str) -> tuple[float, int]:
    """(F1, 1): harmonic mean of precision and recall of the answer's words, as a bag (SQuAD, Rajpurkar et al. 2016)."""
    given, wanted = Counter(words(prediction)), Counter(words(reference))
    shared, total = (given & wanted).total(), given.total() + wanted.total()
    return (2 * shared / total if total else 1.0), 1


def character_error_rate(prediction: str, reference: str) -> tuple[int, int]:
    """The fewest insertions, deletions and replacements of characters, and the reference's length; may exceed 1."""
    prediction, reference = prediction.strip(), reference.strip()
    return edits(prediction, reference), len(reference)


def syllable_accuracy(prediction: str, reference: str) -> tuple[int, int]:
    """Right syllables and syllables of the reference; white space and Chinese characters separate them (`你nǐ 好hǎo`).

    Right is what remains of the reference's length after the fewest edits that turn the prediction into it, not below
    0; so a forgotten syllable costs one and not all that follow it.
    """
    wanted, given = (_HANS.sub(" ", text).split() for text in (reference, prediction))
    return max(0, len(wanted) - edits(given, wanted)), len(wanted)


def edits(given: Sequence[str], wanted: Sequence[str]) -> int:
    """Levenshtein distance, one row at a time."""
    row = list(range(len(wanted) + 1))
    for number, left in enumerate(given, start=1):
        diagonal, row[0] = row[0], number
        for column, right in enumerate(wanted, start=1):
            changed = min(row[column] + 1, row[column - 1] + 1, diagonal + (left != right))
            diagonal, row[column] = row[column], changed
    return row[-1]


METRICS: dict[str, Metric] = {
    "exact_match": Metric(exact_match),
    "prefix_match": Metric(prefix_match),
    "shared_prefix": Metric(shared_prefix, graded=True),
    "token_f1": Metric(token_f1, graded=True),
    "character_error_rate": Metric(character_error_rate, graded=True, lower_is_better=True),
    "syllable_accuracy": Metric(syllable_accuracy, graded=True),
}


def find_metric(name: str) -> Metric:
    """A metric by its name.

    Raises:
        ValueError: There is none of that name.
    """
    if name not in METRICS:
        raise ValueError(f"there is no metric {name!r}: choose one of {', '.join(METRICS)}")
    return METRICS[name]


def score_answers(metric: str, answers: Sequence[str], references: Sequence[str]) -> float:
    """Score of many answers: of a method without a model, or of one and the same answer to everything.

    Raises:
        ValueError: The metric is unknown, or there is nothing to score.
    """
    measure = find_metric(metric)
    pairs = [measure(given, wanted) for given, wanted in zip(answers, references, strict=True)]
    if not sum(possible for _, possible in pairs):
        raise ValueError("there is nothing to score: the references are empty")
    return share(pairs)


def share(pairs: Iterable[tuple[float, float]]) -> float:
    """Sum of points / sum of possible points; 0 where none are possible."""
    points = possible = 0.0
    for gained, could in pairs:
        points, possible = points + gained, possible + could
    return points / possible if possible else 0.0
