"""Conversations as token ids with a mask of what is trained, and the one rule for those that are too long.

Trained are exactly the assistant's texts and their `<|end|>`, in every turn. What exceeds `max_length` input
positions is shortened so: whole turns are dropped from the end while an earlier answer remains; if the first
answer alone does not fit, its text is cut at the end. The end token is always kept, no character is cut in
two, and prompts are never cut: where one leaves no room for a single character of answer and the end token, the
example is refused. All of it is counted and reported by line. Deliberately unknown here: batches, sampling
order, torch, and how answers are scored.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from llmtrain.data.records import (
    Conversation,
    EmptyExampleError,
    ExampleReport,
    hold_out,
    normalise,
    read_examples,
)
from llmtrain.data.windows import IGNORED
from llmtrain.tokenizer import Tokenizer, render_chat

__all__ = [
    "Conversation",
    "Example",
    "ExampleReport",
    "encode_examples",
    "hold_out",
    "normalise",
    "read_examples",
]


MIN_LENGTH = 4
"""The shortest example, in input positions: `<|user|>` text `<|assistant|>` text, with `<|end|>` as the last target."""


@dataclass(frozen=True)
class Example:
    """One conversation, ready for training and for asking.

    Attributes:
        input_ids: (T,) the rendered conversation without its last token.
        labels: (T,) the next token at every position that is trained, −100 elsewhere.
        prompt: Text of the message before the last answer.
        completion: Text of the last answer; the whole text, even where the ids were cut.
        prompt_ids: The rendered conversation up to the last answer, that `<|assistant|>` included.
        where: File and line, or its number where there is no file.
    """

    input_ids: list[int]
    labels: list[int]
    prompt: str
    completion: str
    prompt_ids: list[int]
    where: str = field(default="", compare=False)

    @cached_property
    def trained_tokens(self) -> int:
        """How many positions are trained."""
        return sum(label != IGNORED for label in self.labels)


def encode_examples(
    items: Iterable[Conversation | Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    max_length: int,
) -> tuple[list[Example], ExampleReport]:
    """Render, mask and, where needed, shorten conversations.

    Args:
        items: Conversations, or records of any form that `normalise` takes.
        tokenizer: One with the role markers.
        max_length: The most input positions an example may have; the model's context.

    Returns:
        The examples, and a report whose `read` counts the items given here and whose `kept` counts the
        examples returned.

    Raises:
        ValueError: `max_length` is below `MIN_LENGTH`, or no example is left.
    """
    if max_length < MIN_LENGTH:
        raise ValueError(f"max_length must be at least {MIN_LENGTH}, got {max_length}")
    report = ExampleReport()
    examples = []
    for number, item in enumerate(items, start=1):
        report.read += 1
        where = (isinstance(item, Conversation) and item.where) or f"example {number}"
        try:
            messages = item.messages if isinstance(item, Conversation) else normalise(item)
        except EmptyExampleError as error:
            report.empty.append(f"{where} {error}")
            continue
        except ValueError as error:
            report.malformed.append(f"{where} {error}")
            continue
        example = _encode(messages, tokenizer, max_length, where, report)
        if example:
            examples.append(example)
    report.kept = len(examples)
    if not examples:
        reasons = "; ".join(report.lines()) or "the data set is empty"
        raise ValueError(f"no example is left to train on: {reasons}: mend them, or raise data.max_length={max_length}")
    return examples, report


def _encode(
    messages: list[dict[str, str]], tokenizer: Tokenizer, max_length: int, where: str, report: ExampleReport
) -> Example | None:
    ids, trained = render_chat(messages, tokenizer)
    length = len(ids) - 1
    if length > max_length:
        messages, ids, trained = _drop_turns(messages, tokenizer, max_length)
    if len(ids) - 1 > max_length:
        shortened = _cut_answer(ids, trained, tokenizer, max_length)
        if shortened is None:
            start = trained.index(True)
            report.too_long.append(f"{where} its prompt has {start} tokens, the limit of {max_length} leaves no room")
            return None
        ids, trained = shortened
    if length > max_length:
        report.cut.append(f"{where} from {length} to {len(ids) - 1} tokens")
    return Example(
        input_ids=ids[:-1],
        labels=[token if train else IGNORED for token, train in zip(ids[1:], trained[1:], strict=True)],
        prompt=messages[-2]["content"],
        completion=messages[-1]["content"],
        prompt_ids=ids[: _last_answer(trained)],
        where=where,
    )


def _last_answer(trained: list[bool]) -> int:
    """Where the last answer's text begins; a marker stands before every answer, so runs of trained ids never touch."""
    start = len(trained)
    while trained[start - 1]:
        start -= 1
    return start


def _drop_turns(
    messages: list[dict[str, str]], tokenizer: Tokenizer, max_length: int
) -> tuple[list[dict[str, str]], list[int], list[bool]]:
    """The longest beginning that ends with an answer and fits; the shortest such beginning if none fits."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    for last in reversed(answers):
        kept = messages[: last + 1]
        ids, trained = render_chat(kept, tokenizer)
        if len(ids) - 1 <= max_length or last == answers[0]:
            break
    return kept, ids, trained


def _cut_answer(
    ids: list[int], trained: list[bool], tokenizer: Tokenizer, max_length: int
) -> tuple[list[int], list[bool]] | None:
    """Cut the only answer's text, keeping the end token and whole characters; None if nothing would be left of it."""
    start = trained.index(True)
    answer = tokenizer.decode(ids[start:-1])
    # ids[:stop] + end token = max_length + 1 ids = max_length inputs; a UTF-8 character has at most four bytes
    for stop in range(max_length, max(start, max_length - 4), -1):
        kept = tokenizer.decode(ids[start:stop])  # half a character decodes to U+FFFD, which the answer may hold, too
        if kept and answer.startswith(kept):
            return [*ids[:stop], ids[-1]], [*trained[:stop], True]
    return None
