"""How much a model weighs and costs: parameters, FLOPs, cache bytes. Pure arithmetic on a config.

Knows nothing of how it is trained: what that takes of memory depends on the strategy, too.

Shapes: B batch, T sequence length, C hidden, H heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from llmtrain.model.config import ModelConfig

BYTES = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2}


def layer_matrix_parameters(config: ModelConfig) -> int:
    """Weights of one layer's matrices: attention projections and SwiGLU."""
    attention = config.hidden_size * config.head_dim * 2 * (config.num_attention_heads + config.num_key_value_heads)
    return attention + 3 * config.hidden_size * config.intermediate_size


def parameter_count(config: ModelConfig, *, embeddings: bool = True) -> int:
    """Number of parameters, a tied head counted once.

    Args:
        config: the model's shape.
        embeddings: count the embedding table and an untied head too.
    """
    per_layer = layer_matrix_parameters(config) + 2 * config.hidden_size
    if config.attention_bias:
        per_layer += config.head_dim * (config.num_attention_heads + 2 * config.num_key_value_heads)
    if config.qk_norm:
        per_layer += 2 * config.head_dim
    total = config.num_hidden_layers * per_layer + config.hidden_size
    if embeddings:
        total += config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return total


def flops_per_token(config: ModelConfig, sequence_length: int, *, training: bool = True) -> int:
    """Floating-point operations per token, a multiply-add counted as two.

    Matrix products (the head included, the embedding look-up not) cost 2 per weight; causal attention costs 4·H·D per
    visible key (scores and weighted sum), T/2 of them on average. Backward costs twice the forward, so training is
    3 × forward (Kaplan et al., 2020, with the causal half of attention counted exactly once).
    """
    matrices = config.num_hidden_layers * layer_matrix_parameters(config) + config.hidden_size * config.vocab_size
    visible = (sequence_length + 1) / 2
    attention = config.num_hidden_layers * 4 * config.num_attention_heads * config.head_dim * visible
    return int((3 if training else 1) * (2 * matrices + attention))


def kv_cache_bytes_per_token(config: ModelConfig, dtype: str = "float32") -> int:
    """Bytes that one cached token takes over all layers: 2 (key and value) · layers · K · D · element size."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * BYTES[dtype]


def moment_count(config: ModelConfig, optimizer: str) -> int:
    """Numbers that the optimiser keeps between steps: AdamW two per parameter, Muon one for each of hidden matrices.

    Raises:
        ValueError: an optimiser that is not known here.
    """
    total = parameter_count(config)
    if optimizer == "adamw":
        return 2 * total
    if optimizer == "muon":
        return 2 * total - config.num_hidden_layers * layer_matrix_parameters(config)
    raise ValueError(f"optimizer={optimizer!r} must be adamw or muon.")
