"""What is held out: by document, stable, never both sides, never nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.data.split import Validation, choose_split
from llmtrain.data.text import Piece


def split(pieces: Sequence[Piece], **validation: float) -> tuple[list[str], list[str]]:
    """The documents of both sides."""
    route = choose_split(lambda: iter(pieces), Validation(**validation), title="'test'")  # type: ignore[arg-type]
    sides: tuple[list[str], list[str]] = ([], [])
    open_text = {False: "", True: ""}
    for text, ends, held_out in route(iter(pieces)):
        open_text[held_out] += text
        if ends:
            sides[held_out].append(open_text[held_out])
            open_text[held_out] = ""
    assert not any(open_text.values()), "a document was left open"
    return sides


def documents(count: int) -> list[Piece]:
    return [Piece(f"document {number}", True) for number in range(count)]


def test_the_last_documents() -> None:
    pieces = [Piece("a", False), Piece("b", True), Piece("c", True), Piece("d", False), Piece("e", True)]
    assert split(pieces, last=1) == (["ab", "c"], ["de"])
    assert split(pieces, last=2) == (["ab"], ["c", "de"])
    with pytest.raises(ValueError, match=r"data\.validation_last=3 leaves nothing to train on: .* has 3 documents"):
        split(pieces, last=3)


class Counted:
    """A source that counts how many pieces were read, over all readings."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces
        self.read = 0

    def pieces(self) -> Iterator[Piece]:
        for piece in self._pieces:
            self.read += 1
            yield piece


@pytest.mark.parametrize("downloads", [False, True])
def test_a_source_that_is_downloaded_is_not_read_once_more_to_be_counted(downloads: bool) -> None:
    pieces = [Piece("a", False), Piece("b", True), *documents(20)]
    source = Counted(pieces)
    route = choose_split(source.pieces, Validation(last=2), title="'test'", downloads=downloads)
    assert source.read == (1 + 4 if downloads else 1 + len(pieces))
    sides = [(text, held_out) for text, _, held_out in route(iter(pieces))]
    assert sides == [(piece.text, number >= len(pieces) - 2) for number, piece in enumerate(pieces)]


@pytest.mark.parametrize("validation", [{"last": 1}, {"fraction": 0.1}, {}])
def test_a_long_document_passes_through(validation: dict[str, float]) -> None:
    """Nothing waits for the end of a document that is larger than memory."""
    pieces = [*(Piece("text", False) for _ in range(100)), Piece("end", True), *documents(1)]
    route = choose_split(lambda: iter(pieces), Validation(**validation), title="'test'")  # type: ignore[arg-type]
    source = Counted(pieces)
    for number, _ in enumerate(route(source.pieces()), start=1):
        assert source.read <= number


def test_a_hash_holds_out_about_its_fraction() -> None:
    train, val = split(documents(2000), fraction=0.1)
    assert len(train) + len(val) == 2000
    assert 150 < len(val) < 250  # the hash is fixed, so this cannot fail by chance


def test_a_document_stays_on_its_side() -> None:
    _, val = split(documents(500), fraction=0.05)
    changed = [*reversed(documents(500)[:400]), *(Piece(f"new {number}", True) for number in range(100))]
    _, later = split(changed, fraction=0.05)
    assert {text for text in later if text.startswith("document")} == {t for t in val if int(t.split()[1]) < 400}


def test_copies_are_on_one_side() -> None:
    train, val = split(documents(300) * 2, fraction=0.05)
    assert not set(train) & set(val)


@pytest.mark.parametrize("count", [1, 2, 39])
def test_few_documents_lose_their_tail(count: int) -> None:
    lines = [f"line {number:03d} of the text\n" for number in range(200)]
    per_document = len(lines) // count + 1
    pieces = []
    for first in range(0, len(lines), per_document):
        pieces.append(Piece("".join(lines[first : first + per_document]), True))
    train, val = split(pieces, fraction=0.05)
    assert "".join(train + val) == "".join(lines)
    assert "".join(val) == "".join(lines[190:])


@settings(max_examples=150)
@given(
    sizes=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=6),
    fraction=st.floats(0.01, 0.99),
    text=st.text(st.sampled_from("ab \n"), min_size=150, max_size=150),
)
def test_nothing_is_lost_and_both_sides_have_text(sizes: list[list[int]], fraction: float, text: str) -> None:
    pieces, position = [], 0
    for document in sizes:
        for number, size in enumerate(document):
            pieces.append(Piece(text[position : position + size], number == len(document) - 1))
            position += size
    if position < 2:
        return
    train, val = split(pieces, fraction=fraction)
    assert sorted("".join(train + val)) == sorted(text[:position])
    assert "".join(train)
    assert "".join(val)


def test_without_validation_all_is_trained_on() -> None:
    train, val = split(documents(3))
    assert (len(train), val) == (3, [])


def test_what_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="the corpus 'test' is empty"):
        split([], fraction=0.1)
    with pytest.raises(ValueError, match="has 1 character: that is too little"):
        split([Piece("x", True)], fraction=0.1)
    with pytest.raises(ValueError, match=r"validation_fraction=1\.5: give a share from 0 up to but below 1"):
        Validation(fraction=1.5)
    with pytest.raises(ValueError, match=r"validation_last=-1"):
        Validation(last=-1)
    with pytest.raises(ValueError, match="are both set"):
        Validation(fraction=0.1, last=1)
