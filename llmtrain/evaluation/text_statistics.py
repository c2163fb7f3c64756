"""Figures about text that a model wrote: how much it repeats itself, and how much it copied.

Pure functions of sequences; characters of a string or token ids, whatever the caller counts in. Knows no models, no
tokenizers and no files.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple


def distinct_n(sequences: Iterable[Sequence[Hashable]], n: int = 4) -> float:
    """Different n-grams / n-grams, over all sequences together (Li et al. 2016); 1 means that none occurs twice.

    Sequences shorter than n have none; 1.0 when no sequence has any.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    seen: set[tuple[Hashable, ...]] = set()
    total = 0
    for sequence in sequences:
        grams = list(zip(*(sequence[start:] for start in range(n)), strict=False))
        seen.update(grams)
        total += len(grams)
    return len(seen) / total if total else 1.0


class CopiedSpan(NamedTuple):
    """The longest span that stands word for word in the training text.

    Attributes:
        length: In the units of the sequences.
        sequence: Which sequence it is in, by number.
        start: Where in that sequence it begins.
    """

    length: int
    sequence: int
    start: int


def longest_copied_span(sequences: Sequence[Sequence[Hashable]], training: Iterable[Sequence[Hashable]]) -> CopiedSpan:
    """The longest run of any sequence that occurs in a training document.

    A suffix automaton of the sequences (Blumer et al. 1985) is led along the documents once, so time is linear in both
    and memory does not grow with the training text.

    Args:
        sequences: What the model wrote.
        training: The documents, one at a time; a span never crosses from one to the next.
    """
    automaton = _SuffixAutomaton()
    starts: list[int] = []
    length = 0
    for number, sequence in enumerate(sequences):
        starts.append(length)
        for symbol in sequence:
            automaton.extend(symbol)
        automaton.extend(_Border(number))  # equal to nothing in a document, so no span crosses it
        length += len(sequence) + 1
    best, end = 0, 0
    for document in training:
        found, where = automaton.longest_match(document)
        if found > best:
            best, end = found, where
    if not best:
        return CopiedSpan(0, 0, 0)
    start = end - best
    number = max(i for i, first in enumerate(starts) if first <= start)
    return CopiedSpan(best, number, start - starts[number])


class _Border(NamedTuple):
    """A symbol of its own between two sequences."""

    number: int
    mark: str = "border"


class _SuffixAutomaton:
    """The smallest automaton that reads exactly the runs of one sequence, grown symbol by symbol.

    State 0 is the empty run. Every state stands for runs that end at the same places; `length` is its longest run,
    `link` the state of the longest shorter one that occurs in more places, `end` the place where it ends first.
    """

    def __init__(self) -> None:
        self.next: list[dict[Hashable, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.end = [0]
        self._last = 0

    def extend(self, symbol: Hashable) -> None:
        """Append one symbol to the sequence."""
        new = self._add(self.length[self._last] + 1, {}, self.length[self._last] + 1)
        state = self._last
        while state >= 0 and symbol not in self.next[state]:
            self.next[state][symbol] = new
            state = self.link[state]
        if state < 0:
            self.link[new] = 0
        else:
            self.link[new] = self._split(state, symbol)
        self._last = new

    def _split(self, state: int, symbol: Hashable) -> int:
        """The state of the longest run that `state` reads with `symbol`, separated from longer runs if need be."""
        target = self.next[state][symbol]
        if self.length[target] == self.length[state] + 1:
            return target
        copy = self._add(self.length[state] + 1, dict(self.next[target]), self.end[target])
        self.link[copy], self.link[target] = self.link[target], copy
        while state >= 0 and self.next[state].get(symbol) == target:
            self.next[state][symbol] = copy
            state = self.link[state]
        return copy

    def _add(self, length: int, transitions: dict[Hashable, int], end: int) -> int:
        self.next.append(transitions)
        self.link.append(-1)
        self.length.append(length)
        self.end.append(end)
        return len(self.next) - 1

    def longest_match(self, document: Sequence[Hashable]) -> tuple[int, int]:
        """Length of the longest run that occurs in the document, and where it ends (exclusive) in the sequence."""
        following, link, lengths = self.next, self.link, self.length
        state = length = best = end = 0
        for symbol in document:
            after = following[state].get(symbol)
            while after is None and state:
                state = link[state]
                length = lengths[state]
                after = following[state].get(symbol)
            if after is None:
                continue  # not even this symbol alone occurs
            state, length = after, length + 1
            if length > best:
                best, end = length, self.end[state]
        return best, end
