"""One decode step on a CPU: a single new token for each row of a cache, in as few and large operations as there are.

The same arithmetic as `Transformer.forward`. What differs is the shape of the work: activations (N, C) stand in
memory as columns wherever W · xᵀ is faster than x · Wᵀ; the projections that read the same input are one matrix; and
no module is called, because for a small model those calls cost as much as its matrix products. Adapters, GPUs and
prompts go through `Transformer` itself.

Shapes: N rows, C hidden, H heads, K key/value heads, G = H/K group, D head size, I intermediate, S keys seen,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.model.cache import KVCache
from llmtrain.model.transformer import Layer, Linear, RMSNorm, Transformer


class _Weights(NamedTuple):
    """A layer's parameters, taken out of its modules once: finding them there takes longer than a small product."""

    norm: Tensor  # (C,)
    query_key_value: Tensor  # ((H + 2 K) · D, C)
    bias: Tensor | None  # ((H + 2 K) · D,)
    output: Tensor  # (C, H · D)
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    mlp_norm: Tensor  # (C,)
    gate_up: Tensor  # (2 I, C)
    down: Tensor  # (C, I)


class Place(NamedTuple):
    """Where the new tokens stand and what they may see: the same for all layers.

    Attributes:
        position: fp32; the rotation of a head, (D, D) or (N, D, D), or the sinusoidal vectors, (C,) or (N, C).
        slots: (N·K,) where keys and values go, in rows that lie end to end.
        mask: (1 or N·K, 1, S), −inf where a row has no key.
    """

    position: Tensor
    slots: Tensor
    mask: Tensor


class OneToken:
    """The decode step of one model with the weights that it has now: joining them copies two thirds of them.

    Args:
        model: Plain, on a CPU (`can_step`), in evaluation mode whenever this is called.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.config = model.config
        self._layers = [_weights(layer) for layer in model.model.layers]
        self._norm = model.model.norm.weight.detach()
        self._identity = torch.eye(self.config.head_dim)
        self._swap = self._identity.roll(self.config.head_dim // 2, 1)  # x @ this swaps the halves of x
        self._eps = torch.full((1, 1), self.config.rms_norm_eps)

    def __call__(self, token_ids: Tensor, cache: KVCache, rows: int) -> Tensor:
        """Reads one token for each of the first `rows` rows of a cache.

        Args:
            token_ids: (N,) ids.
            cache: Its lengths grow by one.
            rows: N.

        Returns:
            (N, V) logits in the model's dtype.

        Raises:
            ValueError: a row is full; nothing is counted then.
        """
        lengths = cache.lengths[:rows]
        if max(lengths) >= cache.capacity:
            raise ValueError(f"a row holds {max(lengths)} tokens, and the cache's capacity is {cache.capacity}.")
        logits = self._read(token_ids, self._place(cache, lengths), cache.keys, cache.values)
        for row in range(rows):
            cache.lengths[row] += 1
        return logits

    def _place(self, cache: KVCache, lengths: Sequence[int]) -> Place:
        """Where rows of such lengths go on; one position for all, where they have the same."""
        return self._place_of_each(cache, lengths[:1] if min(lengths) == max(lengths) else lengths, len(lengths))

    def _place_of_each(self, cache: KVCache, lengths: Sequence[int], rows: int) -> Place:
        kv_heads, span = self.config.num_key_value_heads, max(lengths) + 1
        if len(lengths) == 1:
            positions = owned = torch.tensor(lengths[0])
            mask = torch.zeros(1, 1, span, dtype=cache.keys[0].dtype)
        else:
            positions = torch.tensor(lengths)
            owned = positions.repeat_interleave(kv_heads)  # (N·K,)
            hidden = torch.arange(span) > owned[:, None]  # (N·K, S)
            mask = torch.zeros(hidden.shape, dtype=cache.keys[0].dtype).masked_fill_(hidden, -torch.inf).unsqueeze(1)
        return Place(self._position(positions), torch.arange(rows * kv_heads) * cache.capacity + owned, mask)

    def _position(self, positions: Tensor) -> Tensor:
        table = self.model.model.table(positions.device)
        if self.config.position == "sinusoidal":
            return table[0][positions]
        cos, sin = (each[positions].unsqueeze(-2) for each in table)
        return torch.addcmul(self._identity * cos, self._swap, sin)  # heads @ this is what `rotate` does

    def _read(self, token_ids: Tensor, place: Place, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """(N,) ids → (N, V) logits; writes to every layer's keys and values (B, K, capacity, D)."""
        x = self.model.model.embed_tokens.weight[token_ids]  # (N, C)
        if self.config.position == "sinusoidal":
            x = x + place.position.to(x.dtype)
        if _in_columns(x):
            x = x.t().contiguous().t()
        for weights, key, value in zip(self._layers, keys, values, strict=True):
            self._attention(x, weights, place, key, value)
            gate, up = _product(self._normed(x, weights.mlp_norm), weights.gate_up).chunk(2, dim=1)  # (N, I) each
            _add_product(x, F.silu(gate).mul_(up), weights.down)
        return _product(self._normed(x, self._norm), self.model.lm_head.weight)

    def _attention(self, x: Tensor, weights: _Weights, place: Place, keys: Tensor, values: Tensor) -> None:
        """Adds a layer's attention to x (N, C), in place."""
        query_heads = self.config.num_attention_heads
        turned = query_heads + self.config.num_key_value_heads  # values have no position
        joined = _product(self._normed(x, weights.norm), weights.query_key_value)
        if weights.bias is not None:
            joined += weights.bias
        heads = joined.contiguous().view(x.shape[0], -1, self.config.head_dim)  # (N, H + 2 K, D)
        queries_keys = heads[:, :turned]
        if weights.query_norm is not None and weights.key_norm is not None:
            normed = weights.query_norm(heads[:, :query_heads]), weights.key_norm(heads[:, query_heads:turned])
            queries_keys = torch.cat(normed, dim=1)
        if self.config.position == "rope":
            queries_keys = _turned(queries_keys, place.position)
        keys = _stored(keys, queries_keys[:, query_heads:], place)  # (N·K, S, D)
        values = _stored(values, heads[:, turned:], place)
        grouped = queries_keys[:, :query_heads].reshape(keys.shape[0], -1, keys.shape[-1])  # (N·K, G, D)
        _add_product(x, self._attended(grouped, keys, values, place.mask).view(x.shape[0], -1), weights.output)

    def _attended(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """What queries (N·K, G, D) find in their rows (N·K, S, D), (N·K, G, D)."""
        if query.dtype == torch.bfloat16 and query.shape[0] <= FUSED_UP_TO:
            return F.scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=mask[None])[0]
        scores = torch.baddbmm(mask, query, keys.mT, alpha=self.config.head_dim**-0.5)  # (N·K, G, S)
        return torch.bmm(torch.softmax(scores, dim=-1), values)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of (N, C), the mean square in fp32."""
        norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32)  # (N, 1)
        scale = torch.addcmul(self._eps, norm, norm, value=1 / x.shape[1]).rsqrt_()
        return torch.mul(x, scale).to(x.dtype).mul_(weight)


def can_step(model: nn.Module) -> bool:
    """Whether a model is plain (no adapter's layers inside), on a CPU, and all of one dtype that has such products."""
    if type(model) is not Transformer:
        return False
    weight = model.lm_head.weight
    plain = all(type(module) in _PLAIN for module in model.modules() if not list(module.children()))
    return plain and weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)


