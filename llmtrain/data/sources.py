"""Where documents come from: files and folders, lists in memory, data sets of `datasets`.

All give pieces and a fingerprint.
Knows nothing of splits, tokens or shards, nor which corpora there are (`corpora`), which files a path stands for
(`files`) or how one is parsed (`readers`).
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from llmtrain.data.files import expand, find_files, hash_files
from llmtrain.data.readers import SUFFIXES, read_file
from llmtrain.data.text import Piece, document_pieces

GZIP_RATIO = 4  # how much text unpacks to, for estimates


class Source(Protocol):
    """A stream of documents that can be read again and again and always comes out the same."""

    name: str

    @property
    def title(self) -> str:
        """What a message calls it: its name, and the files if there are some."""

    @property
    def downloads(self) -> bool:
        """Whether every reading fetches it anew."""

    def fingerprint(self) -> str:
        """Names the content: another text, another fingerprint."""

    def pieces(self) -> Iterator[Piece]:
        """All documents, cut into pieces."""

    def size_bytes(self) -> int | None:
        """About how many bytes of text there are; None if that is not known before reading."""

    @property
    def size_is_exact(self) -> bool:
        """Whether it is no estimate: packed files unpack to more, and records may hold much beside the text."""


class ListSource:
    """Documents that fit into memory, made when they are first needed.

    Args:
        name: for reports and folder names.
        content_key: names the content, such as the hash of the wheel it is cut from and the version of the cutting.
        make: returns the documents.
    """

    downloads = False
    size_is_exact = True

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

    downloads = False

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
        self.files = find_files(paths, SUFFIXES)
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

    @property
    def size_is_exact(self) -> bool:
        return all(file.suffix.lower() in (".txt", ".md") for file in self.files)

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

    size_is_exact = False

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
        self._remote: list[str] = []
        if data_files:
            data_files = [data_files] if isinstance(data_files, str) else data_files
            local = {given: [file for file in expand(given) if file.is_file()] for given in data_files}
            self._files = [file for files in local.values() for file in files]
            self._remote = [given for given, files in local.items() if not files]
            self._arguments["data_files"] = [
                name for given, files in local.items() for name in (list(map(str, files)) or [given])
            ]
        elif Path(path).is_dir():
            self._files = sorted(file for file in Path(path).rglob("*") if file.is_file())

    @property
    def title(self) -> str:
        return _title(self.name, self._files)

    @property
    def downloads(self) -> bool:
        return self._streaming and (not self._files or bool(self._remote))

    def fingerprint(self) -> str:
        """From the arguments and, for local files, their content."""
        arguments = self._arguments
        if self._files:  # by their content, wherever they lie
            arguments = {**arguments, "data_files": self._remote or None}
        recipe = [
            "huggingface",
            arguments,
            self._text_field,
            self._max_documents,
            hash_files(self._files, self._data_dir),
        ]
        return _digest(recipe)

    def size_bytes(self) -> int | None:
        if self._files and not self._remote and self._max_documents is None:
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


def _digest(recipe: Any) -> str:
    return hashlib.sha256(json.dumps(recipe, ensure_ascii=False, sort_keys=True).encode()).hexdigest()
