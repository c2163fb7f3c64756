"""Files: which ones a path stands for, their hashes, and their text in blocks, unpacked and decoded.

One rule for text to pretrain on and for examples to fine-tune on. Knows nothing of what the text means.
"""

import codecs
import glob
import gzip
import hashlib
import io
import json
import logging
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20


def suffix_of(path: Path) -> str:
    """The suffix that decides how a file is read: ".txt" for book.TXT and for book.txt.gz."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def find_files(paths: Sequence[str | Path], suffixes: Sequence[str]) -> list[Path]:
    """The readable files that paths stand for: in the order given, those of a folder or pattern by name.

    Hidden files and folders in a folder are passed over, and so are files of other kinds, with a warning.

    Args:
        paths: files, folders or patterns with `*`; `~` is the home folder.
        suffixes: of readable files, such as ".jsonl"; capitals and a .gz behind them do not matter.

    Raises:
        ValueError: nothing at a path, a file with an unknown extension, or no readable file at all.
    """
    kinds = f"{' '.join(suffixes)} (each also with .gz)"
    if not paths:
        raise ValueError("no path was given: set data.paths, for example data.paths=[corpus/]")
    found: dict[Path, None] = {}
    for given in paths:
        matches = expand(given)
        if not matches:
            raise ValueError(f"there is nothing at {given}: correct the path{_how_to_quote(str(given))}")
        for path in matches:
            _check_regular(path)
            if path.is_dir():
                found.update(dict.fromkeys(_readable_below(path, suffixes)))
            elif suffix_of(path) in suffixes:
                found[path] = None
            else:
                raise ValueError(f"{path} has an unknown extension: use {kinds}, or rename the file")
    if not found:
        raise ValueError(f"no file of the kinds {kinds} in {', '.join(map(str, paths))}")
    return list(found)


def _how_to_quote(given: str) -> str:
    """For a path with brackets or quotation marks, which settings take for a list: how it is written."""
    if not set(given) & set("[]\"'"):
        return ""
    return (
        " (one that holds brackets, quotation marks or commas is put in quotation marks inside the list, with a "
        'backslash before a quotation mark of its own: data.paths=["a[1].txt", "b\\"c.txt"]; the shell takes the whole '
        "in single quotation marks)"
    )


def _check_regular(path: Path) -> None:
    """Refuses what is neither file nor folder: text is read several times, which a pipe is not made for."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(
            f"{path} is a pipe or a device, and text is read more than once: write it to a file first and give that"
        )


def expand(given: str | Path) -> list[Path]:
    """What is at a path, or at the paths that fit a pattern, by name; nothing where there is nothing."""
    path = Path(given).expanduser()
    if path.exists():
        return [path]
    if any(character in str(given) for character in "*?["):
        return [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207 (absolute patterns)
    return []


def _readable_below(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    files = [
        f for f in folder.rglob("*") if f.is_file() and not any(p.startswith(".") for p in f.relative_to(folder).parts)
    ]
    readable = sorted(file for file in files if suffix_of(file) in suffixes)
    others = len(files) - len(readable)
    if others:
        logger.warning("%s: %d files of other kinds than %s are passed over", folder, others, " ".join(suffixes))
    return readable


def hash_files(files: Sequence[Path], data_dir: Path) -> list[str]:
    """The sha256 of each file's content.

    Reading everything again at each start would be slow, so the hashes are remembered with path, size, times of change
    and inode, as git does. A file changed in the last two seconds is not remembered: it may change again within the
    grain of the clock.
    """
    memory_file = data_dir / "file_hashes.json"
    try:
        memory = json.loads(memory_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        memory = {}
    memory = memory if isinstance(memory, dict) else {}
    hashes, learned = [], False
    for file in files:
        state = file.stat()
        stamp = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
        key = str(file.resolve())
        known = memory.get(key)
        if known and known[0] == stamp:
            hashes.append(known[1])
            continue
        digest = _sha256(file)
        hashes.append(digest)
        if time.time_ns() - max(state.st_mtime_ns, state.st_ctime_ns) > 2_000_000_000:
            memory[key], learned = [stamp, digest], True
    if learned:
        data_dir.mkdir(parents=True, exist_ok=True)
        beside = memory_file.with_name(f".{memory_file.name}.{os.getpid()}.partial")
        beside.write_text(json.dumps(memory, ensure_ascii=False), encoding="utf-8")
        beside.replace(memory_file)
    return hashes


def _sha256(file: Path) -> str:
    try:
        with file.open("rb") as bytes_of_it:
            return hashlib.file_digest(bytes_of_it, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"{path} cannot be read: {error.strerror or error}")


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked if it ends in .gz.

    Raises:
        ValueError: from within the `with` too, where a file turns out not to be readable, or not gzip to its end.
    """
    try:
        with path.open("rb") as file:
            if path.name.lower().endswith(".gz"):
                with gzip.open(file, "rb") as unpacked:
                    yield cast(BinaryIO, unpacked)
            else:
                yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a whole gzip file ({error}): fetch or pack it again") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def text_blocks(path: Path, encoding: str) -> Iterator[str]:
    """The text of a file in blocks, line ends made \\n, without its byte order mark.

    Raises:
        ValueError: a file that cannot be read, an unknown encoding, or bytes that are not of it, with their place.
    """
    decoder = io.IncrementalNewlineDecoder(_decoder(encoding), translate=True)
    fed, lines, first, more = 0, 0, True, True
    with opened(path) as file:
        while more:
            block = file.read(BLOCK_BYTES)
            fed, more = fed + len(block), bool(block)
            try:
                text = decoder.decode(block, final=not more)
            except UnicodeDecodeError as error:
                lines += _line_ends(error)
                raise _wrong_encoding(path, fed - len(error.object) + error.start, lines + 1, error) from error
            lines += text.count("\n")
            if first and text:
                text, first = text.removeprefix("\ufeff"), False
            if text:
                yield text


def _decoder(encoding: str) -> codecs.IncrementalDecoder:
    try:
        " ".encode(encoding)  # refuses hex, rot13 and the like, which are codecs too, but not of text
        return codecs.getincrementaldecoder(encoding)()
    except (LookupError, ValueError, TypeError) as error:  # a TypeError if the codec cannot decode bit by bit
        raise ValueError(f"data.encoding={encoding} is unknown: use a name that Python knows, such as utf-8") from error


def _line_ends(error: UnicodeDecodeError) -> int:
    """How many lines end in the good bytes before a bad one."""
    good = error.object[: error.start].decode(error.encoding, "replace")
    return good.replace("\r\n", "\n").replace("\r", "\n").count("\n")


def _wrong_encoding(path: Path, offset: int, line: int, error: UnicodeDecodeError) -> ValueError:
    byte = error.object[error.start]
    return ValueError(
        f"{path} is not {error.encoding.upper()}: byte 0x{byte:02x} at offset {offset}, line {line}; say what it is "
        "(data.encoding=gb18030, for example) or convert it with iconv"
    )
