"""Batches, micro-batches and run lengths: what divides, what does not, and what the messages say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.training.geometry import divide_batch, is_due, rows_per_step, run_length


@given(micro=st.integers(1, 9), accumulation=st.integers(1, 9), world=st.integers(1, 9))
def test_a_whole_batch_divides_without_rest(micro, accumulation, world):
    batch = divide_batch(micro * accumulation * world, micro_batch_size=micro, world_size=world)
    assert (batch.micro_batch_size, batch.accumulation, batch.world_size) == (micro, accumulation, world)


def test_without_a_micro_batch_size_a_process_takes_its_whole_share():
    assert divide_batch(12, world_size=3).micro_batch_size == 4


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: rows_per_step(1000, 128), ["batch_tokens=1000", "sequence_length=128", "896 or 1024"]),
        (lambda: rows_per_step(64, 128), ["batch_tokens=64", "nearest", "128"]),
        (lambda: divide_batch(7, world_size=2), ["7 rows", "2 processes", "6 or 8"]),
        (
            lambda: divide_batch(24, micro_batch_size=5, world_size=2),
            ["micro_batch_size=5", "12 rows", "4, 6", "20 or 30 rows"],
        ),
        (lambda: divide_batch(8, micro_batch_size=0), ["micro_batch_size=0", "at least 1"]),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_that_does(call, words):
    with pytest.raises(ValueError, match=r"at least 1|nearest|valid near") as error:
        call()
    assert all(word in str(error.value) for word in words), error.value


def test_the_smallest_limit_wins_and_says_so():
    length = run_length(max_steps=100, max_tokens=5000, max_epochs=9, rows=4, epoch_rows=50, row_tokens=32)
    assert length.steps == 5000 // 128
    assert length.decided_by.startswith("trainer.max_tokens=5000 (comes before trainer.max_steps=100")


def test_tokens_are_never_exceeded_and_epochs_are_completed():
    assert run_length(max_tokens=1000, rows=2, epoch_rows=9, row_tokens=32).steps == 15  # 960 tokens
    assert run_length(max_epochs=1, rows=4, epoch_rows=50).steps == 13  # 52 rows
    assert run_length(max_epochs=0.5, rows=4, epoch_rows=50).steps == 7


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, "nothing says when to stop"),
        ({"max_steps": 0}, "trainer.max_steps=0 must be a whole number of at least 1"),
        ({"max_epochs": 0}, "trainer.max_epochs=0 must be above 0"),
        ({"max_tokens": 100, "row_tokens": 32}, "less than one step of 128 tokens"),
        ({"max_tokens": 100}, "counts tokens of equal rows"),
    ],
)
def test_limits_that_allow_no_step_are_refused(limits, message):
    with pytest.raises(ValueError, match=message):
        run_length(rows=4, epoch_rows=50, **limits)


def test_due_steps():
    assert [step for step in range(11) if is_due(step, 5)] == [5, 10]
    assert not is_due(5, None)
