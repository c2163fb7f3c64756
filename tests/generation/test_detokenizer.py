"""Text comes out whole: no half characters, no stop strings, nothing lost, however the bytes are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.generation.detokenizer import StreamingDetokenizer

TEXT = "naïve 你好 🌍  x"


def feed(pieces, stop=()):
    detokenizer = StreamingDetokenizer(stop)
    out = []
    for piece in pieces:
        out.append(detokenizer.push(piece))
        if detokenizer.stopped:
            break
    out.append(detokenizer.finish())
    return out, detokenizer.stopped


def cut(data, size):
    return [data[start : start + size] for start in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_pieces_join_to_the_text_and_none_holds_half_a_character(size):
    """Characters of one to four bytes, one of them beyond the basic plane, and two spaces in a row."""
    pieces, stopped = feed(cut(TEXT.encode(), size))
    assert "".join(pieces) == TEXT
    assert "\ufffd" not in "".join(pieces)
    assert not stopped


def test_bytes_that_are_no_text_become_replacement_characters_as_in_decode():
    data = b"a\xff\xe4\xbdb\xf0\x9f"
    pieces, _ = feed(cut(data, 1))
    assert "".join(pieces) == data.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("aaab!", ["aab"], "a"),  # a match that starts inside a failed one
        ("abababc", ["ababc"], "ab"),
        ("one\n\ntwo", ["\n\n"], "one"),
        ("你好。世界", ["。"], "你好"),
        ("abc", ["bc", "c"], "a"),  # both are complete at the same place: the longer one
        ("abcd", ["b", "abcd"], "a"),  # the one complete first
        ("stop", ["stop"], ""),
        ("sto", ["stop"], "sto"),
        ("🌍🌎", ["🌎"], "🌍"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_stop_strings_end_the_text_wherever_tokens_are_cut(text, stop, expected, size):
    pieces, stopped = feed(cut(text.encode(), size), stop)
    assert "".join(pieces) == expected
    assert stopped == (expected != text)


def test_nothing_that_may_begin_a_stop_string_is_given_out_early():
    detokenizer = StreamingDetokenizer(["END"])
    assert [detokenizer.push(c.encode()) for c in "xENx"] == ["x", "", "", "ENx"]
    assert detokenizer.push(b"E") == ""
    assert detokenizer.finish() == "E"


def test_nothing_comes_after_a_stop():
    detokenizer = StreamingDetokenizer(["."])
    assert detokenizer.push(b"a.b") == "a"
    assert detokenizer.push(b"c") == ""
    assert detokenizer.finish() == ""


def stopped_text(text, stops):
    """The plain rule: read on until a stop string is complete (the longest of several), and cut it off."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - len(max(ending, key=len))]
    return text


@given(
    st.text(alphabet="ab你🌍", max_size=30),
    st.lists(st.text(alphabet="ab你🌍", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 7), min_size=1, max_size=20),
)
def test_the_text_does_not_depend_on_where_tokens_are_cut(text, stops, sizes):
    data, pieces = text.encode(), []
    while data:
        size = sizes[len(pieces) % len(sizes)]
        pieces, data = [*pieces, data[:size]], data[size:]
    out, _ = feed(pieces, stops)
    assert "".join(out) == stopped_text(text, stops)
