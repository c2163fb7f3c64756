"""Reading windows of a circular stream, and covering a validation stream exactly once."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.data.windows import IGNORED, ValidationWindows, read_windows

EOS = 0


@dataclass
class Stream:
    """A stream whose tokens are 1, 2, 3, …, so that a token says where it stands; refuses to read beyond its end."""

    num_tokens: int

    def read(self, start: int, count: int) -> np.ndarray:
        assert 0 <= start <= start + count <= self.num_tokens
        return np.arange(start + 1, start + count + 1, dtype=np.int64)


def test_windows_are_read_from_their_streams_and_go_round_at_the_end() -> None:
    windows = read_windows([Stream(10), Stream(6)], np.array([0, 1, 1]), np.array([2, 0, 4]), 4)
    assert windows.dtype == np.int64
    assert windows.tolist() == [[3, 4, 5, 6, 7], [1, 2, 3, 4, 5], [5, 6, 1, 2, 3]]


@given(
    tokens=st.integers(1, 300), length=st.integers(1, 40), batch_size=st.integers(1, 5), world_size=st.integers(1, 5)
)
def test_validation_scores_every_token_once(tokens: int, length: int, batch_size: int, world_size: int) -> None:
    ranks = [
        ValidationWindows(
            Stream(tokens),
            eos_id=EOS,
            sequence_length=length,
            batch_size=batch_size,
            world_size=world_size,
            rank=rank,
        )
        for rank in range(world_size)
    ]
    assert len({len(rank) for rank in ranks}) == 1
    targets = []
    for rank in ranks:
        batches = list(rank)
        assert len(batches) == len(rank)
        for inputs, labels in batches:
            assert inputs.shape == labels.shape == (batch_size, length)
            scored = labels != IGNORED
            assert (inputs[scored] == labels[scored] - 1).all()  # the token before; EOS = 0 before token 1
            targets += labels[scored].tolist()
    assert sorted(targets) == list(range(1, tokens + 1))


def test_windows_follow_each_other_in_rows_ranks_and_batches() -> None:
    windows = ValidationWindows(Stream(11), eos_id=EOS, sequence_length=2, batch_size=2, world_size=2, rank=1)
    (_, first), (inputs, second) = windows
    assert first.tolist() == [[5, 6], [7, 8]]
    assert second.tolist() == [[IGNORED, IGNORED], [IGNORED, IGNORED]]
    assert (inputs == EOS).all()


def test_an_empty_validation_stream_is_refused() -> None:
    with pytest.raises(ValueError, match="the validation text has no tokens"):
        ValidationWindows(Stream(0), eos_id=EOS, sequence_length=2, batch_size=2)
