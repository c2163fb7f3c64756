"""Reads the documents of one file as a stream: .txt .md .jsonl .json .csv .parquet, each also with .gz behind.

    .txt .md            one document
    .jsonl .json        one document per value, see `json_values`: an object with the text field, or a bare string
    .csv .parquet       one document per row, from the column of that name

No file is ever held whole. Knows nothing of folders, weights, splits or tokens.
"""

import csv
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from llmtrain.data.files import BLOCK_BYTES, opened, suffix_of, text_blocks
from llmtrain.data.json_values import Place, lines, read_json
from llmtrain.data.text import Piece, document_pieces, join_pieces


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
    yield from reader(path, text_field, encoding)


def _read_text(path: Path, text_field: str, encoding: str) -> Iterator[Piece]:
    return join_pieces(text_blocks(path, encoding))


def _read_json(path: Path, text_field: str, encoding: str) -> Iterator[Piece]:
    for place, value in read_json(path, encoding):
        if isinstance(value, ValueError):
            raise ValueError(
                f"{place}: not JSON ({value}): mend it or take it out, or name the file .txt if it is plain text"
            )
        yield from document_pieces(_field(value, text_field, place))


def _read_csv(path: Path, text_field: str, encoding: str) -> Iterator[Piece]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default refuses fields above 131,072 characters
    rows = csv.reader((line + "\n" for line in lines(text_blocks(path, encoding))), strict=True)
    names: list[str] = []
    column = -1
    line = 1  # where the row at hand begins; it ends further down if a field holds line ends
    try:
        for row in rows:
            if row and column < 0:
                names, column = row, _column(row, text_field, path)
            elif row:
                _check_row(row, names, Place(path, "line", line))
                yield from document_pieces(row[column])
            line = rows.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {line}: the row that begins there is not CSV ({error}): mend it or take it out"
        ) from error
    if column < 0:
        raise _no_field(str(path), text_field, [], "column")


def _column(names: list[str], text_field: str, path: Path) -> int:
    """Which of the columns holds the text."""
    if names.count(text_field) > 1:
        raise ValueError(f"{path} has {names.count(text_field)} columns {text_field!r}: rename all but one")
    if text_field not in names:
        raise _no_field(str(path), text_field, names, "column")
    return names.index(text_field)


def _check_row(row: list[str], names: list[str], place: Place) -> None:
    """A row with other fields than the header has lost a comma's quotes: which field is the text cannot be told."""
    if len(row) != len(names):
        raise ValueError(
            f"{place}: {len(row)} fields under a header of {len(names)}: put fields with commas or line ends in "
            "quotes, or take the row out"
        )


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
                    yield from document_pieces(_text(value, text_field, Place(path, "row", row)))
        except pyarrow.ArrowException as error:
            raise ValueError(
                f"{path} is not a parquet file that can be read{f' beyond row {row}' if row else ''} ({error}): "
                "write or fetch it again"
            ) from error


@contextmanager
def _seekable(path: Path) -> Iterator[Path | BinaryIO]:
    """Parquet is read from its end: a packed file is unpacked to disk first."""
    with opened(path) as file, tempfile.TemporaryFile() as unpacked:
        if not path.name.lower().endswith(".gz"):
            yield path
            return
        shutil.copyfileobj(file, unpacked)
        unpacked.seek(0)
        yield unpacked


def _field(value: Any, text_field: str, place: Place) -> str:
    """The text of a JSON value: the value itself, or the field of an object."""
    if isinstance(value, dict):
        if text_field not in value:
            raise _no_field(str(place), text_field, list(value), "field")
        return _text(value[text_field], text_field, place)
    if value is not None and not isinstance(value, str):
        raise ValueError(
            f'{place}: found {_KINDS[type(value)]}, expected {{"{text_field}": "…"}} or a text in quotes: '
            "mend it or take it out"
        )
    return value or ""


# What JSON calls them.
_KINDS = {list: "a list", dict: "an object", int: "a number", float: "a number", bool: "true or false"}


def _text(value: Any, text_field: str, place: Place) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        kind = _KINDS.get(type(value), type(value).__name__)
        raise ValueError(f"{place}: {text_field!r} holds {kind}, not text: choose another data.text_field, or mend it")
    return value


def _no_field(where: str, text_field: str, names: list[str], what: str) -> ValueError:
    there = ", ".join(names[:12]) or "none"
    return ValueError(f"{where}: no {what} {text_field!r} (there is: {there}): set data.text_field")


_READERS: dict[str, Callable[[Path, str, str], Iterator[Piece]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
SUFFIXES = tuple(_READERS)
