"""Rank files of tiktoken, made into the text of a tokenizer.json: the same ids for every text.

Such a file has one token a line, its bytes in base64 and its rank, which is its id; any two neighbours are merged whose
union has a rank, the lowest rank first. How a text is cut before that does not stand in the file: `SPLIT_PATTERNS` has
the published patterns by name. The file names no special tokens either. Knows nothing of models or settings.
"""

import base64
import binascii
import re
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from llmtrain.tokenizer.bytelevel import CHARACTER_OF_BYTE

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"

SPLIT_PATTERNS: dict[str, str] = {
    "gpt2": _GPT2,
    "r50k_base": _GPT2,
    "p50k_base": _GPT2,
    "p50k_edit": _GPT2,
    "cl100k_base": (
        rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "o200k_base": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
SPLIT_PATTERNS["o200k_harmony"] = SPLIT_PATTERNS["o200k_base"]
"""The regular expression (Oniguruma) of one pre-token, by the name of the encoding."""

MAX_RANKS = 2**20  # five times the largest in use

_LINE = re.compile(r"[A-Za-z0-9+/]+={0,2} \d+")


def is_rank_file(path: Path) -> bool:
    """Whether a file begins as a rank file does."""
    with path.open("rb") as file:
        return _LINE.fullmatch(file.readline(4096).decode("utf-8", "replace").strip()) is not None


def split_pattern(path: Path, pattern: str | None) -> str:
    """How a rank file's text is cut.

    Args:
        path: the file; its name says it if `pattern` does not, as in o200k_base.tiktoken.
        pattern: a name of `SPLIT_PATTERNS`, or a regular expression.

    Raises:
        ValueError: neither says it.
    """
    if pattern is not None:
        return SPLIT_PATTERNS.get(pattern, pattern)
    named = next((name for name in SPLIT_PATTERNS if path.name.startswith(name)), None)
    if named is None:
        raise ValueError(
            f"{path} is a tiktoken rank file, which does not say how text is cut before it is merged: name the "
            f"encoding with tokenizer.pattern={'|'.join(SPLIT_PATTERNS)} or give a regular expression"
        )
    return SPLIT_PATTERNS[named]


def read_ranks(path: Path) -> dict[bytes, int]:
    """Bytes → rank.

    Raises:
        ValueError: a line that is no token and rank, one given twice, or a byte without a token.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            known = ranks.setdefault(token, int(rank))
        except (ValueError, binascii.Error):
            raise ValueError(
                f"{path}, line {number}: {line[:40]!r} is not a token in base64 and its rank: fetch the file again"
            ) from None
        if known != int(rank) or not token:
            raise ValueError(f"{path}, line {number}: the token {line[:40]!r} stands there twice, or is empty")
    highest = max(ranks.values(), default=0)
    if highest >= MAX_RANKS:
        raise ValueError(f"{path} has a token of rank {highest}, and {MAX_RANKS:,} is the limit: fetch the file again")
    if len(set(ranks.values())) != len(ranks):
        raise ValueError(f"{path} gives one rank to two tokens: fetch the file again")
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise ValueError(f"{path} has no token for the byte {missing}, so it cannot encode every text")
    return ranks


def definition_of_ranks(path: Path, pattern: str | None = None) -> str:
    """The text of a tokenizer.json that gives the ids of a rank file.

    A rank file merges two neighbours whatever pair they are, if only their union has a rank: so every way to cut a
    token into two tokens is a merge, and merges stand in the order of the tokens that they make. A pre-token that is a
    token is not merged at all.

    Args:
        path: the rank file.
        pattern: as for `split_pattern`.

    Raises:
        ValueError: as in `split_pattern` and `read_ranks`, or a pattern that does not compile.
    """
    chosen = split_pattern(path, pattern)
    try:
        split = pre_tokenizers.Split(tokenizers.Regex(chosen), "isolated")
    except Exception as error:  # a bare Exception from the regex engine
        names = ", ".join(SPLIT_PATTERNS)
        raise ValueError(f"tokenizer.pattern is no name ({names}) and does not compile: {error}") from error
    ranks = read_ranks(path)
    written = {token: "".join(CHARACTER_OF_BYTE[byte] for byte in token) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(written[left], written[right]) for left, right in pairs]
    vocabulary = {written[token]: rank for token, rank in ranks.items()}
    # What is added later takes the number of tokens for the next free id, so holes are filled. No text can spell such
    # a name: a space is written otherwise in a vocabulary of bytes.
    unused = {f"<|unused {rank}|>": rank for rank in sorted(set(range(max(ranks.values()))) - set(ranks.values()))}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary | unused, merges=merges, ignore_merges=True))
    inner.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in unused])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    inner.decoder = decoders.ByteLevel()
    return inner.to_str()
