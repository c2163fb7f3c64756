"""Accuracy by likelihood: of the answers to choose from, the one that the model finds most likely is its own.

Asks in the chat template, as `tasks` does, and scores each choice's text, without the end of the turn. Knows questions
and the engine; not where they come from.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmtrain.data.questions import Question
from llmtrain.evaluation.tasks import ItemResult, TaskResult, summarise
from llmtrain.evaluation.team import ALONE, Team
from llmtrain.generation import Engine, Score
from llmtrain.tokenizer import render_chat

ACCURACY, NORMALISED = "accuracy", "accuracy_norm"


def score_choices(
    engine: Engine, questions: Sequence[Question], *, warns: bool = True, team: Team = ALONE
) -> TaskResult:
    """Score every choice of every question.

    `accuracy` takes the choice of the highest summed log-probability, `accuracy_norm` that of the highest one per
    character, as lm-eval's `acc` and `acc_norm`; of equal ones the first. Chance is the mean of 1 / number of choices.

    Args:
        engine: Whose model is measured.
        questions: At least one.
        warns: Say how many questions could not be scored.
        team: The processes that share the questions; every one gets the whole result.

    Raises:
        ValueError: There are no questions.
    """
    if not questions:
        raise ValueError("there are no items to score: give the task at least one")
    mine = team.deal(questions)
    pairs = []
    for question in mine:
        ids, _ = render_chat(question.messages, engine.tokenizer, add_generation_prompt=True)
        pairs += [(ids, engine.tokenizer.encode(choice)) for choice in question.choices]
    scores = iter(engine.score(pairs) if pairs else [])
    items = [_item(question, [next(scores) for _ in question.choices]) for question in mine]
    guessing = sum(1 / len(question.choices) for question in questions) / len(questions)
    return summarise(team.merge(items), {ACCURACY: guessing, NORMALISED: guessing}, warns=warns)


def _item(question: Question, scores: Sequence[Score]) -> ItemResult:
    logprobs = [score.logprob_sum for score in scores]
    error = next((score.error for score in scores if score.error), None)
    raw = _best(logprobs)
    normalised = _best([each / len(choice) for each, choice in zip(logprobs, question.choices, strict=True)])
    return {
        "prompt": question.messages[-1]["content"],
        "reference": question.choices[question.answer],
        "prediction": "" if error else question.choices[raw],
        "metric": ACCURACY,
        "points": int(not error and raw == question.answer),
        "possible": 1,
        "also": {NORMALISED: (int(not error and normalised == question.answer), 1)},
        "details": {"choices": list(question.choices), "logprobs": None if error else logprobs},
        "finish_reason": "error" if error else "stop",
        "error": error,
    }


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
