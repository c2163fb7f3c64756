"""One tokenizer, whatever its origin: ids, text, raw bytes, hash and the files that other programs read.

Wraps a `tokenizers.Tokenizer`. The JSON text it was made from is kept and written back unchanged, so the hash of a
tokenizer survives newer versions of `tokenizers`. Knows nothing of how a vocabulary is trained or what is in a corpus.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from llmtrain.tokenizer.bytelevel import BYTE_OF_CHARACTER, plain_bytes
from llmtrain.tokenizer.chat import END, ROLE_TOKENS, chat_template
from llmtrain.tokenizer.ranks import definition_of_ranks, is_rank_file

logger = logging.getLogger(__name__)

# Said explicitly, because otherwise a data loader that forks later makes `tokenizers` warn and drop to one thread.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"
SPECIAL_TOKENS: tuple[str, ...] = (END_OF_TEXT, PAD, *ROLE_TOKENS.values(), END)
"""The special tokens of a tokenizer made here, in the order of their ids 0..5."""

# What other families call theirs, asked in this order when a tokenizer.json is not one of ours.
_END_OF_TEXT_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eot_id|>", "[EOS]", "[SEP]")
_PAD_NAMES = (PAD, "<pad>", "[PAD]", "<|finetune_right_pad_id|>", "<|padding|>")


class Tokenizer:
    """Text ↔ ids. Made by `load`, `train_bpe` or `byte_tokenizer`.

    Attributes:
        vocab_size: one more than the largest id.
        eos_id: the id that ends a document: `<|endoftext|>`, unless the tokenizer is another family's.
        pad_id: the id to fill batches with (`eos_id` where the tokenizer has no padding token).
        bos_token, bos_id: what other programs are told begins a text; both None where there is nothing of the kind.
        add_bos_token: whether `bos_id` really stands in front of every text, as in Llama; see `begin`.
        end_id: the id that ends an assistant's turn; None where there is none.
        special_ids: every special token and its id, in the order of the ids.
    """

    def __init__(
        self,
        definition: str,
        *,
        eos_token: str | None = None,
        pad_token: str | None = None,
        bos_token: str | None = None,
    ) -> None:
        """Takes the text of a tokenizer.json and, if they are known, the names of its special tokens.

        Whether a begin-of-text token stands in front of every text is the definition's to say, by its post-processor;
        so it is in `transformers`, which does not ask the tokenizer_config.json's `add_bos_token` either.

        Args:
            definition: the text of a tokenizer.json.
            eos_token, pad_token, bos_token: names of the end-of-text, padding and begin-of-text tokens.

        Raises:
            ValueError: text that `tokenizers` cannot read, or a tokenizer without an end-of-text token, or one that
                puts several tokens in front of a text.
        """
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # `tokenizers` raises a bare Exception for any fault in the text
            raise ValueError(
                f"this tokenizer.json cannot be read by tokenizers {tokenizers.__version__}: {error}"
            ) from error
        self._definition = definition
        # A published tokenizer.json may carry truncation and padding, which would silently cut or fill what we encode.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # "<|end|>" in a text is seven characters, not a marker
        added = sorted(self._tokenizer.get_added_tokens_decoder().items())
        self._added_ids = frozenset(token_id for token_id, _ in added)
        self.special_ids: dict[str, int] = {token.content: token_id for token_id, token in added if token.special}
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        eos = _first_of(self.special_ids, (eos_token, *_END_OF_TEXT_NAMES))
        if eos is None:
            raise ValueError(
                f"the tokenizer has no end-of-text token (looked for {', '.join(_END_OF_TEXT_NAMES)}): "
                f"add {END_OF_TEXT} to its special tokens, or give it as tokenizer=file tokenizer.path=…, which adds it"
            )
        self.eos_token: str = eos
        self.pad_token: str = _first_of(self.special_ids, (pad_token, *_PAD_NAMES)) or eos
        self.eos_id: int = self.special_ids[eos]
        self.pad_id: int = self.special_ids[self.pad_token]
        self.end_id: int | None = self.special_ids.get(END)
        self._check_encodes()
        in_front = self._put_in_front()
        self.add_bos_token: bool = in_front is not None
        self.bos_token: str | None = in_front or _first_of(self.special_ids, (bos_token,))
        self.bos_id: int | None = None if self.bos_token is None else self._tokenizer.token_to_id(self.bos_token)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, path: str | Path, *, add_special_tokens: bool = False, pattern: str | None = None) -> "Tokenizer":
        """Reads a folder that holds tokenizer.json, or that file itself, of any family; or a tiktoken rank file.

        Args:
            path: the folder or file; a tokenizer_config.json beside it may name the end-of-text, padding and
                begin-of-text tokens.
            add_special_tokens: adds those of `SPECIAL_TOKENS` that are missing, behind the vocabulary.
            pattern: how a rank file's text is cut, if its name does not say it; see `ranks.split_pattern`.

        Raises:
            ValueError: no such file, or one that cannot be read, or one without an end-of-text token.
        """
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(
                f"no tokenizer at {file}: give a tokenizer.json, a folder that holds one, or a tiktoken rank file"
            )
        names = _declared_tokens(file.with_name("tokenizer_config.json"))
        if is_rank_file(file):
            definition = definition_of_ranks(file, pattern)
            return cls(_with_special_tokens(definition, names) if add_special_tokens else definition, **names)
        if pattern is not None:
            logger.warning("tokenizer.pattern is ignored with %s, which says itself how text is cut", file)
        try:
            definition = file.read_text(encoding="utf-8")
            if add_special_tokens:
                definition = _with_special_tokens(definition, names)
            return cls(definition, **names)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    def with_special_tokens(self) -> "Tokenizer":
        """The same tokenizer with those of `SPECIAL_TOKENS` that it lacks, behind the vocabulary."""
        names = self._names()
        return Tokenizer(_with_special_tokens(self._definition, names), **names)

    def encode(self, text: str) -> list[int]:
        """Text to ids. Nothing is put in front or behind; special-token strings inside stay ordinary text.

        The ids of a piece of text; those of a text from its start are `begin(encode(text))`.
        """
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise _not_text([text], error) from error

    def begin(self, ids: Sequence[int]) -> list[int]:
        """Puts in front of the ids what stands at the start of every text: `bos_id`, in families that have one there.

        With tokenizers made here that is nothing. Prompts, conversations and the documents of a corpus begin so.
        """
        return [self.bos_id, *ids] if self.add_bos_token and self.bos_id is not None else list(ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts at once, on all cores."""
        return [encoding.ids for encoding in self.encode_raw(list(texts))]

    def encode_raw(self, texts: list[str]) -> list[tokenizers.Encoding]:
        """`encode_batch` that leaves the ids where `tokenizers` put them, for a caller who converts them later."""
        try:
            return self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise _not_text(texts, error) from error

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Ids to text; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        ids = list(ids)
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            raise self._outside(next(token_id for token_id in ids if not 0 <= token_id < self.vocab_size))
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes that a token stands for; for a special token, its name in UTF-8.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            raise self._outside(token_id)
        token = self._tokenizer.id_to_token(token_id)
        if token is None:  # a hole in the numbering of another family's vocabulary
            return b""
        if token_id in self._added_ids:
            return token.encode()
        if self._is_byte_level:
            return bytes(BYTE_OF_CHARACTER[character] for character in token)
        return plain_bytes(token)

    def _outside(self, token_id: int) -> ValueError:
        return ValueError(f"id {token_id} is outside the vocabulary: ids go from 0 to {self.vocab_size - 1}")

    def _check_encodes(self) -> None:
        """Refuses a vocabulary that cannot take every text: without words, or without its word for the unknown."""
        if self._tokenizer.get_vocab_size(with_added_tokens=False) == 0:
            raise ValueError("the tokenizer has an empty vocabulary: train it, or give another tokenizer.json")
        try:
            self._tokenizer.encode_batch_fast(["a", "\u4f60\U0001f30d \n~"], add_special_tokens=False)
        except Exception as error:  # `tokenizers` raises a bare Exception
            raise ValueError(
                f"the tokenizer cannot encode every text ({error}): put its unk_token into the vocabulary, or give "
                "another tokenizer.json"
            ) from error

    def _put_in_front(self) -> str | None:
        """The token that the definition's post-processor puts in front of a text, if it does."""
        processed = self._tokenizer.encode("a", add_special_tokens=True)
        mask = processed.special_tokens_mask
        before = processed.ids[: mask.index(0) if 0 in mask else 0]
        if len(before) > 1:
            raise ValueError(
                f"the tokenizer's post_processor puts {len(before)} tokens in front of a text, and at most one is "
                "supported: take the others out of the tokenizer.json"
            )
        return self._tokenizer.id_to_token(before[0]) if before else None

    def _names(self) -> dict[str, str]:
        """What the constructor needs beside the definition to make this tokenizer again."""
        names = {"eos_token": self.eos_token, "pad_token": self.pad_token, "bos_token": self.bos_token}
        return {key: name for key, name in names.items() if name is not None}

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = json.loads(self._definition).get("decoder") or {}
        return any(part.get("type") == "ByteLevel" for part in decoder.get("decoders", [decoder]))

    @cached_property
    def hash(self) -> str:
        """sha256 (hex) of the tokenizer.json in canonical form: tokenizers of one hash give the same ids."""
        content = json.loads(self._definition)
        content.pop("truncation", None)
        content.pop("padding", None)
        canonical = json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and (if it has the role markers) chat_template.jinja.

        `transformers` 4 and 5 read the folder with AutoTokenizer and get the same ids for ordinary text, what stands
        in front of it included.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "pad_token": self.pad_token,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 10**30,  # what transformers writes for "not said": the model's config.json says it
        }
        _write(folder / "tokenizer.json", self._definition)
        _write(folder / "tokenizer_config.json", json.dumps(config, ensure_ascii=False, indent=2) + "\n")
        if all(token in self.special_ids for token in (*ROLE_TOKENS.values(), END)):
            _write(folder / "chat_template.jinja", chat_template(bos=self.add_bos_token))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._definition, self._names())

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, hash={self.hash[:12]})"


