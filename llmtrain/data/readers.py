"""Reads the documents of one file as a stream: .txt .md .jsonl .json .csv .parquet, each also with .gz behind.

    .txt .md            one document
    .jsonl              one document per line: an object with the text field, or a bare string
    .json               one document per element of the array (or per value, if values follow one another)
    .csv .parquet       one document per row, from the column of that name

No file is ever held whole. Knows nothing of folders, weights, splits or tokens.
"""

import codecs
import csv
import gzip
import io
import json
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from llmtrain.data.text import Piece, document_pieces, join_pieces

BLOCK_BYTES = 1 << 20

_Place = tuple[Path, str, int]  # such as (a.jsonl, "line", 3); made into words only when something is wrong there


def suffix_of(path: Path) -> str:
    """The suffix that decides how a file is read: ".txt" for book.TXT and for book.txt.gz."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def is_readable(path: Path) -> bool:
    return suffix_of(path) in _READERS


def read_file(path: Path, *, text_field: str = "text", encoding: str = "utf-8") -> Iterator[Piece]:
    """The documents of one file, as pieces.

    Args:
        path: its suffix says what it is.
        text_field: the field or column that holds the text (not used for .txt and .md).
        encoding: of everything but parquet.

    Raises:
        ValueError: an unknown suffix, or content that cannot be read; says where.
    """
    reader = _READERS.get(suffix_of(path))
    if reader is None:
        raise ValueError(
            f"{path} has the unknown extension {path.suffix!r}: use {' '.join(SUFFIXES)}, each also with .gz"
        )
    try:
        yield from reader(path, text_field, encoding)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a whole gzip file ({error}): fetch or pack it again") from error
    except LookupError as error:  # from the codecs
        raise ValueError(f"data.encoding={encoding} is unknown: use a name that Python knows, such as utf-8") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked if it ends in .gz."""
    with path.open("rb") as file:
        if path.name.lower().endswith(".gz"):
            with gzip.open(file, "rb") as unpacked:
                yield cast(BinaryIO, unpacked)
        else:
            yield file


def _read_text(path: Path, text_field: str, encoding: str) -> Iterator[Piece]:
    return join_pieces(_blocks(path, encoding))


