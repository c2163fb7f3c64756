"""Documents become token shards: read ahead, tokenized on all cores, written behind, kept under a fingerprint.

    <data_dir>/shards/<name>-<fingerprint>/train/   (train-00, train-01, … if the corpus has several weighted sources)
                                          /val/
                                          /manifest.json, written last

Only a few batches of text are in memory, however large the corpus. Interrupted work lies in `<folder>.partial` and is
continued; a second process waits for the first. Knows nothing of settings files, windows or models.
"""

import errno
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import itemgetter
from pathlib import Path
from typing import Any

from llmtrain.data.corpora import Corpus
from llmtrain.data.locking import locked
from llmtrain.data.shards import MANIFEST, ShardSet, token_dtype
from llmtrain.data.sources import Source
from llmtrain.data.tokenizing import Addressed, tokenize_stream
from llmtrain.data.writer import ShardWriter, write_json
from llmtrain.tokenizer import Tokenizer, ensure_tokenizer

logger = logging.getLogger(__name__)

PREPARATION = 1
"""Counted up when the same sources, tokenizer and settings come to make other shards."""

SAMPLE_CHARACTERS = 10_000_000
"""A vocabulary is learned from at most so many characters, spread evenly over the corpus. Learning holds every distinct
pre-token, and in Chinese nearly every clause is one: at worst about 300 MB for a million characters."""


@dataclass(frozen=True)
class PreparedCorpus:
    """The shards of a corpus.

    Attributes:
        train: a shard set per source and its weight.
        val: one shard set.
        fingerprint: names sources, tokenizer and settings.
        folder: where it lies.
        stats: train_tokens, val_tokens, documents, characters, utf8_bytes, characters_per_token; and seconds,
            tokens_per_second, characters_per_second of the run that made it.
        cached: whether it was there already.
    """

    train: list[tuple[ShardSet, float]]
    val: ShardSet
    fingerprint: str
    folder: Path
    stats: dict[str, Any]
    cached: bool


def corpus_tokenizer(
    corpus: Corpus,
    *,
    data_dir: str | Path,
    kind: str = "bpe",
    vocab_size: int | None = None,
    path: str | Path | None = None,
    pattern: str | None = None,
    sample_characters: int = SAMPLE_CHARACTERS,
    sequence_length: int | None = None,
    learn: bool = True,
) -> tuple[Tokenizer, Path]:
    """The tokenizer for a corpus and its folder; a vocabulary is learned from the part that is trained on, once.

    Args:
        corpus: from `open_corpus`.
        sample_characters: of a larger corpus a vocabulary is learned from so many characters, spread evenly over it.
        sequence_length: of the windows to be cut; nothing is learned from a corpus that cannot fill one of them.
        learn: learn a vocabulary that is not there yet, instead of raising `LookupError`.
        data_dir, kind, vocab_size, path, pattern: as in `llmtrain.tokenizer.ensure_tokenizer`, and so are the errors.
    """
    if sample_characters < 1:
        raise ValueError(f"tokenizer.sample_characters={sample_characters}: give a number of characters, 1 or more")

    def documents() -> Iterator[str]:
        if not learn:
            raise LookupError(f"the vocabulary of the corpus {corpus.name!r} is not learned yet")
        if sequence_length is not None:
            _check_length(corpus, sequence_length)
        return _training_texts(corpus, sample_characters)

    return ensure_tokenizer(
        kind=kind,
        data_dir=data_dir,
        vocab_size=vocab_size,
        path=path,
        pattern=pattern,
        documents=documents,
        documents_fingerprint="" if kind in ("byte", "file") else f"{corpus.fingerprint()} {sample_characters}",
    )


