"""The order in which samples are visited: a pure function of (seed, epoch, global index).

Nothing here is stored, shuffled in memory or advanced: sample number one trillion is computed as quickly as
sample number one, so resuming at any step, on any number of ranks, is arithmetic. A checkpoint needs the step
and nothing more.

- `EpochOrder` visits the numbers 0..size-1 once each per epoch, in an order of its own for every (seed,
epoch).
- `WindowSampler` turns those numbers into start offsets of windows in one stream of tokens.
- `MixtureSampler` interleaves several streams by weight.

Deliberately unknown here: what a sample looks like, how many ranks there are, files, torch and Lightning.
(`global_indices` says which samples belong to which step, rank and micro-batch.)
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from math import isqrt

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]

MIXTURE_PERIOD = 1000  # samples after which the interleaving of sources repeats
_ROUNDS = 8  # half-rounds of the Feistel network, an even number
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # splitmix64's finaliser


def global_indices(
    steps: range, *, micro_batch_size: int, accumulation: int, world_size: int = 1, rank: int = 0
) -> Int64Array:
    """The samples that one rank sees in a run of consecutive optimiser steps.

    Row b of micro-batch m on rank r of step s is sample ((s·accumulation + m)·world_size + r)·micro_batch_size + b. So
    the *set* of samples in a step depends on nothing but the step and the size of the global batch.

    Returns:
        Global sample indices, (steps, accumulation, micro_batch_size) int64.
    """
    micro_batches = np.arange(steps.start * accumulation, steps.stop * accumulation, dtype=np.int64)
    first = (micro_batches * world_size + rank) * micro_batch_size
    rows = first[:, None] + np.arange(micro_batch_size, dtype=np.int64)
    return rows.reshape(len(steps), accumulation, micro_batch_size)


@lru_cache(maxsize=1024)
def _epoch_words(seed: int, stream: int, epoch: int) -> NDArray[np.uint64]:
    """One 64-bit key per round of the permutation, and one more for the offset of the window grid."""
    digest = hashlib.shake_128(f"llmtrain order {seed} {stream} {epoch}".encode()).digest(8 * (_ROUNDS + 1))
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _mix(values: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A 64-bit hash of each value under its key (splitmix64's finaliser; wraps modulo 2^64 on purpose)."""
    mixed = (values + key) * _MULTIPLIERS[0]
    mixed ^= mixed >> np.uint64(29)
    mixed *= _MULTIPLIERS[1]
    mixed ^= mixed >> np.uint64(32)
    return mixed


