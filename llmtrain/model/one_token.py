"""One decode step on a CPU: a single new token for each row of a cache, in as few and large operations as there are.

The same arithmetic as `Transformer.forward` on the same weights, which are read where they lie, so a model in training
is never out of date here. What differs is the shape of the work: activations stand as columns (C, N), because W · x
splits over the cores where x · Wᵀ of a few rows does not, and no module is called, because for a small model those
calls cost as much as its matrix products. Adapters, GPUs and prompts go through `Transformer` itself.

Shapes: N rows, C hidden, H heads, K key/value heads, G = H/K group, D head size, S keys seen, V vocabulary.
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

    norm: Tensor  # (C, 1)
    query: Linear
    key: Linear
    value: Linear
    output: Tensor
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    mlp_norm: Tensor  # (C, 1)
    gate: Tensor
    up: Tensor
    down: Tensor


class OneToken:
    """The decode step of one model.

    Args:
        model: Plain, on a CPU (`can_step`), in evaluation mode whenever this is called.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.config = model.config
        self._layers = [_weights(layer) for layer in model.model.layers]
        self._norm = _column(model.model.norm)
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
        body = self.model.model
        x = body.embed_tokens.weight[token_ids].t()  # (C, N)
        place = _Place(cache, lengths, self.config.num_key_value_heads, x.dtype)
        rotation = None
        if self.config.position == "sinusoidal":
            x = x + body.table(x.device)[0][place.positions.reshape(-1)].to(x.dtype).t()
        else:
            rotation = self._rotation(place.positions, x.dtype)
        x = x.contiguous()
        for number, weights in enumerate(self._layers):
            self._attention(x, weights, number, rotation, place)
            hidden = self._normed(x, weights.mlp_norm)
            x.addmm_(weights.down, F.silu(torch.mm(weights.gate, hidden)).mul_(torch.mm(weights.up, hidden)))
        logits = torch.mm(self.model.lm_head.weight, self._normed(x, self._norm)).t()
        for row in range(rows):
            cache.lengths[row] += 1
        return logits

    def _attention(self, x: Tensor, weights: _Weights, layer: int, rotation: Tensor | None, place: _Place) -> None:
        """Adds a layer's attention to the columns x (C, N), in place."""
        config, count = self.config, x.shape[1]
        hidden = self._normed(x, weights.norm)
        query = _heads(weights.query, hidden, config.head_dim)  # (N, H, D)
        key = _heads(weights.key, hidden, config.head_dim)  # (N, K, D)
        if weights.query_norm is not None and weights.key_norm is not None:
            query, key = weights.query_norm(query), weights.key_norm(key)
        if rotation is not None:
            query, key = query @ rotation, key @ rotation
        keys, values = place.store(layer, key, _heads(weights.value, hidden, config.head_dim))  # (N·K, S, D)
        grouped = query.reshape(keys.shape[0], -1, config.head_dim)  # (N·K, G, D)
        scores = torch.baddbmm(place.mask, grouped, keys.mT, alpha=config.head_dim**-0.5)  # (N·K, G, S)
        seen = torch.bmm(torch.softmax(scores, dim=-1), values)
        x.addmm_(weights.output, seen.view(count, -1).t())

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of columns (C, N), the mean square in fp32."""
        wide = x if x.dtype == torch.float32 else x.float()
        norm = torch.linalg.vector_norm(wide, dim=0, keepdim=True)  # (1, N)
        scale = torch.addcmul(self._eps, norm, norm, value=1 / x.shape[0]).rsqrt_()
        return wide.mul(scale).to(x.dtype).mul_(weight)

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """(D, D) or (N, D, D): the matrix that turns a head by its position's angles, x @ matrix, as `rotate` does."""
        cos, sin = (table[positions] for table in self.model.model.table(positions.device))  # (D,) or (N, D)
        return torch.addcmul(self._identity * cos.unsqueeze(-2), self._swap, sin.unsqueeze(-2)).to(dtype)


class _Place:
    """Where this step's keys and values go, and what each row may see: the same for all layers.

    Attributes:
        positions: () if all rows are equally long, else (N,).
        mask: (1, 1, 1) zeros, or (N·K, 1, S) with −inf where a row has no key.
    """

    def __init__(self, cache: KVCache, lengths: Sequence[int], kv_heads: int, dtype: torch.dtype) -> None:
        self._cache, self._rows = cache, len(lengths)
        self._span = max(lengths) + 1
        self._equal = min(lengths) + 1 == self._span
        self.positions = torch.tensor(lengths[0] if self._equal else lengths)
        self.mask = torch.zeros(1, 1, 1, dtype=dtype)
        if not self._equal:
            starts = torch.arange(self._rows * kv_heads) * cache.capacity
            owned = self.positions.repeat_interleave(kv_heads)  # (N·K,)
            self._index = starts + owned
            hidden = torch.arange(self._span) > owned[:, None]  # (N·K, S)
            self.mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf).unsqueeze(1)

    def store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes (N, K, D) keys and values and returns all that stand in the rows, (N·K, S, D)."""
        return self._stored(self._cache.keys[layer], key), self._stored(self._cache.values[layer], value)

    def _stored(self, whole: Tensor, new: Tensor) -> Tensor:
        if self._equal:
            whole[: self._rows].select(2, self._span - 1).copy_(new)
        else:
            whole.view(-1, new.shape[-1]).index_copy_(0, self._index, new.reshape(-1, new.shape[-1]))
        return whole.flatten(0, 1).narrow(0, 0, self._rows * whole.shape[1]).narrow(1, 0, self._span)


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
    return _Weights(
        norm=_column(layer.input_layernorm),
        query=attention.q_proj,
        key=attention.k_proj,
        value=attention.v_proj,
        output=attention.o_proj.weight,
        query_norm=attention.q_norm,
        key_norm=attention.k_norm,
        mlp_norm=_column(layer.post_attention_layernorm),
        gate=mlp.gate_proj.weight,
        up=mlp.up_proj.weight,
        down=mlp.down_proj.weight,
    )


def _column(norm: RMSNorm) -> Tensor:
    return norm.weight.detach()[:, None]


def _heads(projection: Linear, hidden: Tensor, head_dim: int) -> Tensor:
    """Columns (C, N) → (N, heads, D)."""
    columns = torch.mm(projection.weight, hidden)
    if projection.bias is not None:
        columns += projection.bias[:, None]
    return columns.t().reshape(hidden.shape[1], -1, head_dim)
