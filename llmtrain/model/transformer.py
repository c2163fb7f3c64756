"""The decoder-only transformer: Hugging Face Llama's names, config fields and arithmetic in plain `torch.nn`.

Knows tensors and its own shape. Does not know tokenizers, files, optimisers, devices or adapters; what peft and
transformers ask of a model (`get_input_embeddings`, `_tied_weights_keys`, …) is here because they look for it on the
module itself.

Shapes: B batch, T time, C hidden, H heads, K key/value heads, G = H/K group, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llmtrain.model.cache import CacheWrite, KVCache
from llmtrain.model.config import ModelConfig
from llmtrain.model.deltas import RowDeltas
from llmtrain.model.positions import document_layout, rotary_table, rotate, sinusoidal_table


class RMSNorm(nn.Module):
    """x / rms(x) · weight, the mean square in fp32 (Zhang & Sennrich, 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) → (..., C)."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Linear(nn.Linear):
    """`nn.Linear` that is quicker for the few rows of a decode step on the CPU.

    For 2 to 32 rows in fp32, W·xᵀ splits its long side over the cores where x·Wᵀ has nothing to split: 1.2 to 1.7 times
    as fast for the default model on two cores, up to 4 times for the 30 M one (docs/LOG.md). bf16 gains nothing.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) → (..., out)."""
        rows = x.numel() // self.in_features
        if not 2 <= rows <= 32 or x.dtype != torch.float32 or x.device.type != "cpu" or torch.is_grad_enabled():
            return super().forward(x)
        columns = self.weight @ x.reshape(rows, self.in_features).t()  # (out, rows)
        if self.bias is not None:
            columns += self.bias[:, None]
        return columns.t().contiguous().view(*x.shape[:-1], self.out_features)


class Attention(nn.Module):
    """Grouped-query causal self-attention with rotary positions."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        bias = config.attention_bias
        self.q_proj = Linear(config.hidden_size, self.heads * self.head_dim, bias=bias)
        self.k_proj = Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        write: CacheWrite | None,
        mask: Tensor | None = None,
        deltas: RowDeltas | None = None,
    ) -> Tensor:
        """(B, T, C) → (B, T, C); `rotation` is (cos, sin) in x's dtype, or None for sinusoidal positions.

        `mask` (B, 1, T, T) is true where a query sees a key; without one (and without a cache) attention is causal.
        """
        batch, time, _ = x.shape
        query = _applied(self.q_proj, x, deltas).view(batch, time, self.heads, self.head_dim)
        key = _applied(self.k_proj, x, deltas).view(batch, time, self.kv_heads, self.head_dim)
        value = _applied(self.v_proj, x, deltas).view(batch, time, self.kv_heads, self.head_dim).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = query.transpose(1, 2), key.transpose(1, 2)  # (B, H, T, D), (B, K, T, D)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        causal = mask is None and time > 1
        if write is not None:
            key, value = write.store(self.layer, key, value)
            mask, causal = write.mask, write.causal and time > 1
        attended = self._attend(query, key, value, mask, causal)  # (B, H, T, D)
        return _applied(self.o_proj, attended.transpose(1, 2).reshape(batch, time, -1), deltas)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        if query.shape[2] == 1:
            return self._attend_one(query, key, value, mask)
        grouped = self.heads > self.kv_heads
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped)

    def _attend_one(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """One new token per row: the G queries of a key head become G "positions" that all see the same keys.

        So nothing is copied G times. On the CPU two batched products take half the time of the fused kernel, whose
        blocks are made for many queries.
        """
        batch = query.shape[0]
        grouped = query.reshape(batch, self.kv_heads, -1, self.head_dim)  # (B, K, G, D)
        if query.device.type != "cpu":
            attended = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask)
        else:
            scores = (grouped * self.head_dim**-0.5) @ key.mT  # (B, K, G, S)
            if mask is not None:
                scores = scores.masked_fill(~mask, -torch.inf)
            attended = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype) @ value
        return attended.reshape(batch, self.heads, 1, self.head_dim)


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020, arXiv:2002.05202): down(silu(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, deltas: RowDeltas | None = None) -> Tensor:
        """(..., C) → (..., C)."""
        gated = F.silu(_applied(self.gate_proj, x, deltas)) * _applied(self.up_proj, x, deltas)
        return _applied(self.down_proj, gated, deltas)


class Layer(nn.Module):
    """One transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.dropout = config.dropout

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        write: CacheWrite | None,
        mask: Tensor | None = None,
        deltas: RowDeltas | None = None,
    ) -> Tensor:
        """(B, T, C) → (B, T, C)."""
        x = x + self._drop(self.self_attn(self.input_layernorm(x), rotation, write, mask, deltas))
        return x + self._drop(self.mlp(self.post_attention_layernorm(x), deltas))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, training=True) if self.dropout and self.training else x


