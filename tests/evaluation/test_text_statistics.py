"""Repetition and copying, against small tables and against the plain way of counting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.evaluation import distinct_n, longest_copied_span


@pytest.mark.parametrize(
    ("sequences", "n", "expected"),
    [
        (["abcdef"], 4, 1.0),
        (["aaaaaa"], 4, 1 / 3),
        (["abab"], 2, 2 / 3),
        (["abc", "abc"], 3, 0.5),  # over all sequences together
        ([[1, 2, 1, 2, 1]], 2, 0.5),  # ids as well as characters
        (["abc"], 4, 1.0),  # too short to repeat anything
        ([], 4, 1.0),
    ],
)
def test_distinct_n(sequences, n, expected):
    assert distinct_n(sequences, n) == pytest.approx(expected)


def test_distinct_n_needs_an_n():
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        distinct_n(["a"], 0)


@pytest.mark.parametrize(
    ("samples", "documents", "expected"),
    [
        (["xxhello worldxx"], ["say hello world!"], (11, 0, 2)),
        (["ab", "cdef"], ["..def.."], (3, 1, 1)),
        (["abcd"], ["ab", "cd"], (2, 0, 0)),  # never across documents
        (["ab", "cd"], ["abcd"], (2, 0, 0)),  # nor across samples
        (["abc"], [], (0, 0, 0)),
        ([], ["abc"], (0, 0, 0)),
        (["abc"], ["xyz"], (0, 0, 0)),
        ([[7, 8, 9]], [[1, 8, 9, 1]], (2, 0, 1)),
        (["天下大势，分久必合"], ["话说天下大势，分久"], (7, 0, 0)),
    ],
)
def test_longest_copied_span(samples, documents, expected):
    assert longest_copied_span(samples, documents) == expected


def plain_longest(samples, documents):
    best = 0
    for sample in samples:
        for start in range(len(sample)):
            while start + best < len(sample) and any(sample[start : start + best + 1] in text for text in documents):
                best += 1
    return best


@given(
    st.lists(st.text(alphabet="abc", max_size=20), max_size=3),
    st.lists(st.text(alphabet="abc", max_size=30), max_size=3),
)
def test_longest_copied_span_is_what_trying_every_span_finds(samples, documents):
    found = longest_copied_span(samples, documents)
    assert found.length == plain_longest(samples, documents)
    if found.length:
        span = samples[found.sequence][found.start : found.start + found.length]
        assert len(span) == found.length
        assert any(span in text for text in documents)
