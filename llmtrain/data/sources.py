"""Where documents come from: files and folders, lists in memory, data sets of `datasets`.

All give pieces and a fingerprint.
Knows nothing of splits, tokens or shards, nor which corpora there are (`corpora`) or how a file is parsed (`readers`).
"""

import glob
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from llmtrain.data.readers import SUFFIXES, is_readable, read_file
from llmtrain.data.text import Piece, document_pieces

logger = logging.getLogger(__name__)

GZIP_RATIO = 4  # how much text unpacks to, for estimates


class Source(Protocol):
    """A stream of documents that can be read again and again and always comes out the same."""

    name: str

    @property
    def title(self) -> str:
        """What a message calls it: its name, and the files if there are some."""

    def fingerprint(self) -> str:
        """Names the content: another text, another fingerprint."""

    def pieces(self) -> Iterator[Piece]:
        """All documents, cut into pieces."""

    def size_bytes(self) -> int | None:
        """About how many bytes of text there are; None if that is not known before reading."""


class ListSource:
    """Documents that fit into memory, made when they are first needed.

    Args:
        name: for reports and folder names.
        content_key: names the content, such as the hash of the wheel it is cut from and the version of the cutting.
        make: returns the documents.
    """

    def __init__(self, name: str, content_key: str, make: Callable[[], Sequence[str]]) -> None:
        self.name = name
        self._content_key = content_key
        self._make = make
        self._documents: Sequence[str] | None = None

    @property
    def title(self) -> str:
        return repr(self.name)

    def fingerprint(self) -> str:
        return hashlib.sha256(f"list\n{self._content_key}".encode()).hexdigest()

    def pieces(self) -> Iterator[Piece]:
        for document in self._loaded():
            yield from document_pieces(document)

    def size_bytes(self) -> int | None:
        return sum(len(document.encode()) for document in self._loaded())

    def _loaded(self) -> Sequence[str]:
        if self._documents is None:
            self._documents = self._make()
        return self._documents