def find_prepared(
    corpus: Corpus,
    *,
    data_dir: str | Path,
    tokenizer: Tokenizer | None = None,
    sequence_length: int | None = None,
    **settings: Any,
) -> tuple[Tokenizer, PreparedCorpus] | None:
    """The tokenizer and the shards of a corpus, if both are there already; nothing is fetched or learned.

    Args:
        corpus: from `open_corpus`.
        data_dir: as for `prepare`.
        tokenizer: the tokenizer; without one it is that of `settings`, which are `corpus_tokenizer`'s.
        sequence_length: of the windows to be cut; every source must fill one.

    Raises:
        ValueError: the prepared corpus is too short.
    """
    if not (Path(data_dir) / "shards").is_dir():
        return None
    if tokenizer is None:
        try:
            tokenizer, _ = corpus_tokenizer(corpus, data_dir=data_dir, learn=False, **settings)
        except LookupError:
            return None
    folder = _place(corpus, tokenizer, data_dir)[0]
    return (tokenizer, _open(folder, corpus, sequence_length, cached=True)) if (folder / MANIFEST).is_file() else None


def prepare(
    corpus: Corpus, tokenizer: Tokenizer, *, data_dir: str | Path, sequence_length: int | None = None
) -> PreparedCorpus:
    """Returns the shards of a corpus, made now unless they are there already.

    Args:
        corpus: from `open_corpus`.
        tokenizer: what makes the ids.
        data_dir: shards lie in `<data_dir>/shards/`.
        sequence_length: of the windows to be cut from them; every source must fill one.

    Raises:
        ValueError: an empty, unreadable or too short corpus, or no disk space.
    """
    folder, fingerprint = _place(corpus, tokenizer, data_dir)
    if (folder / MANIFEST).is_file():
        return _open(folder, corpus, sequence_length, cached=True)
    with locked(folder.with_name(f".{folder.name}.lock"), work=f"preparing {folder}"):
        cached = (folder / MANIFEST).is_file()
        if not cached:
            try:
                _make(folder, corpus, tokenizer, fingerprint, sequence_length)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise ValueError(
                    f"no space is left on the disk of {folder.parent}: free some and repeat the command, which goes on "
                    "from where it stopped, or set paths.data_dir to another disk"
                ) from error
        return _open(folder, corpus, sequence_length, cached=cached)


def _place(corpus: Corpus, tokenizer: Tokenizer, data_dir: str | Path) -> tuple[Path, str]:
    """Where the shards lie, and their fingerprint."""
    recipe = [PREPARATION, corpus.fingerprint(), tokenizer.hash, tokenizer.eos_id, *tokenizer.begin([])]
    fingerprint = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()
    return Path(data_dir) / "shards" / f"{corpus.name}-{fingerprint[:12]}", fingerprint


def _open(folder: Path, corpus: Corpus, sequence_length: int | None, *, cached: bool) -> PreparedCorpus:
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    names = _train_names(corpus)
    train = [
        (ShardSet.open(folder / name), weighted.weight) for name, weighted in zip(names, corpus.sources, strict=True)
    ]
    for (shards, _), weighted in zip(train, corpus.sources, strict=True):
        if sequence_length is not None and shards.num_tokens <= sequence_length:
            raise _too_short(weighted.source.title, str(shards.num_tokens), sequence_length)
    val = ShardSet.open(folder / "val")
    return PreparedCorpus(train, val, manifest["fingerprint"], folder, manifest["stats"], cached)


def _train_names(corpus: Corpus) -> list[str]:
    count = len(corpus.sources)
    return ["train"] if count == 1 else [f"train-{index:02d}" for index in range(count)]


