"""Token shards, the first narrow waist: memory-mapped files of token ids with a JSON manifest.

    tokens-00000.bin, …   little-endian uint16 (uint32 above 65,536 ids): documents end to end, each followed by the
                          end-of-text token (and led by the begin-of-text token in families that put one there)
    documents.bin         uint64: where each document ends, behind its end-of-text token
    manifest.json         written last: a folder without it is not a shard folder

Reads and writes such folders. Knows nothing of text, windows, batches or torch.
"""

import json
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np

MANIFEST = "manifest.json"
DOCUMENTS = "documents.bin"
VERSION = 1


class HasHash(Protocol):
    """What a shard folder needs to know of a tokenizer."""

    @property
    def hash(self) -> str: ...


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that holds every id: uint16 up to 65,536 ids, else uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class ShardSet:
    """The tokens of one split as one long sequence, read from memory-mapped files.

    Cheap to open and to pickle (files are mapped on first use, in whichever process reads).

    Attributes:
        folder: where it lies.
        manifest: the dict of manifest.json.
        num_tokens, num_documents: counts, end-of-text tokens included.
        utf8_bytes, characters: size of the cleaned text that the tokens stand for.
        vocab_size: ids of the tokenizer that made it.
        never_seen: the ids that occur nowhere in it, ascending.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Use `open`."""
        self.folder = folder
        self.manifest = manifest
        self.num_tokens: int = manifest["num_tokens"]
        self.num_documents: int = manifest["num_documents"]
        self.utf8_bytes: int = manifest["utf8_bytes"]
        self.characters: int = manifest["characters"]
        self.vocab_size: int = manifest["vocab_size"]
        self.never_seen: list[int] = manifest["never_seen"]
        self._dtype = np.dtype(manifest["dtype"])
        self._ends = list(accumulate(shard["tokens"] for shard in manifest["shards"]))
        self._maps: dict[str, np.ndarray] = {}

    @classmethod
    def open(cls, folder: str | Path) -> "ShardSet":
        """Opens a shard folder.

        Raises:
            ValueError: no (complete) shard folder, a newer format, or files that have not the size in the manifest.
        """
        folder = Path(folder)
        file = folder / MANIFEST
        if not file.is_file():
            raise ValueError(f"no token shards at {folder} (it has no {MANIFEST}): run `llmtrain prepare` to make them")
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
            if "folders" in manifest:
                raise _whole_corpus(folder, manifest["folders"])
            version = manifest["version"]
            expected = {
                shard["file"]: shard["tokens"] * np.dtype(manifest["dtype"]).itemsize for shard in manifest["shards"]
            }
            expected[DOCUMENTS] = manifest["num_documents"] * 8
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is damaged: delete {folder} and prepare the corpus again") from error
        if version != VERSION:
            raise ValueError(f"{file} is of format {version}, this program reads {VERSION}: prepare the corpus again")
        for name, size in expected.items():
            found = (folder / name).stat().st_size if (folder / name).is_file() else None
            if found != size:
                have = "is missing" if found is None else f"has {found} bytes"
                raise ValueError(
                    f"{folder / name} {have}, its manifest says {size}: delete {folder} and prepare the corpus again"
                )
        return cls(folder, manifest)

    def read(self, start: int, count: int) -> np.ndarray:
        """Copies tokens `start .. start + count` out, across shard boundaries.

        Returns:
            int64 array (count,).

        Raises:
            ValueError: a range that leaves 0 .. num_tokens.
        """
        stop = start + count
        if start < 0 or count < 0 or stop > self.num_tokens:
            raise ValueError(f"tokens {start}..{stop} are outside {self.folder}, which holds {self.num_tokens}")
        out = np.empty(count, dtype=np.int64)
        shard = bisect_right(self._ends, start)
        position = start
        while position < stop:
            first = self._ends[shard - 1] if shard else 0
            until = min(stop, self._ends[shard])
            out[position - start : until - start] = self._shard(shard)[position - first : until - first]
            position = until
            shard += 1
        return out

    def document_ends(self) -> np.ndarray:
        """Where each document ends, behind its end-of-text token: uint64 (num_documents,), mapped, not read."""
        return self._map(DOCUMENTS, np.dtype("<u8"))

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document, its end-of-text token included: int64 (length,)."""
        if not 0 <= index < self.num_documents:
            raise ValueError(f"document {index} is outside {self.folder}, which holds {self.num_documents}")
        ends = self.document_ends()
        start = int(ends[index - 1]) if index else 0
        return self.read(start, int(ends[index]) - start)

    def check_tokenizer(self, tokenizer: HasHash) -> None:
        """Refuses a tokenizer that did not make these shards.

        Raises:
            ValueError: names both hashes.
        """
        own = self.manifest["tokenizer_hash"]
        if tokenizer.hash != own:
            raise ValueError(
                f"the shards in {self.folder} were made with tokenizer {own[:12]}, not with {tokenizer.hash[:12]}: "
                "use the tokenizer they were made with, or prepare the corpus again"
            )

    def _shard(self, index: int) -> np.ndarray:
        return self._map(self.manifest["shards"][index]["file"], self._dtype)

    def _map(self, name: str, dtype: np.dtype) -> np.ndarray:
        if name not in self._maps:
            if (self.folder / name).stat().st_size == 0:  # mmap refuses an empty file
                return np.empty(0, dtype=dtype)
            self._maps[name] = np.memmap(self.folder / name, dtype=dtype, mode="r")
        return self._maps[name]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}

    def __repr__(self) -> str:
        return f"ShardSet({str(self.folder)!r}, num_tokens={self.num_tokens:,}, num_documents={self.num_documents:,})"


def _whole_corpus(folder: Path, names: list[str]) -> ValueError:
    return ValueError(f"{folder} holds a whole corpus: give one of the shard folders in it, {', '.join(names)}")
