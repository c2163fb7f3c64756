"""Honest speed: seconds of training alone, and the tokens counted in them.

Knows clocks. The watch runs while steps are taken and stands still for validation, checkpoints and samples; what is
reported is tokens of finished steps over those seconds, whatever the accumulation or the number of processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Counts running time, without pauses.

    Args:
        clock: seconds, monotonic; replaced in tests.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._counted = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Runs; no effect while running."""
        if self._since is None:
            self._since = self._clock()

    def stop(self) -> None:
        """Stands still; no effect while standing."""
        if self._since is not None:
            self._counted += self._clock() - self._since
            self._since = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Does not count the body; does not set a standing watch running."""
        was_running = self._since is not None
        self.stop()
        try:
            yield
        finally:
            if was_running:
                self.start()

    @property
    def seconds(self) -> float:
        """Running time so far."""
        return self._counted + (self._clock() - self._since if self._since is not None else 0.0)


class Rate:
    """Amount per second of a stopwatch between two readings.

    Args:
        stopwatch: the watch; shared with others.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._amount = 0.0
        self._seconds = stopwatch.seconds

    def reset(self, amount: float) -> None:
        """Begins to count from this total amount, now."""
        self._amount, self._seconds = amount, self._stopwatch.seconds

    def read(self, amount: float) -> float:
        """Increase of the total amount per second since the last reading."""
        seconds = self._stopwatch.seconds - self._seconds
        rate = (amount - self._amount) / seconds if seconds > 0 else 0.0
        self.reset(amount)
        return rate
