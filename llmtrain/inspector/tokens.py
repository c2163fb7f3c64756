"""The text cut into its tokens: which bytes each holds, and which characters, whole or in parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llmtrain.tokenizer import Tokenizer, character_spans

WHOLE_VOCABULARY = 8192
"""A vocabulary of up to so many tokens is listed whole; of a larger one, the tokens that occur."""


def token_rows(ids: Sequence[int], prompt_tokens: int, read: int, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """One entry per token of prompt and answer, in order.

    A character may be spread over several tokens: each then lists its part of it. Special tokens are no text, so no
    character runs through them.
    """
    special = set(tokenizer.special_ids.values())
    rows: list[dict[str, Any]] = []
    run: list[int] = []  # the text since the last special token
    for token_id in [*ids, None]:
        if token_id is not None and token_id not in special:
            run.append(token_id)
            continue
        rows += _text_rows(run, tokenizer)
        run = []
        if token_id is not None:
            name = tokenizer.token_bytes(token_id)
            rows.append(
                {
                    "id": token_id,
                    "bytes": name.hex(),
                    "text": name.decode("utf-8", "replace"),
                    "characters": 0,
                    "parts": [],
                    "special": True,
                }
            )
    for position, row in enumerate(rows):
        row["position"] = position
        row["source"] = "prompt" if position < prompt_tokens else "answer"
        row["read"] = position < read
    return rows


def _text_rows(ids: Sequence[int], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    pieces = [tokenizer.token_bytes(token_id) for token_id in ids]
    spans = character_spans(b"".join(pieces))
    rows, begin, index = [], 0, 0
    for token_id, piece in zip(ids, pieces, strict=True):
        end = begin + len(piece)
        whole, parts = 0, list[dict[str, Any]]()
        while index < len(spans) and spans[index][1] < end:
            character, first, behind = spans[index]
            if begin <= first and behind <= end:
                whole += character != "\ufffd" or piece[first - begin : behind - begin] == b"\xef\xbf\xbd"
                if character == "\ufffd" and behind - first == 1:  # a byte of no character
                    parts.append({"character": None, "first": 1, "last": 1, "of": 1})
            else:
                parts.append(
                    {
                        "character": character,
                        "first": max(first, begin) - first + 1,
                        "last": min(behind, end) - first,
                        "of": behind - first,
                    }
                )
            if behind > end:
                break  # the next token holds more of it
            index += 1
        rows.append(
            {
                "id": token_id,
                "bytes": piece.hex(),
                "text": None if parts else piece.decode("utf-8", "replace"),
                "characters": whole,
                "parts": parts,
                "special": False,
            }
        )
        begin = end
    return rows


def vocabulary(tokenizer: Tokenizer, size: int, mentioned: Iterable[int]) -> dict[str, Any]:
    """What each id stands for: of all ids, or of those mentioned where the vocabulary is large.

    Args:
        tokenizer: Whose tokens they are.
        size: The model's number of ids, which may exceed the tokenizer's.
        mentioned: Ids that must be there.
    """
    complete = size <= WHOLE_VOCABULARY
    ids = range(size) if complete else sorted(set(mentioned))
    return {
        "size": size,
        "complete": complete,
        "special": sorted(tokenizer.special_ids.values()),
        "pieces": {str(each): piece_text(tokenizer, each) for each in ids},
    }


def piece_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text; bytes that are no whole character as ‹e5 ba›, an id without a token as the empty text."""
    if token_id >= tokenizer.vocab_size:
        return ""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return f"‹{raw.hex(' ')}›"