class Body(nn.Module):
    """Everything but the output layer (Hugging Face's `LlamaModel`)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self._tables: dict[torch.device, tuple[Tensor, ...]] = {}

    def forward(
        self,
        input_ids: Tensor,
        write: CacheWrite | None = None,
        document_ids: Tensor | None = None,
        deltas: RowDeltas | None = None,
    ) -> Tensor:
        """(B, T) ids → (B, T, C) after the final norm."""
        mask = None
        if document_ids is not None:
            positions, mask = document_layout(document_ids)
        elif write is not None:
            positions = write.positions
        else:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embed_tokens(input_ids)
        if deltas is not None:
            x = deltas.embedded(input_ids, x)
        rotation = None
        if self.config.position == "sinusoidal":
            x = x + self.table(x.device)[0][positions].to(x.dtype)
        else:
            rotation = self._rotation(positions, x)
        if self.config.dropout and self.training:
            x = F.dropout(x, self.config.dropout, training=True)
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        for layer in self.layers:
            if recompute:
                x = checkpoint(layer, x, rotation, write, mask, use_reentrant=False)
            else:
                x = layer(x, rotation, write, mask, deltas)
        return self.norm(x)

    def _rotation(self, positions: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine at the positions, (T, D) or (B, 1, T, D), in the dtype the heads are computed in."""
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        cos, sin = (table[positions].to(dtype) for table in self.table(x.device))
        return (cos[:, None], sin[:, None]) if positions.dim() == 2 else (cos, sin)

    def table(self, device: torch.device) -> tuple[Tensor, ...]:
        """The table of positions on a device, made when first asked for: `rotary_table` or (`sinusoidal_table`,)."""
        if device not in self._tables:
            with torch.inference_mode(False), torch.no_grad():
                length = self.config.max_position_embeddings
                if self.config.position == "sinusoidal":
                    self._tables[device] = (sinusoidal_table(self.config, length, device),)
                else:
                    self._tables[device] = rotary_table(self.config, length, device)
        return self._tables[device]


class Transformer(nn.Module):
    """A decoder-only language model. Its state dict has exactly Hugging Face Llama's keys.

    `forward` returns logits for every position; training and decoding call `hidden_states` and `logits` so that the
    (B, T, V) tensor exists only where it is needed.
    """

    # Where a tied head takes its weight from: peft and safetensors look here.
    _tied_weights_keys: dict[str, str] | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Makes the output layer share the embedding table, if the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
            self._tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def forward(
        self,
        input_ids: Tensor,
        *,
        cache: KVCache | None = None,
        rows: tuple[int, int] | None = None,
        new_lengths: Sequence[int] | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Scores of every next token.

        Args:
            input_ids: (B, T) ids. T may not exceed `max_position_embeddings`.
            cache: where keys and values of earlier tokens are and new ones go; see `hidden_states`.
            rows: the block of cache rows that these B sequences occupy; default all.
            new_lengths: how many of the T tokens are real in each row (the rest is right padding); default all.
            document_ids: (B, T) which document each token belongs to, for rows that hold several end to end: none
                attends to another, and positions start anew in each. Each is one run of its own number. Without a
                cache only.

        Returns:
            (B, T, V) logits in the model's dtype.
        """
        hidden = self.hidden_states(
            input_ids, cache=cache, rows=rows, new_lengths=new_lengths, document_ids=document_ids
        )
        return self.logits(hidden)

    def hidden_states(
        self,
        input_ids: Tensor,
        *,
        cache: KVCache | None = None,
        rows: tuple[int, int] | None = None,
        new_lengths: Sequence[int] | None = None,
        document_ids: Tensor | None = None,
        deltas: RowDeltas | None = None,
    ) -> Tensor:
        """(B, T) ids → (B, T, C) after the final norm. With a cache, row b's tokens continue at its length.

        `deltas` says which adapter each row uses; with a cache only, and not in training.

        Raises:
            ValueError: if the tokens do not fit the context or the cache; nothing is counted then.
        """
        time = input_ids.shape[1]
        if cache is None:
            if time > self.config.max_position_embeddings:
                raise ValueError(
                    f"{time} tokens exceed the model's context of {self.config.max_position_embeddings} "
                    "(max_position_embeddings)."
                )
            return self.model(input_ids, document_ids=document_ids)
        assert document_ids is None, "a cache holds one document per row"
        write = CacheWrite(cache, rows or (0, cache.batch_size), time, new_lengths)
        if write.stop - write.start != input_ids.shape[0]:
            raise ValueError(f"{input_ids.shape[0]} sequences do not fit {write.stop - write.start} cache rows.")
        hidden = self.model(input_ids, write, deltas=deltas)
        write.commit()
        return hidden

    def logits(self, hidden: Tensor, deltas: RowDeltas | None = None) -> Tensor:
        """(..., C) → (..., V)."""
        logits = self.lm_head(hidden)
        return logits if deltas is None else deltas.scored(hidden, logits)

    @property
    def gradient_checkpointing(self) -> bool:
        """Recompute each layer's activations in backward instead of keeping them."""
        return self.model.gradient_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        self.model.gradient_checkpointing = value

    # What peft asks of a causal language model.
    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def set_input_embeddings(self, module: nn.Module) -> None:
        self.model.embed_tokens = module  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def prepare_inputs_for_generation(self, *args: object, **kwargs: object) -> dict:
        """Only looked up by peft, never called: generation is `llmtrain.generation`'s."""
        raise NotImplementedError("generate with llmtrain.generation.Engine")


def _applied(layer: nn.Linear, x: Tensor, deltas: RowDeltas | None) -> Tensor:
    return layer(x) if deltas is None else deltas.linear(layer, x)


def build_model(
    config: ModelConfig, *, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Transformer:
    """A model with random weights; the same seed gives the same weights on every device and in every process.

    | parameter | initial value |
    |---|---|
    | `embed_tokens` (and a tied `lm_head`) | normal, standard deviation `initializer_range` |
    | `q_proj`, `k_proj`, `v_proj`, `gate_proj`, `up_proj`, an untied `lm_head` | normal, `initializer_range` |
    | `o_proj`, `down_proj` | normal, `initializer_range` / √(2 · layers), for as many residual branches (GPT-2) |
    | biases | 0 |
    | all norms | 1 |
    """
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device="cpu")
    model.tie_weights()
    generator = torch.Generator().manual_seed(seed)
    branch_std = config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith(".bias"):
                parameter.zero_()
            else:
                branch = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = branch_std if branch else config.initializer_range
                parameter.normal_(0.0, std, generator=generator)
    return model.to(device=device, dtype=dtype)