def _make(folder: Path, corpus: Corpus, tokenizer: Tokenizer, fingerprint: str, sequence_length: int | None) -> None:
    """Writes all shard folders of a corpus into `<folder>.partial`, then gives that its final name."""
    beside = folder.with_name(f"{folder.name}.partial")
    _check_space(corpus, tokenizer, beside)
    if (beside / MANIFEST).is_file():  # interrupted between the last two lines of this function
        beside.rename(folder)
        return
    progress_file = beside / "progress.json"
    progress: dict[str, Any] = {"pieces": 0, "seconds": 0.0, "writers": {}}
    if progress_file.is_file():
        progress = json.loads(progress_file.read_text(encoding="utf-8"))
        logger.info("going on with the preparation that was interrupted after %.0f s", progress["seconds"])
    names = [*_train_names(corpus), "val"]
    writers = [
        ShardWriter(beside / name, vocab_size=tokenizer.vocab_size, state=progress["writers"].get(name))
        for name in names
    ]
    start = time.perf_counter() - progress["seconds"]

    def save(pieces: int) -> None:
        states = {name: writer.save_state() for name, writer in zip(names, writers, strict=True)}
        write_json(progress_file, {"pieces": pieces, "seconds": time.perf_counter() - start, "writers": states})

    try:
        expected = _expected_bytes(corpus)
        tokenize_stream(
            _addressed(corpus), tokenizer, writers, done=progress["pieces"], save=save, expected_bytes=expected
        )
    finally:
        for writer in writers:
            writer.close()
    seconds = time.perf_counter() - start
    _check_filled(corpus, writers, sequence_length or 0)
    shared = {"tokenizer_hash": tokenizer.hash, "fingerprint": fingerprint}
    sources = [weighted.source for weighted in corpus.sources]
    for index, (name, writer) in enumerate(zip(names, writers, strict=True)):
        split = "val" if name == "val" else "train"
        held = sources[index : index + 1] if split == "train" else list(corpus.validation_sources) or sources
        entries = [{"name": source.name, "fingerprint": source.fingerprint()} for source in held]
        writer.finish({"name": corpus.name, "split": split, "sources": entries, **shared})
    progress_file.unlink(missing_ok=True)
    stats = _stats(writers, seconds, special=1 + len(tokenizer.begin([])))
    write_json(beside / MANIFEST, {"name": corpus.name, "folders": names, "stats": stats, **shared})
    shutil.rmtree(folder, ignore_errors=True)  # only what has no manifest can be there
    beside.rename(folder)


def _addressed(corpus: Corpus) -> Iterator[Addressed]:
    """All pieces of a corpus, source after source, each with the number of its writer; validation is the last one."""
    val = len(corpus.sources)
    begins = True  # no piece stands between those of one document
    for index, (weighted, split) in enumerate(zip(corpus.sources, corpus.splits, strict=True)):
        for text, ends_document, held_out in split(weighted.source.pieces()):
            yield Addressed(text, begins, ends_document, val if held_out else index)
            begins = ends_document
    for source in corpus.validation_sources:
        for text, ends_document in source.pieces():
            yield Addressed(text, begins, ends_document, val)
            begins = ends_document


def _training_texts(corpus: Corpus, limit: int) -> Iterator[str]:
    """The text that is trained on; of more than `limit` characters, pieces spread evenly over it.

    How much there is shows at the end only (files may be packed, or hold more than text), and the text is read once: so
    each piece has a rank, those below a bound are kept, and the bound goes down whenever there are too many.
    """
    val = len(corpus.sources)
    training = (piece.text for piece in _addressed(corpus) if piece.writer != val)
    kept: list[tuple[int, int, str]] = []  # a heap of (−rank, number, text): the next to go is in front
    bound, characters = 1 << 64, 0
    for number, text in enumerate(training):
        # Multiples of the golden ratio, modulo 1: those below any bound are spread more evenly than by chance, and
        # follow no period that the corpus may have.
        rank = number * 0x9E3779B97F4A7C15 % (1 << 64)
        if rank >= bound:
            continue
        heappush(kept, (-rank, number, text))
        characters += len(text)
        while characters > limit and len(kept) > 1:
            bound = -kept[0][0]
            characters -= len(heappop(kept)[2])
    if bound < 1 << 64:
        logger.info("the vocabulary is learned from a sample of %.1f M characters", characters / 1e6)
    kept.sort(key=itemgetter(1))
    return (text for _, _, text in kept)


