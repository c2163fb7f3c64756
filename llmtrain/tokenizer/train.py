"""Makes tokenizers, and keeps them: byte-level BPE or characters of documents, bytes alone, or somebody else's file.

Knows nothing of where documents come from: it is handed an iterable of texts and the fingerprint of their sources.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from llmtrain.tokenizer.bytelevel import CHARACTER_OF_BYTE
from llmtrain.tokenizer.ranks import is_rank_file, split_pattern
from llmtrain.tokenizer.tokenizer import END_OF_TEXT, SPECIAL_TOKENS, Tokenizer

logger = logging.getLogger(__name__)

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # English contractions
    r"| ?\p{L}+"  # a word with the space before it, or a run of Chinese
    r"|\p{N}"  # every digit alone: 9051 is four tokens, whatever the corpus
    r"| ?[!-/:-@\[-`{-~]+[\r\n]*"  # ASCII marks, as code has them, with the line end behind them
    r"| ?[^\s\p{L}\p{N}]"  # any other mark alone, Chinese ones above all
    r"|\s*[\r\n]+"  # blank lines, indentation before them included
    r"|\s+(?!\S)|\s+"  # indentation, leaving one space for the word
)
"""How text is cut before the merges are learned: a merge never crosses such a cut.

Chosen by bits per byte, not by characters per token. On sanguo at 4,096 ids, letting a mark join the word behind it
(Qwen2's pattern) packs 1.31 characters into a token against 1.25, and yet a model of 2.8 M parameters trained for
500 steps of 1,024 tokens came to 2.416 bits per byte with it and 2.353 with marks alone: "，曹操" and "曹操" as two ids
halve what is learned about each. The table is in docs/LOG.md.
"""

MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
MAX_VOCAB_SIZE = 2**20  # four times the largest in use; far beyond, the trainer of `tokenizers` aborts the process

_RECIPE_VERSION = 2  # counted up when the same settings come to make another tokenizer


def train_bpe(
    documents: Iterable[str], *, vocab_size: int, pattern: str = PATTERN, min_frequency: int = 2
) -> Tokenizer:
    """Learns a byte-level BPE. Deterministic: the same documents give the same tokenizer.

    Args:
        documents: texts, or pieces of texts; read once, never held together.
        vocab_size: ids in all: 6 special tokens, 256 bytes and vocab_size − 262 merges.
        pattern: regular expression (Oniguruma) of one pre-token.
        min_frequency: a pair of tokens met less often is not merged.

    Raises:
        ValueError: a vocabulary below 262 or above 1,048,576, a pattern that does not compile, or no text at all.
    """
    _check_size(vocab_size)
    try:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    except Exception as error:  # a bare Exception from the regex engine
        raise ValueError(f"tokenizer.pattern does not compile: {error}") from error
    inner = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[tokenizers.AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=CHARACTER_OF_BYTE,
        show_progress=False,
    )
    counter = _Counter(documents)
    inner.train_from_iterator(counter, trainer)
    if counter.characters == 0:
        raise ValueError("there is no text to train a tokenizer on: the corpus is empty")
    tokenizer = Tokenizer(inner.to_str(pretty=True), bos_token=END_OF_TEXT)
    if tokenizer.vocab_size < vocab_size:
        logger.warning(
            "tokenizer.vocab_size=%d could not be filled: in %s characters only %d ids were worth making "
            "(pairs met fewer than %d times are not merged)",
            vocab_size, f"{counter.characters:,}", tokenizer.vocab_size, min_frequency,
        )  # fmt: skip
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """The tokenizer without a vocabulary to learn: 6 special tokens, then byte b as id 6 + b."""
    vocabulary = {token: token_id for token_id, token in enumerate((*SPECIAL_TOKENS, *CHARACTER_OF_BYTE))}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    return Tokenizer(inner.to_str(pretty=True), bos_token=END_OF_TEXT)


def character_tokenizer(documents: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """One id for each character of the documents: a token ends wherever a character does. Deterministic.

    A character that has no id of its own is spelled in bytes, so that any text can still be encoded.

    Args:
        documents: texts, or pieces of texts; read once.
        vocab_size: the most ids: 6 special tokens, 256 bytes and the most frequent characters beyond ASCII.

    Raises:
        ValueError: a vocabulary below 262 or above 1,048,576, or no text at all.
    """
    _check_size(vocab_size)
    counts = Counter(character for text in documents for character in text)
    if not counts:
        raise ValueError("there is no text to take characters from: the corpus is empty")
    wanted = sorted((c for c in counts if not c.isascii()), key=lambda c: (-counts[c], c))
    names = ["".join(CHARACTER_OF_BYTE[byte] for byte in character.encode()) for character in wanted]
    tokens = (*SPECIAL_TOKENS, *CHARACTER_OF_BYTE, *names)[:vocab_size]
    # Without merges, and with `ignore_merges` a pre-token that is in the vocabulary is one token.
    inner = tokenizers.Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[], ignore_merges=True)
    )
    each_character = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([each_character, byte_level])
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    return Tokenizer(inner.to_str(pretty=True), bos_token=END_OF_TEXT)


def ensure_tokenizer(
    *,
    kind: str,
    data_dir: str | Path,
    vocab_size: int | None = None,
    path: str | Path | None = None,
    pattern: str | None = None,
    documents: Callable[[], Iterable[str]] | None = None,
    documents_fingerprint: str = "",
) -> tuple[Tokenizer, Path]:
    """Returns the tokenizer that the settings ask for and its folder, from the cache if it was made before.

    Args:
        kind: "bpe" (learned from `documents`), "characters" (those of `documents`), "byte", or "file" (any
            tokenizer.json or tiktoken rank file at `path`, to which the special tokens it lacks are added).
        data_dir: the cache is `<data_dir>/tokenizers/<kind>-<fingerprint>/`.
        vocab_size: ids of a BPE, or the most of characters.
        path: the tokenizer.json, a folder that holds one, or the rank file, for kind "file".
        pattern: pre-tokenization of a BPE, None for `PATTERN`; or of a rank file, see `ranks.split_pattern`.
        documents: called only if a vocabulary has to be learned.
        documents_fingerprint: what names the content of `documents`.

    Raises:
        ValueError: an unknown kind, a missing setting, or one that is ignored by this kind.
    """
    takers = {
        "vocab_size": (vocab_size, ("bpe", "characters")),
        "pattern": (pattern, ("bpe", "file")),
        "path": (path, ("file",)),
    }
    for name, (value, kinds) in takers.items():
        if value is not None and kind not in kinds:
            logger.warning("tokenizer.%s is ignored with tokenizer.kind=%s", name, kind)
    if kind == "byte":
        return _kept(Path(data_dir), kind, "", byte_tokenizer)
    if kind == "file":
        return _from_file(path, pattern, Path(data_dir))
    if kind not in ("bpe", "characters"):
        raise ValueError(f"tokenizer.kind={kind} is unknown: use bpe, characters, byte or file")
    if vocab_size is None or documents is None:
        raise ValueError(f"tokenizer.kind={kind} needs tokenizer.vocab_size and a corpus to learn from")
    _check_size(vocab_size)  # before the corpus is touched
    if kind == "characters":
        recipe = json.dumps([documents_fingerprint, vocab_size])
        return _kept(Path(data_dir), kind, recipe, lambda: character_tokenizer(documents(), vocab_size=vocab_size))
    chosen = PATTERN if pattern is None else pattern
    recipe = json.dumps([documents_fingerprint, vocab_size, chosen])
    return _kept(Path(data_dir), kind, recipe, lambda: train_bpe(documents(), vocab_size=vocab_size, pattern=chosen))


def _from_file(path: str | Path | None, pattern: str | None, data_dir: Path) -> tuple[Tokenizer, Path]:
    """Somebody else's tokenizer with our special tokens."""
    if path is None:
        raise ValueError(
            "tokenizer=file needs tokenizer.path: a tokenizer.json, a folder that holds one, or a tiktoken rank file"
        )
    if Path(path).is_file() and is_rank_file(Path(path)):  # known by its text: to convert one takes seconds
        content = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        recipe = json.dumps([content, split_pattern(Path(path), pattern)])
        return _kept(data_dir, "file", recipe, lambda: Tokenizer.load(path, add_special_tokens=True, pattern=pattern))
    given = Tokenizer.load(path, add_special_tokens=True, pattern=pattern)
    recipe = json.dumps([given.hash, given.eos_token, given.pad_token, given.bos_token])
    return _kept(data_dir, "file", recipe, lambda: given)


def _check_size(vocab_size: int) -> None:
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"tokenizer.vocab_size={vocab_size} is too small: {len(SPECIAL_TOKENS)} special tokens and 256 bytes need "
            f"at least {MIN_VOCAB_SIZE}"
        )
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"tokenizer.vocab_size={vocab_size} must be at most {MAX_VOCAB_SIZE:,}")


class _Counter:
    """Passes documents on and counts their characters."""

    def __init__(self, documents: Iterable[str]) -> None:
        self.documents = documents
        self.characters = 0

    def __iter__(self) -> Iterator[str]:
        for text in self.documents:
            self.characters += len(text)
            yield text


def _kept(data_dir: Path, kind: str, recipe: str, make: Callable[[], Tokenizer]) -> tuple[Tokenizer, Path]:
    """Loads `<data_dir>/tokenizers/<kind>-<fingerprint of the recipe>/`, made first if it is not there."""
    fingerprint = hashlib.sha256(f"{_RECIPE_VERSION}\n{kind}\n{recipe}".encode()).hexdigest()
    folder = data_dir / "tokenizers" / f"{kind}-{fingerprint[:12]}"
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.load(folder), folder
    start = time.perf_counter()
    tokenizer = make()
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    tokenizer.save(beside)
    try:
        beside.rename(folder)
    except OSError:  # another process was faster; what it made is the same
        shutil.rmtree(beside)
    seconds = time.perf_counter() - start
    logger.info("tokenizer with %d ids made in %.1f s: %s", tokenizer.vocab_size, seconds, folder)
    return Tokenizer.load(folder), folder
