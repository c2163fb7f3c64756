"""What a forward pass works out on its way and throws away: the residual stream, and who looked at whom.

`watched` hangs on a `Transformer` while it reads a text once, without a cache, and takes itself off again. Attention's
own code runs as ever; its queries, keys and values are copied on their way in and what it made of them on its way out,
so that weights worked out from them can be held against what the layer really did. Knows one model's modules; not
tokens, text or files.

Shapes: T time, C hidden, H heads, K key/value heads, G = H/K group, D head size, V vocabulary, N queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llmtrain.model.deltas import ModelDelta, RowDeltas
from llmtrain.model.transformer import Attention, Transformer


@dataclass(frozen=True)
class WatchedAttention:
    """One layer's attention: what went in, turned by position and normed as the model does, and what came out."""

    query: Tensor  # (H, T, D)
    key: Tensor  # (K, T, D)
    value: Tensor  # (K, T, D)
    attended: Tensor  # (H, T, D), before the output projection

    def weights(self, first: int = 0) -> Tensor:
        """How much each of the last T − `first` positions looked at every position, (H, N, T) in fp32.

        softmax(query · key / √D) over the positions up to its own, the definition; a row sums to 1.
        """
        heads, time, size = self.query.shape
        key = self.key.repeat_interleave(heads // self.key.shape[0], dim=0)
        scores = self.query[:, first:].float() @ key.float().mT * size**-0.5
        queries = torch.arange(first, time, device=scores.device)
        later = torch.arange(time, device=scores.device) > queries[:, None]  # (N, T)
        return scores.masked_fill(later, -torch.inf).softmax(dim=-1)

    def error(self, weights: Tensor, first: int = 0) -> float:
        """The largest difference between weights (H, N, T) times values and what the layer gave."""
        heads = self.query.shape[0]
        value = self.value.repeat_interleave(heads // self.value.shape[0], dim=0).float()
        return float((weights @ value - self.attended[:, first:].float()).abs().max())


@dataclass
class Watched:
    """A text as the model read it.

    Attributes:
        stream: (T, C) each: the residual stream before the first layer and after every layer.
        layers: one per layer.
        hidden: (T, C) after the final norm.
    """

    stream: list[Tensor] = field(default_factory=list)
    layers: list[WatchedAttention] = field(default_factory=list)
    hidden: Tensor | None = None


@torch.inference_mode()
def read_watched(model: Transformer, token_ids: Sequence[int], adapter: ModelDelta | None = None) -> Watched:
    """Reads a text in one pass and keeps what it saw.

    Args:
        model: In evaluation mode.
        token_ids: T ids, at most the model's context.
        adapter: Whose changes are added, as the engine does for a request that names it.

    Raises:
        ValueError: The text is longer than the context.
    """
    if len(token_ids) > model.config.max_position_embeddings:
        raise ValueError(
            f"{len(token_ids)} tokens exceed the model's context of {model.config.max_position_embeddings} "
            "(max_position_embeddings)."
        )
    device = model.model.embed_tokens.weight.device
    with watched(model) as seen:
        seen.hidden = model.model(
            torch.tensor([list(token_ids)], device=device), deltas=RowDeltas.of([adapter], device)
        )[0]
    return seen


@contextmanager
def watched(model: Transformer) -> Iterator[Watched]:
    """While it is open, the one row that the model reads is written down."""
    seen = Watched()
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    handles = [
        layer.register_forward_pre_hook(lambda _, args: seen.stream.append(args[0][0])) for layer in model.model.layers
    ]
    handles.append(model.model.norm.register_forward_pre_hook(lambda _, args: seen.stream.append(args[0][0])))
    for attention in attentions:
        _watch(attention, seen)
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
        for attention in attentions:
            del attention.__dict__["_attend"]


def _watch(attention: Attention, seen: Watched) -> None:
    attend = attention._attend  # the class's; one of the instance stands before it until it is deleted

    def watching(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        attended = attend(query, key, value, mask, causal)
        seen.layers.append(WatchedAttention(query[0], key[0], value[0], attended[0]))
        return attended

    attention._attend = watching  # type: ignore[method-assign]
