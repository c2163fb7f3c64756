"""Which prompts are read together, and who moves where when a row is freed."""

from types import SimpleNamespace

import pytest
import torch

from llmtrain.generation.rows import Rows
from llmtrain.model import KVCache
from tests.generation.conftest import small_config


def request(length, fed=0):
    return SimpleNamespace(input_ids=[10 + length] * length, fed=fed)


def rows_of(*lengths, decoding=0):
    rows = Rows(KVCache.allocate(small_config(), 16, 32), 320)
    rows.admit([request(length) for length in lengths])
    rows.decoding = decoding
    return rows


@pytest.mark.parametrize(
    ("lengths", "tokens", "expected"),
    [
        ((5,), 100, (1, 5)),
        ((5, 3, 9), 100, (3, 9)),  # little padding in all: together
        ((5, 3, 9), 20, (2, 5)),  # three rows of nine would be too many tokens
        ((200,), 100, (1, 100)),  # a long prompt, in pieces
        ((100, 100, 700), 4096, (2, 100)),  # 1,200 tokens of padding cost more than another pass
        ((600, 650, 700), 4096, (3, 700)),
    ],
)
def test_prompts_of_like_length_are_read_together(lengths, tokens, expected):
    assert rows_of(*lengths).reading_group(tokens) == expected


def test_a_prompt_that_has_been_begun_is_finished_alone():
    rows = rows_of(4, 6)
    rows.requests[0].fed = 2
    assert rows.reading_group(100) == (1, 2)


def test_admitted_requests_sit_behind_the_others_and_in_order_of_length():
    rows = rows_of(9)
    rows.admit([request(7), request(3)])
    assert [len(each.input_ids) for each in rows.requests] == [9, 3, 7]
    assert rows.free == 13


@pytest.mark.parametrize(
    ("freed", "expected", "decoding"),
    [(0, [3, 2, 5, 4], 2), (1, [1, 3, 5, 4], 2), (2, [1, 2, 5, 4], 2), (3, [1, 2, 3, 5], 3), (4, [1, 2, 3, 4], 3)],
)
def test_a_gap_is_filled_by_the_last_of_its_block(freed, expected, decoding):
    """Rows 0–2 decode and rows 3–4 still read."""
    rows = rows_of(1, 2, 3, 4, 5, decoding=3)
    for row, each in enumerate(rows.requests):
        length = len(each.input_ids)
        rows.cache.lengths[row] = length
        rows.cache.keys[0][row, :, :length] = length
        rows.note_prompt(row)
    rows.release(freed)
    assert [len(each.input_ids) for each in rows.requests] == expected
    assert rows.decoding == decoding
    assert rows.cache.lengths[:5] == [*expected, 0]
    for row, length in enumerate(expected):
        assert (rows.cache.keys[0][row, :, :length] == length).all()
        assert rows.seen([row])[0].nonzero().flatten().tolist() == [10 + length]


def test_wiping_leaves_nothing_of_a_failed_request():
    rows = rows_of(3, 4)
    rows.cache.keys[1][0] = torch.nan
    rows.release(0, wipe=True)
    assert all(layer.isfinite().all() for layer in rows.cache.keys)
