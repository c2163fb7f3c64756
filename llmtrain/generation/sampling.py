"""From logits to token ids: pure functions of tensors, for one row or a whole batch of unlike requests.

Every filter is a threshold on a row's logits: what lies below becomes −inf, ties with the last one kept stay. So the
outcome depends neither on the order a sort gives equal values nor on what else is in the batch. Knows nothing of
models, caches, tokenizers or text.

Shapes: N rows, V vocabulary; `...` stands for any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmtrain.generation.params import SamplingParams

NUCLEUS_GUESS = 512
"""Top-p first looks at this many of the largest logits and sorts the whole row only when they do not suffice."""

LOWEST_TEMPERATURE = 1e-6
"""Temperatures above 0 and below this are taken as this: the same choice, and no overflow to infinity in fp32."""

LARGEST_UNIFORM = 1 - 2**-24
"""The largest fp32 below 1: `uniform · total` then stays below `total`, so a token is always found."""


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: Tensor | float) -> Tensor:
    """Make tokens that occurred less likely (CTRL, Keskar et al. 2019; the same rule as transformers').

    Args:
        logits: (..., V).
        seen: (..., V) bool, the tokens of the prompt and the answer so far.
        penalty: A number, or (..., 1); 1 changes nothing.
    """
    penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, penalized, logits)


def keep_top_k(logits: Tensor, k: Tensor | int) -> Tensor:
    """Keep the k largest logits of every row (..., V); k is a number or (...,), and 0 keeps all."""
    k = torch.as_tensor(k, device=logits.device).expand(logits.shape[:-1])
    largest = min(int(k.max()), logits.shape[-1])
    if largest <= 0:
        return logits
    values = logits.topk(largest, dim=-1).values  # (..., largest), descending
    index = k.clamp(1, largest).unsqueeze(-1) - 1
    threshold = values.gather(-1, index)  # (..., 1)
    drop = (logits < threshold) & (k > 0).unsqueeze(-1)
    return logits.masked_fill(drop, -torch.inf)


def keep_top_p(logits: Tensor, p: Tensor | float) -> Tensor:
    """Keep the smallest set of most likely tokens whose probabilities reach p (Holtzman et al. 2020).

    Args:
        logits: (..., V).
        p: A number or (...,) in (0, 1]; 1 keeps all. The most likely token always stays.
    """
    p = torch.as_tensor(p, dtype=logits.dtype, device=logits.device).expand(logits.shape[:-1]).unsqueeze(-1)
    filtered = p < 1
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    for count in (min(NUCLEUS_GUESS, logits.shape[-1]), logits.shape[-1]):
        values = logits.topk(count, dim=-1).values  # (..., count), descending
        probabilities = (values - log_total).exp()
        before = probabilities.cumsum(-1) - probabilities  # what the more likely tokens already hold
        kept = (before < p).sum(-1, keepdim=True).clamp(min=1)
        if count == logits.shape[-1] or not bool(((kept == count) & filtered).any()):
            break
    threshold = values.gather(-1, kept - 1)
    return logits.masked_fill((logits < threshold) & filtered, -torch.inf)


def keep_min_p(logits: Tensor, p: Tensor | float) -> Tensor:
    """Keep tokens at least p times as likely as the most likely one (Nguyen et al. 2024); p is a number or (...,)."""
    p = torch.as_tensor(p, dtype=logits.dtype, device=logits.device).expand(logits.shape[:-1]).unsqueeze(-1)
    threshold = logits.amax(dim=-1, keepdim=True) + p.log()  # log 0 = −inf keeps all
    return logits.masked_fill(logits < threshold, -torch.inf)


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution at one uniform number.

    Args:
        logits: (..., V) in fp32; −inf is never drawn.
        uniform: (...,) in [0, 1).

    Returns:
        Token ids (...,) int64; −1 where the row holds NaN or +inf, or nothing that can be drawn.
    """
    cumulative = logits.softmax(dim=-1).cumsum(dim=-1)
    total = cumulative[..., -1:]  # about 1, and NaN when any logit is
    target = uniform.to(cumulative.dtype).clamp(max=LARGEST_UNIFORM).unsqueeze(-1) * total
    ids = torch.searchsorted(cumulative, target, right=True)  # the first token whose cumulative exceeds target
    return torch.where(total.isfinite(), ids, -1).squeeze(-1)


def most_likely(logits: Tensor) -> Tensor:
    """The arg-max of every row (..., V) → (...,); −1 where the largest is not finite (NaN counts as largest)."""
    values, ids = logits.max(dim=-1)
    return torch.where(values.isfinite(), ids, -1)


@dataclass(frozen=True)
class BatchSampling:
    """The settings of N requests as tensors, made once and used until the set of rows changes.

    A part that no row uses is None, so the common cases run only the operations they need.
    """

    all_greedy: bool
    greedy: Tensor | None  # (N,) bool, when greedy and sampling rows are mixed
    temperature: Tensor  # (N, 1), 1 for greedy rows
    top_k: Tensor | None  # (N,)
    top_p: Tensor | None  # (N,)
    min_p: Tensor | None  # (N,)
    penalty: Tensor | None  # (N, 1)

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> BatchSampling:
        """Stack the settings of N requests."""

        def column(name: str, neutral: float, dtype: torch.dtype) -> Tensor | None:
            values = [getattr(each, name) for each in params]
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, dtype=dtype, device=device)

        greedy = [each.greedy for each in params]
        penalty = column("repetition_penalty", 1.0, torch.float32)
        temperature = [1.0 if each.greedy else max(each.temperature, LOWEST_TEMPERATURE) for each in params]
        return cls(
            all_greedy=all(greedy),
            greedy=torch.tensor(greedy, device=device) if any(greedy) and not all(greedy) else None,
            temperature=torch.tensor(temperature, dtype=torch.float32, device=device).unsqueeze(1),
            top_k=column("top_k", 0, torch.int64),
            top_p=column("top_p", 1.0, torch.float32),
            min_p=column("min_p", 0.0, torch.float32),
            penalty=None if penalty is None else penalty.unsqueeze(1),
        )


def choose(logits: Tensor, settings: BatchSampling, uniform: Tensor | None, seen: Tensor | None = None) -> Tensor:
    """Choose the next token of N requests at once, each by its own settings.

    Args:
        logits: (N, V) in fp32; not changed.
        settings: The N requests' settings.
        uniform: (N,) in [0, 1), one number per request; may be None when all are greedy.
        seen: (N, V) bool, needed when any request has a repetition penalty.

    Returns:
        Token ids (N,) int64, −1 for a row whose logits are not finite.
    """
    if settings.penalty is not None:
        assert seen is not None
        logits = penalize_repetition(logits, seen, settings.penalty)
    if settings.all_greedy:
        return most_likely(logits)
    assert uniform is not None
    scaled = logits / settings.temperature
    if settings.top_k is not None:
        scaled = keep_top_k(scaled, settings.top_k)
    if settings.top_p is not None:
        scaled = keep_top_p(scaled, settings.top_p)
    if settings.min_p is not None:
        scaled = keep_min_p(scaled, settings.min_p)
    ids = draw(scaled, uniform)
    if settings.greedy is not None:
        ids = torch.where(settings.greedy, most_likely(logits), ids)
    return ids
