"""Who sits in which row of the key/value cache, and what must move when somebody leaves.

From the first row: [0, decoding) generate together in each step; [decoding, in use) still read their prompts; the rest
is free. Both blocks stay contiguous, because the model takes a block of rows: a gap is filled by the last of its block.
A freed row keeps its keys and values until somebody needs the room, and a prompt that begins like what any row holds is
read from there on only (prefix reuse). Knows nothing of logits, sampling or text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llmtrain.generation.request import Request
from llmtrain.model import KVCache, ModelConfig, ModelDelta, kv_cache_bytes_per_token
from llmtrain.model.memory import available_memory

logger = logging.getLogger(__name__)

CACHE_SHARE = 0.25
"""Without a stated length per row, the cache takes at most this share of the free memory."""

FREE_PADDING = 128
"""So many tokens of padding always cost less than another pass through the model."""

LEAST_SHARED = 32
"""Prompts that begin alike for fewer tokens are each read whole: that costs less than waiting for one another."""


class Kept(NamedTuple):
    """Whose keys and values a row holds although nobody sits there: these ids, read with this adapter."""

    ids: list[int]
    adapter: ModelDelta | None
    since: int  # a count that grows: what was left longest ago is given up first


_NOTHING = Kept([], None, 0)


class Rows:
    """The rows of one cache and the requests in them.

    A request that has been seated but not begun owns no part of the cache: until it is read, its row still holds what
    the one before left there.

    Args:
        cache: The cache whose rows are given out.
        vocab_size: V, for the record of tokens seen that repetition penalties need.
    """

    def __init__(self, cache: KVCache, vocab_size: int):
        self.cache = cache
        self.requests: list[Request] = []
        self.decoding = 0
        self._kept = [_NOTHING] * cache.batch_size
        self._clock = 0
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
        """Which reading rows to take together: how many, and how many tokens of each at most.

        What a row still holds of a prompt's beginning is made use of here: it is copied, and counted as read. A request
        that begins like another of the group is put off until that one has been read.

        Args:
            tokens: The most tokens, padding included, of one forward pass.
        """
        start = self.decoding
        first = self.requests[start]
        begun = first.fed > 0
        if not begun:
            self._begin(start, *self._longest_beginning(first))
        width = len(first.input_ids) - first.fed
        if begun or width > tokens:  # a long prompt is read alone, piece by piece
            return 1, min(width, tokens)
        count, real = 1, width
        for position in range(start + 1, len(self.requests)):
            request = self.requests[position]
            if request.fed:
                break
            source, known = self._longest_beginning(request)
            group = self.requests[start : start + count]
            if any(_shared(request, each.input_ids, each.adapter) - known >= LEAST_SHARED for each in group):
                continue
            length = len(request.input_ids) - known
            wider, real = max(width, length), real + length
            padding = wider * (count + 1) - real
            if wider * (count + 1) > tokens or padding > max(FREE_PADDING, real // 4):
                break
            self._reseat(position, start + count)
            self._begin(start + count, source, known)
            count, width = count + 1, wider
        return count, max(len(each.input_ids) - each.fed for each in self.requests[start : start + count])

    def _begin(self, row: int, source: int, length: int) -> None:
        """Gives a row to the request that sits there, with the `length` tokens of its prompt that `source` holds."""
        request = self.requests[row]
        if len(self._kept[row].ids) - length * (source == row) >= LEAST_SHARED:
            self._rescue(row, spared=source)
        if length and source == row:
            self.cache.truncate(row, length)
        else:
            self.cache.reset(row)
            if length:
                self.cache.copy_row(source, row, length)
        self._kept[row] = _NOTHING
        request.fed = request.reused = length

    def _longest_beginning(self, request: Request) -> tuple[int, int]:
        """The row that holds most of a request's beginning, and how many tokens; (−1, 0) if it is hardly worth it."""
        best, longest = -1, LEAST_SHARED - 1
        for row in range(self.cache.batch_size):
            ids, adapter = self._held(row)
            if len(ids) > longest:
                length = _shared(request, ids, adapter)
                if length > longest:
                    best, longest = row, length
        return (best, longest) if best >= 0 else (-1, 0)

    def _held(self, row: int) -> tuple[list[int], ModelDelta | None]:
        """The ids whose keys and values are in a row, and the adapter that they were read with."""
        if row < len(self.requests) and (row < self.decoding or self.requests[row].fed):
            request = self.requests[row]
            return request.known_ids[: self.cache.lengths[row]], request.adapter
        kept = self._kept[row]
        return kept.ids, kept.adapter

    def _rescue(self, row: int, *, spared: int) -> None:
        """Before a row is overwritten: brings what it holds into the free row that is least likely to be missed."""
        kept = self._kept[row]
        free = [each for each in reversed(range(len(self.requests), self.cache.batch_size)) if each != spared]
        oldest = min(free, key=lambda each: self._kept[each].since, default=row)
        if self._kept[oldest].since < kept.since:
            self.cache.copy_row(row, oldest)
            self._kept[oldest] = kept

    def release(self, row: int, *, wipe: bool = False) -> None:
        """Free a row and close the gap; what it holds stays for those whose prompt begins alike.

        Args:
            row: The row of a request that has ended.
            wipe: Overwrite its keys and values. A masked key has weight 0, but 0 · NaN is NaN: what a failed request
                leaves behind would reach the row's next tenant.
        """
        ids, adapter = self._held(row)
        self._clock += 1
        if wipe:
            for layer in (*self.cache.keys, *self.cache.values):
                layer[row].zero_()
            self.cache.reset(row)
            ids = []
        self._kept[row] = Kept(ids, adapter, self._clock)
        if row < self.decoding:
            self.decoding -= 1
            self._exchange(row, self.decoding)
            row = self.decoding
        last = len(self.requests) - 1
        if self.requests[last].fed:
            self._exchange(row, last)
        else:
            self._reseat(row, last)
        self.requests.pop()

    def _exchange(self, one: int, other: int) -> None:
        """Two requests change places, with all that their rows hold."""
        if one == other:
            return
        self.cache.swap_rows(one, other)
        self._kept[one], self._kept[other] = self._kept[other], self._kept[one]
        self._reseat(one, other)
        if self._seen is not None:
            self._seen[[one, other]] = self._seen[[other, one]]

    def _reseat(self, one: int, other: int) -> None:
        """Two requests change places; what the rows hold stays. At least one of them has not begun."""
        self.requests[one], self.requests[other] = self.requests[other], self.requests[one]

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


def _shared(request: Request, ids: Sequence[int], adapter: ModelDelta | None) -> int:
    """How many of a request's first tokens these are, at most as many as need not be read for what they predict."""
    if adapter is not request.adapter:
        return 0
    mine, limit = request.input_ids, min(len(ids), request.reusable)
    if mine[:limit] == ids[:limit]:
        return limit
    low, high = 0, limit  # equal up to low, not up to high: slices compare at the speed of C
    while high - low > 1:
        middle = (low + high) // 2
        if mine[low:middle] == ids[low:middle]:
            low = middle
        else:
            high = middle
    return low


def fitting_length(
    config: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device, cache_bytes: int | None = None
) -> int:
    """The model's context, or as much of it per row as fits (then it warns).

    Args:
        config: The model's shape.
        rows: How many rows share the cache.
        dtype: Of keys and values.
        device: Where they lie.
        cache_bytes: What the cache may take in all; None is `CACHE_SHARE` of the free memory.
    """
    context, free = config.max_position_embeddings, available_memory(device)
    if cache_bytes is None:
        if free is None:
            return context
        cache_bytes = int(free * CACHE_SHARE)
    fits = cache_bytes // (rows * kv_cache_bytes_per_token(config, "float32") // 4 * dtype.itemsize)
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
