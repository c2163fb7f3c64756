"""Curves as SVG: lines by matplotlib, text as text, colours that the page decides.

Knows pairs of numbers and labels of plain letters. What a user wrote (a run's name) never comes here: it may have
characters for which matplotlib has no glyphs, and stands in the page's legend instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import Any

from llmtrain.report.words import WORDS

MOST_POINTS = 400
_SIZE = (4.4, 2.7)  # inches of 72 points: one point is one pixel where a chart is shown at its own width
_INK, _FAINT = "#123456", "#654321"  # stand-ins that the page's colours are put in the place of
_COLOURS = ("#0072b1", "#d55e01", "#009e72", "#cc79a8", "#e69f01", "#56b4e8", "#777778")
"""Okabe and Ito's, told apart by the colour-blind; each changed by one, so that nothing else has it."""
_LABEL_HEIGHT, _LABEL_WIDTH = 12, 60  # points
_MANTISSAS = "236"  # of an axis with less than about one power of ten, those that have a number beside them
_DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Line:
    """A curve.

    Attributes:
        points: pairs of x and y, by x.
        label: written at its end: a letter, or a word of `WORDS` in `@`.
        colour: number of its colour, and of its dashes.
        marked: whether its points are marked, for those that are few.
    """

    points: Sequence[tuple[float, float]]
    label: str = ""
    colour: int = 0
    marked: bool = False


def thin(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most so many points, with the highest and the lowest of every bucket: a spike is never lost.

    What is not finite is left out.
    """
    points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if len(points) <= most:
        return points
    buckets = max(1, (most - 2) // 2)
    kept = {0, len(points) - 1}
    for bucket in range(buckets):
        inside = range(bucket * len(points) // buckets, (bucket + 1) * len(points) // buckets)
        kept |= {min(inside, key=lambda index: points[index][1]), max(inside, key=lambda index: points[index][1])}
    return [points[index] for index in sorted(kept)]


def chart(name: str, lines: Sequence[Line], *, x: str, logarithmic: bool = False) -> str | None:
    """An `<svg>` of some curves over one axis; None if there is nothing to draw.

    Args:
        name: unlike that of any other chart of the page: what it defines is named by it.
        lines: the curves.
        x: what the axis counts, a key of `WORDS`.
        logarithmic: y by powers of ten, where all of it is above zero.
    """
    drawn = [(line, thin(line.points)) for line in lines]
    drawn = [(line, points) for line, points in drawn if points]
    if not drawn:
        return None
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 10, "path.simplify": False}
    with mpl.rc_context(settings):
        figure = Figure(figsize=_SIZE, dpi=72)
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0.14, 0.17, 0.74, 0.78))
        if logarithmic and all(y > 0 for _, points in drawn for _, y in points):
            axes.set_yscale("log")
        for line, points in drawn:
            _draw(axes, line, points)
        axes.autoscale_view()  # where the lines end is not known before
        _label(axes, drawn)
        if axes.get_yscale() == "log":
            low, high = axes.get_ylim()
            between = _MANTISSAS if math.log10(high / low) < 1.2 else ()
            axes.yaxis.set_minor_formatter(FuncFormatter(lambda y, _: _number(y) if f"{y:e}"[0] in between else ""))
        axes.yaxis.set_major_formatter(FuncFormatter(_number))
        axes.xaxis.set_major_formatter(FuncFormatter(_number))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel(f"@{x}@", color=_INK)
        axes.tick_params(colors=_INK, which="both", length=3)
        axes.grid(color=_FAINT, linewidth=0.6, alpha=0.5)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(_FAINT)
        figure.patch.set_visible(False)
        axes.patch.set_visible(False)
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return _of_the_page(text.getvalue())


def _draw(axes: Any, line: Line, points: Sequence[tuple[float, float]]) -> None:
    colour = _COLOURS[line.colour % len(_COLOURS)]
    marker = "o" if line.marked or len(points) == 1 else None
    dashes = _DASHES[line.colour // len(_COLOURS) % len(_DASHES)]
    axes.plot(*zip(*points, strict=True), color=colour, linestyle=dashes, linewidth=1.6, marker=marker, markersize=3.5)


def _label(axes: Any, drawn: Sequence[tuple[Line, Sequence[tuple[float, float]]]]) -> None:
    """The labels at the ends of the lines; those that would lie on each other are moved apart, upwards."""
    ends = [(axes.transData.transform(points[-1]), line, points[-1]) for line, points in drawn if line.label]
    free: dict[int, float] = {}  # the lowest free height, by where on the x axis the lines end
    for place, line, point in sorted(ends, key=lambda end: end[0][1]):
        column = round(place[0] / _LABEL_WIDTH)
        beside = [free[near] for near in (column - 1, column, column + 1) if near in free]
        height = max([place[1], *beside])
        free[column] = height + _LABEL_HEIGHT
        axes.annotate(
            line.label, point, xytext=(5, height - place[1]), textcoords="offset points", va="center",
            color=_COLOURS[line.colour % len(_COLOURS)], annotation_clip=False,
        )  # fmt: skip


def _number(value: float, place: int | None = None) -> str:
    """5k, 2M, 0.003: a unit for what is large, a plain number for what is small."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"


def _of_the_page(svg: str) -> str:
    """Without what a page has no use for, in its colours, its font and its languages."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"(?s)<metadata>.*?</metadata>", "", svg)
    svg = re.sub(r'(<g) id="[^"]*"', r"\1", svg)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    svg = svg.replace("<svg ", '<svg role="img" ', 1)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    for number, colour in enumerate(_COLOURS):
        svg = svg.replace(colour, f"var(--line-{number})")
    svg = svg.replace(_INK, "currentColor").replace(_FAINT, "var(--edge)")
    return re.sub(r"@(\w+)@", lambda found: _both(found[1]), svg)


def _both(key: str) -> str:
    english, chinese = (escape(word) for word in WORDS[key])
    return f'<tspan class="en">{english}</tspan><tspan class="zh">{chinese}</tspan>'
