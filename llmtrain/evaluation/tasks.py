"""Scores on tasks: ask the engine every item's prompt, compare each answer with its reference. The one scorer.

Knows items, the chat template (as `render_chat`), metrics and intervals. Does not know models, adapters, training, or
where items come from; a base model and a fine-tuned one are asked in exactly the same way.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from llmtrain.data.examples import Conversation, Example, normalise
from llmtrain.data.tasks import Item
from llmtrain.evaluation.intervals import Interval, score_interval
from llmtrain.evaluation.metrics import find_metric, score_answers, share
from llmtrain.evaluation.team import ALONE, Team
from llmtrain.generation import Engine, SamplingParams
from llmtrain.tokenizer import Tokenizer, render_chat

logger = logging.getLogger(__name__)

SPARE_TOKENS = 8
"""Without a stated limit, answers may be so much longer than the longest reference: it shows that they are wrong."""


class ItemResult(TypedDict):
    """One item: what was asked, wanted and answered. `points` and `possible` are by the task's first metric, `also` has
    those of the others by name, `details` what only some kinds of items have. `error` says why there is no answer."""

    prompt: str
    reference: str
    prediction: str
    metric: str
    points: float
    possible: float
    also: dict[str, tuple[float, float]]
    details: dict[str, Any]
    finish_reason: str
    error: str | None


class Scored(TypedDict):
    """A score, its 95 % bootstrap interval over the items, and what guessing gets."""

    score: float
    interval: Interval
    chance: float


class TaskResult(TypedDict):
    """`metric`, `score`, `interval` and `chance` are the first metric's, `metrics` has all by name; `n` is the number
    of items, `stopped` the share of answers that ended by themselves, `errors` the number that could not be asked (they
    count as empty answers)."""

    metric: str
    score: float
    interval: Interval
    chance: float
    n: int
    stopped: float
    errors: int
    metrics: dict[str, Scored]
    items: list[ItemResult]


def score_task(
    engine: Engine,
    items: Sequence[Item | Example],
    *,
    metric: str | Sequence[str] = "exact_match",
    sampling: SamplingParams | None = None,
    guess: str | None = None,
    warns: bool = True,
    team: Team = ALONE,
) -> TaskResult:
    """Ask every item and score the answers.

    Args:
        engine: Whose model is measured.
        items: Records of any form that `normalise` takes, conversations, or encoded examples. The last message is the
            reference, all before it are the prompt.
        metric: Keys of `llmtrain.evaluation.METRICS`; the first is the task's own.
        sampling: How to answer; None is greedy, with room for the longest reference and a little more.
        guess: The answer to everything whose score is chance: the most common one of the examples trained on. None
            takes the most common reference.
        warns: Say how many items could not be answered; not needed again for a second model on the same items.
        team: The processes that share the items; every one gets the whole result.

    Raises:
        ValueError: No items, an unknown metric, or an item that is no example.
    """
    names = [metric] if isinstance(metric, str) else list(dict.fromkeys(metric))
    for name in names:
        find_metric(name)
    if not items:
        raise ValueError("there are no items to score: give the task at least one")
    questions = [_question(item, engine.tokenizer) for item in items]
    references = [reference for _, _, reference in questions]
    sampling = sampling or _greedy(engine, references)
    mine = team.deal(questions)
    completions = engine.generate([ids for ids, _, _ in mine], sampling) if mine else []
    results: list[ItemResult] = []
    for (_, prompt, reference), completion in zip(mine, completions, strict=True):
        answer = "" if completion.error else completion.text
        found = {name: find_metric(name)(answer, reference) for name in names}
        points, possible = found.pop(names[0])
        results.append(
            {
                "prompt": prompt,
                "reference": reference,
                "prediction": completion.text,
                "metric": names[0],
                "points": points,
                "possible": possible,
                "also": found,
                "details": {},
                "finish_reason": completion.finish_reason,
                "error": completion.error,
            }
        )
    guess = most_common(references) if guess is None else guess
    chances = {name: score_answers(name, [guess] * len(references), references) for name in names}
    return summarise(team.merge(results), chances, warns=warns)


def summarise(items: list[ItemResult], chances: Mapping[str, float], *, warns: bool = True) -> TaskResult:
    """Scores of items that were answered.

    Args:
        items: At least one, all scored by the same metrics.
        chances: What guessing gets, by metric; the task's own is the first.
        warns: Say how many items could not be answered.
    """
    errors = [item["error"] for item in items if item["error"]]
    if errors and warns:
        logger.warning("%d of %d items could not be answered and score 0: %s", len(errors), len(items), errors[0])
    metrics: dict[str, Scored] = {}
    for name, chance in chances.items():
        pairs = [points_of(item, name) for item in items]
        metrics[name] = {"score": share(pairs), "interval": score_interval(pairs), "chance": chance}
    first = next(iter(chances))
    return {
        "metric": first,
        **metrics[first],
        "n": len(items),
        "stopped": sum(item["finish_reason"] == "stop" for item in items) / len(items),
        "errors": len(errors),
        "metrics": metrics,
        "items": items,
    }


def points_of(item: ItemResult, metric: str) -> tuple[float, float]:
    """(points, possible points) of one item by one of its metrics."""
    return (item["points"], item["possible"]) if metric == item["metric"] else item["also"][metric]


def most_common(answers: Sequence[str]) -> str:
    """Of several equally common ones the first met."""
    return Counter(answers).most_common(1)[0][0]


def _question(item: Item | Example, tokenizer: Tokenizer) -> tuple[list[int], str, str]:
    """Token ids up to the assistant's turn, the prompt's text, and the reference."""
    if isinstance(item, Example):
        return item.prompt_ids, item.prompt, item.completion
    messages = item.messages if isinstance(item, Conversation) else normalise(item)
    ids, _ = render_chat(messages[:-1], tokenizer, add_generation_prompt=True)
    return ids, messages[-2]["content"], messages[-1]["content"]


def _greedy(engine: Engine, references: Sequence[str]) -> SamplingParams:
    longest = max(len(ids) for ids in engine.tokenizer.encode_batch(references))
    return replace(SamplingParams(), temperature=0.0, max_new_tokens=longest + SPARE_TOKENS)
