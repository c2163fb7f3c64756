"""The pipeline of preparation: one thread reads text ahead, all cores tokenize, one thread writes behind.

The three overlap, so that the whole runs at about the speed of tokenizing alone, and a handful of batches is all that
is in memory. Knows nothing of files, sources or fingerprints: it is given a stream of pieces and the writers for them.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from queue import Empty, Full, Queue
from typing import Any, NamedTuple

import numpy as np

from llmtrain.data.writer import ShardWriter
from llmtrain.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

BATCH_CHARACTERS = 1 << 19
"""Enough for every core and little memory: `tokenizers` needs about 100 bytes for a character while it works."""
SAVE_SECONDS = 10.0
REPORT_SECONDS = 5.0


_Write = Callable[[list["Addressed"], list[Any], int], None]


class Addressed(NamedTuple):
    """A piece of text, whether its document begins with it and ends behind it, and which writer it goes to."""

    text: str
    begins_document: bool
    ends_document: bool
    writer: int


def tokenize_stream(
    stream: Iterable[Addressed],
    tokenizer: Tokenizer,
    writers: Sequence[ShardWriter],
    *,
    done: int = 0,
    save: Callable[[int], None],
    expected_bytes: int | None = None,
) -> None:
    """Tokenizes a stream into the writers, the end-of-text token behind each document and `Tokenizer.begin` included.

    Args:
        stream: the pieces, always the same ones in the same order.
        tokenizer: what makes the ids.
        writers: by `Addressed.writer`.
        done: pieces at the front of the stream that are in the writers already.
        save: called now and then, in the writing thread, with the number of pieces that have been written by then.
        expected_bytes: size of the whole stream, for the reports on the way.
    """
    reports = _Reports(expected_bytes, sum(writer.utf8_bytes for writer in writers))
    last_saved = time.monotonic()
    written = done

    def write(batch: list[Addressed], encodings: list[Any], pieces: int) -> None:
        nonlocal last_saved, written
        _write(batch, encodings, tokenizer.begin([]), tokenizer.eos_id, writers)
        written = pieces
        reports.report(writers)
        if time.monotonic() - last_saved > SAVE_SECONDS:
            save(pieces)
            last_saved = time.monotonic()

    try:
        _overlap(stream, tokenizer, write, done)
    except KeyboardInterrupt:
        save(written)
        raise


def _overlap(stream: Iterable[Addressed], tokenizer: Tokenizer, write: _Write, done: int) -> None:
    """Reads ahead, tokenizes here, writes behind; when it returns or raises, nothing is being written any more."""
    with ThreadPoolExecutor(1, thread_name_prefix="shards") as writing:
        behind: Future[None] | None = None
        pieces = done
        for batch in _read_ahead(_batches(islice(stream, done, None)), depth=2):
            encodings = tokenizer.encode_raw([piece.text for piece in batch])
            pieces += len(batch)
            if behind is not None:
                behind.result()
            behind = writing.submit(write, batch, encodings, pieces)
            del batch, encodings
        if behind is not None:
            behind.result()


def _batches(pieces: Iterator[Addressed]) -> Iterator[list[Addressed]]:
    batch: list[Addressed] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _write(
    batch: list[Addressed], encodings: list[Any], beginning: list[int], eos_id: int, writers: Sequence[ShardWriter]
) -> None:
    """Appends each writer's share of a batch as one run."""
    runs: dict[int, tuple[list[int], list[int], list[str]]] = {}  # ids, ends of documents, texts
    for (text, begins_document, ends_document, index), encoding in zip(batch, encodings, strict=True):
        run = runs.get(index)
        if run is None:
            run = runs[index] = ([], [], [])
        ids, ends, texts = run
        if begins_document:
            ids += beginning
        ids += encoding.ids  # one list for the whole run: an array for each piece is slow where pieces are short
        texts.append(text)
        if ends_document:
            ids.append(eos_id)
            ends.append(len(ids))
    for index, (ids, ends, texts) in runs.items():
        whole = "".join(texts)
        writers[index].append(
            np.array(ids, dtype=writers[index].dtype),
            np.array(ends, dtype=np.int64),
            utf8_bytes=len(whole) if whole.isascii() else len(whole.encode()),
            characters=len(whole),
        )


def _read_ahead(batches: Iterator[list[Addressed]], depth: int) -> Iterator[list[Addressed]]:
    """Runs an iterator in a thread, at most `depth` items ahead; its exception comes out here."""
    queue: Queue[tuple[list[Addressed] | None, BaseException | None]] = Queue(depth)
    stop = threading.Event()

    def put(item: tuple[list[Addressed] | None, BaseException | None]) -> None:
        while not stop.is_set():
            try:
                return queue.put(item, timeout=0.1)
            except Full:
                continue

    def work() -> None:
        failure: BaseException | None = None
        try:
            for batch in batches:
                put((batch, None))
                if stop.is_set():
                    return
        except BaseException as error:
            failure = error
        put((None, failure))

    thread = threading.Thread(target=work, name="reading", daemon=True)
    thread.start()
    try:
        while True:
            try:
                # The time-out lets Ctrl-C through while the reader waits for a slow disk or network.
                batch, failure = queue.get(timeout=0.5)
            except Empty:
                continue
            if failure is not None:
                raise failure
            if batch is None:
                return
            yield batch
            del batch
    finally:
        stop.set()
        thread.join()


class _Reports:
    """Says every few seconds how far a long preparation is."""

    def __init__(self, expected_bytes: int | None, start_bytes: int) -> None:
        self._expected = expected_bytes
        self._start_bytes = start_bytes
        self._start = self._last = time.monotonic()

    def report(self, writers: Sequence[ShardWriter]) -> None:
        now = time.monotonic()
        if now - self._last < REPORT_SECONDS:
            return
        self._last = now
        tokens = sum(writer.num_tokens for writer in writers)
        read = sum(writer.utf8_bytes for writer in writers)
        speed = (read - self._start_bytes) / (now - self._start)
        left = ""
        if self._expected and read < self._expected:
            left = f", about {(self._expected - read) / max(speed, 1):.0f} s to go"
        logger.info("%.1f M tokens from %.0f MB of text, %.1f MB/s%s", tokens / 1e6, read / 1e6, speed / 1e6, left)
