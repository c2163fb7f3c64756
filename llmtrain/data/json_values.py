"""Reads the JSON values of one file as a stream, each with its place: text to pretrain on, examples to fine-tune on.

    begins with [       one value per element of the array, whatever the file is called
    .jsonl              one value per line; blank lines do not count
    .json               values that follow one another

A line that is not JSON is passed on as such, for the lines behind it can be read all the same; behind a fault in an
array nothing can. Knows nothing of what the values mean.
"""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from llmtrain.data.files import suffix_of, text_blocks

SUFFIXES = (".jsonl", ".json")
_BLANKS = " \t\n"  # line ends are \n by now


class Place(NamedTuple):
    """Where a value stands, such as (a.jsonl, "line", 3); made into words only when something is wrong there."""

    path: Path
    what: str
    number: int

    def __str__(self) -> str:
        return f"{self.path}, {self.what} {self.number}"


def read_json(path: Path, encoding: str = "utf-8") -> Iterator[tuple[Place, Any]]:
    """The values of a file and their places; in place of a line that is not JSON, a `ValueError` that says why.

    Raises:
        ValueError: an array or a run of values that is not JSON, with the place, or a file that cannot be read.
    """
    blocks = text_blocks(path, encoding)
    beginning = ""
    while not beginning.strip(_BLANKS) and (block := next(blocks, "")):
        beginning += block
    blocks = chain([beginning], blocks)
    if beginning.lstrip(_BLANKS).startswith("["):
        yield from _elements(path, _Scanner(blocks))
    elif suffix_of(path) == ".jsonl":
        yield from _line_values(path, blocks)
    else:
        yield from _values(path, _Scanner(blocks))


def lines(blocks: Iterator[str]) -> Iterator[str]:
    """Lines that end in \\n and nothing else: JSON strings may hold U+2028 and the like."""
    held: list[str] = []
    for block in blocks:
        first, *others = block.split("\n")
        held.append(first)
        if others:
            yield "".join(held)
            yield from others[:-1]
            held = [others[-1]]
    yield "".join(held)


def _line_values(path: Path, blocks: Iterator[str]) -> Iterator[tuple[Place, Any]]:
    for number, line in enumerate(lines(blocks), start=1):
        if line and not line.isspace():
            yield Place(path, "line", number), _parsed(line)


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        return ValueError(f"{error.msg}, column {error.colno}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in brackets in brackets
        return ValueError(str(error))


def _elements(path: Path, scanner: "_Scanner") -> Iterator[tuple[Place, Any]]:
    """The elements of an array that is all there is in the file."""
    mark, number = scanner.take(), 0
    if scanner.peek() == "]":
        mark = scanner.take()
    while mark != "]":
        number += 1
        place = Place(path, "element", number)
        yield place, scanner.value(place)
        mark = scanner.take()
        if mark not in ("]", ","):
            found = f"found {mark!r} behind it, not a comma or ]" if mark else "the array is not closed"
            raise _not_json(f"{place}", f"{found}, line {scanner.line}")
    if scanner.peek():
        raise _not_json(f"{path}, line {scanner.line}", f"found {scanner.peek()!r} behind the end of the array")


def _values(path: Path, scanner: "_Scanner") -> Iterator[tuple[Place, Any]]:
    while scanner.peek():
        place = Place(path, "line", scanner.line)
        yield place, scanner.value(place)


class _Scanner:
    """Takes values and marks off a text that comes in blocks, holding little more than what it is about to take."""

    def __init__(self, blocks: Iterator[str]) -> None:
        self._blocks = blocks
        self._held, self._position, self._exhausted = "", 0, False
        self._decoder = json.JSONDecoder()
        self.line = 1  # of the position

    def peek(self) -> str:
        """The next character that is not blank; empty at the end."""
        while True:
            while self._position < len(self._held) and (mark := self._held[self._position]) in _BLANKS:
                self._move(self._position + 1)
            if self._position < len(self._held):
                return mark
            if not self._read():
                return ""

    def take(self) -> str:
        """Goes behind the next character that is not blank and returns it."""
        mark = self.peek()
        self._move(self._position + len(mark))
        return mark

    def value(self, place: Place) -> Any:
        """Goes behind the next value and returns it."""
        self.peek()
        wanted = 1  # how much to hold before trying; doubled when the value is longer, so that long ones stay linear
        while True:
            while len(self._held) - self._position < wanted and self._read():
                pass
            try:
                value, end = self._decoder.raw_decode(self._held, self._position)
            except (ValueError, RecursionError) as error:
                if self._exhausted:
                    raise _not_json(f"{place}", self._reason(error)) from error
                wanted = 2 * (len(self._held) - self._position)
                continue
            if end == len(self._held) and not self._exhausted:  # a number may go on in the next block
                wanted = len(self._held) - self._position + 1
                continue
            self._move(end)
            return value

    def _read(self) -> bool:
        """Holds one more block, if there is one."""
        block = next(self._blocks, None)
        if block is None:
            self._exhausted = True
            return False
        self._held, self._position = self._held[self._position :] + block, 0
        return True

    def _move(self, position: int) -> None:
        self.line += self._held.count("\n", self._position, position)
        self._position = position

    def _reason(self, error: Exception) -> str:
        """The decoder counts lines from the start of what is held; this counts them from the start of the file."""
        if not isinstance(error, json.JSONDecodeError):
            return str(error)
        return f"{error.msg}, line {self.line + self._held.count(chr(10), self._position, error.pos)}"


def _not_json(where: str, reason: str) -> ValueError:
    return ValueError(f"{where}: not JSON ({reason}): mend the file, nothing behind this place can be read")
