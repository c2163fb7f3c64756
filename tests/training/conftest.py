"""A run at toy size: model T on random tokens, through the same `fit` as `make pretrain`."""

from __future__ import annotations

import csv
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from llmtrain.training.fit import FitResult

SEQUENCE_LENGTH = 32


@dataclass(frozen=True)
class RandomTokens:
    """A token stream of 16 different ids, so that a few steps learn something."""

    num_tokens: int
    seed: int

    def read(self, start: int, count: int) -> np.ndarray:
        tokens = np.random.default_rng(self.seed).integers(6, 22, self.num_tokens)
        return tokens[start : start + count].astype(np.int64)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of tiny files would be forced to the disk; surviving a power cut is another test's business."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def train(tiny_config: Callable[..., Any], byte_tok: Any) -> Callable[..., FitResult]:
    """`train(run_dir, steps=12, …)`: one run; further arguments are those of `fit`."""

    def run(
        run_dir: Path,
        *,
        steps: int = 12,
        rows: int = 2,
        accumulation: int = 2,
        dropout: float = 0.1,
        val_tokens: int = 700,
        seen: list[list[int]] | None = None,
        **options: Any,
    ) -> FitResult:
        from llmtrain.data.modules import PretrainDataModule
        from llmtrain.model import build_model
        from llmtrain.training.fit import fit

        run_dir.mkdir(parents=True, exist_ok=True)
        data = PretrainDataModule(
            [(RandomTokens(5000, 1), 1.0)],
            RandomTokens(val_tokens, 2),
            eos_id=byte_tok.eos_id,
            sequence_length=SEQUENCE_LENGTH,
            micro_batch_size=rows,
            accumulation=accumulation,
            total_steps=steps,
            seed=0,
        )
        settings: dict[str, Any] = {
            "strategy": "single",
            "accelerator": "cpu",
            "devices": 1,
            "precision": "fp32",
            "warmup_steps": 2,
            "log_every": 1,
            "val_every": 5,
            "checkpoint_every": 3,
            "tokens_per_byte": 1.0,
        }
        return fit(
            model=build_model(tiny_config(dropout=dropout), seed=0),
            data=data,
            tokenizer=byte_tok,
            run_dir=run_dir,
            total_steps=steps,
            accumulation=accumulation,
            **(settings | options),
        )

    return run


@pytest.fixture
def micro_batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, list[int]]]:
    """Grows by (step, micro-batch, sample ids) with every training step taken."""
    from llmtrain.training.module import LanguageModule

    seen: list[tuple[int, int, list[int]]] = []
    original = LanguageModule.training_step

    def training_step(self: Any, batch: dict, batch_idx: int) -> Any:
        micro_batch = batch_idx % self.trainer.accumulate_grad_batches
        seen.append((self.trainer.global_step, micro_batch, batch["sample_ids"].tolist()))
        return original(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModule, "training_step", training_step)
    return seen


@pytest.fixture
def signal_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`signal_at(6)`: SIGTERM in the first micro-batch of step 6 (counted from 0); `signal_at(None)`: no more."""
    from llmtrain.training.module import LanguageModule

    original = LanguageModule.on_train_batch_start
    wanted: list[int | None] = [None]

    def on_train_batch_start(self: Any, batch: dict, batch_idx: int) -> None:
        original(self, batch, batch_idx)
        if self.trainer.global_step == wanted[0] and batch_idx % self.trainer.accumulate_grad_batches == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(LanguageModule, "on_train_batch_start", on_train_batch_start)
    return lambda step: wanted.__setitem__(0, step)


def metrics(run_dir: Path) -> list[dict[str, str]]:
    """The rows of `metrics.csv` without the columns that depend on the clock."""
    with (run_dir / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    clocked = ("seconds", "train/tokens_per_second", "train/mfu")
    return [{name: value for name, value in row.items() if name not in clocked} for row in rows]
