"""What a value of a setting may be: kinds such as a whole number of at least 1, and what each says of a value.

Knows values, not keys: which key has which kind is in `keys`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from llmtrain.training.ranges import LARGEST, is_number, shown

Fault = Callable[[Any], "str | None"]
_LONGEST_SHOWN = 60


@dataclass(frozen=True)
class Kind:
    """One kind of value.

    Attributes:
        fault: Says what a value should be; None if it is that already.
        words: What else it may be, such as auto.
        null: Whether it may be null.
    """

    fault: Fault
    words: tuple[str, ...] = ()
    null: bool = False

    def or_null(self) -> Kind:
        """The same, or null."""
        return replace(self, null=True)

    def or_word(self, *words: str) -> Kind:
        """The same, or one of these words."""
        return replace(self, words=words)

    def wants(self, value: Any) -> str | None:
        """What a value should be, with all that it may be instead; None if it is that."""
        if (self.null and value is None) or (isinstance(value, str) and value in self.words):
            return None
        expected = self.fault(value)
        others = [*self.words, *(["null"] if self.null else [])]
        return f"{expected}, or {' or '.join(others)}" if expected and others else expected


def as_written(value: Any) -> str:
    """A value as it is written in settings, or its beginning."""
    if isinstance(value, list):
        text = f"[{', '.join(map(as_written, value))}]"
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{key}: {as_written(each)}" for key, each in value.items()) + "}"
    else:
        text = shown(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def whole(least: int = 0, most: int = LARGEST - 1) -> Kind:
    """A whole number from `least` to `most`; without `most` one that products of fit into 64 bits."""
    limit = "a whole number " + (f"of at least {least:,}" if most == LARGEST - 1 else f"from {least:,} to {most:,}")

    def fault(value: Any) -> str | None:
        if isinstance(value, int) and not isinstance(value, bool) and least <= value:
            return None if value <= most else "below 2^53" if most == LARGEST - 1 else limit
        if isinstance(value, float) and value.is_integer() and value >= LARGEST == most + 1:
            return "below 2^53"
        return limit

    return Kind(fault)


def number(
    *, above: float | None = None, least: float | None = None, below: float | None = None, most: float | None = None
) -> Kind:
    """A finite number inside the given limits, of which `above` and `below` do not belong to it."""
    limits = {"above": above, "at least": least, "below": below, "at most": most}
    words = " and ".join(f"{word} {end:,}" for word, end in limits.items() if end is not None)
    limit = f"a number {'of ' * words.startswith('at ')}{words}"

    def fault(value: Any) -> str | None:
        inside = (
            is_number(value)
            and (above is None or value > above)
            and (least is None or value >= least)
            and (below is None or value < below)
            and (most is None or value <= most)
        )
        return None if inside else limit

    return Kind(fault)


def one_of(*words: str) -> Kind:
    """One of some words."""
    listed = f"{', '.join(words[:-1])} or {words[-1]}"
    return Kind(lambda value: None if isinstance(value, str) and value in words else listed)


def list_of(item: Kind, *, least: int = 0) -> Kind:
    """A list of at least so many values of a kind."""

    def fault(value: Any) -> str | None:
        size = "a list" if not least else "a list of at least one"
        if not isinstance(value, list):
            return f"{size}, in brackets"
        if len(value) < least:
            return size
        faults = ((each, item.fault(each)) for each in value)
        wrong = next(((each, expected) for each, expected in faults if expected), None)
        return wrong and f"a list in which each value is {wrong[1]}, and {as_written(wrong[0])} is not"

    return Kind(fault)


def _text(value: Any, *, empty: bool) -> str | None:
    if not isinstance(value, str):
        return "text (in quotation marks if it looks like a number)"
    return None if value or empty else "text, and not empty"


SWITCH = Kind(lambda value: None if isinstance(value, bool) else "true or false")
TEXT = Kind(lambda value: _text(value, empty=False))
"""Text with something in it: a path, a name."""
ANY_TEXT = Kind(lambda value: _text(value, empty=True))
"""What a user or a model says, which may be anything."""
LABEL = Kind(lambda value: None if is_number(value) else _text(value, empty=False))
"""A name that may look like a number."""
MAPPING = Kind(lambda value: None if isinstance(value, dict) else "a mapping, such as {name: value}")
ANYTHING = Kind(lambda value: None)
