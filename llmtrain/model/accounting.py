"""How much a model weighs and costs: parameters, FLOPs, cache bytes, training memory. Pure arithmetic on a config.

Shapes: B batch, T sequence length, C hidden, H heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes per process by part."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All parts together."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def training_memory(
    config: ModelConfig,
    *,
    micro_batch_size: int,
    sequence_length: int,
    precision: str = "bf16",
    optimizer_state_per_parameter: int = 2,
    zero_stage: int = 1,
    world_size: int = 1,
    gradient_checkpointing: bool = False,
) -> TrainingMemory:
    """Memory of one training process.

    Weights are in the compute dtype and sharded at stage 3; gradients are accumulated in fp32 and sharded from stage 2;
    the optimiser holds fp32 master weights (in bf16 only: in fp32 they are the weights) and
    `optimizer_state_per_parameter` fp32 numbers (2 for AdamW, about 1 for Muon), sharded from stage 1.
    Activations per token and layer: about 10·C for the norms, residual branches and attention plus 2·(H+K)·D for
    q, k, v and the attention output, plus 4·intermediate for SwiGLU; with recomputation only the layer's input stays.

    Returns:
        Bytes by part. Activations are an estimate; the rest is exact up to allocator and bucket overhead.
    """
    count = parameter_count(config)
    width = BYTES[precision]
    tokens = micro_batch_size * sequence_length
    master = 4 if width < 4 else 0
    optimizer = count * (master + 4 * optimizer_state_per_parameter)
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    per_layer = 10 * config.hidden_size + heads + 4 * config.intermediate_size
    layers = config.num_hidden_layers
    if gradient_checkpointing:
        activations = tokens * width * (layers * config.hidden_size + per_layer)
    else:
        activations = tokens * width * layers * per_layer
    return TrainingMemory(
        weights=count * width // (world_size if zero_stage >= 3 else 1),
        gradients=count * 4 // (world_size if zero_stage >= 2 else 1),
        optimizer=optimizer // (world_size if zero_stage >= 1 else 1),
        activations=activations,
        logits=tokens * config.vocab_size * (width + 2 * 4),
    )
