"""Bits per byte: how well a model predicts a text, comparable across tokenizers.

All targets of the stream count once, the end-of-text tokens included: nats / ln 2 / UTF-8 bytes of the cleaned text.
Several processes take whole batches in turn, so that every window is scored as one process alone would score it. Knows
token shards and anything that has `hidden_states` and `logits`; does not know Lightning, devices to choose, or where
the shards came from.

Shapes: B windows, T tokens per window, C hidden, V vocabulary, M scored tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from llmtrain.data.shards import ShardSet
from llmtrain.data.windows import IGNORED, ValidationWindows
from llmtrain.evaluation.intervals import Interval, score_interval
from llmtrain.evaluation.team import ALONE, Team

CHANCE = 8.0
"""Bits per byte of taking all 256 bytes for equally likely."""

LOGITS_BYTES = 256 << 20
"""Logits are worked out for so many bytes (fp32) at a time; nothing needs them twice."""


class LanguageModel(Protocol):
    """What is asked of a model here; `llmtrain.model.Transformer` has it."""

    training: bool

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        """(B, T) ids → (B, T, C)."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., C) → (..., V)."""
        ...

    def parameters(self) -> Iterable[Tensor]: ...

    def train(self, mode: bool = True) -> object: ...


class BitsPerByte(TypedDict):
    """`loss` in nats per token, `bpb` in bits per byte with its 95 % bootstrap interval over the windows, and what they
    were taken over."""

    loss: float
    bpb: float
    interval: Interval
    tokens: int
    bytes: int


def bits_per_byte(
    model: LanguageModel,
    shards: ShardSet,
    *,
    sequence_length: int,
    eos_id: int,
    batch_size: int = 16,
    token_bytes: Sequence[int] | None = None,
    team: Team = ALONE,
) -> BitsPerByte:
    """Score every token of a shard folder once, in windows without overlap.

    Args:
        model: Any language model; its dtype and device are used as they are, the loss is taken in fp32.
        shards: The text; that it belongs to the model's tokenizer is the caller's to check.
        sequence_length: T, the length the model was trained on; the first token of each window is predicted from one
            token alone, so another length gives another figure.
        eos_id: The end-of-text token, which stands before the first token of the stream.
        batch_size: Windows at a time.
        token_bytes: (V,) how many bytes of text each id stands for, for the interval: windows hold different numbers of
            bytes. None takes all tokens for equally long there.
        team: The processes that share the batches; every one gets the whole result.

    Raises:
        ValueError: The shards are empty, or a size is out of range.
    """
    if shards.utf8_bytes < 1:
        raise ValueError(f"{shards.folder} holds no text, so there is nothing to measure: give it a document")
    windows = ValidationWindows(
        shards,
        eos_id=eos_id,
        sequence_length=sequence_length,
        batch_size=batch_size,
        world_size=team.size,
        rank=team.rank,
    )
    lengths = None if token_bytes is None else np.asarray(token_bytes, dtype=np.float64)
    found = np.concatenate(team.merge(list(_window_figures(model, windows, lengths))))  # (B, 3), in the stream's order
    nats, tokens = float(found[:, 0].sum()), int(found[:, 1].sum())
    size = shards.utf8_bytes
    low, high = score_interval(found[:, [0, 2]].tolist())
    bits = float(found[:, 2].sum()) / math.log(2) / size  # of a ratio of the windows' own bytes
    return {
        "loss": nats / tokens,
        "bpb": nats / math.log(2) / size,
        "interval": (low * bits, high * bits),
        "tokens": tokens,
        "bytes": size,
    }


def nats_and_tokens(model: LanguageModel, batches: Iterable[tuple[NDArray, NDArray]]) -> tuple[float, int]:
    """Summed loss in nats and number of targets; of one rank's batches, for its caller to add up over ranks.

    Args:
        model: Any language model; if it is in training mode, dropout is off meanwhile.
        batches: (input_ids, labels), each (B, T) int64, labels shifted and −100 where nothing is scored.
    """
    found = np.concatenate([np.zeros((0, 3)), *_window_figures(model, batches, None)])
    return float(found[:, 0].sum()), int(found[:, 1].sum())


@torch.inference_mode()
def _window_figures(
    model: LanguageModel, batches: Iterable[tuple[NDArray, NDArray]], lengths: NDArray[np.float64] | None
) -> Iterator[NDArray[np.float64]]:
    """Per batch (B, 3): nats, targets and bytes of each window; rows that only fill a last batch are left out."""
    device = next(iter(model.parameters())).device
    training = model.training
    model.train(False)
    try:
        for inputs, labels in batches:
            scored = labels != IGNORED
            used = scored.any(axis=1)
            counts = scored[used].sum(axis=1)
            figures = np.stack([np.zeros(len(counts)), counts, counts], axis=1)
            if len(counts):
                targets = torch.from_numpy(labels[used]).to(device)  # (B, T)
                hidden = model.hidden_states(torch.from_numpy(inputs[used]).to(device))  # (B, T, C)
                nats = _nats(model, hidden.flatten(0, 1), targets.flatten()).view(targets.shape)
                figures[:, 0] = nats.double().sum(dim=1).cpu().numpy()
            if lengths is not None:
                figures[:, 2] = np.where(scored[used], lengths[labels[used]], 0).sum(axis=1)
            yield figures
    finally:
        model.train(training)


def _nats(model: LanguageModel, hidden: Tensor, targets: Tensor) -> Tensor:
    """(M,) cross-entropy of hidden states (M, C) and targets (M,), worked out a stretch of tokens at a time."""
    size = _tokens_at_once(model, hidden)
    parts = zip(hidden.split(size), targets.split(size), strict=True)
    return torch.cat(
        [
            F.cross_entropy(model.logits(part).float(), wanted, ignore_index=IGNORED, reduction="none")
            for part, wanted in parts
        ]
    )


def _tokens_at_once(model: LanguageModel, hidden: Tensor) -> int:
    vocab_size = model.logits(hidden[:1]).shape[-1]
    return max(1, LOGITS_BYTES // (4 * vocab_size))
