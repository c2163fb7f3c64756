"""The formulas against counted parameters, counted FLOPs and known models."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from llmtrain.model import ModelConfig, build_model, flops_per_token, parameter_count, training_memory

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    "extra",
    [{}, {"tie_word_embeddings": False}, {"attention_bias": True}, {"qk_norm": True, "head_dim": 32}],
    ids=["tied", "untied", "qwen2", "qwen3"],
)
def test_parameters_are_those_of_the_built_model(extra):
    config = ModelConfig(**SHAPE, **extra)
    model = build_model(config, seed=0)
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())
    tables = 512 * 64 * (1 if config.tie_word_embeddings else 2)
    assert parameter_count(config, embeddings=False) == parameter_count(config) - tables


def test_llama_2_7b_has_the_published_number_of_parameters():
    config = ModelConfig(
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=11_008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        tie_word_embeddings=False,
    )
    assert parameter_count(config) == 6_738_415_616


def test_forward_flops_equal_torchs_own_count_of_the_matrix_products():
    config = ModelConfig(**SHAPE)
    model = build_model(config, seed=0)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(tokens)
    products = counter.get_flop_counts()["Global"]
    counted = sum(flops for operation, flops in products.items() if "attention" not in str(operation))
    attention = config.num_hidden_layers * 4 * 64 * (32 + 1) / 2
    assert flops_per_token(config, 32, training=False) - attention == counted / 64
    assert flops_per_token(config, 32) == 3 * flops_per_token(config, 32, training=False)


def test_zero_stages_shard_what_they_say():
    config = ModelConfig(**SHAPE)
    count = parameter_count(config)
    memory = {
        stage: training_memory(config, micro_batch_size=1, sequence_length=8, zero_stage=stage, world_size=2)
        for stage in (0, 1, 2, 3)
    }
    assert memory[0].optimizer == 12 * count == 2 * memory[1].optimizer
    assert memory[1].gradients == 4 * count == 2 * memory[2].gradients
    assert memory[2].weights == 2 * count == 2 * memory[3].weights
    assert memory[0].total > memory[1].total > memory[2].total > memory[3].total
