"""Which documents are held out for validation. The choice is by document, stable, and made while documents stream past.

Three ways, decided before anything is tokenized:
- the last k documents (`last`);
- by hash (`fraction`): a document is held out if the hash of its beginning falls below the fraction. It stays where it
  is when documents are added, removed or reordered, and copies of one document never stand on both sides;
- the tail (`fraction`, few documents): where documents are so few that a hash would leave one side empty or lopsided,
  as with one novel in one file, the last `fraction` of the text is held out, cut at a line end.

Knows nothing of files, tokens or shards.
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from llmtrain.data.text import Piece, cut_position

EXPECTED_HELD_OUT = 2  # a hash is trusted from so many documents on that it should hold out two


class RoutedPiece(NamedTuple):
    """A piece and the side it belongs to; `ends_document` ends the document on that side."""

    text: str
    ends_document: bool
    held_out: bool


@dataclass(frozen=True)
class Validation:
    """What to hold out of each source: either its last documents or a fraction of it; nothing if both are 0."""

    fraction: float = 0.0
    last: int = 0

    def __post_init__(self) -> None:
        if self.last < 0:
            raise ValueError(f"data.validation_last={self.last}: give a number of documents, 0 or more")
        if not 0 <= self.fraction < 1:
            raise ValueError(f"data.validation_fraction={self.fraction}: give a share from 0 up to but below 1")
        if self.last and self.fraction:
            raise ValueError(
                "data.validation_last and data.validation_fraction are both set: choose one, set the other to 0"
            )


Split = Callable[[Iterable[Piece]], Iterator[RoutedPiece]]


def choose_split(
    pieces: Callable[[], Iterable[Piece]], validation: Validation, *, title: str, downloads: bool = False
) -> Split:
    """Looks at as much of a source as it must and returns the function that routes its pieces.

    Args:
        pieces: opens the source.
        validation: what to hold out.
        title: of the source, for messages.
        downloads: opening it anew is dear: it is not read to the end merely to count its documents.

    Raises:
        ValueError: no text, or too little to hold anything out.
    """
    first = next(iter(pieces()), None)
    if first is None:
        raise ValueError(
            f"the corpus {title} is empty: it holds no document with anything but white space; give it some text"
        )
    if validation.last:
        documents = _count_documents(pieces(), enough=validation.last + 1 if downloads else None)
        if documents <= validation.last:
            raise ValueError(
                f"data.validation_last={validation.last} leaves nothing to train on: the corpus {title} has "
                f"{documents} documents; hold out fewer, or set data.validation_fraction"
            )
        if downloads:
            return lambda stream: _route_last_unseen(stream, validation.last)
        return lambda stream: _route_from(stream, documents - validation.last)
    if not validation.fraction:
        return _route_all
    needed = math.ceil(EXPECTED_HELD_OUT / validation.fraction)
    documents = characters = 0
    sides = set()
    starts = True
    for piece in pieces():
        if starts:
            sides.add(_is_held_out(piece.text, validation.fraction))
        starts = piece.ends_document
        documents += starts
        characters += len(piece.text)
        if documents >= needed and len(sides) == 2:
            return lambda stream: _route_by_hash(stream, validation.fraction)
    at = round(characters * (1 - validation.fraction))
    if characters < 2:
        raise ValueError(
            f"the corpus {title} has {characters} character: that is too little to hold some of it out; give more text"
        )
    return lambda stream: _route_tail(stream, min(max(at, 1), characters - 1))


def _count_documents(pieces: Iterable[Piece], enough: int | None) -> int:
    """How many documents there are, or `enough` as soon as there are so many."""
    documents = 0
    for piece in pieces:
        documents += piece.ends_document
        if documents == enough:
            break
    return documents


def _is_held_out(beginning: str, fraction: float) -> bool:
    digest = hashlib.blake2b(beginning.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def _route_all(pieces: Iterable[Piece]) -> Iterator[RoutedPiece]:
    return (RoutedPiece(text, ends, False) for text, ends in pieces)


def _route_by_hash(pieces: Iterable[Piece], fraction: float) -> Iterator[RoutedPiece]:
    starts, held_out = True, False
    for text, ends in pieces:
        if starts:
            held_out = _is_held_out(text, fraction)
        starts = ends
        yield RoutedPiece(text, ends, held_out)


def _route_from(pieces: Iterable[Piece], first: int) -> Iterator[RoutedPiece]:
    """Holds out document number `first`, counted from 0, and all behind it."""
    document = 0
    for text, ends in pieces:
        yield RoutedPiece(text, ends, document >= first)
        document += ends


def _route_last_unseen(pieces: Iterable[Piece], last: int) -> Iterator[RoutedPiece]:
    """Holds out the last documents of a source whose end is not known: each passes when `last` have come after it.

    Those wait in memory. Sources that are downloaded have rows for documents, which are whole in memory at some time
    in any case; a file of any size as one document is found on a disk, where counting is cheap.
    """
    waiting: deque[list[Piece]] = deque()
    document: list[Piece] = []
    for piece in pieces:
        document.append(piece)
        if piece.ends_document:
            waiting.append(document)
            document = []
            if len(waiting) > last:
                for text, ends in waiting.popleft():
                    yield RoutedPiece(text, ends, False)
    for held in waiting:
        for text, ends in held:
            yield RoutedPiece(text, ends, True)


def _route_tail(pieces: Iterable[Piece], at: int) -> Iterator[RoutedPiece]:
    """Holds out what comes after character `at`, from the nearest line end in its piece."""
    position, held_out = 0, False
    for text, ends in pieces:
        behind = position + len(text)
        if held_out or behind < at or (behind == at and not ends):
            yield RoutedPiece(text, ends, held_out)
        elif behind == at:
            yield RoutedPiece(text, True, False)
            held_out = True
        else:
            cut = _line_end(text, at - position)
            yield RoutedPiece(text[:cut], True, False)
            held_out = True
            yield RoutedPiece(text[cut:], ends, True)
        position = behind


def _line_end(text: str, near: int) -> int:
    """The place behind a line end that is nearest to `near`, else a good place before it; never an end of the text."""
    near = min(max(near, 1), len(text) - 1)
    places = [text.rfind("\n", 0, near) + 1, text.find("\n", near, len(text) - 1) + 1]
    found = [place for place in places if place]
    return min(found, key=lambda place: abs(place - near)) if found else cut_position(text, 0, near)
