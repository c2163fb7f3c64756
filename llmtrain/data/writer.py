"""Writes one shard folder, so that it can be interrupted at any moment and continued from its last saved state.

Knows nothing of text, sources or tokenizers.
"""

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llmtrain.data.shards import DOCUMENTS, MANIFEST, VERSION, token_dtype

SHARD_TOKENS = 1 << 27  # 256 MB of uint16: few files, each quick to copy


class ShardWriter:
    """Appends tokens to a shard folder; `finish` writes its manifest.

    Args:
        folder: made if it is not there.
        vocab_size: ids of the tokenizer.
        shard_tokens: a new file is begun after so many tokens.
        state: what `save_state` returned; files are cut back to it. None starts afresh.
    """

    def __init__(
        self, folder: Path, *, vocab_size: int, shard_tokens: int = SHARD_TOKENS, state: dict[str, Any] | None = None
    ) -> None:
        self.folder = folder
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self._shard_tokens = shard_tokens
        self._seen = np.zeros(vocab_size, dtype=bool)
        self.num_tokens = self.num_documents = self.utf8_bytes = self.characters = 0
        folder.mkdir(parents=True, exist_ok=True)
        if state is not None:
            self.num_tokens = state["num_tokens"]
            self.num_documents = state["num_documents"]
            self.utf8_bytes = state["utf8_bytes"]
            self.characters = state["characters"]
            packed = np.frombuffer(bytes.fromhex(state["seen"]), dtype=np.uint8)
            self._seen[:] = np.unpackbits(packed, count=vocab_size).astype(bool)
        self._documents = _cut_back(folder / DOCUMENTS, self.num_documents * 8)
        shard, rest = divmod(self.num_tokens, shard_tokens)
        self._tokens = _cut_back(self._shard_path(shard), rest * self.dtype.itemsize)
        for stale in folder.glob("tokens-*.bin"):
            if stale.name > self._shard_path(shard).name:
                stale.unlink()

    def append(self, ids: np.ndarray, document_ends: np.ndarray, *, utf8_bytes: int, characters: int) -> None:
        """Adds a run of tokens.

        Args:
            ids: (n,) of this writer's dtype.
            document_ends: places behind the end of a document, counted from the start of `ids`, ascending.
            utf8_bytes, characters: size of the text that the run stands for.
        """
        self._seen[ids] = True
        ends = document_ends.astype("<u8") + np.uint64(self.num_tokens)
        self._documents.write(ends.tobytes())
        self.num_documents += len(ends)
        self.utf8_bytes += utf8_bytes
        self.characters += characters
        while len(ids):
            room = self._shard_tokens - self.num_tokens % self._shard_tokens
            part, ids = ids[:room], ids[room:]
            self._tokens.write(part.tobytes())
            self.num_tokens += len(part)
            if len(part) == room:
                _close(self._tokens)
                self._tokens = _cut_back(self._shard_path(self.num_tokens // self._shard_tokens), 0)

    def save_state(self) -> dict[str, Any]:
        """Puts everything on disk and returns what is needed to continue from here."""
        for file in (self._tokens, self._documents):
            file.flush()
            os.fsync(file.fileno())
        return {
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "utf8_bytes": self.utf8_bytes,
            "characters": self.characters,
            "seen": np.packbits(self._seen).tobytes().hex(),
        }

    def finish(self, extra: dict[str, Any]) -> None:
        """Closes the files and writes the manifest, with `extra` in it."""
        self.close()
        shards = []
        for first in range(0, self.num_tokens, self._shard_tokens):
            tokens = min(self._shard_tokens, self.num_tokens - first)
            shards.append({"file": self._shard_path(first // self._shard_tokens).name, "tokens": tokens})
        unused = self._shard_path(len(shards))  # begun when the last file had just become full
        unused.unlink(missing_ok=True)
        manifest = {
            "version": VERSION,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "utf8_bytes": self.utf8_bytes,
            "characters": self.characters,
            "dtype": self.dtype.name,
            "vocab_size": self.vocab_size,
            "shards": shards,
            "never_seen": np.flatnonzero(~self._seen).tolist(),
            **extra,
        }
        write_json(self.folder / MANIFEST, manifest)

    def close(self) -> None:
        _close(self._tokens)
        _close(self._documents)

    def _shard_path(self, index: int) -> Path:
        return self.folder / f"tokens-{index:05d}.bin"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes beside the final name, makes sure it is on disk, and renames."""
    beside = path.with_name(f".{path.name}.partial")
    with beside.open("w", encoding="utf-8", newline="\n") as file:
        json.dump(content, file, ensure_ascii=False, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _cut_back(path: Path, size: int) -> BinaryIO:
    """Opens a file for appending behind its first `size` bytes; what stood behind them goes."""
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(size)
    file.seek(size)
    return file


def _close(file: BinaryIO) -> None:
    if not file.closed:
        file.flush()
        os.fsync(file.fileno())
        file.close()