_PLAIN = (Linear, RMSNorm, nn.Embedding)


def _weights(layer: nn.Module) -> _Weights:
    assert isinstance(layer, Layer)
    attention, mlp = layer.self_attn, layer.mlp
    joined = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = [each.bias.detach() for each in joined if each.bias is not None]
    return _Weights(
        norm=layer.input_layernorm.weight.detach(),
        query_key_value=torch.cat([each.weight.detach() for each in joined]),
        bias=torch.cat(biases) if biases else None,
        output=attention.o_proj.weight,
        query_norm=attention.q_norm,
        key_norm=attention.k_norm,
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]),
        down=mlp.down_proj.weight,
    )


COLUMNS_FROM = 16
"""Rows from which fp32 products are faster on columns; for 2 to 15 the library's W · xᵀ takes up to three times x · Wᵀ.
"""

FUSED_UP_TO = 32
"""Heads of keys up to which, in bf16, calling two batched products takes up to four times as long as the fused kernel.
"""


def _in_columns(x: Tensor) -> bool:
    """Whether activations of so many rows are better kept column by column."""
    return x.dtype != torch.float32 or x.shape[0] == 1 or x.shape[0] >= COLUMNS_FROM


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x · Wᵀ: (N, in) and (out, in) → (N, out), in columns where these are better."""
    return torch.mm(weight, x.t()).t() if _in_columns(x) else torch.mm(x, weight.t())


def _add_product(total: Tensor, x: Tensor, weight: Tensor) -> None:
    """total (N, out) += x · Wᵀ, in place."""
    if _in_columns(x):
        total.t().addmm_(weight, x.t())
    else:
        total.addmm_(x, weight.t())


def _turned(heads: Tensor, rotation: Tensor) -> Tensor:
    """Heads (N, *, D) by an fp32 matrix for all (D, D), or one for each row (N, D, D)."""
    wide = heads.float()
    if rotation.dim() == 3:
        return torch.bmm(wide, rotation).to(heads.dtype)
    # One product: `@` makes one of each row where rows do not stand end to end.
    return torch.mm(wide.reshape(-1, wide.shape[-1]), rotation).view(heads.shape).to(heads.dtype)


def _stored(whole: Tensor, new: Tensor, place: Place) -> Tensor:
    """Writes keys or values (N, K, D) to a layer's (B, K, capacity, D); returns all that may be seen, (N·K, S, D)."""
    whole.view(-1, whole.shape[-1]).index_copy_(0, place.slots, new.reshape(-1, new.shape[-1]))
    return whole.view(-1, *whole.shape[2:])[: place.slots.shape[0], : place.mask.shape[-1]]
