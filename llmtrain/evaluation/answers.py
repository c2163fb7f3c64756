"""How likely a model finds the answers that a task wants: the loss of fine-tuning, on items held out.

Knows items and the chat template (as `render_chat`). Knows nothing of what the model itself would answer (`tasks`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from llmtrain.data.examples import Conversation, normalise
from llmtrain.data.tasks import Item
from llmtrain.generation import Engine
from llmtrain.tokenizer import render_chat

logger = logging.getLogger(__name__)


def answer_loss(engine: Engine, items: Sequence[Item]) -> float | None:
    """Nats per token of the items' last answers, the end of the turn included, after all that stands before them.

    Args:
        engine: Whose model is measured.
        items: Records of any form that `normalise` takes, or conversations.

    Returns:
        The sum over all tokens divided by their number; None where no item fits into the model's context. Items that
        do not fit are left out, and a warning counts them.
    """
    pairs = []
    for item in items:
        messages = item.messages if isinstance(item, Conversation) else normalise(item)
        question, _ = render_chat(messages[:-1], engine.tokenizer, add_generation_prompt=True)
        whole, _ = render_chat(messages, engine.tokenizer)
        pairs.append((question, whole[len(question) :]))
    scores = engine.score(pairs)
    fitting = [score for score in scores if score.error is None]
    if len(fitting) < len(scores):
        error = next(score.error for score in scores if score.error is not None)
        logger.warning("the loss leaves %d of %d items out: %s", len(scores) - len(fitting), len(scores), error)
    if not fitting:
        return None
    return -sum(score.logprob_sum for score in fitting) / sum(score.num_tokens for score in fitting)
