"""Small pieces of HTML: words in both languages, escaped text, tables, numbers. Knows nothing of runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from llmtrain.report.words import WORDS

NOTHING = "–"
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Html(str):
    """Text that is HTML already; every other text is escaped."""


def word(key: str) -> Html:
    """A word of the page in both languages, of which the page shows one."""
    english, chinese = WORDS[key]
    return Html(
        f'<span class="en" lang="en">{escape(english)}</span><span class="zh" lang="zh">{escape(chinese)}</span>'
    )


def html(value: Any) -> Html:
    """A value as it can stand in the page: a text is shown as it is, whatever it holds."""
    if isinstance(value, Html):
        return value
    if value is None:
        return Html(NOTHING)
    if isinstance(value, bool):
        return Html(str(value).lower())
    return Html(escape(str(value)))


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], *, kind: str = "") -> Html:
    """A table, in a box of its own that scrolls sideways where it is too wide; the first cell of a row is its head."""
    names = "".join(f'<th scope="col">{html(cell)}</th>' for cell in head)
    lines = []
    for first, *others in rows:
        cells = "".join(f"<td>{html(cell)}</td>" for cell in others)
        lines.append(f'<tr><th scope="row">{html(first)}</th>{cells}</tr>')
    return Html(
        f'<div class="wide" tabindex="0"><table class="{kind}"><thead><tr>{names}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def section(key: str, *parts: str) -> Html:
    """A section with its heading."""
    return Html(f'<section id="{key}"><h2>{word(key)}</h2>{"".join(parts)}</section>')


def note(key: str) -> Html:
    """A plain sentence below a heading."""
    return Html(f'<p class="note">{word(key)}</p>')


def count(value: Any) -> str | None:
    """A whole number with commas."""
    return f"{value:,.0f}" if isinstance(value, int | float) else None


def figure(value: Any, digits: int = 3) -> str | None:
    """A number with so many places."""
    return f"{value:.{digits}f}" if isinstance(value, int | float) and not isinstance(value, bool) else None


def size(value: Any) -> str | None:
    """Bytes, in MB of a million."""
    return f"{value / 1e6:,.1f} MB" if isinstance(value, int | float) else None


def compact(value: Any) -> str | None:
    """1.54 M."""
    if not isinstance(value, int | float):
        return None
    for limit, unit in _UNITS:
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.3g}"


def duration(value: Any) -> str | None:
    """6:21 minutes and seconds, 1:02:03 with hours."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
