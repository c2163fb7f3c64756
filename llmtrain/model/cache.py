"""The key/value cache: preallocated, one length per row, passed to `forward` as an argument.

Knows tensors and lengths. Does not know requests, prompts or tokens: who owns which row is the engine's business.

Shapes: B rows, K key/value heads, S capacity in tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmtrain.model.config import ModelConfig


class KVCache:
    """Keys and values of every layer for B independent rows of up to S tokens.

    A row's valid keys are positions 0..length-1. What stands at or beyond the length is garbage by contract (right
    padding, a former tenant) and is never attended to; it is overwritten as the row grows.

    Attributes:
        keys, values: one (B, K, S, D) tensor per layer.
        lengths: valid tokens per row, on the host.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor]) -> None:
        self.keys = keys
        self.values = values
        self.lengths: list[int] = [0] * keys[0].shape[0]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        batch_size: int,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> KVCache:
        """A zeroed cache.

        Raises:
            ValueError: if a size is below 1 or the capacity exceeds the model's context.
        """
        if batch_size < 1 or capacity < 1:
            raise ValueError(f"a cache of {batch_size} rows × {capacity} tokens is empty; both must be at least 1.")
        if capacity > config.max_position_embeddings:
            raise ValueError(
                f"a cache of {capacity} tokens exceeds the model's context of {config.max_position_embeddings} "
                "(max_position_embeddings)."
            )
        shape = (batch_size, config.num_key_value_heads, capacity, config.head_dim)
        layers = range(config.num_hidden_layers)
        return cls(
            [torch.zeros(shape, dtype=dtype, device=device) for _ in layers],
            [torch.zeros(shape, dtype=dtype, device=device) for _ in layers],
        )

    @property
    def batch_size(self) -> int:
        """B, the number of rows."""
        return self.keys[0].shape[0]

    @property
    def capacity(self) -> int:
        """S, tokens per row."""
        return self.keys[0].shape[2]

    @property
    def bytes(self) -> int:
        """Bytes of all keys and values together."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of one row takes over all layers."""
        return self.bytes // (self.batch_size * self.capacity)

    def reset(self, row: int) -> None:
        """Frees a row."""
        self.lengths[row] = 0

    def truncate(self, row: int, length: int) -> None:
        """Forgets a row's tokens from `length` on.

        Raises:
            ValueError: if the row holds fewer tokens.
        """
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"cannot cut row {row} of {self.lengths[row]} tokens to {length}.")
        self.lengths[row] = length

    def copy_row(self, source: int, target: int, length: int | None = None) -> None:
        """Copies a row's first `length` tokens (all by default) over another row, which then holds nothing else.

        Raises:
            ValueError: if the source holds fewer tokens.
        """
        length = self.lengths[source] if length is None else length
        if length > self.lengths[source]:
            raise ValueError(f"cannot copy {length} tokens of row {source}, which holds {self.lengths[source]}.")
        for layer in (*self.keys, *self.values):
            layer[target, :, :length] = layer[source, :, :length]
        self.lengths[target] = length

    def swap_rows(self, one: int, other: int) -> None:
        """Exchanges the valid tokens of two rows."""
        first, second = self.lengths[one], self.lengths[other]
        for layer in (*self.keys, *self.values):
            kept = layer[one, :, :first].clone()
            layer[one, :, :second] = layer[other, :, :second]
            layer[other, :, :first] = kept
        self.lengths[one], self.lengths[other] = second, first


class CacheWrite:
    """One forward call's place in a cache: which rows, which positions, which keys each query may see.

    Built once per call and shared by all layers.

    Attributes:
        positions: (T,) if every row starts at the same position, else (b, T): where the new tokens go.
        mask: None, or a boolean (b or 1, 1, T, S') with True where a query may look.
        causal: the plain causal triangle over the new tokens alone is right (nothing stood in the rows before).
        span: S', the keys that can be seen by anybody.
    """

    def __init__(self, cache: KVCache, rows: tuple[int, int], length: int, new_lengths: Sequence[int] | None) -> None:
        start, stop = rows
        if not 0 <= start < stop <= cache.batch_size:
            raise ValueError(f"rows {start}..{stop} lie outside the cache of {cache.batch_size} rows.")
        self.cache = cache
        self.start, self.stop, self.length = start, stop, length
        before = cache.lengths[start:stop]
        self.new_lengths = [length] * (stop - start) if new_lengths is None else list(new_lengths)
        if len(self.new_lengths) != stop - start or any(not 0 <= n <= length for n in self.new_lengths):
            raise ValueError(f"new_lengths={self.new_lengths} do not fit {stop - start} rows of {length} new tokens.")
        longest = max(before)
        if longest + length > cache.capacity:
            raise ValueError(
                f"{longest} cached + {length} new tokens exceed the cache's capacity of {cache.capacity}; "
                "allocate a larger one or stop earlier."
            )
        device = cache.keys[0].device
        self.span = longest + length
        self.causal = longest == 0
        self.equal = min(before) == longest
        self.offset = before[0]
        steps = torch.arange(length, device=device)
        if self.equal:
            self.positions = steps + self.offset if self.offset else steps
        else:
            self.positions = torch.tensor(before, device=device)[:, None] + steps
            self.rows = torch.arange(stop - start, device=device)[:, None]
        self.mask: Tensor | None = None
        if not self.causal and not (self.equal and length == 1):
            seen = self.positions if self.positions.dim() == 2 else self.positions[None]
            self.mask = (torch.arange(self.span, device=device) <= seen[..., None])[:, None]  # (b|1, 1, T, S')

    def store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes (b, K, T, D) keys and values and returns all that may be seen, (b, K, S', D)."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if self.stop - self.start < keys.shape[0]:
            keys, values = keys[self.start : self.stop], values[self.start : self.stop]
        if self.equal:
            keys.narrow(2, self.offset, self.length).copy_(key)
            values.narrow(2, self.offset, self.length).copy_(value)
        else:
            keys[self.rows, :, self.positions] = key.transpose(1, 2).to(keys.dtype)
            values[self.rows, :, self.positions] = value.transpose(1, 2).to(values.dtype)
        if self.causal:
            return key, value
        return keys.narrow(2, 0, self.span), values.narrow(2, 0, self.span)

    def commit(self) -> None:
        """Counts the new tokens, after all layers have written."""
        for row, new in zip(range(self.start, self.stop), self.new_lengths, strict=True):
            self.cache.lengths[row] += new
