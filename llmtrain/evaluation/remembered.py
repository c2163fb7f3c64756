"""How much of a text a model says by heart: the next line, given the lines before it, letter by letter.

Asked of the text that was trained on and of the text held out, the two figures tell memory from skill: what is right in
the first alone was learned by heart. Joins token shards and the engine; does not know where either comes from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypedDict

from llmtrain.data.shards import ShardSet
from llmtrain.data.windows import ValidationWindows
from llmtrain.evaluation.bpb import nats_and_tokens
from llmtrain.generation import Engine, SamplingParams
from llmtrain.tokenizer import Tokenizer

LOSS_BATCHES = 64  # enough for a figure; a large training text is not scored to its end


class Recall(TypedDict):
    """`right` of the `asked` lines were given exactly; `loss` in nats per token of the same text, at its beginning."""

    asked: int
    right: int
    loss: float


class NextLine(NamedTuple):
    """A line, and the ids of as many lines before it as there was room for."""

    before: list[int]
    line: str
    most: int  # tokens that an answer may have; one more than the line's, so that one that goes on is seen


def recall(engine: Engine, shards: Sequence[ShardSet], *, limit: int, sequence_length: int) -> Recall:
    """Ask for up to `limit` next lines, greedily, and take the loss.

    Args:
        engine: The model with its tokenizer.
        shards: The text, at least one folder.
        limit: The most lines to ask for, spread evenly over the text.
        sequence_length: Tokens of question and answer together, the length the model was trained on.
    """
    questions = next_lines(shards, engine.tokenizer, limit=limit, room=sequence_length)
    settings = [
        SamplingParams(temperature=0.0, max_new_tokens=question.most, stop=("\n",), seed=0) for question in questions
    ]
    answers = engine.generate([question.before for question in questions], settings)
    right = sum(answer.text == question.line for question, answer in zip(questions, answers, strict=True))
    nats = tokens = 0.0
    for each in shards:
        windows = ValidationWindows(
            each, eos_id=engine.tokenizer.eos_id, sequence_length=sequence_length, batch_size=16
        )
        found, count = nats_and_tokens(engine.model, islice(windows, LOSS_BATCHES))
        nats, tokens = nats + found, tokens + count
    return {"asked": len(questions), "right": right, "loss": nats / tokens}


def next_lines(shards: Sequence[ShardSet], tokenizer: Tokenizer, *, limit: int, room: int) -> list[NextLine]:
    """Up to `limit` lines with what stands before them, spread evenly over the text; first lines are no questions."""
    asked = [question for document in _documents(shards, tokenizer, limit) for question in _of(document)]
    step = max(1, -(-len(asked) // max(limit, 1)))
    questions = []
    for before, line in asked[::step]:
        most = len(tokenizer.encode(line)) + 1
        kept = room - most
        if kept >= 1:
            questions.append(NextLine(tokenizer.begin(tokenizer.encode(before)[-kept:]), line, most))
    return questions


def _documents(shards: Sequence[ShardSet], tokenizer: Tokenizer, limit: int) -> Iterator[str]:
    for each in shards:
        for index in range(0, each.num_documents, max(1, each.num_documents // max(limit, 1))):
            yield tokenizer.decode(each.document(index).tolist())


def _of(document: str) -> Iterable[tuple[str, str]]:
    lines = document.split("\n")
    return (("\n".join(lines[:index]) + "\n", line) for index, line in enumerate(lines) if index and line)
