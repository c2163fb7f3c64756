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


def mfu_and_what_it_should_be(run_dir, *, flops_per_position: float, peak: float) -> list[tuple[float, float]]:
    """Of every logged step but the first: the figure, and FLOPs over seconds of the watch over the peak.

    Each position of the toy's text is trained, so tokens are positions.
    """
    import csv
    from itertools import pairwise

    with (run_dir / "metrics.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["train/mfu"]]
    found = []
    for before, after in pairwise(rows):
        positions = int(after["tokens"]) - int(before["tokens"])
        seconds = float(after["seconds"]) - float(before["seconds"])
        found.append((float(after["train/mfu"]), positions * flops_per_position / seconds / peak))
    return found


def counted_flops_per_position() -> float:
    """Forward and backward of the toy model, as torch counts the FLOPs of its operations."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from llmtrain.model import loss_sum
    from tests.training.toy import SEQUENCE_LENGTH, toy_model

    ids = torch.randint(0, 300, (2, SEQUENCE_LENGTH))
    with FlopCounterMode(display=False) as counter:
        loss_sum(toy_model().train(), ids, ids)[0].backward()
    return counter.get_total_flops() / ids.numel()


@pytest.mark.medium
def test_mfu_is_counted_flops_over_time_over_the_peak(train, tmp_path, monkeypatch, caplog):
    """Also above 1, where the peak was measured in a busy moment: that is said once, and the peak stays what it was."""
    from llmtrain.model import flops_per_token
    from llmtrain.training import hardware
    from tests.training.toy import SEQUENCE_LENGTH, toy_model

    counted = counted_flops_per_position()
    stated = flops_per_token(toy_model().config, SEQUENCE_LENGTH)
    assert stated == pytest.approx(counted, rel=0.1)
    for peak, exceeds in ((1e15, False), (1e6, True)):
        caplog.clear()
        monkeypatch.setattr(hardware, "peak_of", lambda *arguments, peak=peak: hardware.Peak(peak, "a test"))
        folder = tmp_path / str(exceeds)
        with caplog.at_level("INFO"):
            train(folder, steps=8, rows=8, val_every=3, checkpoint_every=None, flops_per_position=stated)
        pairs = mfu_and_what_it_should_be(folder, flops_per_position=counted, peak=peak)
        assert len(pairs) == 7
        assert all(mfu == pytest.approx(expected, rel=0.15) for mfu, expected in pairs)
        assert all((mfu > 1) is exceeds for mfu, _ in pairs)
        assert caplog.text.count("exceeds 1: training does") == exceeds
        assert f"train/mfu is a share of {peak / 1e12:.3g} TFLOP/s in fp32: 1 × a test" in caplog.text