def _check_length(corpus: Corpus, sequence_length: int) -> None:
    """Refuses a corpus that cannot fill one training window, before a tokenizer is learned from it.

    No token of ours is shorter than a byte, so bytes and ends of documents bound the tokens from above. Of a corpus
    that is long enough only the beginning is read.

    Raises:
        ValueError: a source has too little text to train on, or none.
    """
    for weighted, split in zip(corpus.sources, corpus.splits, strict=True):
        most = 0
        for text, ends_document, held_out in split(weighted.source.pieces()):
            if not held_out:
                most += len(text.encode()) + ends_document
            if most > sequence_length:
                break
        else:
            raise _too_short(weighted.source.title, f"at most {most}", sequence_length)


def _too_short(title: str, tokens: str, sequence_length: int) -> ValueError:
    return ValueError(
        f"data.sequence_length={sequence_length} needs a training text of at least {sequence_length + 1} tokens, but "
        f"the corpus {title} has {tokens}: lower data.sequence_length or add text"
    )


def held_out_texts(corpus: Corpus) -> Iterator[str]:
    """The text that is validated on, in pieces."""
    val = len(corpus.sources)
    return (piece.text for piece in _addressed(corpus) if piece.writer == val)


def _sources(corpus: Corpus) -> list[Source]:
    return [*(weighted.source for weighted in corpus.sources), *corpus.validation_sources]


def _expected_bytes(corpus: Corpus) -> int | None:
    sizes = [source.size_bytes() for source in _sources(corpus)]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _first_text(corpus: Corpus) -> str:
    piece = next(iter(corpus.sources[0].source.pieces()), None)
    return piece.text if piece else ""


def _check_space(corpus: Corpus, tokenizer: Tokenizer, beside: Path) -> None:
    """Refuses at once what cannot fit where the size of the sources is known, and warns where it is estimated."""
    expected, sample = _expected_bytes(corpus), _first_text(corpus)
    if not expected or not sample:
        return
    tokens_per_byte = (len(tokenizer.encode(sample)) + 1) / len(sample.encode())
    needed = int(expected * tokens_per_byte * token_dtype(tokenizer.vocab_size).itemsize)
    there = sum(file.stat().st_size for file in beside.rglob("*.bin"))  # from an interrupted preparation
    free = shutil.disk_usage(beside.parent).free
    if needed - there <= free:
        return
    need = f"the shards need about {needed / 1e6:,.0f} MB and the disk of {beside.parent} has {free / 1e6:,.0f} MB left"
    remedy = "free some, or set paths.data_dir to another disk"
    if all(source.size_is_exact for source in _sources(corpus)):
        raise ValueError(f"{need}: {remedy}")
    logger.warning("%s, if the files hold text and little else: else %s", need, remedy)


def _check_filled(corpus: Corpus, writers: list[ShardWriter], sequence_length: int) -> None:
    """Refuses what cannot be trained or validated on, before the shards count as made."""
    for weighted, writer in zip([*corpus.sources, None], writers, strict=True):
        if writer.num_tokens == 0:
            title = weighted.source.title if weighted else repr(corpus.name)
            raise ValueError(
                f"the corpus {title} has no text to {'train' if weighted else 'validate'} on: hold out another part "
                "(data.validation_fraction, data.validation_last), or give more text"
            )
        if weighted and writer.num_tokens <= sequence_length:
            raise _too_short(weighted.source.title, str(writer.num_tokens), sequence_length)


def _stats(writers: list[ShardWriter], seconds: float, *, special: int) -> dict[str, Any]:
    """Counts over all folders, and speeds; characters per token without the `special` tokens around each document."""
    tokens = sum(writer.num_tokens for writer in writers)
    documents = sum(writer.num_documents for writer in writers)
    characters = sum(writer.characters for writer in writers)
    return {
        "train_tokens": tokens - writers[-1].num_tokens,
        "val_tokens": writers[-1].num_tokens,
        "documents": documents,
        "characters": characters,
        "utf8_bytes": sum(writer.utf8_bytes for writer in writers),
        "characters_per_token": characters / max(tokens - special * documents, 1),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "characters_per_second": characters / seconds,
    }
