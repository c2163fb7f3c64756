"""`compare_runs` on folders made by hand: equal ones, and each kind of fault seeded into a copy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmtrain.launch.differences import compare_runs

METRICS = "step,train/loss,train/lr,train/tokens_per_second,val/loss,seconds\n"


@pytest.fixture
def straight(tmp_path: Path) -> Path:
    """A run of four steps, with validation and a checkpoint after the second and fourth."""
    folder = tmp_path / "straight"
    for place in ("model", "checkpoints/step-000002/model", "checkpoints/step-000004/model"):
        (folder / place).mkdir(parents=True)
        weights = {"a": torch.arange(4.0), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
        save_file(weights, folder / place / "model.safetensors")
    for step in (2, 4):
        checkpoint = folder / f"checkpoints/step-{step:06d}"
        counters = {"step": step, "tokens": 64 * step, "train_seconds": 1.5, "best": {"step": 2, "val_loss": 4.5}}
        (checkpoint / "checkpoint.json").write_text(json.dumps(counters))
        (checkpoint / "resume").mkdir()
        parameters = {"a": {"file": "state-00001-of-00001.safetensors", "scalars": {"step": float(step)}}}
        (checkpoint / "resume" / "state.json").write_text(json.dumps({"version": 1, "parameters": parameters}))
        save_file({"a/exp_avg": torch.full((4,), float(step))}, checkpoint / "resume" / "optimizer.safetensors")
    rows = [
        f"{step},{5 - step / 3:.9g},0.001,{900 + step},{4.5 if step % 2 == 0 else ''},{step}\n" for step in range(1, 5)
    ]
    (folder / "metrics.csv").write_text(METRICS + "".join(rows))
    (folder / "sample_ids.csv").write_text("".join(f"{step},{step * 10},{step * 10 + 1}\n" for step in range(1, 5)))
    return folder


@pytest.fixture
def resumed(straight: Path) -> Path:
    """A copy of it, in which the clock went otherwise and a signal left one checkpoint more."""
    folder = straight.with_name("resumed")
    shutil.copytree(straight, folder)
    text = (folder / "metrics.csv").read_text()
    (folder / "metrics.csv").write_text(text.replace(",901,", ",17,").replace("4.5,2", "4.5,99"))
    shutil.copytree(folder / "checkpoints/step-000002", folder / "checkpoints/step-000003")
    replace(folder / "checkpoints/step-000002/checkpoint.json", '"train_seconds": 1.5', '"train_seconds": 2.5')
    return folder


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def nudge(path: Path, name: str, index: int) -> None:
    tensors = load_file(path)
    tensors[name].view(torch.int32)[index] += 1  # the next number that fp32 has
    save_file(tensors, path)


def test_equal_runs(straight, resumed):
    found = compare_runs(straight, resumed, extra=[3])
    assert found.first is None
    assert found.counts == {
        "steps_with_samples": 4, "figures": 4 * 4, "checkpoints": 2, "counters": 8, "weights": 4,
        "optimizer_tensors": 1, "optimizer_scalars": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (
            lambda run: replace(run / "sample_ids.csv", "3,30,31", "3,30,32"),
            "step 3: sample ids is 30,31 straight and 30,32 resumed",
        ),
        (
            lambda run: replace(run / "sample_ids.csv", "4,40,41\n", ""),
            "step 4: sample ids is 40,41 straight and missing resumed",
        ),
        (
            lambda run: replace(run / "metrics.csv", "4.33333333", "4.33333334"),
            "step 2: train/loss is 4.33333333 straight and 4.33333334 resumed",
        ),
        (
            lambda run: replace(run / "metrics.csv", "4.5,4", ",4"),
            "step 4: val/loss is 4.5 straight and missing resumed",
        ),
        (
            lambda run: (run / "checkpoints/step-000002/checkpoint.json").unlink(),
            "step 2: a checkpoint is there straight and missing resumed",
        ),
        (
            lambda run: shutil.copytree(run / "checkpoints/step-000002", run / "checkpoints/step-000001"),
            "step 1: a checkpoint is missing straight and there resumed",
        ),
        (
            lambda run: replace(run / "checkpoints/step-000002/checkpoint.json", '"tokens": 128', '"tokens": 129'),
            "step 2: checkpoint.json: tokens is 128 straight and 129 resumed",
        ),
        (
            lambda run: replace(run / "checkpoints/step-000004/checkpoint.json", '"val_loss": 4.5', '"val_loss": 4.25'),
            "step 4: checkpoint.json: best.val_loss is 4.5 straight and 4.25 resumed",
        ),
        (
            lambda run: replace(run / "checkpoints/step-000004/resume/state.json", '"step": 4.0', '"step": 3.0'),
            "state.json: parameters.a.scalars.step is 4.0 straight and 3.0 resumed",
        ),
        (
            lambda run: replace(run / "checkpoints/step-000004/resume/state.json", '"step": 4.0', ""),
            "state.json: parameters.a.scalars.step is 4.0 straight and missing resumed",
        ),
        (
            lambda run: nudge(run / "model/model.safetensors", "a", 3),
            "model/model.safetensors: a[3] is 3.0 straight and 3.000000238418579 resumed",
        ),
        (
            lambda run: nudge(run / "checkpoints/step-000004/resume/optimizer.safetensors", "a/exp_avg", 0),
            "checkpoints/step-000004/resume/optimizer.safetensors: a/exp_avg[0] is 4.0 straight and 4.000000476837158",
        ),
        (
            lambda run: (run / "checkpoints/step-000004/resume/optimizer.safetensors").unlink(),
            "checkpoints/step-000004/resume/optimizer.safetensors is there straight and missing resumed",
        ),
        (
            lambda run: save_file({"a": torch.arange(4.0)}, run / "model/model.safetensors"),
            "model/model.safetensors: b is there straight and missing resumed",
        ),
    ],
)
def test_each_seeded_fault_is_found_where_it_is(straight, resumed, fault, sentence):
    fault(resumed)
    assert str(compare_runs(straight, resumed, extra=[3]).first).startswith(sentence)


def test_where_a_signal_stopped_the_run_its_checkpoint_may_know_less(straight, resumed):
    """A validation that was due at that step comes after the checkpoint."""
    replace(resumed / "checkpoints/step-000002/checkpoint.json", '"val_loss": 4.5', '"val_loss": 5.5')
    assert compare_runs(straight, resumed, extra=[2, 3]).first is None
    assert compare_runs(straight, resumed, extra=[3]).first is not None


def test_a_tolerance_lets_small_gaps_pass_and_large_ones_not(straight, resumed):
    replace(resumed / "metrics.csv", "4.33333333", "4.3334")
    nudge(resumed / "model/model.safetensors", "a", 3)
    assert compare_runs(straight, resumed, extra=[3], tolerance=1e-3).first is None
    assert compare_runs(straight, resumed, extra=[3], tolerance=1e-6).first.name == "train/loss"
    replace(resumed / "sample_ids.csv", "10", "12")
    assert compare_runs(straight, resumed, extra=[3], tolerance=1e-3).first.name == "sample ids"


def test_what_is_not_a_number_is_a_difference(straight, resumed):
    save_file({"a": torch.tensor([0.0, 1.0, float("nan"), 3.0]), "b": torch.ones(2, 2, dtype=torch.bfloat16)},
              resumed / "model/model.safetensors")  # fmt: skip
    assert "a[2] is 2.0 straight and nan resumed" in str(
        compare_runs(straight, resumed, extra=[3], tolerance=0.1).first
    )
