"""From scores to choice: what each step could have said, what the settings left of it, and what was drawn.

A step's scores are stored whole where all of them together fit `LOGITS_BYTES`; then a page can do again, for any
settings, exactly what the engine does. Otherwise the likeliest are stored, which is as exact for every setting that
keeps none of the others.

Shapes: V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmtrain.generation.sampling import LOWEST_TEMPERATURE, keep_min_p, keep_top_k, keep_top_p, most_likely
from llmtrain.inspector.arrays import packed, rounded
from llmtrain.inspector.recording import Recording

LOGITS_BYTES = 2 << 20
"""The scores of all steps together take at most so many bytes: 128 steps of a vocabulary of 4,096."""

LISTED = 12
"""Candidates of each step that are spelled out."""


def filtered(logits: Tensor, recording: Recording) -> Tensor:
    """(V,) scores after temperature, top-k, top-p and min-p, in the engine's order; −inf for what they exclude."""
    params = recording.params
    if params.greedy:
        return logits
    scaled = logits / max(params.temperature, LOWEST_TEMPERATURE)
    if params.top_k:
        scaled = keep_top_k(scaled, params.top_k)
    if params.top_p < 1:
        scaled = keep_top_p(scaled, params.top_p)
    if params.min_p > 0:
        scaled = keep_min_p(scaled, params.min_p)
    return scaled


def stored_scores(recording: Recording) -> int:
    """How many of V scores are stored of each step."""
    size, steps = recording.excluded.numel(), len(recording.steps)
    if 4 * size * steps <= LOGITS_BYTES:
        return size
    return min(size, max(LISTED, LOGITS_BYTES // (8 * steps)))  # an id and a score each


def step_entries(recording: Recording) -> list[dict[str, Any]]:
    """One entry per generated token."""
    count = stored_scores(recording)
    return [_entry(recording, index, count) for index in range(len(recording.steps))]


def _entry(recording: Recording, index: int, count: int) -> dict[str, Any]:
    step, token = recording.steps[index], recording.completion.token_ids[index]
    logits = recording.choosable(index)
    own = step.logits.log_softmax(-1)  # over all V, as in training
    after = filtered(logits, recording)
    chances = after.softmax(-1)
    greedy = int(most_likely(logits))
    if recording.params.greedy:
        chances = torch.zeros_like(chances)
        chances[greedy] = 1.0
    listed = logits.topk(min(LISTED, int(logits.isfinite().sum()))).indices.tolist()
    took = step.seconds - recording.steps[index - 1].seconds if index else recording.completion.ttft_seconds or 0.0
    return {
        "step": index,
        "position": len(recording.prompt_ids) + index,
        "token": token,
        "greedy": greedy,
        "uniform": step.uniform,
        "rank": int((logits > logits[token]).sum()) + 1,
        "kept": 1 if recording.params.greedy else int(after.isfinite().sum()),
        "entropy": rounded(float(-(own.exp() * own).nan_to_num(0.0).sum())),
        "seconds": rounded(took),
        "candidates": [_candidate(each, logits, own, chances) for each in listed]
        + ([] if token in listed else [_candidate(token, logits, own, chances)]),
        "scores": _scores(logits, count),
    }


def _candidate(token: int, logits: Tensor, own: Tensor, chances: Tensor) -> dict[str, Any]:
    return {
        "id": token,
        "logit": rounded(float(logits[token]), 8),
        "probability": rounded(float(own[token].exp()), 8),
        "chance": rounded(float(chances[token]), 8),
    }


def _scores(logits: Tensor, count: int) -> dict[str, Any]:
    """The scores that settings are applied to: all in the order of the ids, or the highest with their ids."""
    if count == logits.numel():
        return {"kind": "all", "logits": packed(logits)}
    top = logits.topk(count)
    order = top.indices.argsort()  # in the order of the ids, in which the engine draws
    rest = logits.scatter(0, top.indices, -torch.inf)
    return {
        "kind": "top",
        "ids": packed(top.indices[order]),
        "logits": packed(top.values[order]),
        "rest": int(rest.isfinite().sum()),
        "rest_logsumexp": rounded(float(rest.logsumexp(-1)), 9) if bool(rest.isfinite().any()) else None,
    }
