"""`llmtrain tokenize "unhappiness 你好，大模型"`: a table of pieces, ids and bytes; with --ids, the way back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.launch.prepare import corpus_from, tokenizer_from
from llmtrain.launch.reading import check_text
from llmtrain.launch.terminal import visible

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.tokenizer import Tokenizer

STDIN = "-"


def run(settings: DictConfig, run_dir: Path) -> dict[str, Any]:
    """Prints a table of tokens, or the text of the given ids.

    Returns:
        `text`, `ids`, `tokens` (their number), `vocab_size` and the tokenizer's `hash`.

    Raises:
        ValueError: Neither text nor ids, or both; ids that are no numbers or outside the vocabulary.
    """
    from llmtrain.tokenizer import token_table

    if (settings.text is None) == (settings.ids is None):
        given = "both are given" if settings.text is not None else "neither is given"
        raise ValueError(f'tokenize takes a text or ids ({given}): llmtrain tokenize "some text", or --ids 12 345')
    ids = read_ids(settings.ids) if settings.ids is not None else []
    text = _read_stdin() if settings.text == STDIN else settings.text
    check_text(text or "", "the text")
    tokenizer = _tokenizer(settings)
    if settings.ids is not None:
        text = tokenizer.decode(ids, skip_special=False)
        print(visible(text))
    else:
        ids = tokenizer.encode(text)
        print(token_table(ids, tokenizer))
    return {
        "command": "tokenize",
        "text": text,
        "ids": ids,
        "tokens": len(ids),
        "vocab_size": tokenizer.vocab_size,
        "hash": tokenizer.hash,
    }


def read_ids(given: Any) -> list[int]:
    """Ids from a list, a number or text such as "12, 345"."""
    parts = [given] if isinstance(given, str | int) else given
    words = [word for part in parts for word in str(part).replace(",", " ").split()]
    wrong = next((word for word in words if not word.isascii() or not word.isdigit()), None)
    if wrong is not None:
        raise ValueError(f"{wrong!r} is not an id: give whole numbers from 0 on, such as --ids 12 345")
    if not words:
        raise ValueError("there are no ids: give whole numbers from 0 on, such as --ids 12 345")
    return [int(word) for word in words]


def _tokenizer(settings: DictConfig) -> Tokenizer:
    if settings.model is not None:
        from llmtrain.checkpoint import resolve_model
        from llmtrain.tokenizer import Tokenizer

        return Tokenizer.load(resolve_model(settings.model))
    return tokenizer_from(settings, corpus_from(settings))[0]


def _read_stdin() -> str:
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 (byte {error.start}): convert it first") from error
