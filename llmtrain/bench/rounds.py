"""Interleaved rounds: the sides of a comparison take turns, and a ratio is formed within each round.

A machine is never quite quiet: other programs, heat and a hypervisor change its speed from minute to minute. Taken in
turns (A B A B …), neighbouring laps see about the same machine, and the median of the per-round ratios is robust where
the two speeds are not. Knows clocks and arithmetic; knows nothing of what is measured.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

MIN_ROUNDS = 3  # below this a median says nothing about the spread


class Rounds:
    """The laps of several sides: for each side and round how much was done and in how many seconds.

    Args:
        rounds: Rounds that count.
        warmup_rounds: Rounds before them that are run and thrown away: compilation, thread pools, page cache.
        synchronize: Waits until the device has done what it was given; called before each reading of the clock.
        clock: Seconds, monotonic; replaced in tests.

    Raises:
        ValueError: There are too few rounds.
    """

    def __init__(
        self,
        rounds: int,
        *,
        warmup_rounds: int = 1,
        synchronize: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if rounds < MIN_ROUNDS:
            raise ValueError(f"rounds={rounds} must be at least {MIN_ROUNDS}: fewer give no spread.")
        if warmup_rounds < 0:
            raise ValueError(f"warmup_rounds={warmup_rounds} must not be negative.")
        self.rounds, self.warmup_rounds = rounds, warmup_rounds
        self._synchronize, self._clock = synchronize, clock
        self._laps: dict[str, list[float]] = {}
        self._since: float | None = None

    @property
    def total(self) -> int:
        """Rounds to run, those that do not count included."""
        return self.rounds + self.warmup_rounds

    def start(self) -> None:
        """Starts the lap of whoever's turn it is. Garbage of the lap before is not collected in this one."""
        assert self._since is None, "a lap is running"
        gc.collect()
        self._synchronize()
        self._since = self._clock()

    def stop(self, side: str, amount: float) -> float:
        """Ends the lap, in which `side` did `amount` of work; returns its rate, amount per second."""
        self._synchronize()
        now = self._clock()
        assert self._since is not None, "no lap is running"
        rate = amount / (now - self._since)
        self._since = None
        self._laps.setdefault(side, []).append(rate)
        return rate

    def rates(self, side: str) -> list[float]:
        """The side's rates in the rounds that count."""
        return self._laps[side][self.warmup_rounds :]

    def compare(self, ours: str, theirs: str) -> Ratio:
        """The ratio of two sides' rates, round by round.

        Raises:
            ValueError: The sides did not run all rounds.
        """
        for side in (ours, theirs):
            found = len(self._laps.get(side, []))
            if found != self.total:
                raise ValueError(f"{side} ran {found} of {self.total} rounds; the comparison needs all of them.")
        return Ratio(self.rates(ours), self.rates(theirs))


@dataclass(frozen=True)
class Ratio:
    """Two sides' rates in the same rounds, and their quotient.

    Attributes:
        ours: Our rates, one for each round.
        theirs: The other side's.
    """

    ours: Sequence[float]
    theirs: Sequence[float]

    @property
    def per_round(self) -> list[float]:
        """Ours over theirs in each round."""
        return [a / b for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def median(self) -> float:
        """The figure to quote."""
        return statistics.median(self.per_round)

    @property
    def low(self) -> float:
        """The least favourable round."""
        return min(self.per_round)

    @property
    def high(self) -> float:
        """The most favourable round."""
        return max(self.per_round)


def take_turns(
    sides: Mapping[str, Callable[[], float]],
    rounds: Rounds,
    *,
    between: Callable[[str], None] = lambda side: None,
    report: Callable[[int, Mapping[str, float]], None] = lambda number, rates: None,
) -> Rounds:
    """Runs every side once in each round, in the order given.

    Args:
        sides: By name, what does one lap and returns how much it did.
        rounds: Where the laps go.
        between: Called after each lap with the side's name, off the clock, to clean up.
        report: Called after each round with its number (0 and below: warm-up) and the sides' rates.
    """
    with quiet_garbage():
        for number in range(1 - rounds.warmup_rounds, rounds.rounds + 1):
            rates = {}
            for name, lap in sides.items():
                rounds.start()
                amount = lap()
                rates[name] = rounds.stop(name, amount)
                between(name)
            report(number, rates)
    return rounds


@contextmanager
def quiet_garbage() -> Iterator[None]:
    """Takes what exists now out of the garbage collector's rounds.

    The collector stays on, for a side's own garbage is part of its cost; but scanning the modules that *another* side
    imported is not.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
