"""Which prompts are read together, and who moves where when a row is freed."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from llmtrain.generation.rows import LEAST_SHARED, Rows
from llmtrain.model import KVCache
from tests.generation.conftest import small_config

_number = itertools.count(1000)


def request(length, fed=0, ids=None, adapter=None):
    ids = [10 + length, next(_number), *[10 + length] * (length - 2)][:length] if ids is None else ids
    return SimpleNamespace(
        input_ids=ids, known_ids=ids, reusable=len(ids) - 1, adapter=adapter, fed=fed, reused=0, length=len(ids)
    )


def rows_of(*lengths, decoding=0):
    rows = Rows(KVCache.allocate(small_config(), 16, 256), 320)
    rows.admit([request(length) for length in lengths])
    rows.decoding = decoding
    return rows


def read(rows, tokens=4096):
    """Reads the next group: each row's keys become the numbers of its ids."""
    count, width = rows.reading_group(tokens)
    for row in range(rows.decoding, rows.decoding + count):
        each = rows.requests[row]
        length = min(each.fed + width, len(each.input_ids))
        rows.cache.keys[0][row, 0, each.fed : length, 0] = torch.tensor(each.input_ids[each.fed : length]).float()
        each.fed = rows.cache.lengths[row] = length
    rows.decoding += count
    return count


def holds(rows, row, ids):
    return rows.cache.keys[0][row, 0, : len(ids), 0].int().tolist() == list(ids)


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
    """Rows 0–2 decode, row 3 has been begun and row 4 not."""
    rows = rows_of(1, 2, 3, 4, 5, decoding=3)
    for row, each in enumerate(rows.requests[:4]):
        each.fed = rows.cache.lengths[row] = length = len(each.input_ids)
        rows.cache.keys[0][row, :, :length] = length
        rows.note_tokens([row], torch.tensor([length]))
    rows.release(freed)
    assert [len(each.input_ids) for each in rows.requests] == expected
    assert rows.decoding == decoding
    for row, length in enumerate(expected):
        if length != 5:
            assert rows.cache.lengths[row] == length
            assert (rows.cache.keys[0][row, :, :length] == length).all()
            assert rows.seen([row])[0].nonzero().flatten().tolist() == [length]


def test_what_a_freed_row_holds_is_not_read_again():
    rows = rows_of()
    first, other = list(range(40, 140)), list(range(200, 260))
    rows.admit([request(0, ids=first)])
    read(rows)
    rows.release(0)
    rows.admit([request(0, ids=other)])  # sits where the first one was, whose keys are brought elsewhere
    read(rows)
    rows.admit([request(0, ids=[*first, 5, 6]), request(0, ids=[*first[:60], 7, 8])])
    read(rows)
    assert sorted((each.reused, len(each.input_ids)) for each in rows.requests) == [(0, 60), (60, 62), (100, 102)]
    for row, each in enumerate(rows.requests):
        assert holds(rows, row, each.input_ids)


def test_the_last_token_of_a_prompt_is_always_read():
    rows = rows_of()
    for _ in range(2):
        rows.admit([request(0, ids=list(range(50, 100)))])
        read(rows)
    assert [each.reused for each in rows.requests] == [0, 49]


def test_equal_beginnings_are_read_once_and_then_copied():
    """Four samples of one prompt: one is read, then the other three need one token each."""
    rows = rows_of()
    rows.admit([request(0, ids=list(range(60, 160))) for _ in range(4)])
    assert [read(rows), read(rows)] == [1, 3]
    assert [each.reused for each in rows.requests] == [0, 99, 99, 99]


def test_short_beginnings_are_not_waited_for():
    rows = rows_of()
    rows.admit([request(0, ids=[*range(60, 60 + LEAST_SHARED - 1), 7]) for _ in range(4)])
    assert read(rows) == 4


def test_another_adapter_shares_nothing():
    rows = rows_of()
    for adapter in ("one", "two", "one"):
        rows.admit([request(0, ids=list(range(60, 160)), adapter=adapter)])
        read(rows)
    assert [each.reused for each in rows.requests] == [0, 0, 99]


def test_with_all_rows_taken_the_freed_ones_are_the_donors():
    """Sixteen rows, four questions of four choices: each question's context is read once."""
    rows = rows_of()
    contexts = [[20 + number] * (100 + number) for number in range(4)]
    requests = [request(0, ids=[*context, choice, choice]) for context in contexts for choice in (1, 2, 3, 4)]
    rows.admit(requests)
    while rows.reading:
        for _ in range(read(rows)):
            rows.release(rows.decoding - 1)
    assert sorted(each.reused for each in requests) == [0] * 4 + [100] * 3 + [101] * 3 + [102] * 3 + [103] * 3


def test_a_failed_request_leaves_nothing_to_share():
    rows = rows_of()
    rows.admit([request(0, ids=list(range(60, 160)))])
    read(rows)
    rows.release(0, wipe=True)
    rows.admit([request(0, ids=list(range(60, 160)))])
    read(rows)
    assert rows.requests[0].reused == 0


def test_wiping_leaves_nothing_of_a_failed_request():
    rows = rows_of(3, 4)
    read(rows)
    rows.cache.keys[1][0] = torch.nan
    rows.release(0, wipe=True)
    assert all(layer.isfinite().all() for layer in rows.cache.keys)
