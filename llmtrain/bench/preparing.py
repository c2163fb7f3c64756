"""Preparation: characters per second beside bare `tokenizers`, and peak memory of much text beside that of little.

The text is documents as JSON lines, the form in which the reader has most to do. Files lie in the page cache, so what
is measured is the program and not the disk. Does not know where documents come from. Imports no torch: the memory of a
preparation is measured in a process that has nothing else in it (`python -m llmtrain.bench.preparing`).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import llmtrain
from llmtrain.bench.rounds import Ratio, Rounds, take_turns
from llmtrain.data.corpora import open_corpus
from llmtrain.data.prepare import prepare
from llmtrain.data.shards import ShardSet
from llmtrain.tokenizer import Tokenizer
from llmtrain.training.resident import peak_bytes

logger = logging.getLogger(__name__)

FRAMEWORK, BARE, FAST = "llmtrain", "encode_batch", "encode_batch_fast"
BATCH_CHARACTERS = 1 << 20  # of one call of `encode_batch`; one call for all would spend its time on memory
MAX_TOKENS = 1 << 20  # of one document of the text
DISK_PER_TEXT = 2.0  # text, shards and some room, per byte of text


def documents_of(shards: ShardSet, tokenizer: Tokenizer, *, limit_bytes: int) -> list[str]:
    """The first documents of a shard set as text, up to about so many UTF-8 bytes, at least one.

    Of a document of more than a million tokens only the first million count.
    """
    documents: list[str] = []
    size = start = 0
    for end in map(int, shards.document_ends()):
        documents.append(tokenizer.decode(shards.read(start, min(end - start, MAX_TOKENS)).tolist()))
        start = end
        size += len(documents[-1].encode())
        if size >= limit_bytes:
            break
    return documents


def repeated(documents: Sequence[str], size: int) -> Iterator[str]:
    """The documents again and again until they have about `size` UTF-8 bytes."""
    if not any(documents):
        raise ValueError("there is no text to measure the preparation of: the corpus has only empty documents.")
    sizes = [len(document.encode()) for document in documents]
    written = 0
    while True:
        for document, length in zip(documents, sizes, strict=True):
            if written >= size:
                return
            written += length
            yield document


def write_jsonl(documents: Iterator[str], file: Path) -> None:
    """One object with a `text` per line."""
    with file.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps({"text": document}, ensure_ascii=False) + "\n" for document in documents)


def measure_preparing(
    documents: Sequence[str],
    tokenizer: Tokenizer,
    rounds: Rounds,
    *,
    size: int,
    folder: Path,
    report: Callable[[int, Mapping[str, float]], None] = lambda number, rates: None,
) -> Rounds:
    """Lets the whole preparation and bare `tokenizers` take turns; rates are characters per second.

    `encode_batch_fast` leaves out the offsets, as the preparation does; beside it only the rest of our work shows.

    Args:
        documents: The text, repeated to `size`.
        tokenizer: For both sides.
        rounds: Where the laps go.
        size: UTF-8 bytes of text for one lap.
        folder: An empty folder for the text and the shards.
        report: Called after each round; see `take_turns`.
    """
    check_space(folder, size)
    file = folder / "corpus.jsonl"
    write_jsonl(repeated(documents, size), file)
    texts = list(repeated(documents, size))
    characters = sum(map(len, texts))
    batches = list(batched(texts, BATCH_CHARACTERS))
    bare = _bare_tokenizer(tokenizer, folder)
    shards = folder / "data"

    def ours() -> float:
        prepared = _prepare_file(file, tokenizer, shards)
        assert abs(prepared["characters"] / characters - 1) < 0.01, "the preparation has read another text"
        return characters

    def encode(method: Callable[..., Any]) -> float:
        for batch in batches:
            method(batch, add_special_tokens=False)
        return characters

    sides: dict[str, Callable[[], float]] = {
        FRAMEWORK: ours,
        BARE: partial(encode, bare.encode_batch),
        FAST: partial(encode, bare.encode_batch_fast),
    }

    with _quiet("llmtrain.data"):
        take_turns(sides, rounds, between=lambda side: shutil.rmtree(shards, ignore_errors=True), report=report)
    return rounds


def _prepare_file(file: Path, tokenizer: Tokenizer, data_dir: Path) -> dict[str, Any]:
    corpus = open_corpus("files", data_dir=data_dir, paths=[str(file)], validation_fraction=0.05)
    prepared = prepare(corpus, tokenizer, data_dir=data_dir)
    assert not prepared.cached
    return prepared.stats


def _bare_tokenizer(tokenizer: Tokenizer, folder: Path) -> Any:
    import tokenizers

    tokenizer.save(folder / "tokenizer")
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))


def batched(texts: Sequence[str], characters: int) -> Iterator[list[str]]:
    """Runs of texts of at least so many characters each; the last one may be shorter."""
    batch: list[str] = []
    held = 0
    for text in texts:
        batch.append(text)
        held += len(text)
        if held >= characters:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def measure_memory(documents: Sequence[str], tokenizer: Tokenizer, *, small: int, large: int, folder: Path) -> Ratio:
    """Peak resident memory, in MB, of preparing `large` bytes of text over that of preparing `small` bytes.

    Each in a process of its own, one after the other, from the first import to the last byte written.
    """
    check_space(folder, large)
    tokenizer.save(folder / "tokenizer")
    peaks = {}
    for size in (small, large):
        file = folder / "corpus.jsonl"
        logger.info("memory: writing %.0f MB of text and preparing it", size / 1e6)
        write_jsonl(repeated(documents, size), file)
        peaks[size] = _peak_of_preparing(file, folder / "tokenizer", folder / "data") / 1e6
        shutil.rmtree(folder / "data")
        file.unlink()
    return Ratio([peaks[large]], [peaks[small]])


def _peak_of_preparing(file: Path, tokenizer: Path, data_dir: Path) -> int:
    root = str(Path(llmtrain.__file__).resolve().parents[1])  # a checkout may not be installed
    search = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "llmtrain.bench.preparing", str(file), str(tokenizer), str(data_dir)],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        env={**os.environ, "PYTHONPATH": search},
    )
    return int(done.stdout.split()[-1])


def check_space(folder: Path, size: int) -> None:
    """Refuses to begin what the disk cannot hold.

    Raises:
        ValueError: Too little room for `size` bytes of text and its shards.
    """
    needed, free = size * DISK_PER_TEXT, shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"the bench needs about {needed / 1e6:,.0f} MB on the disk of {folder}, which has {free / 1e6:,.0f} MB "
            "left: free some, or set paths.run_dir to another disk."
        )


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keeps the progress reports of a package off the screen."""
    package = logging.getLogger(name)
    level = package.level
    package.setLevel(logging.WARNING)
    try:
        yield
    finally:
        package.setLevel(level)


def main(arguments: Sequence[str]) -> None:
    """Prepares `arguments[0]` with the tokenizer in `arguments[1]` into `arguments[2]`; prints the peak memory."""
    file, tokenizer, data_dir = map(Path, arguments)
    _prepare_file(file, Tokenizer.load(tokenizer), data_dir)
    print(peak_bytes())


if __name__ == "__main__":
    main(sys.argv[1:])
