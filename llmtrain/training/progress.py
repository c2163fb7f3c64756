"""The progress line on stderr: rewritten in place on a terminal, one line every so often elsewhere.

Knows text and time. It does not know Lightning or what the figures mean.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm


class ProgressLine:
    """Shows how a run goes on.

    On a terminal the line is a `tqdm` bar without a bar: what logs to the terminal knows how to write above those.

    Args:
        total: the last step.
        stream: where to write; `None` means the standard error of the moment.
        plain_every: seconds between lines where the stream is not a terminal.
        clock: seconds, monotonic; replaced in tests.
    """

    def __init__(
        self,
        total: int,
        *,
        stream: TextIO | None = None,
        plain_every: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self._stream = stream
        self._every = plain_every
        self._clock = clock
        self._last = float("-inf")
        self._line: tqdm | None = None

    @property
    def stream(self) -> TextIO:
        """The stream that is written to."""
        return self._stream or sys.stderr

    def show(self, step: int, figures: str, *, left: float | None = None) -> None:
        """Shows a step, unless the last one shown is recent.

        Args:
            step: steps done.
            figures: loss, speed and so on, short.
            left: seconds to the end, if known.
        """
        terminal = self.stream.isatty()
        now = self._clock()
        if now - self._last < (0.2 if terminal else self._every):
            return
        self._last = now
        text = self._step(step, figures)
        if left is not None and step < self.total:
            text += f"  {duration(left)} left"
        if not terminal:
            self.stream.write(text + "\n")
            self.stream.flush()
            return
        columns, rows = shutil.get_terminal_size((110, 24))  # tqdm shows nothing on a terminal that has no size
        if self._line is None:
            self._line = tqdm(file=self.stream, bar_format="{desc}", mininterval=0, nrows=rows, ncols=columns - 1)
        self._line.ncols = columns - 1
        self._line.set_description_str(text)

    def keep(self, step: int, figures: str) -> None:
        """Writes figures of a step that stay, whatever is shown later."""
        self.write(self._step(step, figures))

    def _step(self, step: int, figures: str) -> str:
        return f"step {step:>{len(str(self.total))}}/{self.total}  {figures}"

    def write(self, text: str) -> None:
        """Writes whole lines, above the progress line."""
        with tqdm.external_write_mode(file=self.stream):
            self.stream.write(text + "\n")
            self.stream.flush()

    def close(self) -> None:
        """Leaves the last state standing."""
        if self._line is not None:
            self._line.close()
            self._line = None


def duration(seconds: float) -> str:
    """`1:05` minutes and seconds, `2:03:04` with hours, `3d 04:05` beyond a day."""
    whole = max(0, round(seconds))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def compact(number: float) -> str:
    """Three digits and a unit: 950, 31.2k, 1.54M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            value = number / limit
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}{unit}"
    return f"{number:.0f}"
