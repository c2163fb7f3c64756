"""The stopwatch and its rates."""

import re

import pytest

from llmtrain.training.throughput import Rate, Stopwatch


def test_pauses_do_not_count():
    now = [0.0]
    watch = Stopwatch(clock=lambda: now[0])
    watch.start()
    now[0] = 2.0
    with watch.paused():
        now[0] = 10.0
        assert watch.seconds == 2.0
    now[0] = 13.0
    assert watch.seconds == 5.0
    watch.stop()
    with watch.paused():
        now[0] = 20.0
    now[0] = 30.0
    assert watch.seconds == 5.0


def test_a_rate_is_what_was_added_between_two_readings():
    now = [0.0]
    watch = Stopwatch(clock=lambda: now[0])
    watch.start()
    rate = Rate(watch)
    rate.reset(100)
    now[0] = 4.0
    assert rate.read(300) == 50.0
    now[0] = 5.0
    assert rate.read(310) == 10.0


@pytest.mark.medium
@pytest.mark.parametrize("accumulation", [1, 8])
def test_logged_speed_is_counted_tokens_over_wall_time(train, tmp_path, monkeypatch, accumulation):
    """Whatever the accumulation, logged tokens/s within 5 % of tokens / wall time, MFU never above 1."""
    import csv
    import time

    from llmtrain.training.module import LanguageModule

    stamps: list[float] = []
    original = LanguageModule.on_train_batch_end

    def on_train_batch_end(self, outputs, batch, batch_idx):
        original(self, outputs, batch, batch_idx)
        stamps.append(time.perf_counter())

    monkeypatch.setattr(LanguageModule, "on_train_batch_end", on_train_batch_end)
    steps = 64 // accumulation
    result = train(
        tmp_path, steps=steps, rows=4, accumulation=accumulation, log_every=steps // 2, val_every=None,
        checkpoint_every=None, flops_per_position=1e5,
    )  # fmt: skip
    with (tmp_path / "metrics.csv").open(encoding="utf-8") as file:
        last = list(csv.DictReader(file))[-1]
    half = len(stamps) // 2
    counted = half * 4 * 32 / (stamps[-1] - stamps[half - 1])
    assert float(last["train/tokens_per_second"]) == pytest.approx(counted, rel=0.05)
    assert 0 < float(last["train/mfu"]) <= 1
    assert result.tokens == 64 * 4 * 32
    assert re.fullmatch(r"\d+", last["tokens"])


@pytest.mark.medium
def test_a_peak_measured_in_a_busy_moment_does_not_lift_mfu_above_one(train, tmp_path, monkeypatch):
    import csv

    from llmtrain.training import hardware

    monkeypatch.setattr(hardware, "peak_flops", lambda *arguments, **options: 1.0)
    train(tmp_path, steps=4, val_every=None, checkpoint_every=None, flops_per_position=1e5)
    with (tmp_path / "metrics.csv").open(encoding="utf-8") as file:
        shares = [float(row["train/mfu"]) for row in csv.DictReader(file) if row["train/mfu"]]
    assert shares
    assert max(shares) == 1.0
