"""One run of `fit`: what it leaves behind, what it counts, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch

from llmtrain.checkpoint import load_model_folder
from llmtrain.training.control import RunControl
from tests.training.conftest import metrics


def test_a_run_leaves_its_model_its_figures_and_its_checkpoints(train, tmp_path, byte_tok):
    result = train(tmp_path, info={"trained_length": 32})
    rows = metrics(tmp_path)
    assert [int(row["step"]) for row in rows] == list(range(1, 13))
    assert [int(row["tokens"]) for row in rows] == [128 * step for step in range(1, 13)]
    assert [int(row["step"]) for row in rows if row["val/loss"]] == [5, 10, 12]
    assert float(rows[-1]["train/loss"]) < float(rows[0]["train/loss"])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000009", "step-000012"]
    loaded = load_model_folder(tmp_path)
    assert loaded.tokenizer.hash == byte_tok.hash
    assert loaded.info["step"] == result.best_step
    assert loaded.info["tokens"] == 128 * result.best_step
    assert loaded.info["val_loss"] == pytest.approx(result.val_loss)
    assert loaded.info["trained_length"] == 32
    assert load_model_folder(tmp_path / "checkpoints" / "step-000009").info["val_loss"] is None


def test_the_best_model_stays_when_later_ones_are_worse(train, tmp_path):
    """A learning rate that explodes after the first validation."""
    result = train(tmp_path, steps=10, lr=0.5, warmup_steps=10, grad_clip=None, dropout=0.0, val_every=1)
    losses = {int(row["step"]): float(row["val/loss"]) for row in metrics(tmp_path)}
    assert result.best_step == min(losses, key=losses.__getitem__) != 10
    assert result.val_loss == pytest.approx(losses[result.best_step], rel=1e-6)
    assert result.last_val_loss == pytest.approx(losses[10], rel=1e-6)
    assert json.loads((tmp_path / "model" / "llmtrain.json").read_text())["step"] == result.best_step


def test_without_validation_the_last_model_is_the_runs_model(train, tmp_path):
    result = train(tmp_path, steps=4, validates=False, checkpoint_every=None)
    assert result.val_loss is None
    assert result.best_step == 4
    assert load_model_folder(tmp_path).info["step"] == 4
    assert not (tmp_path / "checkpoints").exists()


def test_logging_less_often_changes_no_step(train, tmp_path):
    every = train(tmp_path / "every", log_every=1)
    rarely = train(tmp_path / "rarely", log_every=5)
    assert every.val_loss == rarely.val_loss
    assert [int(row["step"]) for row in metrics(tmp_path / "rarely")] == [1, 5, 10, 12]
    assert metrics(tmp_path / "rarely")[1] == metrics(tmp_path / "every")[4]


def test_validation_loss_is_the_mean_over_all_targets(train, tmp_path, byte_tok):
    """Also in a last window that is half padding; and bits per byte follow from it."""
    from llmtrain.evaluation import nats_and_tokens
    from tests.training.conftest import RandomTokens

    result = train(tmp_path, val_tokens=333, steps=3, val_every=None)
    from llmtrain.data.windows import ValidationWindows

    model = load_model_folder(tmp_path).model
    windows = ValidationWindows(RandomTokens(333, 2), eos_id=byte_tok.eos_id, sequence_length=32, batch_size=4)
    nats, tokens = nats_and_tokens(model, windows)
    assert tokens == 333
    assert result.val_loss == pytest.approx(nats / tokens, rel=1e-6)
    assert result.val_bpb == pytest.approx(result.val_loss / 0.6931471805599453)


def test_samples_are_written_by_the_shared_engine(train, tmp_path):
    from llmtrain.generation import SamplingParams

    train(
        tmp_path, steps=4, sample_every=2, sample_prompts=["ab", "c"], sampling=SamplingParams(max_new_tokens=5, seed=1)
    )
    text = (tmp_path / "samples.md").read_text(encoding="utf-8")
    assert "## step 2" in text
    assert "**ab**" in text
    assert "## step 4" not in text  # the command prints those of the finished model


def test_sampling_changes_no_step(train, tmp_path):
    from llmtrain.generation import SamplingParams

    plain = train(tmp_path / "plain", steps=6)
    sampled = train(
        tmp_path / "sampled", steps=6, sample_every=2, sample_prompts=["ab"], sampling=SamplingParams(max_new_tokens=3)
    )
    assert plain.val_loss == sampled.val_loss


def test_gradient_checkpointing_gives_the_same_losses(train, tmp_path):
    plain = train(tmp_path / "plain", steps=4, dropout=0.1)
    recomputed = train(tmp_path / "recomputed", steps=4, dropout=0.1, gradient_checkpointing=True)
    assert recomputed.val_loss == pytest.approx(plain.val_loss, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"log_every": 0}, "trainer.log_every=0 must be a whole number of at least 1"),
        ({"val_every": -1}, "trainer.val_every=-1 must be a whole number of at least 1, or null"),
        ({"keep_last": 0}, "trainer.keep_last=0"),
        ({"precision": "fp8"}, "trainer.precision='fp8'"),
        ({"accelerator": "tpu"}, "trainer.accelerator='tpu'"),
        ({"devices": 0}, "trainer.devices=0"),
        ({"strategy": "ddp"}, "strategy=ddp"),
        ({"devices": 2}, "strategy=single runs one process"),
        ({"optimizer": "sgd"}, "optim.name=sgd"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence(train, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        train(tmp_path, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_gpu_that_is_not_there_is_refused(train, tmp_path):
    with pytest.raises(ValueError, match="sees no CUDA device"):
        train(tmp_path, accelerator="gpu")


def test_compiling_without_a_compiler_is_refused(train, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ValueError, match=r"trainer\.compile=true needs a C\+\+ compiler"):
        train(tmp_path, compile_model=True)


def test_the_timetable():
    control = RunControl(
        total_steps=12, accumulation=2, log_every=5, val_every=5, validates=True, checkpoint_every=3, sample_every=4,
        progress=None,
    )  # fmt: skip
    steps = range(1, 13)
    assert [step for step in steps if control.logs_at(step)] == [1, 5, 10, 12]
    assert [step for step in steps if control.validates_at(step)] == [5, 10, 12]
    assert [step for step in steps if control.saves_at(step)] == [3, 6, 9, 12]
    assert [step for step in steps if control.samples_at(step)] == [4, 8]
    assert [index for index in range(4) if control.ends_step(index)] == [1, 3]
    control.stop_signal = "SIGTERM"
    assert control.saves_at(7)
    assert not control.validates_at(10)
