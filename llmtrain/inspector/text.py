"""The essentials of an inspection as lines for a terminal. Reads the document only, as a page does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from llmtrain.tokenizer import display_width

LISTED = 5
"""Candidates on each step's line."""

_KINDS = {
    "end_token": "the end token {text} (id {id})",
    "stop_id": "the stop id {id}, {text}",
    "stop_string": "the stop string {text}",
    "length": "the length: {limit} new tokens were asked for (sampling.max_new_tokens)",
    "context": "the context: prompt and answer together may have {limit} tokens",
    "cancelled": "the caller, who left",
}


def as_text(document: Mapping[str, Any]) -> str:
    """Tokens with their ids, each step's likeliest tokens, times, and why the answer ended."""
    return "\n".join([*_tokens(document), "", *_steps(document), "", *_times(document), f"ended by {_end(document)}"])


def _tokens(document: Mapping[str, Any]) -> Iterator[str]:
    pieces = document["vocabulary"]["pieces"]
    yield f"{document['prompt_tokens']} tokens of the prompt, {document['answer_tokens']} of the answer"
    rows = [
        (str(token["position"]), _quoted(pieces[str(token["id"])]), str(token["id"]), _what(token))
        for token in document["tokens"]
    ]
    places, shown, ids = (max(display_width(row[column]) for row in rows) for column in range(3))
    for place, piece, token_id, what in rows:
        filled = piece + " " * (shown - display_width(piece))
        yield f"{place:>{places + 2}}  {filled}  {token_id:>{ids}}  {what}"


def _what(token: Mapping[str, Any]) -> str:
    parts = ", ".join(
        f"byte {part['first']}–{part['last']} of {part['of']} of {_quoted(part['character'])}"
        if part["character"] is not None
        else "a byte of no character"
        for part in token["parts"]
    )
    notes = [token["source"], "special" if token["special"] else "", parts]
    return ", ".join(note for note in notes if note)


def _steps(document: Mapping[str, Any]) -> Iterator[str]:
    pieces = document["vocabulary"]["pieces"]
    how = "greedy" if document["sampling"]["greedy"] else f"seed {document['sampling']['seed']}"
    yield f"each step ({how}): the token, its chance under the settings; the model's own likeliest"
    names = [_quoted(pieces[str(step["token"])]) for step in document["steps"]]
    width = max(map(display_width, names))
    for name, step in zip(names, document["steps"], strict=True):
        chosen = next(each for each in step["candidates"] if each["id"] == step["token"])
        listed = "  ".join(
            f"{_quoted(pieces[str(each['id'])])} {each['probability']:.3f}" for each in step["candidates"][:LISTED]
        )
        drawn = "" if step["uniform"] is None else f"  drawn {step['uniform']:.3f}"
        filled = name + " " * (width - display_width(name))
        yield f"{step['step'] + 1:>6}  {filled}  {chosen['chance']:.3f}{drawn}  of  {listed}"


def _times(document: Mapping[str, Any]) -> Iterator[str]:
    cache, later = document["cache"], [step["seconds"] for step in document["steps"][1:]]
    each = f", then {1000 * sum(later) / len(later):.1f} ms a token" if later else ""
    yield f"first token after {1000 * cache['ttft_seconds']:.1f} ms{each}"
    yield f"cache: {cache['bytes_per_token']:,} bytes a token, {cache['bytes']:,} for {cache['tokens']} tokens"
    measured = (document["measured"] or {"lengths": []})["lengths"]
    if measured:
        yield "measured, in ms: tokens before, first token, next token with the cache, next token without it"
    for row in measured:
        times = "".join(f"{1000 * row[key]:>10.2f}" for key in ("ttft_seconds", "with_cache", "without_cache"))
        yield f"{row['tokens']:>8}{times}"


def _end(document: Mapping[str, Any]) -> str:
    finish = document["finish"]
    values = {**finish, "text": _quoted(finish["text"])} if finish.get("text") is not None else finish
    return _KINDS[finish["kind"]].format_map({"text": "?", **values})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text.isprintable() else json.dumps(text)