class FileSource:
    """Files in the order of their paths; folders stand for every readable file below them.

    Args:
        paths: files, folders or patterns with `*`.
        data_dir: where the hashes of files are remembered.
        text_field: the field or column that holds the text in .jsonl, .json, .csv and .parquet.
        encoding: of everything but parquet.

    Raises:
        ValueError: nothing there, an unknown extension, or no readable file.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        data_dir: str | Path,
        name: str = "files",
        text_field: str = "text",
        encoding: str = "utf-8",
    ) -> None:
        self.name = name
        self.files = find_files(paths)
        self._data_dir = Path(data_dir)
        self._text_field = text_field
        self._encoding = encoding

    @property
    def title(self) -> str:
        return _title(self.name, self.files)

    def fingerprint(self) -> str:
        """From the content of the files, not their paths or dates: moved or touched files do not count as changed."""
        hashes = hash_files(self.files, self._data_dir)
        recipe = [[file.name.lower(), digest] for file, digest in zip(self.files, hashes, strict=True)]
        return _digest(["files", self._text_field, self._encoding, recipe])

    def pieces(self) -> Iterator[Piece]:
        for file in self.files:
            yield from read_file(file, text_field=self._text_field, encoding=self._encoding)

    def size_bytes(self) -> int | None:
        return sum(f.stat().st_size * (GZIP_RATIO if f.suffix.lower() == ".gz" else 1) for f in self.files)


class HuggingFaceSource:
    """A split of a data set that `datasets.load_dataset` can load, from the hub or from local files.

    Args:
        path: a name on the hub, a folder, or a builder ("json", "parquet", "csv", "text") together with data_files.
        subset: the configuration of the data set, if it has several.
        split: for example "train" or "train[:10%]".
        streaming: reads as it goes instead of downloading all first.
        revision: a commit or tag of the hub; without one, a data set that changes there is not noticed.
        data_files: the files of a builder, or some files of a data set.
        max_documents: takes only the first so many.
    """

    def __init__(
        self,
        path: str,
        *,
        data_dir: str | Path,
        name: str = "huggingface",
        subset: str | None = None,
        split: str = "train",
        streaming: bool = True,
        revision: str | None = None,
        data_files: Sequence[str] | None = None,
        text_field: str = "text",
        max_documents: int | None = None,
    ) -> None:
        self.name = name
        self._data_dir = Path(data_dir)
        self._text_field = text_field
        self._streaming = streaming
        self._max_documents = max_documents
        self._arguments: dict[str, Any] = {"path": path, "name": subset, "split": split, "revision": revision}
        self._files: list[Path] = []
        if data_files:
            local = [file for pattern in data_files for file in _expand(pattern)]
            self._files = [file for file in local if file.is_file()]
            self._arguments["data_files"] = [str(file) for file in self._files] or list(data_files)
        elif Path(path).is_dir():
            self._files = sorted(file for file in Path(path).rglob("*") if file.is_file())

    @property
    def title(self) -> str:
        return _title(self.name, self._files)

    def fingerprint(self) -> str:
        """From the arguments and, for local files, their content."""
        arguments = {**self._arguments, "data_files": None} if self._files else self._arguments
        recipe = [
            "huggingface",
            arguments,
            self._text_field,
            self._max_documents,
            hash_files(self._files, self._data_dir),
        ]
        return _digest(recipe)

    def size_bytes(self) -> int | None:
        if self._files and self._max_documents is None:
            return sum(f.stat().st_size * (GZIP_RATIO if f.suffix == ".gz" else 1) for f in self._files)
        return None

    def pieces(self) -> Iterator[Piece]:
        where = self._arguments["path"]
        count = 0
        for batch in self._load().iter(batch_size=64):
            for value in batch[self._text_field]:
                if self._max_documents is not None and count >= self._max_documents:
                    return
                count += 1
                if value is not None and not isinstance(value, str):
                    kind = type(value).__name__
                    raise ValueError(
                        f"{where}: {self._text_field!r} holds {kind}, not text: choose another data.text_field"
                    )
                yield from document_pieces(value or "")

    def _load(self) -> Any:
        import datasets

        where = f"data set {self._arguments['path']!r}"
        datasets.disable_progress_bars()
        try:
            loaded = datasets.load_dataset(**self._arguments, streaming=self._streaming)
            columns = loaded.column_names
            if columns is None:
                columns = list(next(iter(loaded.take(1)), {}))
        except Exception as error:  # datasets, huggingface_hub, httpx and pyarrow each have their own
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise ValueError(f"{where} cannot be loaded: {reason}") from error
        if self._text_field not in columns:
            raise ValueError(
                f"{where} has no column {self._text_field!r} (there is: {', '.join(columns)}): set data.text_field"
            )
        return loaded.select_columns([self._text_field])


def _title(name: str, files: Sequence[Path], shown: int = 3) -> str:
    """`'files' (a.txt, b.txt, c.txt and 2 more)`, or the name alone where there are no files."""
    more = f" and {len(files) - shown} more" if len(files) > shown else ""
    return f"{name!r} ({', '.join(map(str, files[:shown]))}{more})" if files else repr(name)


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """The readable files that paths stand for: in the order given, those of a folder or pattern by name.

    Hidden files and folders are passed over, and so are files of other kinds in a folder, with a warning.

    Raises:
        ValueError: nothing at a path, a file with an unknown extension, or no readable file at all.
    """
    if not paths:
        raise ValueError("no path was given: set data.paths, for example data.paths=[corpus/]")
    found: dict[Path, None] = {}
    for given in paths:
        matches = _expand(given)
        if not matches:
            raise ValueError(f"there is nothing at {given}: correct data.paths")
        for path in matches:
            if path.is_dir():
                found.update(dict.fromkeys(_readable_below(path)))
            elif is_readable(path):
                found[path] = None
            else:
                raise ValueError(
                    f"{path} has an unknown extension: use {' '.join(SUFFIXES)}, each also with .gz; "
                    "a text with another name can be renamed to .txt"
                )
    if not found:
        raise ValueError(f"no {' '.join(SUFFIXES)} file (each also with .gz) in {', '.join(map(str, paths))}")
    return list(found)


def _expand(given: str | Path) -> list[Path]:
    path = Path(given).expanduser()
    if path.exists():
        return [path]
    if any(character in str(given) for character in "*?["):
        return [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207 (absolute patterns)
    return []


def _readable_below(folder: Path) -> list[Path]:
    files = [
        f for f in folder.rglob("*") if f.is_file() and not any(p.startswith(".") for p in f.relative_to(folder).parts)
    ]
    readable = sorted(file for file in files if is_readable(file))
    others = len(files) - len(readable)
    if others:
        logger.warning("%s: %d files of other kinds than %s are passed over", folder, others, " ".join(SUFFIXES))
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
    hashes, learned = [], False
    for file in files:
        state = file.stat()
        stamp = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
        key = str(file.resolve())
        known = memory.get(key)
        if known and known[0] == stamp:
            hashes.append(known[1])
            continue
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        hashes.append(digest)
        if time.time_ns() - max(state.st_mtime_ns, state.st_ctime_ns) > 2_000_000_000:
            memory[key], learned = [stamp, digest], True
    if learned:
        data_dir.mkdir(parents=True, exist_ok=True)
        beside = memory_file.with_name(f".{memory_file.name}.{os.getpid()}.partial")
        beside.write_text(json.dumps(memory, ensure_ascii=False), encoding="utf-8")
        beside.replace(memory_file)
    return hashes


def _digest(recipe: Any) -> str:
    return hashlib.sha256(json.dumps(recipe, ensure_ascii=False, sort_keys=True).encode()).hexdigest()
