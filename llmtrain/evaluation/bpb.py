"""Bits per byte: how well a model predicts a text, comparable across tokenizers.

All targets of the stream count once, the end-of-text tokens included: nats / ln 2 / UTF-8 bytes of the cleaned text.
Knows token shards and anything that has `hidden_states` and `logits`; does not know Lightning, devices to choose, or
where the shards came from.

Shapes: B windows, T tokens per window, C hidden, V vocabulary, M scored tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol, TypedDict

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from llmtrain.data.shards import ShardSet
from llmtrain.data.windows import IGNORED, ValidationWindows

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
    """`loss` in nats per token, `bpb` in bits per byte, and what they were taken over."""

    loss: float
    bpb: float
    tokens: int
    bytes: int


def bits_per_byte(
    model: LanguageModel, shards: ShardSet, *, sequence_length: int, eos_id: int, batch_size: int = 16
) -> BitsPerByte:
    """Score every token of a shard folder once, in windows without overlap.

    Args:
        model: Any language model; its dtype and device are used as they are, the loss is taken in fp32.
        shards: The text; that it belongs to the model's tokenizer is the caller's to check.
        sequence_length: T, the length the model was trained on; the first token of each window is predicted from one
            token alone, so another length gives another figure.
        eos_id: The end-of-text token, which stands before the first token of the stream.
        batch_size: Windows at a time.

    Raises:
        ValueError: The shards are empty, or a size is out of range.
    """
    if shards.utf8_bytes < 1:
        raise ValueError(f"{shards.folder} holds no text, so there is nothing to measure: give it a document")
    windows = ValidationWindows(shards, eos_id=eos_id, sequence_length=sequence_length, batch_size=batch_size)
    nats, tokens = nats_and_tokens(model, windows)
    size = shards.utf8_bytes
    return {"loss": nats / tokens, "bpb": nats / math.log(2) / size, "tokens": tokens, "bytes": size}


@torch.inference_mode()
def nats_and_tokens(model: LanguageModel, batches: Iterable[tuple[NDArray, NDArray]]) -> tuple[float, int]:
    """Summed loss in nats and number of targets; of one rank's batches, for its caller to add up over ranks.

    Args:
        model: Any language model; if it is in training mode, dropout is off meanwhile.
        batches: (input_ids, labels), each (B, T) int64, labels shifted and −100 where nothing is scored.
    """
    device = next(iter(model.parameters())).device
    training = model.training
    model.train(False)
    total = torch.zeros((), dtype=torch.float64, device=device)
    tokens = 0
    try:
        for inputs, labels in batches:
            used = (labels != IGNORED).any(axis=1)  # rows that only fill a rank's last batch cost nothing
            if not used.any():
                continue
            targets = torch.from_numpy(labels[used]).to(device)  # (B, T)
            hidden = model.hidden_states(torch.from_numpy(inputs[used]).to(device))  # (B, T, C)
            tokens += int((labels != IGNORED).sum())
            total += _nats(model, hidden.flatten(0, 1), targets.flatten())
    finally:
        model.train(training)
    return float(total), tokens


def _nats(model: LanguageModel, hidden: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy of hidden states (M, C) and targets (M,), a stretch of tokens at a time."""
    size = _tokens_at_once(model, hidden)
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for part, wanted in zip(hidden.split(size), targets.split(size), strict=True):
        total += F.cross_entropy(model.logits(part).float(), wanted, ignore_index=IGNORED, reduction="sum")
    return total


def _tokens_at_once(model: LanguageModel, hidden: Tensor) -> int:
    vocab_size = model.logits(hidden[:1]).shape[-1]
    return max(1, LOGITS_BYTES // (4 * vocab_size))
