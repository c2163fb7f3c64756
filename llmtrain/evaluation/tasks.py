"""Scores on tasks: ask the engine every item's prompt, compare each answer with its reference.

Knows items, the chat template (as `render_chat`) and metrics. Does not know models, adapters, training, or where items
come from; a base model and a fine-tuned one are asked in exactly the same way.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypedDict

from llmtrain.data.examples import Conversation, Example, normalise
from llmtrain.data.tasks import Item
from llmtrain.evaluation.metrics import Metric, find_metric
from llmtrain.generation import Engine, SamplingParams
from llmtrain.tokenizer import Tokenizer, render_chat

logger = logging.getLogger(__name__)

SPARE_TOKENS = 8
"""Without a stated limit, answers may be so much longer than the longest reference: it shows that they are wrong."""


class ItemResult(TypedDict):
    """One item: what was asked, wanted and answered. `error` says why there is no answer."""

    prompt: str
    reference: str
    prediction: str
    points: int
    possible: int
    finish_reason: str
    error: str | None


class TaskResult(TypedDict):
    """`score` and `chance` lie in 0 … 1; `n` is the number of items, `stopped` the share of answers that ended by
    themselves, `errors` the number that could not be asked (they score 0)."""

    metric: str
    score: float
    chance: float
    n: int
    stopped: float
    errors: int
    items: list[ItemResult]


def score_task(
    engine: Engine,
    items: Sequence[Item | Example],
    *,
    metric: str = "exact_match",
    sampling: SamplingParams | None = None,
    chance: float | None = None,
    warns: bool = True,
) -> TaskResult:
    """Ask every item and score the answers.

    Args:
        engine: Whose model is measured.
        items: Records of any form that `normalise` takes, conversations, or encoded examples. The last message is the
            reference, all before it are the prompt.
        metric: A key of `llmtrain.evaluation.METRICS`.
        sampling: How to answer; None is greedy, with room for the longest reference and a little more.
        chance: The score of guessing; None takes the best score that one and the same answer to everything gets here.
        warns: Say how many items could not be answered; not needed again for a second model on the same items.

    Raises:
        ValueError: No items, an unknown metric, or an item that is no example.
    """
    measure = find_metric(metric)
    if not items:
        raise ValueError("there are no items to score: give the task at least one")
    questions = [_question(item, engine.tokenizer) for item in items]
    references = [reference for _, _, reference in questions]
    sampling = sampling or _greedy(engine, references)
    completions = engine.generate([ids for ids, _, _ in questions], sampling)
    results: list[ItemResult] = []
    for (_, prompt, reference), completion in zip(questions, completions, strict=True):
        points, possible = measure(completion.text, reference)
        results.append(
            {
                "prompt": prompt,
                "reference": reference,
                "prediction": completion.text,
                "points": 0 if completion.error else points,
                "possible": possible,
                "finish_reason": completion.finish_reason,
                "error": completion.error,
            }
        )
    errors = [result["error"] for result in results if result["error"]]
    if errors and warns:
        logger.warning("%d of %d items could not be answered and score 0: %s", len(errors), len(items), errors[0])
    return {
        "metric": metric,
        "score": _share((result["points"], result["possible"]) for result in results),
        "chance": constant_answer(measure, references) if chance is None else chance,
        "n": len(results),
        "stopped": sum(result["finish_reason"] == "stop" for result in results) / len(results),
        "errors": len(errors),
        "items": results,
    }


def constant_answer(measure: Metric, references: Sequence[str], tries: int = 20) -> float:
    """The best score that always giving the same answer gets, of the `tries` most frequent references."""
    answers = [answer for answer, _ in Counter(references).most_common(tries)]
    return max(_share(measure(answer, reference) for reference in references) for answer in answers)


def _share(pairs: Iterable[tuple[int, int]]) -> float:
    points = possible = 0
    for gained, could in pairs:
        points, possible = points + gained, possible + could
    return points / possible if possible else 0.0


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
