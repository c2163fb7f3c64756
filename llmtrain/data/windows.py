"""Windows of tokens: reading them for training, and laying them over a validation stream to score every token once.

Labels are already shifted: `labels[b, t]` is the target of position t, −100 where nothing is trained or
scored. Letters: B rows, T positions, N tokens of a stream. Works with anything that has `num_tokens` and
`read(start, count)`; deliberately knows nothing of files, of sampling order, of torch or of Lightning.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]

IGNORED = -100  # the label of a position that is neither trained nor scored


class TokenStream(Protocol):
    """One long row of token ids, such as `llmtrain.data.shards.ShardSet`."""

    @property
    def num_tokens(self) -> int: ...

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Tokens [start, start + count), (count,) int64."""
        ...


def read_windows(
    streams: Sequence[TokenStream], sources: Int64Array, starts: Int64Array, sequence_length: int
) -> Int64Array:
    """Read windows of T + 1 tokens; a window that runs past its stream's end goes on at the stream's beginning.

    Args:
        streams: The streams.
        sources: (B,) which stream each window is in.
        starts: (B,) where in it the window starts.
        sequence_length: T, the targets of each window.

    Returns:
        (B, T + 1) int64.
    """
    count = sequence_length + 1
    windows = np.empty((len(starts), count), dtype=np.int64)
    for row, (source, start) in enumerate(zip(sources.tolist(), starts.tolist(), strict=True)):
        stream = streams[source]
        inside = min(count, stream.num_tokens - start)
        windows[row, :inside] = stream.read(start, inside)
        if inside < count:  # the sampler keeps T below the stream's length, so once round is enough
            windows[row, inside:] = stream.read(0, count - inside)
    return windows


class ValidationWindows:
    """The batches in which one rank scores its part of a stream; over all ranks every token is a target exactly once.

    The inputs are the stream shifted right by one with the end-of-text token in front; windows do not
    overlap, and the last one is padded. Row b of batch k on rank r is window (k·world_size + r)·B + b. Every
    rank gets the same number of batches; rows beyond the last window have only −100 as labels.

    Iterating yields (input_ids, labels), each (B, T) int64.

    Args:
        stream: What to score.
        eos_id: The end-of-text token, the input before the first target.
        sequence_length: T; the length the model was trained with.
        batch_size: B.
        world_size: How many ranks share the work.
        rank: Which of them this is.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        eos_id: int,
        sequence_length: int,
        batch_size: int,
        world_size: int = 1,
        rank: int = 0,
    ) -> None:
        for name, value in (("sequence_length", sequence_length), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if stream.num_tokens < 1:
            raise ValueError("the validation text has no tokens: give the validation split at least one document")
        self.stream, self.eos_id, self.sequence_length = stream, eos_id, sequence_length
        self.batch_size, self.world_size, self.rank = batch_size, world_size, rank
        self.num_windows = -(-stream.num_tokens // sequence_length)

    def __len__(self) -> int:
        """Batches on each rank."""
        return -(-self.num_windows // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[tuple[Int64Array, Int64Array]]:
        return map(self.batch, range(len(self)))

    def batch(self, number: int) -> tuple[Int64Array, Int64Array]:
        """This rank's batch of that number. Its windows are one stretch of the stream, so one read serves them all."""
        first = (number * self.world_size + self.rank) * self.batch_size
        shape = self.batch_size, self.sequence_length
        inputs = np.full(self.batch_size * self.sequence_length, self.eos_id, dtype=np.int64)
        labels = np.full(self.batch_size * self.sequence_length, IGNORED, dtype=np.int64)
        start = first * self.sequence_length
        count = min(labels.size, self.stream.num_tokens - start)
        if count > 0:
            labels[:count] = self.stream.read(start, count)
            inputs[1:count] = labels[: count - 1]
            if start > 0:
                inputs[0] = self.stream.read(start - 1, 1)[0]
        return inputs.reshape(shape), labels.reshape(shape)
