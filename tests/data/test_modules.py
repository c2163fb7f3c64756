"""The data modules: what each rank gets in each step, exact on resume, the same samples for any split of the batch."""

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from llmtrain.data.examples import Example
from llmtrain.data.modules import FinetuneDataModule, PretrainDataModule
from llmtrain.data.windows import IGNORED

EOS, PAD = 0, 1


@dataclass
class Stream:
    """A stream whose tokens are 1, 2, 3, …, so that a token says where it stands."""

    num_tokens: int

    def read(self, start: int, count: int) -> np.ndarray:
        assert 0 <= start <= start + count <= self.num_tokens
        return np.arange(start + 1, start + count + 1, dtype=np.int64)


def pretrain(*, world_size: int = 1, rank: int = 0, **changes: Any) -> PretrainDataModule:
    settings: dict[str, Any] = {
        "train": [(Stream(1000), 1.0)],
        "val": Stream(95),
        "eos_id": EOS,
        "sequence_length": 10,
        "micro_batch_size": 4,
        "accumulation": 2,
        "total_steps": 30,
        "seed": 1,
    }
    module = PretrainDataModule(**{**settings, **changes})
    module.trainer = SimpleNamespace(world_size=world_size, global_rank=rank)
    return module


def example(number: int, *, trained: int = 1, length: int = 5) -> Example:
    """An example whose inputs are all its own number, with so many trained positions at its end."""
    labels = [IGNORED] * (length - trained) + [number] * trained
    return Example([number] * length, labels, prompt="", completion="", prompt_ids=[])


def finetune(examples: list[Example], *, world_size: int = 1, rank: int = 0, **changes: Any) -> FinetuneDataModule:
    settings: dict[str, Any] = {
        "val": [],
        "pad_id": PAD,
        "micro_batch_size": 4,
        "accumulation": 2,
        "total_steps": 30,
        "seed": 1,
    }
    module = FinetuneDataModule(examples, **{**settings, **changes})
    module.trainer = SimpleNamespace(world_size=world_size, global_rank=rank)
    return module


def sample_ids(module: PretrainDataModule | FinetuneDataModule) -> list[list[int]]:
    return [batch["sample_ids"].tolist() for batch in module.train_dataloader()]


# --- both modules


def test_resuming_near_the_end_of_an_epoch_leaves_the_next_epoch_whole() -> None:
    """100 numbered samples, stopped at 90, resumed: epoch 2 sees each of them once."""
    module = finetune([example(n) for n in range(100)], micro_batch_size=5, accumulation=2, total_steps=20)
    first = sample_ids(module)[:18]
    module.start_step = 9
    rest = sample_ids(module)
    seen = [number for micro_batch in first + rest for number in micro_batch]
    assert sorted(seen[:100]) == sorted(seen[100:]) == list(range(100))
    assert seen[:100] != seen[100:]


@pytest.mark.parametrize("build", [pretrain, lambda: finetune([example(n) for n in range(33)])])
def test_a_second_resume_goes_on_where_the_first_one_stopped(build: Any) -> None:
    """30 steps at once are 10 + 10 + 10."""
    straight = sample_ids(build())
    joined: list[list[int]] = []
    for start in (0, 10, 20):
        module = build()
        module.start_step = start
        joined += sample_ids(module)[: 10 * 2]
    assert joined == straight
    assert len(straight) == 30 * 2


@pytest.mark.parametrize("build", [pretrain, lambda **kw: finetune([example(n) for n in range(33)], **kw)])
def test_a_step_has_the_same_samples_and_tokens_however_it_is_split(build: Any) -> None:
    steps = []
    for micro_batch_size, accumulation, world_size in [(8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 2, 4)]:
        ranks = [
            list(
                build(
                    micro_batch_size=micro_batch_size, accumulation=accumulation, world_size=world_size, rank=rank
                ).train_dataloader()
            )
            for rank in range(world_size)
        ]
        by_step: list[tuple[list[int], set[int]]] = []
        for step in range(30):
            batches = [b for rank in ranks for b in rank[step * accumulation : (step + 1) * accumulation]]
            ids = sorted(int(number) for batch in batches for number in batch["sample_ids"])
            by_step.append((ids, {int(batch["step_tokens"]) for batch in batches}))
            assert {int((b["labels"] != IGNORED).sum()) for b in batches} != {0}
            assert sum(int((b["labels"] != IGNORED).sum()) for b in batches) == int(batches[0]["step_tokens"])
        steps.append(by_step)
    assert all(split == steps[0] for split in steps)


def test_lengths_are_those_of_the_whole_run() -> None:
    module = pretrain()
    module.start_step = 29
    loader = module.train_dataloader()
    assert len(loader) == 60
    assert len(list(loader)) == 2
    module.start_step = 31
    with pytest.raises(ValueError, match="start_step must be between 0 and the run's 30 steps, got 31"):
        module.train_dataloader()


