"""What a setting may be, asked before it is compared: users write `null`, words and infinities where numbers belong.

Knows kinds of values; not which setting has which limits.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number; `true` is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any, *, least: int) -> TypeGuard[int]:
    """Whether a value is a whole number of at least this."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def shown(value: Any) -> str:
    """A value as it is written in settings: `null`, `true`."""
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if _is_word(value) else str(value)


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)