def _blocks(path: Path, encoding: str) -> Iterator[str]:
    """The text of a file in blocks, line ends made \\n, without its byte order mark."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(encoding)(), translate=True)
    fed, first, more = 0, True, True
    with _opened(path) as file:
        while more:
            block = file.read(BLOCK_BYTES)
            fed, more = fed + len(block), bool(block)
            try:
                text = decoder.decode(block, final=not more)
            except UnicodeDecodeError as error:
                raise _wrong_encoding(path, fed - len(error.object) + error.start, error) from error
            if first and text:
                text, first = text.removeprefix("\ufeff"), False
            if text:
                yield text


def _wrong_encoding(path: Path, offset: int, error: UnicodeDecodeError) -> ValueError:
    byte = error.object[error.start]
    return ValueError(
        f"{path} is not {error.encoding.upper()}: byte 0x{byte:02x} at offset {offset}; say what it is "
        "(data.encoding=gb18030, for example) or convert it with iconv"
    )


def _read_jsonl(path: Path, text_field: str, encoding: str) -> Iterator[Piece]:
    for number, line in enumerate(_lines(path, encoding), start=1):
        if line.isspace() or not line:
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _not_json(f"{path}, line {number}", str(error)) from error
        yield from document_pieces(_field(value, text_field, (path, "line", number)))


def _lines(path: Path, encoding: str) -> Iterator[str]:
    """Lines that end in \\n and nothing else: JSON strings may hold U+2028 and the like."""
    held: list[str] = []
    for block in _blocks(path, encoding):
        first, *others = block.split("\n")
        held.append(first)
        if others:
            yield "".join(held)
            yield from others[:-1]
            held = [others[-1]]
    yield "".join(held)


def _read_json(path: Path, text_field: str, encoding: str) -> Iterator[Piece]:
    for number, value in enumerate(_json_values(path, encoding), start=1):
        yield from document_pieces(_field(value, text_field, (path, "element", number)))


def _json_values(path: Path, encoding: str) -> Iterator[Any]:
    """The elements of a top-level array, or the values of a file that holds one after another."""
    decoder = json.JSONDecoder()
    blocks = _blocks(path, encoding)
    held, position, in_array, exhausted = "", 0, None, False
    number = 1  # of the next value
    wanted = 1  # how much to hold before trying again; doubled when a value is longer, so that long values stay linear
    while True:
        while not exhausted and len(held) - position < wanted:
            block = next(blocks, None)
            if block is None:
                exhausted = True
            else:
                held, position = held[position:] + block, 0
        separators = " \t\n," if in_array else " \t\n"
        while position < len(held) and held[position] in separators:
            position += 1
        if position == len(held):
            if not exhausted:
                continue
            if in_array:
                raise _not_json(str(path), "the array is not closed")
            return
        if in_array is None:
            in_array = held[position] == "["
            position += in_array
            continue
        if in_array and held[position] == "]":
            return
        try:
            value, end = decoder.raw_decode(held, position)
        except (ValueError, RecursionError) as error:
            if exhausted:
                raise _not_json(f"{path}, element {number}", str(error)) from error
            wanted = 2 * (len(held) - position)
            continue
        if end == len(held) and not exhausted:  # a number may go on in the next block
            wanted = len(held) - position + 1
            continue
        yield value
        number += 1
        position, wanted = end, 1


def _not_json(where: str, error: str) -> ValueError:
    return ValueError(f"{where}: not JSON ({error}): mend it or take it out, or name the file .txt if it is plain text")


def _read_csv(path: Path, text_field: str, encoding: str) -> Iterator[Piece]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default refuses fields above 131,072 characters
    reader = csv.DictReader(_lines_with_end(path, encoding))
    if text_field not in (reader.fieldnames or []):
        raise _no_field(str(path), text_field, list(reader.fieldnames or []), "column")
    try:
        for row in reader:
            yield from document_pieces(row[text_field] or "")
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: not CSV ({error}): mend it or take it out") from error


def _lines_with_end(path: Path, encoding: str) -> Iterator[str]:
    return (line + "\n" for line in _lines(path, encoding))


def _read_parquet(path: Path, text_field: str, encoding: str) -> Iterator[Piece]:
    import pyarrow
    import pyarrow.parquet

    row = 0
    with _seekable(path) as file:
        try:
            # Without pre-buffering and with a buffer of its own, a row group of any size passes through page by page.
            table = pyarrow.parquet.ParquetFile(file, buffer_size=BLOCK_BYTES, pre_buffer=False)
            if text_field not in table.schema_arrow.names:
                raise _no_field(str(path), text_field, table.schema_arrow.names, "column")
            for batch in table.iter_batches(batch_size=256, columns=[text_field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield from document_pieces(_text(value, text_field, (path, "row", row)))
        except pyarrow.ArrowException as error:
            raise ValueError(
                f"{path} is not a parquet file that can be read{f' beyond row {row}' if row else ''} ({error}): "
                "write or fetch it again"
            ) from error


@contextmanager
def _seekable(path: Path) -> Iterator[Path | BinaryIO]:
    """Parquet is read from its end: a packed file is unpacked to disk first."""
    if not path.name.lower().endswith(".gz"):
        yield path
        return
    with tempfile.TemporaryFile() as unpacked:
        with _opened(path) as file:
            shutil.copyfileobj(file, unpacked)
        unpacked.seek(0)
        yield unpacked


def _field(value: Any, text_field: str, place: _Place) -> str:
    """The text of a JSON value: the value itself, or the field of an object."""
    if isinstance(value, dict):
        if text_field not in value:
            raise _no_field(_named(place), text_field, list(value), "field")
        return _text(value[text_field], text_field, place)
    if value is not None and not isinstance(value, str):
        raise ValueError(
            f'{_named(place)}: found {_KINDS[type(value)]}, expected {{"{text_field}": "…"}} or a text in quotes: '
            "mend it or take it out"
        )
    return value or ""


# What JSON calls them.
_KINDS = {list: "a list", dict: "an object", int: "a number", float: "a number", bool: "true or false"}


def _text(value: Any, text_field: str, place: _Place) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        kind = _KINDS.get(type(value), type(value).__name__)
        raise ValueError(
            f"{_named(place)}: {text_field!r} holds {kind}, not text: choose another data.text_field, or mend it"
        )
    return value


def _named(place: _Place) -> str:
    path, what, number = place
    return f"{path}, {what} {number}"


def _no_field(where: str, text_field: str, names: list[str], what: str) -> ValueError:
    there = ", ".join(names[:12]) or "none"
    return ValueError(f"{where}: no {what} {text_field!r} (there is: {there}): set data.text_field")


_READERS: dict[str, Callable[[Path, str, str], Iterator[Piece]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
SUFFIXES = tuple(_READERS)