@pytest.mark.parametrize("name", ["micro_batch_size", "accumulation", "total_steps"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        pretrain(**{name: 0})


# --- pretraining


def test_labels_are_the_next_tokens_and_ids_say_where_a_window_starts() -> None:
    module = pretrain(train=[(Stream(1000), 3.0), (Stream(500), 1.0)])
    for batch in module.train_dataloader():
        assert {name: tuple(value.shape) for name, value in batch.items()} == {
            "input_ids": (4, 10),
            "labels": (4, 10),
            "step_tokens": (),
            "sample_ids": (4,),
        }
        assert all(value.dtype == torch.int64 for value in batch.values())
        assert int(batch["step_tokens"]) == 80
        assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
        starts = torch.where(batch["sample_ids"] < 1000, batch["sample_ids"], batch["sample_ids"] - 1000)
        assert torch.equal(batch["input_ids"][:, 0], starts + 1)


def test_validation_is_the_same_tokens_on_any_number_of_ranks() -> None:
    for world_size in (1, 2, 5):
        ranks = [list(pretrain(world_size=world_size, rank=rank).val_dataloader()) for rank in range(world_size)]
        assert len({len(batches) for batches in ranks}) == 1
        labels = torch.cat([batch["labels"].flatten() for batches in ranks for batch in batches])
        assert sorted(labels[labels != IGNORED].tolist()) == list(range(1, 96))
    assert pretrain(val=None).val_dataloader() == []


def test_a_micro_batch_costs_less_than_a_millisecond() -> None:
    module = pretrain(train=[(Stream(10**9), 1.0)], sequence_length=128, micro_batch_size=8, total_steps=500)
    durations = []
    loader = iter(module.train_dataloader())
    for _ in range(1000):
        begin = time.perf_counter()
        next(loader)
        durations.append(time.perf_counter() - begin)
    assert np.median(durations) < 1e-3


# --- fine-tuning


def test_step_tokens_count_the_whole_step() -> None:
    """Rows with 3 and with 97 trained labels weigh by their tokens, however they are split."""
    examples = [example(0, trained=3, length=100), example(1, trained=97, length=100)]
    for micro_batch_size, accumulation, world_size in [(2, 1, 1), (1, 2, 1), (1, 1, 2)]:
        for rank in range(world_size):
            module = finetune(
                examples,
                micro_batch_size=micro_batch_size,
                accumulation=accumulation,
                world_size=world_size,
                rank=rank,
                total_steps=3,
            )
            assert {int(batch["step_tokens"]) for batch in module.train_dataloader()} == {100}


def test_examples_are_padded_to_the_longest_of_their_micro_batch() -> None:
    examples = [example(n + 10, length=2 + n % 7) for n in range(21)]
    for batch in finetune(examples).train_dataloader():
        rows = [examples[number] for number in batch["sample_ids"].tolist()]
        assert batch["input_ids"].shape == batch["labels"].shape == (4, max(len(row.input_ids) for row in rows))
        for row, inputs, labels in zip(rows, batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            length = len(row.input_ids)
            assert (inputs[:length], set(inputs[length:]) <= {PAD}) == (row.input_ids, True)
            assert (labels[:length], set(labels[length:]) <= {IGNORED}) == (row.labels, True)


def test_micro_batches_without_a_trained_token_are_ordinary() -> None:
    examples = [example(n, trained=0) for n in range(15)] + [example(15, trained=3)]
    counts = [int(batch["step_tokens"]) for batch in finetune(examples, total_steps=4).train_dataloader()]
    assert sorted(set(counts)) == [1, 3]  # never 0, which would divide nothing by nothing


def test_every_validation_example_is_seen_once_and_ranks_keep_step() -> None:
    examples = [example(n + 10, length=1 + n % 5) for n in range(9)]
    for world_size in (1, 2, 4):
        ranks = [
            list(finetune([example(0)], val=examples, world_size=world_size, rank=rank).val_dataloader())
            for rank in range(world_size)
        ]
        assert len({len(batches) for batches in ranks}) == 1
        batches = [batch for rank in ranks for batch in rank]
        assert all(batch["input_ids"].shape[0] == batch["labels"].shape[0] == 4 for batch in batches)
        labels = torch.cat([batch["labels"].flatten() for batch in batches])
        assert sorted(labels[labels != IGNORED].tolist()) == list(range(10, 19))
    assert finetune([example(0)]).val_dataloader() == []


def test_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(ValueError, match="no example to train on"):
        finetune([])


# --- under Lightning


class Recorder(lightning.LightningModule):
    """The least module that trains; remembers the samples it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []
        self.validated = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch["sample_ids"].tolist())
        return self.weight * batch["labels"].sum()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validated += int((batch["labels"] != IGNORED).sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # lightning 2.6.6 under torch 2.13
@pytest.mark.parametrize("kind", ["pretrain", "finetune"])
def test_lightning_takes_the_run_as_one_epoch(kind: str, tmp_path: Any) -> None:
    examples = [example(n + 2) for n in range(33)]
    module = pretrain(total_steps=6) if kind == "pretrain" else finetune(examples, val=examples, total_steps=6)
    module.trainer = None
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=2,
        val_check_interval=4,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    recorder = Recorder()
    trainer.fit(recorder, datamodule=module)
    assert trainer.global_step == 6
    assert recorder.seen == sample_ids(module)
    assert recorder.validated == 3 * (95 if kind == "pretrain" else 33)
