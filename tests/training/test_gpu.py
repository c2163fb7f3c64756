"""What needs a card: every strategy in both precisions trains as on the CPU, saves and resumes. A minute in all."""

from __future__ import annotations

import pytest

from tests.training.conftest import metrics

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["single", "deepspeed_1", "deepspeed_2", "deepspeed_3"])
def test_training_on_a_gpu_follows_the_cpu(train, tmp_path, strategy, precision):
    train(tmp_path / "cpu", dropout=0.0)
    train(tmp_path / "gpu", dropout=0.0, accelerator="gpu", strategy=strategy, precision=precision)
    tolerance = 1e-3 if precision == "fp32" else 2e-2
    for ours, theirs in zip(metrics(tmp_path / "gpu"), metrics(tmp_path / "cpu"), strict=True):
        assert float(ours["train/loss"]) == pytest.approx(float(theirs["train/loss"]), rel=tolerance)
        assert float(ours["train/grad_norm"]) == pytest.approx(float(theirs["train/grad_norm"]), rel=10 * tolerance)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["single", "deepspeed_1", "deepspeed_2", "deepspeed_3"])
def test_resuming_on_a_gpu(train, signal_at, tmp_path, strategy, precision):
    """With dropout. Equal up to the order of sums, which a card does not fix."""
    options = {"accelerator": "gpu", "strategy": strategy, "precision": precision}
    train(tmp_path / "straight", **options)
    signal_at(6)
    train(tmp_path / "interrupted", **options)
    signal_at(None)
    train(tmp_path / "interrupted", resume="auto", **options)
    ours, theirs = metrics(tmp_path / "interrupted"), metrics(tmp_path / "straight")
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert float(one["train/loss"]) == pytest.approx(float(other["train/loss"]), rel=1e-3)


def test_compiled_training_on_a_gpu(train, tmp_path):
    plain = train(tmp_path / "plain", dropout=0.0, accelerator="gpu", precision="bf16")
    compiled = train(tmp_path / "compiled", dropout=0.0, accelerator="gpu", precision="bf16", compile_model=True)
    assert compiled.val_loss == pytest.approx(plain.val_loss, rel=1e-2)