def _restore(definition: str, names: dict[str, str]) -> Tokenizer:
    return Tokenizer(definition, **names)


def _first_of(special_ids: dict[str, int], names: Iterable[str | None]) -> str | None:
    return next((name for name in names if name in special_ids), None)


def _declared_tokens(config_file: Path) -> dict[str, str]:
    """The token names that a tokenizer_config.json declares; empty if there is no such file."""
    if not config_file.is_file():
        return {}
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{config_file} is not JSON ({error}): fetch it again, or delete it") from error
    if not isinstance(config, dict):
        raise ValueError(f"{config_file} holds no object: fetch it again, or delete it")
    names = {}
    for key in ("eos_token", "pad_token", "bos_token"):
        value = config.get(key)
        name = value.get("content") if isinstance(value, dict) else value  # older files hold the whole token
        if isinstance(name, str):
            names[key] = name
    return names


def _with_special_tokens(definition: str, names: dict[str, str]) -> str:
    """The definition with the role markers, an end-of-text and a padding token added where they are missing."""
    try:
        tokenizer = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:
        raise ValueError(
            f"this tokenizer.json cannot be read by tokenizers {tokenizers.__version__}: {error}"
        ) from error
    special = {t.content: i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    wanted = [token for token in (*ROLE_TOKENS.values(), END) if token not in special]
    if _first_of(special, (names.get("pad_token"), *_PAD_NAMES)) is None:
        wanted.insert(0, PAD)
    if _first_of(special, (names.get("eos_token"), *_END_OF_TEXT_NAMES)) is None:
        wanted.insert(0, END_OF_TEXT)
    if not wanted:
        return definition
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in wanted])
    return tokenizer.to_str(pretty=True)


def _not_text(texts: Sequence[str], error: Exception) -> ValueError:
    """Finds the lone surrogate that made `tokenizers` refuse a text."""
    for text in texts:
        for position, character in enumerate(text):
            if "\ud800" <= character <= "\udfff":
                return ValueError(
                    f"the text holds a lone surrogate (U+{ord(character):04X}, character {position}), which is no "
                    "Unicode text: mend it where it was decoded, for example with errors='replace'"
                )
    return ValueError(f"only text can be encoded: {error}")


def _write(path: Path, text: str) -> None:
    """Writes beside the final name and renames, so that a reader never sees half a file."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    beside.write_text(text, encoding="utf-8", newline="\n")
    beside.replace(path)
