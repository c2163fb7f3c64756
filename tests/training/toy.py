"""A run at toy size: model T on random tokens, through the same `fit` as `make pretrain`; an adapter if wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

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


def toy_model(*, dropout: float = 0.0) -> Any:
    from llmtrain.model import ModelConfig, build_model

    config = ModelConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        dropout=dropout,
    )
    return build_model(config, seed=0)


def toy_fit(
    run_dir: Path,
    *,
    steps: int = 12,
    rows: int = 2,
    accumulation: int = 2,
    dropout: float = 0.1,
    train_tokens: int = 5000,
    val_tokens: int = 700,
    weights: tuple[float, ...] = (1.0,),
    lora: bool = False,
    **options: Any,
) -> FitResult:
    """One run; further arguments are those of `fit`.

    Args:
        run_dir: the run folder; made if it is not there.
        steps: of the whole run.
        rows: of a micro-batch.
        accumulation: micro-batches per step and process.
        dropout: of the model, or of the adapter.
        train_tokens: of each source; an epoch has `train_tokens // 32` windows.
        val_tokens: of the held-out text.
        weights: one source for each.
        lora: train an adapter with rows of three tokens, and leave it in `adapter/`.
        **options: of `fit`.
    """
    from llmtrain.data.modules import PretrainDataModule
    from llmtrain.tokenizer import byte_tokenizer
    from llmtrain.training.fit import fit

    run_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    data = PretrainDataModule(
        [(RandomTokens(train_tokens, 1 + 2 * number), weight) for number, weight in enumerate(weights)],
        RandomTokens(val_tokens, 2),
        eos_id=tokenizer.eos_id,
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
    model = toy_model(dropout=0.0 if lora else dropout)
    if lora:
        settings |= with_adapter(model, dropout=dropout)
    return fit(
        model=model,
        data=data,
        tokenizer=tokenizer,
        run_dir=run_dir,
        total_steps=steps,
        accumulation=accumulation,
        **(settings | options),
    )


def with_adapter(model: Any, *, dropout: float) -> dict[str, Any]:
    """Attaches an adapter; returns the arguments of `fit` that write it."""
    from llmtrain import adapters
    from llmtrain.checkpoint import save_adapter_folder

    adapted = adapters.attach(model, r=4, lora_dropout=dropout, train_tokens=[7, 8, 9], seed=0)

    def write(folder: Path, weights: Mapping[str, Any], counters: Mapping[str, Any]) -> None:
        save_adapter_folder(folder, adapted, info={"base_state_hash": "toy", **counters}, state_dict=weights)

    return {"write_model": write, "model_name": "adapter"}
