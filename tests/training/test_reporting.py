"""The callback that writes a run's report: when it writes, and that no error of it reaches the training."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.medium  # imports Lightning


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Control:
    """A timetable in which every tenth step is logged, and every batch ends a step."""

    def __init__(self) -> None:
        self.stood_still = 0
        self.stopwatch = SimpleNamespace(paused=self._paused)

    @contextmanager
    def _paused(self):
        self.stood_still += 1
        yield

    def ends_step(self, batch: int) -> bool:
        return True

    def logs_at(self, step: int) -> bool:
        return step % 10 == 0


def written_at(write_seconds: float, *, every: float = 60.0, steps: int = 2000, rank_zero: bool = True) -> list[float]:
    """When a report is written in a run whose steps take a second each."""
    from llmtrain.training.reporting import Report

    clock, times, control = Clock(), [], Control()

    def write() -> None:
        times.append(clock.now)
        clock.now += write_seconds

    report = Report(control, write, every=every, clock=clock)
    for step in range(1, steps + 1):
        clock.now += 1
        report.on_train_batch_end(SimpleNamespace(is_global_zero=rank_zero, global_step=step), None, None, None, step)
    assert control.stood_still == len(times)
    return times


def test_it_writes_every_so_often_after_steps_that_are_logged():
    assert written_at(0.0)[:3] == [60, 120, 180]
    assert written_at(0.0, every=0)[:3] == [10, 20, 30]
    assert written_at(0.0, rank_zero=False) == []


def test_it_takes_a_hundredth_of_the_time_at_most():
    times = written_at(5.0)
    assert len(times) == 4
    assert all(later - earlier >= 500 for earlier, later in pairwise(times))


def test_an_error_is_one_warning(caplog):
    from llmtrain.training.reporting import Report

    calls = []

    def fail() -> None:
        calls.append(1)
        raise OSError("no space left")

    clock = Clock()
    report = Report(Control(), fail, every=0, clock=clock)
    with caplog.at_level(logging.WARNING):
        for step in (10, 20, 30):
            clock.now += 10
            report.on_train_batch_end(SimpleNamespace(is_global_zero=True, global_step=step), None, None, None, step)
    assert len(calls) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "no report while this run goes on: OSError: no space left"
    ]
