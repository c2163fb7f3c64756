"""Steps that are not finite in one process: counted, logged, resumed over, ended after several; and the spike alarm.

That every strategy leaves them out on all ranks is `test_equality.py`'s.
"""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch
from safetensors.torch import load_file

from llmtrain.training import checkpointing
from llmtrain.training.module import LanguageModule
from llmtrain.training.skipping import NonFiniteError
from tests.training.conftest import metrics

STRATEGIES = ["single", pytest.param("deepspeed_1", marks=pytest.mark.medium)]


@pytest.fixture
def spoil(monkeypatch):
    """`spoil([3, 4])`: the losses of those steps (counted from 0) are NaN, or `value`, or `factor` times as large."""
    original = LanguageModule.batch_loss
    chosen: dict = {"steps": [], "value": math.nan, "factor": 1.0}

    def batch_loss(module, batch):
        total = original(module, batch)
        if module.trainer.global_step not in chosen["steps"]:
            return total
        return total * chosen["factor"] if chosen["factor"] != 1.0 else total + chosen["value"]

    monkeypatch.setattr(LanguageModule, "batch_loss", batch_loss)
    return lambda steps, **changes: chosen.update({"value": math.nan, "factor": 1.0, "steps": steps, **changes})


def weights(run_dir, step: int):
    return load_file(run_dir / "checkpoints" / f"step-{step:06d}" / "model" / "model.safetensors")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_skipped_step_changes_no_weight_and_nothing_else(train, spoil, tmp_path, caplog, strategy, value):
    options = {"steps": 8, "strategy": strategy, "checkpoint_every": 1, "keep_last": None, "log_every": 4}
    whole = train(tmp_path / "whole", **options)
    spoil([4], value=value)
    skipped = train(tmp_path / "skipped", **options)
    before, after = weights(tmp_path / "skipped", 4), weights(tmp_path / "skipped", 5)
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert not all(torch.equal(before[name], value) for name, value in weights(tmp_path / "skipped", 6).items())
    rows = {int(row["step"]): row for row in metrics(tmp_path / "skipped")}
    assert {step: row["train/skipped_steps"] for step, row in rows.items()} == {1: "0", 4: "0", 5: "1", 8: "1"}
    assert not math.isfinite(float(rows[5]["train/loss"]))
    expected = {int(row["step"]): row for row in metrics(tmp_path / "whole")}
    assert rows[8]["train/lr"] == expected[8]["train/lr"]  # the schedule went on
    assert rows[8]["tokens"] == expected[8]["tokens"]  # and so did the data
    assert (skipped.tokens, skipped.steps) == (whole.tokens, whole.steps)
    assert f"step 5 was skipped, as its loss ({value:g}) or gradient is not finite" in caplog.text
    assert f"llmtrain show-batch run={tmp_path / 'skipped'} step=5" in caplog.text


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resuming_after_a_skipped_step_is_exact(train, spoil, signal_at, tmp_path, strategy):
    """Interrupted at skipped steps, the first time between two that follow each other."""
    spoil([3, 4, 8])
    train(tmp_path / "straight", strategy=strategy)
    for stop in (3, 8, None):
        signal_at(stop)
        train(tmp_path / "interrupted", strategy=strategy, resume="auto")
    assert metrics(tmp_path / "interrupted") == metrics(tmp_path / "straight")
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("straight", "interrupted"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_several_in_a_row_end_the_run_and_say_where_to_look(train, spoil, micro_batches, tmp_path, strategy):
    spoil([5, 7, 8, 9, 10])  # the lonely one does not count
    with pytest.raises(NonFiniteError) as error:
        train(tmp_path, strategy=strategy, max_skipped_steps=3)
    message = str(error.value)
    ids = [sample for step, _, samples in micro_batches for sample in samples if step == 9]
    assert "step 10 was the 3rd in a row to be skipped (trainer.max_skipped_steps=3)" in message
    assert (
        f"the samples {', '.join(map(str, ids))}, which `llmtrain show-batch run={tmp_path} step=10` prints" in message
    )
    assert f"the last checkpoint is {tmp_path / 'checkpoints' / 'step-000009'}" in message
    assert [row["train/skipped_steps"] for row in metrics(tmp_path)] == ["0"] * 5 + ["1", "1", "2", "3", "4"]
    assert all(value.isfinite().all() for value in weights(tmp_path, 9).values())
    assert [each.step for each in checkpointing.list_checkpoints(tmp_path)] == [6, 9]


def test_the_count_in_a_row_goes_on_after_a_resume(train, spoil, signal_at, tmp_path):
    spoil([2, 3, 4])
    signal_at(3)
    train(tmp_path, max_skipped_steps=3)
    signal_at(None)
    with pytest.raises(NonFiniteError, match="step 5 was the 3rd in a row"):
        train(tmp_path, max_skipped_steps=3, resume="auto")


def test_without_a_limit_it_goes_on(train, spoil, tmp_path):
    spoil(range(1, 12))
    train(tmp_path, max_skipped_steps=None)
    assert metrics(tmp_path)[-1]["train/skipped_steps"] == "11"


@pytest.mark.parametrize("setting", [{"max_skipped_steps": 0}, {"spike_alarm": 0.0}])
def test_limits_out_of_range_are_refused(train, tmp_path, setting):
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=rf"trainer\.{name}={value}"):
        train(tmp_path, **setting)


def test_a_validation_that_is_not_finite_is_never_the_best(train, tmp_path, monkeypatch):
    """Neither the first one, which nothing is better than, nor a later one."""
    original = LanguageModule.on_validation_epoch_end

    def spoiled(module):
        original(module)
        if module.trainer.global_step in (2, 6):
            module.last_validation = dict.fromkeys(module.last_validation, math.nan)

    monkeypatch.setattr(LanguageModule, "on_validation_epoch_end", spoiled)
    result = train(tmp_path, steps=6, val_every=2)
    assert result.best_step == 4
    assert json.loads((tmp_path / "model" / "llmtrain.json").read_text())["step"] == 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_that_are_not_finite_are_not_written(train, tmp_path, monkeypatch, strategy):
    """An update can overflow with a finite gradient. The checkpoint before stays, whole."""
    original = LanguageModule.on_train_batch_start

    def on_train_batch_start(module, batch, batch_idx):
        original(module, batch, batch_idx)
        if module.trainer.global_step == 5:
            for group in module.trainer.optimizers[0].param_groups:
                group["lr"] = math.inf

    monkeypatch.setattr(LanguageModule, "on_train_batch_start", on_train_batch_start)
    with pytest.raises(NonFiniteError, match=r"after step 6 the weights themselves are not finite \(.*lower optim.lr"):
        train(tmp_path, strategy=strategy, val_every=None)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if "step" in path.name] == ["step-000003"]
    assert all(value.isfinite().all() for value in weights(tmp_path, 3).values())


def test_the_spike_alarm_names_the_step_and_only_warns(train, spoil, tmp_path, caplog):
    spoil([24], factor=3.0)
    with caplog.at_level(logging.WARNING):
        alarmed = train(tmp_path / "alarmed", steps=30, spike_alarm=0.5, val_every=None)
    assert [record.message for record in caplog.records if "more than" in record.message] == [
        "the loss of step 25 is more than 1.5 times the mean of the last 20 steps; its texts: "
        f"llmtrain show-batch run={tmp_path / 'alarmed'} step=25"
    ]
    silent = train(tmp_path / "silent", steps=30, val_every=None)
    assert alarmed.val_loss == silent.val_loss
    assert "spike" not in "".join(path.name for path in tmp_path.rglob("*"))
