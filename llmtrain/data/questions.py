"""The user's own items to be evaluated on: conversations, or questions with answers to choose from.

    {"prompt": "…", "choices": ["…", "…"], "answer": 0}

Deliberately unknown here: tokenizers, and how answers are scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.data.files import find_files
from llmtrain.data.json_values import SUFFIXES, read_json
from llmtrain.data.records import Conversation, EmptyExampleError, Messages, normalise


@dataclass(frozen=True)
class Question:
    """A prompt and possible answers, one of which is right.

    Attributes:
        messages: All before the answer; the last one is the user's.
        choices: The answers, at least two.
        answer: Which is right, counted from 0.
        where: File and line.
    """

    messages: Messages
    choices: tuple[str, ...]
    answer: int
    where: str = ""


def read_questions(
    paths: str | Path | Sequence[str | Path], *, encoding: str = "utf-8"
) -> tuple[list[Conversation], list[Question]]:
    """All records of the files: those with a reference, and those with choices, each in the files' order.

    Args:
        paths: .jsonl and .json files (also .gz), folders of them, or patterns with `*`.
        encoding: Of the files.

    Raises:
        ValueError: A file is missing or cannot be read, or a record is of no accepted form; with file and line.
    """
    conversations: list[Conversation] = []
    questions: list[Question] = []
    for file in find_files([paths] if isinstance(paths, str | Path) else paths, SUFFIXES):
        for place, record in read_json(file, encoding):
            where = f"{place.path}:{place.number}" if place.what == "line" else f"{place.path}[{place.number}]"
            if isinstance(record, ValueError):
                raise ValueError(f"{where} does not parse as JSON: {record}")
            try:
                if isinstance(record, Mapping) and "choices" in record:
                    questions.append(_question(record, where))
                else:
                    conversations.append(Conversation(normalise(record), where))
            except EmptyExampleError as error:
                raise ValueError(f"{where} cannot be asked: {error}") from error
            except ValueError as error:
                raise ValueError(f"{where} is no item to evaluate on: {error}") from error
    if not conversations and not questions:
        raise ValueError(f"there are no items in {paths}: give at least one record")
    return conversations, questions


def _question(record: Mapping[str, Any], where: str) -> Question:
    choices, answer = record["choices"], record.get("answer")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(each, str) and each for each in choices):
        raise ValueError('"choices" must be a list of at least two texts, none of them empty')
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise ValueError(f'"answer" must be the number of the right choice, 0 … {len(choices) - 1}, got {answer!r}')
    rest = {key: value for key, value in record.items() if key not in ("choices", "answer")}
    texts = {**rest, "completion": choices[answer]} if "prompt" in rest else {**rest, "output": choices[answer]}
    return Question(normalise(texts)[:-1], tuple(choices), answer, where)
