"""Writes a conversation down as a line that fine-tuning reads; never over anything.

Knows files and the record {"messages": […]}; not where a conversation comes from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path


def save_transcript(name: str, messages: Sequence[Mapping[str, str]]) -> str:
    """Adds a conversation to a .jsonl file as one more line.

    Turns without an answer are left out, since nothing can be learned from them.

    Args:
        name: The file; `~` is the home folder.
        messages: "role" and "content" of each.

    Returns:
        What was done, with the number of conversations that the file then holds.

    Raises:
        ValueError: There is no name or no answer, or the file is no .jsonl file of records or cannot be written.
    """
    kept = _answered(messages)
    if not name:
        raise ValueError("/save needs a file: /save FILE.jsonl")
    path = Path(name).expanduser()
    if path.suffix != ".jsonl":
        raise ValueError(
            f"/save {name}: give a name that ends with .jsonl, which is what finetune data=jsonl looks for"
        )
    if not any(message["role"] == "assistant" for message in kept):
        raise ValueError("there is no answer to save yet")
    line = json.dumps({"messages": kept}, ensure_ascii=False) + "\n"
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        _check_records(path, before)
        with path.open("a", encoding="utf-8") as file:
            file.write(line if not before or before.endswith("\n") else "\n" + line)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: give another file") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}): give another file") from error
    count = len(before.splitlines()) + 1
    return f"(saved to {path})" if count == 1 else f"(added to {path}, which now holds {count} lines)"


def _answered(messages: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    kept: list[Mapping[str, str]] = []
    for message in messages:
        if message["role"] == "assistant" and not message["content"].strip():
            kept.pop()
        else:
            kept.append(message)
    return kept


def _check_records(path: Path, text: str) -> None:
    """The last line tells whether a file is one of conversations, to which another may be added."""
    lines = text.splitlines()
    try:
        if lines and "messages" not in json.loads(lines[-1]):
            raise ValueError
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is there and holds no conversations: give another file, nothing was written"
        ) from error
