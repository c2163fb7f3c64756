"""Cleaned text in bounded pieces: how documents pass through memory, and where a long one may be cut.

A document is a run of pieces, the last of which says so; nothing holds more than a few pieces at once. Knows nothing of
files, tokens or splits.

Where a long document is cut: the places that `cut_position` prefers end a pre-token under `llmtrain.tokenizer.PATTERN`
whatever surrounds them, so the ids of the pieces, one after another, are those of the whole document. Under another
pattern, or another family's tokenizer, such a place (a line end, as a rule) may lie inside a token of the whole
document; the ids differ there, and stand for the same text.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

PIECE_CHARACTERS = 1 << 15
"""A piece is at most this long: enough to make cuts rare, few enough that a batch is many pieces for many cores."""

_MARKS = frozenset("，。；：？！、,.;:?!")


class Piece(NamedTuple):
    """A part of a document, and whether the document ends behind it."""

    text: str
    ends_document: bool


def clean(text: str) -> str:
    """Line ends become \\n, a byte order mark in front goes, half a surrogate pair (from JSON) becomes U+FFFD."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = text.removeprefix("\ufeff")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def document_pieces(text: str) -> Iterable[Piece]:
    """A document that is in memory, cleaned and cut; nothing at all if it is blank."""
    text = clean(text)
    if len(text) > PIECE_CHARACTERS:
        return join_pieces([text])
    return (Piece(text, True),) if text and not text.isspace() else ()


def join_pieces(blocks: Iterable[str]) -> Iterator[Piece]:
    """One document that arrives as cleaned blocks of any length, cut into pieces; nothing at all if it is blank.

    The cuts depend on the text alone, not on the blocks.
    """
    held = ""
    blank: list[Piece] = []  # what a document begins with waits for something else than white space
    seen = False
    for block in blocks:
        held = held + block if held else block
        start = 0
        while len(held) - start > PIECE_CHARACTERS:
            end = cut_position(held, start, start + PIECE_CHARACTERS)
            piece = Piece(held[start:end], False)
            seen = seen or not piece.text.isspace()
            if seen:
                yield from (*blank, piece)
                blank = []
            else:
                blank.append(piece)
            start = end
        held = held[start:]
    if held and (seen or not held.isspace()):
        yield from (*blank, Piece(held, True))


def cut_position(text: str, start: int, limit: int) -> int:
    """Where to cut `text[start:limit]` so that the pre-tokens stay whole: the last such place in start < place ≤ limit.

    First choice: behind a line end with a character other than white space behind it. Second: before a single space
    between two others. Third: between a letter and a mark. Otherwise `limit` itself. `text[limit]` must exist.
    """
    place = text.rfind("\n", start, limit)
    while place >= 0:
        if not text[place + 1].isspace():
            return place + 1
        place = text.rfind("\n", start, place)
    place = text.rfind(" ", start + 1, limit)
    while place > start:
        if not text[place - 1].isspace() and not text[place + 1].isspace():
            return place
        place = text.rfind(" ", start + 1, place)
    for place in range(limit, start, -1):
        if text[place] in _MARKS and text[place - 1].isalpha():
            return place
    return limit
