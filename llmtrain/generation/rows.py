"""Who sits in which row of the key/value cache, and what must move when somebody leaves.

From the first row: [0, decoding) generate together in each step; [decoding, in use) still read their prompts; the rest
is free. Both blocks stay contiguous, because the model takes a block of rows: a gap is filled by the last of its block.
Knows nothing of logits, sampling or text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from llmtrain.generation.request import Request
from llmtrain.model import KVCache, ModelConfig, kv_cache_bytes_per_token
from llmtrain.model.memory import available_memory

logger = logging.getLogger(__name__)

CACHE_SHARE = 0.25
"""Without a stated length per row, the cache takes at most this share of the free memory."""

FREE_PADDING = 128
"""So many tokens of padding always cost less than another pass through the model."""


class Rows:
    """The rows of one cache and the requests in them.

    Args:
        cache: The cache whose rows are given out.
        vocab_size: V, for the record of tokens seen that repetition penalties need.
    """

    def __init__(self, cache: KVCache, vocab_size: int):
        self.cache = cache
        self.requests: list[Request] = []
        self.decoding = 0
        self._vocab_size = vocab_size
        self._seen: Tensor | None = None  # (rows, V) bool, made by the first request with a penalty

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def free(self) -> int:
        """Rows that nobody sits in."""
        return self.cache.batch_size - len(self.requests)

    @property
    def reading(self) -> bool:
        """Whether any request still reads its prompt."""
        return self.decoding < len(self.requests)

    def admit(self, requests: Iterable[Request]) -> None:
        """Seat requests behind those in use; neighbours of like length will share a forward pass."""
        self.requests += sorted(requests, key=lambda request: len(request.input_ids))

    def reading_group(self, tokens: int) -> tuple[int, int]:
        """How many reading rows to take together, and how many tokens of each at most.

        Args:
            tokens: The most tokens, padding included, of one forward pass.
        """
        first, *others = self.requests[self.decoding :]
        count, width = 1, len(first.input_ids) - first.fed
        if first.fed or width > tokens:  # a long prompt is read alone, piece by piece
            return 1, min(width, tokens)
        real = width
        for request in others:
            length = len(request.input_ids)
            wider, real = max(width, length), real + length
            padding = wider * (count + 1) - real
            if request.fed or wider * (count + 1) > tokens or padding > max(FREE_PADDING, real // 4):
                break
            count, width = count + 1, wider
        return count, width

    def release(self, row: int, *, wipe: bool = False) -> None:
        """Free a row and close the gap.

        Args:
            row: The row of a request that has ended.
            wipe: Overwrite its keys and values. A masked key has weight 0, but 0 · NaN is NaN: what a failed request
                leaves behind would reach the row's next tenant.
        """
        if wipe:
            for layer in (*self.cache.keys, *self.cache.values):
                layer[row].zero_()
        if row < self.decoding:
            self.decoding -= 1
            self._move(self.decoding, row)
            row = self.decoding
        self._move(len(self.requests) - 1, row)
        self.requests.pop()
        self.cache.reset(len(self.requests))

    def _move(self, source: int, target: int) -> None:
        if source == target:
            return
        self.cache.move_row(source, target)
        self.requests[target] = self.requests[source]
        if self._seen is not None:
            self._seen[target] = self._seen[source]

    def seen(self, rows: list[int]) -> Tensor:
        """The tokens that occurred in these rows, (N, V) bool."""
        return self._record()[rows]

    def note_prompt(self, row: int) -> None:
        """Start a row's record of seen tokens with its prompt."""
        record = self._record()
        record[row] = False
        record[row, self.requests[row].input_ids] = True

    def note_tokens(self, rows: list[int], token_ids: Tensor) -> None:
        """Add one token (N,) to the record of each row."""
        self._record()[rows, token_ids] = True

    def _record(self) -> Tensor:
        if self._seen is None:
            shape = (self.cache.batch_size, self._vocab_size)
            self._seen = torch.zeros(shape, dtype=torch.bool, device=self.cache.keys[0].device)
        return self._seen


def fitting_length(config: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device) -> int:
    """The model's context, or as much of it per row as `CACHE_SHARE` of the free memory holds (then it warns)."""
    context, free = config.max_position_embeddings, available_memory(device)
    if free is None:
        return context
    fits = int(free * CACHE_SHARE) // (rows * kv_cache_bytes_per_token(config, "float32") // 4 * dtype.itemsize)
    if fits >= context:
        return context
    length = max(1, fits)
    logger.warning(
        "the context is limited to %d of the model's %d tokens so that %d rows of cache fit the memory: "
        "set max_length, or fewer rows, to choose otherwise",
        length,
        context,
        rows,
    )
    return length
