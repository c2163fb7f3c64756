"""What a setting may be, asked before it is compared: users write `null`, words and infinities where numbers belong.

Knows kinds of values; not which setting has which limits.
"""

from __future__ import annotations

import sys
from typing import Any

LARGEST = 2**53
"""Above it not every whole number has a float of its own."""
_WORDS = {"None": "null", "True": "true", "False": "false"}


def is_number(value: Any) -> bool:
    """Whether a value is a finite number; `true` is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def check_whole(name: str, value: Any, *, least: int, otherwise: str = "") -> None:
    """Refuses what is no whole number of at least this; `true` is none.

    Args:
        name: the setting.
        value: what was given.
        least: the limit.
        otherwise: what else it may be, for the sentence.

    Raises:
        ValueError: it is none, or so large that sums and products of it would not fit into 64 bits.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={shown(value)} must be a whole number of at least {least}{otherwise}.")
    if value >= LARGEST:
        raise ValueError(f"{name}={shown(value)} must be below 2^53{otherwise}.")


def shown(value: Any) -> str:
    """A value as it is written in settings."""
    if isinstance(value, int) and LARGEST <= abs(value) <= sys.float_info.max:
        return f"{value:.3g}"
    return _WORDS.get(str(value), str(value))
