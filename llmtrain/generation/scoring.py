"""Log-probabilities of given tokens, from the hidden states that reading them left behind.

Knows the model's output layer and score requests; does not know caches, rows or sampling.

Shapes: N rows, T time, C hidden, V vocabulary, M scored tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmtrain.generation.request import Request, ScoreRequest
from llmtrain.model import RowDeltas, Transformer

LOGITS_BYTES = 64 << 20
"""Scoring needs logits of many positions; they are worked out in slices of at most this size."""


def score_piece(
    model: Transformer,
    group: Sequence[Request],
    hidden: Tensor,
    lengths: Sequence[int],
    excluded: Tensor,
) -> None:
    """Credit every score request in a group with the tokens that this piece of reading predicts.

    Args:
        model: For its output layer.
        group: N requests; those that generate are passed over.
        hidden: (N, T, C) of the piece that starts at each request's `fed`.
        lengths: How many of the T positions are real, per request.
        excluded: (V,) −inf for ids that are never chosen, else 0. It decides only what counts as the most likely token;
            probabilities are over all V, as in training.
    """
    rows: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    shares: list[tuple[ScoreRequest, int]] = []
    for row, (request, length) in enumerate(zip(group, lengths, strict=True)):
        if isinstance(request, ScoreRequest):
            where, tokens = request.scored_positions(request.fed, request.fed + length)
            rows += [row] * len(tokens)
            positions += where
            targets += tokens
            shares.append((request, len(tokens)))
    if not targets:
        return
    device = hidden.device
    picked = hidden[torch.tensor(rows, device=device), torch.tensor(positions, device=device)]  # (M, C)
    wanted = torch.tensor(targets, device=device)
    adapters = [group[row].adapter for row in rows]
    size = max(1, LOGITS_BYTES // (4 * model.config.vocab_size))
    logprobs: list[float] = []
    greedy: list[bool] = []
    for begin, part, tokens_of_part in zip(
        range(0, len(rows), size), picked.split(size), wanted.split(size), strict=True
    ):
        deltas = RowDeltas.of(adapters[begin : begin + size], device)
        logits = model.logits(part, deltas).float()  # (≤ M, V)
        chosen = logits.gather(-1, tokens_of_part.unsqueeze(-1)).squeeze(-1)
        logprobs += (chosen - logits.logsumexp(dim=-1)).tolist()
        greedy += ((logits + excluded).argmax(dim=-1) == tokens_of_part).tolist()
    start = 0
    for request, count in shares:
        request.add(logprobs[start : start + count], greedy[start : start + count])
        start += count
