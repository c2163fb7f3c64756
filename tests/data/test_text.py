"""Pieces: bounded, whole, and cut where no token is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.data import text as text_module
from llmtrain.data.text import Piece, clean, cut_position, document_pieces, join_pieces
from llmtrain.tokenizer import Tokenizer, train_bpe

# Everything that the pattern treats on its own: marks, both kinds of space, contractions, digits, marks of combination.
ALPHABET = st.sampled_from(list("  \n\n\r\t\u3000\x0b\u2028，。：“”'!?.,;-_9٣aZbsé\u0301分久必合〇\x00🌍"))
TEXTS = st.text(ALPHABET, max_size=120)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    sample = "分久必合，分久必合。 it's a test:\n\n  a b  c!!\n“合”？ \r\n\t分 久 \n" * 20
    return train_bpe([sample], vocab_size=340)


@pytest.fixture(scope="module", params=[2, 7, 20])
def small_pieces(request: pytest.FixtureRequest) -> Iterator[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "PIECE_CHARACTERS", request.param)
        yield request.param


@settings(max_examples=100)
@given(text=TEXTS, blocks=st.lists(st.integers(1, 30), max_size=8))
def test_pieces_are_the_document(small_pieces: int, text: str, blocks: list[int]) -> None:
    parts, position = [], 0
    for size in blocks:
        parts.append(text[position : position + size])
        position += size
    pieces = list(join_pieces([*parts, text[position:]]))
    assert pieces == list(join_pieces([text]))
    if not text or text.isspace():
        assert pieces == []
        return
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(0 < len(piece.text) <= small_pieces for piece in pieces)


@settings(max_examples=500)
@given(text=TEXTS, start=st.integers(0, 20), length=st.integers(1, 60))
def test_a_cut_is_between_tokens(tokenizer: Tokenizer, text: str, start: int, length: int) -> None:
    """Wherever a good place was found, the ids on both sides are the ids of the whole."""
    limit = start + length
    if limit >= len(text):
        return
    cut = cut_position(text, start, limit)
    assert start < cut <= limit
    before, after = text[cut - 1], text[cut]
    good = (
        (before == "\n" and not after.isspace())
        or (after == " " and not before.isspace() and cut + 1 < len(text) and not text[cut + 1].isspace())
        or (after in "，。；：？！、,.;:?!" and before.isalpha())
    )
    if good:
        assert tokenizer.encode(text[:cut]) + tokenizer.encode(text[cut:]) == tokenizer.encode(text)


def test_the_best_place_is_taken() -> None:
    assert cut_position("one two\nthree four", 0, 15) == len("one two\n")
    assert cut_position("one two three four", 0, 15) == len("one two three")
    assert cut_position("分久必合，合久必分", 0, 8) == 4
    assert cut_position("分久必合合久必分", 0, 5) == 5
    assert cut_position("a\n\n\n\nb", 0, 4) == 4  # blank lines only: nowhere better


def test_blank_documents_do_not_count() -> None:
    assert list(document_pieces("")) == []
    assert list(document_pieces(" \n\t\u3000")) == []
    assert list(document_pieces("\ufeff")) == []
    assert list(document_pieces("\n" * 100_000)) == []
    assert "".join(piece.text for piece in document_pieces(" \n" * 50_000 + "x")) == " \n" * 50_000 + "x"
    assert list(document_pieces(" x ")) == [Piece(" x ", True)]


def test_cleaning() -> None:
    assert clean("\ufeffa\r\nb\rc\n") == "a\nb\nc\n"
    assert clean("x\ud83dy\ude00") == "x\ufffdy\ufffd"
    assert clean("\ud83d\ude00") == "😀"
    assert clean("a\u2028b\x0b") == "a\u2028b\x0b"
