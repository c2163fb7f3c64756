"""The longest micro-batch before the first step, and what is said when memory does not suffice."""

from __future__ import annotations

import pytest
import torch

from llmtrain.data.examples import Example
from llmtrain.data.modules import FinetuneDataModule
from llmtrain.model import build_model
from llmtrain.training.fit import fit
from llmtrain.training.module import LanguageModule
from llmtrain.training.rehearsal import Rehearsal
from tests.training.conftest import metrics


def example(length: int) -> Example:
    ids = [6 + (7 * i + length) % 250 for i in range(length)]
    return Example(input_ids=ids, labels=ids, prompt="", completion="", prompt_ids=[])


@pytest.fixture
def tune(tiny_config, byte_tok):
    """`tune(run_dir, lengths)`: two steps of four examples with dropout."""

    def run(run_dir, lengths, *, packing_length=None, **options):
        run_dir.mkdir()
        data = FinetuneDataModule(
            [example(length) for length in lengths], [], pad_id=byte_tok.pad_id, micro_batch_size=2, accumulation=2,
            total_steps=2, seed=0, packing_length=packing_length,
        )  # fmt: skip
        return fit(
            model=build_model(tiny_config(dropout=0.1), seed=0), data=data, tokenizer=byte_tok, run_dir=run_dir,
            total_steps=2, accumulation=2, strategy="single", accelerator="cpu", devices=1, precision="fp32",
            validates=False, log_every=1, **options,
        )  # fmt: skip

    return run


@pytest.fixture
def shapes(monkeypatch):
    """(step, shape, whether it is a micro-batch of a step) of every forward pass in training."""
    original = LanguageModule.batch_loss
    seen = []

    def batch_loss(module, batch):
        seen.append((module.trainer.global_step, tuple(batch["input_ids"].shape), "step_tokens" in batch))
        return original(module, batch)

    monkeypatch.setattr(LanguageModule, "batch_loss", batch_loss)
    return seen


LENGTHS = [*range(5, 30), 200]


def test_the_longest_examples_come_first_and_change_nothing(tune, shapes, tmp_path, monkeypatch):
    tune(tmp_path / "rehearsed", LENGTHS)
    assert shapes[0] == (0, (2, 200), False)
    assert all(taken and shape[1] <= 200 for _, shape, taken in shapes[1:])
    monkeypatch.setattr(FinetuneDataModule, "largest_batch", lambda data: None)
    tune(tmp_path / "without", LENGTHS)
    assert metrics(tmp_path / "rehearsed") == metrics(tmp_path / "without")


def test_it_leaves_neither_gradients_nor_another_random_state(tune, tmp_path, monkeypatch):
    """The model has dropout, so the rehearsal does draw random numbers."""
    original = Rehearsal.on_train_start
    found = []

    def on_train_start(callback, trainer, module):
        before = torch.random.get_rng_state()
        original(callback, trainer, module)
        gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        found.append((torch.equal(torch.random.get_rng_state(), before), len(gradients), module.positions_seen))

    monkeypatch.setattr(Rehearsal, "on_train_start", on_train_start)
    tune(tmp_path / "run", LENGTHS)
    assert found == [(True, 0, 0)]


def test_packed_rows_are_rehearsed_as_they_come(tune, shapes, tmp_path):
    tune(tmp_path / "packed", LENGTHS, packing_length=210)
    assert shapes[0] == (0, (2, 200), False)
    assert max(shape[0] * shape[1] for _, shape, _ in shapes[1:]) <= 2 * 200


def test_nothing_is_rehearsed_where_all_batches_are_alike(tune, train, shapes, tmp_path):
    tune(tmp_path / "equal", [20] * 8)
    train(tmp_path / "windows", steps=2)
    assert all(taken for _, _, taken in shapes)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:128] DefaultCPUAllocator: not enough memory"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_longest_batch_that_does_not_fit_is_told_before_the_first_step(tune, tmp_path, monkeypatch, error):
    """Not hours in, when that batch would come."""
    original = LanguageModule.batch_loss
    steps = []

    def batch_loss(module, batch):
        if batch["input_ids"].shape[1] >= 200:
            raise error
        steps.append(batch)
        return original(module, batch)

    monkeypatch.setattr(LanguageModule, "batch_loss", batch_loss)
    with pytest.raises(ValueError, match=r"out of memory with 2 rows.*micro_batch_size.*gradient_checkpointing=true"):
        tune(tmp_path / "run", LENGTHS)
    assert steps == []


def test_other_errors_stay_as_they_are(tune, tmp_path, monkeypatch):
    def batch_loss(module, batch):
        raise RuntimeError("something else")

    monkeypatch.setattr(LanguageModule, "batch_loss", batch_loss)
    with pytest.raises(RuntimeError, match="something else"):
        tune(tmp_path / "run", LENGTHS)
