"""The arithmetic of interleaved rounds, with a clock that only moves when a side says so."""

import gc

import pytest

from llmtrain.bench.rounds import Ratio, Rounds, take_turns


class Clock:
    """Seconds that pass only while a fake side works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def side(self, amount: float, seconds: list[float]):
        """A side that does `amount` in each lap, in the seconds given for it, lap after lap."""
        durations = iter(seconds)

        def lap() -> float:
            self.now += next(durations)
            return amount

        return lap


def test_ratio_is_formed_within_each_round() -> None:
    """The machine slows down fourfold after the first round; the ratio does not notice."""
    clock = Clock()
    rounds = Rounds(3, warmup_rounds=0, clock=clock)
    take_turns({"ours": clock.side(100, [1, 4, 4]), "theirs": clock.side(100, [2, 8, 8])}, rounds)
    ratio = rounds.compare("ours", "theirs")
    assert ratio.per_round == [2, 2, 2]
    assert ratio.ours == [100, 25, 25]


def test_median_and_spread() -> None:
    ratio = Ratio(ours=[9, 10, 30, 8], theirs=[10, 10, 10, 10])
    assert (ratio.median, ratio.low, ratio.high) == (0.95, 0.8, 3.0)


def test_warmup_rounds_are_run_and_thrown_away() -> None:
    clock = Clock()
    rounds = Rounds(3, warmup_rounds=2, clock=clock)
    seen = []
    take_turns(
        {"a": clock.side(1, [100, 50, 1, 1, 1]), "b": clock.side(1, [100, 50, 1, 1, 1])},
        rounds,
        report=lambda number, rates: seen.append((number, rates["a"])),
    )
    assert rounds.rates("a") == [1, 1, 1]
    assert seen == [(-1, 0.01), (0, 0.02), (1, 1), (2, 1), (3, 1)]


def test_sides_take_turns_and_cleaning_up_is_off_the_clock() -> None:
    clock = Clock()
    order = []

    def lap(name: str) -> float:
        order.append(name)
        clock.now += 1
        return 5

    def clean(name: str) -> None:
        order.append(f"clean {name}")
        clock.now += 1000

    rounds = Rounds(3, warmup_rounds=0, clock=clock)
    take_turns({"a": lambda: lap("a"), "b": lambda: lap("b")}, rounds, between=clean)
    assert order == ["a", "clean a", "b", "clean b"] * 3
    assert rounds.rates("a") == [5, 5, 5]


def test_the_device_is_waited_for_before_each_reading_of_the_clock() -> None:
    events: list[str] = []
    rounds = Rounds(
        3, synchronize=lambda: events.append("wait"), clock=lambda: events.append("clock") or float(len(events))
    )
    rounds.start()
    rounds.stop("a", 1)
    assert events == ["wait", "clock", "wait", "clock"]


def test_an_unfinished_comparison_is_refused() -> None:
    clock = Clock()
    rounds = Rounds(3, warmup_rounds=0, clock=clock)
    for _ in range(3):
        rounds.start()
        clock.now += 1
        rounds.stop("ours", 1)
    with pytest.raises(ValueError, match="theirs ran 0 of 3 rounds"):
        rounds.compare("ours", "theirs")


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rounds=2 must be at least 3"):
        Rounds(2)


def test_the_garbage_collector_is_on_during_laps_and_unfrozen_afterwards() -> None:
    clock = Clock()
    states = []

    def lap() -> float:
        states.append((gc.isenabled(), gc.get_freeze_count() > 0))
        clock.now += 1
        return 1

    take_turns({"a": lap}, Rounds(3, warmup_rounds=0, clock=clock))
    assert states == [(True, True)] * 3
    assert gc.get_freeze_count() == 0
