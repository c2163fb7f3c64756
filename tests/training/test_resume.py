"""A run that was interrupted and resumed equals the run that was not: PAINS 2, 3 and 4, and what may not be resumed."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from llmtrain.training import checkpointing
from tests.training.conftest import metrics


def weights(run_dir):
    return load_file(run_dir / "model" / "model.safetensors")


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [("single", "fp32"), pytest.param("deepspeed_1", "fp32", marks=pytest.mark.medium)],
)
def test_interrupted_twice_equals_straight(train, signal_at, micro_batches, tmp_path, strategy, precision):
    """With dropout 0.1 and accumulation 2: the same samples, losses, figures, validation steps and final weights."""
    straight = train(tmp_path / "straight", strategy=strategy, precision=precision)
    expected = list(micro_batches)
    micro_batches.clear()

    interrupted = tmp_path / "interrupted"
    stops = []
    for stop in (3, 8, None):
        signal_at(stop)
        result = train(interrupted, strategy=strategy, precision=precision, resume="auto")
        stops.append((result.resumed_from, result.steps, result.stopped_by))
    assert stops == [(0, 4, "SIGTERM"), (4, 9, "SIGTERM"), (9, 12, None)]
    assert micro_batches == expected
    assert metrics(interrupted) == metrics(tmp_path / "straight")
    assert (result.tokens, result.val_loss, result.best_step) == (
        straight.tokens,
        straight.val_loss,
        straight.best_step,
    )
    ours, theirs = weights(interrupted), weights(tmp_path / "straight")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_counters_after_a_resume_in_the_middle_of_everything(train, signal_at, micro_batches, tmp_path):
    """PAINS 4: accumulation 2, validation every 5 steps, stop at 7 → micro-batch 14, step 7 → 8, validation at 10."""
    signal_at(6)
    assert train(tmp_path, steps=20).steps == 7
    assert [row["step"] for row in metrics(tmp_path) if row["val/loss"]] == ["5"]
    micro_batches.clear()
    signal_at(10)
    train(tmp_path, steps=20, resume="auto")
    assert micro_batches[0][:2] == (7, 0)
    assert len(micro_batches) == 2 * (11 - 7)
    assert [int(row["step"]) for row in metrics(tmp_path)] == list(range(1, 12))
    assert [row["step"] for row in metrics(tmp_path) if row["val/loss"]] == ["5", "10"]


def test_the_resumed_checkpoint_stays_and_foreign_folders_too(train, signal_at, tmp_path):
    signal_at(6)
    train(tmp_path, steps=20, keep_last=1)
    foreign = tmp_path / "checkpoints" / "step-000001"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    signal_at(None)
    train(tmp_path, steps=20, keep_last=1, resume="auto")
    assert [each.step for each in checkpointing.list_checkpoints(tmp_path)] == [7, 20]
    assert (foreign / "notes.txt").read_text() == "mine"


def test_an_older_checkpoint_sets_the_later_ones_aside(train, tmp_path):
    train(tmp_path, steps=9, keep_last=None)
    middle = tmp_path / "checkpoints" / "step-000003"
    result = train(tmp_path, steps=6, keep_last=None, resume=middle)
    assert (result.resumed_from, result.steps) == (3, 6)
    assert [each.step for each in checkpointing.list_checkpoints(tmp_path)] == [3, 6]
    assert {path.name for path in middle.parent.glob("*.superseded")} == {
        "step-000006.superseded",
        "step-000009.superseded",
    }
    assert [int(row["step"]) for row in metrics(tmp_path)] == list(range(1, 7))


def test_a_finished_run_has_nothing_left_to_do(train, tmp_path):
    first = train(tmp_path)
    again = train(tmp_path, resume="auto")
    assert (again.steps, again.tokens, again.val_loss) == (first.steps, first.tokens, first.val_loss)
    assert again.model_dir.exists()


def test_a_finished_run_goes_on_with_more_steps(train, tmp_path):
    train(tmp_path, steps=6, schedule="constant")
    assert train(tmp_path, steps=9, schedule="constant", resume="auto").steps == 9
    assert [int(row["step"]) for row in metrics(tmp_path)] == list(range(1, 10))


def test_a_fresh_start_into_a_used_folder_is_refused(train, tmp_path):
    train(tmp_path, steps=3)
    with pytest.raises(ValueError, match="holds another run; resume=auto continues it"):
        train(tmp_path, steps=3)


def test_resume_auto_without_a_checkpoint_starts_afresh(train, tmp_path):
    assert train(tmp_path, steps=2, resume="auto").resumed_from == 0


def test_half_written_checkpoints_do_not_count(train, tmp_path):
    train(tmp_path, steps=6)
    newest = tmp_path / "checkpoints" / "step-000006"
    (newest / "checkpoint.json").unlink()
    assert checkpointing.find_checkpoint("auto", tmp_path).step == 3
    with pytest.raises(ValueError, match=r"no whole checkpoint there.*this run has .*step-000003"):
        checkpointing.find_checkpoint(newest, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"accumulation": 1, "rows": 4}, "number of micro-batches per step was 2 and is 1"),
        ({"strategy": "deepspeed_1"}, "strategy was single and is deepspeed_1"),
        ({"fixed": {"the data's fingerprint": "bbb"}}, "the data's fingerprint was aaa and is bbb"),
    ],
)
def test_what_may_not_change_is_refused_by_name(train, tmp_path, changes, message):
    train(tmp_path, steps=3, fixed={"the data's fingerprint": "aaa"})
    with pytest.raises(ValueError, match=message):
        train(tmp_path, steps=6, resume="auto", **({"fixed": {"the data's fingerprint": "aaa"}} | changes))


def test_what_may_change_is_reported(train, tmp_path, caplog):
    train(tmp_path, steps=3)
    train(tmp_path, steps=6, lr=1e-4, resume="auto")
    assert "optim.lr was 0.001 and is 0.0001" in caplog.text
    assert float(metrics(tmp_path)[-1]["train/lr"]) == pytest.approx(1e-5)


def test_our_files_hold_plain_tensors(train, tmp_path):
    """PAINS 7: every file of ours loads with weights_only=True."""
    train(tmp_path, steps=3)
    files = list(tmp_path.rglob("*.pt"))
    assert files
    for file in files:
        torch.load(file, weights_only=True)
    marker = json.loads((tmp_path / "checkpoints" / "step-000003" / "checkpoint.json").read_text())
    assert (marker["step"], marker["tokens"]) == (3, 3 * 2 * 2 * 32)


def test_another_runs_checkpoint_continues_in_a_folder_of_its_own(train, tmp_path):
    """Its best model so far is the other run's: the first validation here leaves one, however bad."""
    train(tmp_path / "old", steps=6)
    result = train(tmp_path / "new", steps=9, lr=1e-9, resume=tmp_path / "old")
    assert (result.resumed_from, result.best_step) == (6, 9)
    assert result.model_dir == tmp_path / "new" / "model"
    assert weights(tmp_path / "new")
    assert [int(row["step"]) for row in metrics(tmp_path / "new")] == [7, 8, 9]


def test_a_missing_best_model_is_written_again(train, signal_at, tmp_path):
    signal_at(6)
    train(tmp_path)
    shutil.rmtree(tmp_path / "model")
    signal_at(None)
    result = train(tmp_path, resume="auto")
    assert result.best_step == 12
    assert weights(tmp_path)