def _permute(values: NDArray[np.uint64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Map each value in [0, size) to its place in a pseudo-random permutation of [0, size).

    An alternating Feistel network over pairs (x, y) with x < a, y < b, a = ⌈√size⌉ and b = ⌈size/a⌉, which
    adds modulo a and b and so is a bijection of [0, a·b). What falls at or beyond `size` walks on until it
    does not: fewer than one value in √size does, where the usual network over powers of two would send up to
    three in four round again.

    Args:
        values: (n,) uint64, each below `size`.
        keys: (n, _ROUNDS) uint64, each value's own keys: a batch may straddle epochs.
    """
    side = isqrt(size - 1) + 1
    a, b = np.uint64(side), np.uint64(-(-size // side))
    values = _network(values, a, b, keys)
    while (outside := np.flatnonzero(values >= np.uint64(size))).size:
        values[outside] = _network(values[outside], a, b, keys[outside])
    return values


def _network(values: NDArray[np.uint64], a: np.uint64, b: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One pass of the Feistel network, a bijection of [0, a·b)."""
    x, y = values // b, values % b
    for number in range(0, _ROUNDS, 2):
        x = (x + _mix(y, keys[:, number]) % a) % a
        y = (y + _mix(x, keys[:, number + 1]) % b) % b
    return x * b + y


class EpochOrder:
    """The numbers 0..size-1, once each per epoch, in an order that depends on (seed, stream, epoch) alone.

    Args:
        size: How many items an epoch has, 1 .. 2^62.
        seed: The run's seed.
        stream: Distinguishes several orders of one run (the sources of a mixture).
    """

    def __init__(self, size: int, *, seed: int, stream: int = 0) -> None:
        if not 1 <= size <= 2**62:
            raise ValueError(f"an order needs between 1 and 2^62 items, got {size}")
        self.size, self.seed, self.stream = size, seed, stream

    def words(self, epochs: Int64Array) -> NDArray[np.uint64]:
        """The random words of each epoch, (n, rounds + 1) uint64."""
        numbers, where = np.unique(epochs, return_inverse=True)
        return np.stack([_epoch_words(self.seed, self.stream, int(epoch)) for epoch in numbers])[where]

    def draw(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Epoch and item of each global index.

        Args:
            indices: (n,) int64, not negative.

        Returns:
            (epochs, items), each (n,) int64, with items in [0, size).
        """
        epochs, positions = np.divmod(np.asarray(indices, dtype=np.int64), self.size)
        keys = self.words(epochs)[:, :_ROUNDS]
        return epochs, _permute(positions.astype(np.uint64), self.size, keys).astype(np.int64)


class WindowSampler:
    """Start offsets of windows of `sequence_length` targets in a stream of `num_tokens` tokens.

    The stream is read as a circle (the last document's end-of-text is followed by the first document), cut
    into ⌊num_tokens / sequence_length⌋ windows per epoch, each visited once. The grid of cuts starts at an
    offset in [0, sequence_length) that changes with every epoch, so a small corpus shows its tokens in ever
    new contexts; the fewer than `sequence_length` tokens that no window of an epoch covers lie around the
    stream's two ends.

    Raises:
        ValueError: The stream is not longer than one window.
    """

    def __init__(self, num_tokens: int, sequence_length: int, *, seed: int, stream: int = 0) -> None:
        if sequence_length < 1:
            raise ValueError(f"sequence_length must be at least 1, got {sequence_length}")
        if num_tokens <= sequence_length:
            raise ValueError(
                f"windows of {sequence_length} tokens need a training text of at least {sequence_length + 1} tokens, "
                f"but it has {num_tokens}: lower data.sequence_length or add text"
            )
        self.num_tokens, self.sequence_length = num_tokens, sequence_length
        self.windows_per_epoch = num_tokens // sequence_length
        self._order = EpochOrder(self.windows_per_epoch, seed=seed, stream=stream)

    def offsets(self, epochs: Int64Array) -> Int64Array:
        """Where each epoch's grid of windows begins, (n,) int64 in [0, sequence_length)."""
        return (self._order.words(epochs)[:, _ROUNDS] % np.uint64(self.sequence_length)).astype(np.int64)

    def draw(self, indices: Int64Array) -> Int64Array:
        """Start offset in [0, num_tokens) of each global index, (n,) int64; a window may run past the end."""
        epochs, windows = self._order.draw(indices)
        return (self.offsets(epochs) + windows * self.sequence_length) % self.num_tokens


def mixture_pattern(weights: Sequence[float]) -> Int64Array:
    """Which source each of `MIXTURE_PERIOD` consecutive samples comes from.

    Shares are rounded to whole samples by largest remainder; each next sample goes to the source that is
    furthest behind its share, so short stretches keep the weights too.

    Returns:
        (MIXTURE_PERIOD,) int64 of source numbers.

    Raises:
        ValueError: A weight is not positive and finite, or its share is below one sample in MIXTURE_PERIOD.
    """
    shares = np.asarray(weights, dtype=np.float64)
    if shares.size == 0 or not np.isfinite(shares).all() or (shares <= 0).any():
        raise ValueError(f"the weights of the sources must be positive and finite, got {list(weights)}")
    shares = shares / shares.sum() * MIXTURE_PERIOD
    counts = np.floor(shares).astype(np.int64)
    missing = MIXTURE_PERIOD - int(counts.sum())
    counts[np.argsort(counts - shares, kind="stable")[:missing]] += 1
    if (counts == 0).any():
        source = int(np.argmin(counts))
        raise ValueError(
            f"source {source} has {shares[source] / MIXTURE_PERIOD:.2%} of the total weight, less than one sample in "
            f"{MIXTURE_PERIOD}: it would never be drawn; raise its weight or leave it out"
        )
    pattern = np.empty(MIXTURE_PERIOD, dtype=np.int64)
    drawn = np.zeros_like(counts)
    for slot in range(MIXTURE_PERIOD):
        behind = counts * (slot + 1) - drawn * MIXTURE_PERIOD
        behind[drawn == counts] = np.iinfo(np.int64).min
        pattern[slot] = np.argmax(behind)
        drawn[pattern[slot]] += 1
    return pattern


class MixtureSampler:
    """Windows from several streams, interleaved by weight.

    Any `MIXTURE_PERIOD` consecutive samples hold exactly the same number of each source, and within a source
    its windows come in the order of a `WindowSampler` of its own, epoch after epoch: a source that is small
    for its weight is simply repeated more often.

    Args:
        num_tokens: Length of each stream in tokens.
        weights: Share of each stream in the samples, any positive scale.
        sequence_length: Targets per window.
        seed: The run's seed.
    """

    def __init__(self, num_tokens: Sequence[int], weights: Sequence[float], sequence_length: int, *, seed: int) -> None:
        if len(num_tokens) != len(weights):
            raise ValueError(f"{len(num_tokens)} sources need as many weights, got {len(weights)}")
        self._pattern = mixture_pattern(weights)
        self._counts = np.bincount(self._pattern, minlength=len(weights)).astype(np.int64)
        hits = self._pattern[:, None] == np.arange(len(weights))
        self._rank = (hits.cumsum(axis=0) - 1)[np.arange(MIXTURE_PERIOD), self._pattern].astype(np.int64)
        self._samplers = [
            WindowSampler(tokens, sequence_length, seed=seed, stream=number) for number, tokens in enumerate(num_tokens)
        ]
        self.windows_per_epoch = sum(sampler.windows_per_epoch for sampler in self._samplers)

    def draw(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Source and start offset of each global index.

        Args:
            indices: (n,) int64, not negative.

        Returns:
            (sources, starts), each (n,) int64.
        """
        indices = np.asarray(indices, dtype=np.int64)
        if len(self._samplers) == 1:
            return np.zeros_like(indices), self._samplers[0].draw(indices)
        periods, slots = np.divmod(indices, MIXTURE_PERIOD)
        sources = self._pattern[slots]
        within = periods * self._counts[sources] + self._rank[slots]
        starts = np.empty_like(indices)
        for number, sampler in enumerate(self._samplers):
            mine = sources == number
            if mine.any():
                starts[mine] = sampler.draw(within[mine])
        return sources, starts
