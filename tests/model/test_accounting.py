"""The formulas against counted parameters, counted FLOPs and known models."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from llmtrain.model import (
    KVCache,
    ModelConfig,
    build_model,
    flops_per_token,
    kv_cache_bytes_per_token,
    moment_count,
    parameter_count,
)

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


def test_moments_are_those_of_the_real_optimisers():
    from llmtrain.training.optim import build_optimizer

    config = ModelConfig(**SHAPE)
    for name in ("adamw", "muon"):
        model = build_model(config, seed=0)
        optimizer = build_optimizer(model, name=name, lr=1e-3)
        sum(p.sum() for p in model.parameters()).backward()
        optimizer.step()
        kept = [
            value.numel()
            for state in optimizer.state.values()
            for value in state.values()
            if torch.is_tensor(value) and value.dim()
        ]
        assert moment_count(config, name) == sum(kept)
    with pytest.raises(ValueError, match="optimizer='sgd' must be adamw or muon"):
        moment_count(config, "sgd")


def test_the_cache_takes_what_the_formula_says():
    config = ModelConfig(**SHAPE)
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        cache = KVCache.allocate(config, 1, 10, dtype=dtype)
        assert sum(t.nbytes for t in (*cache.keys, *cache.values)) == 10 * kv_cache_bytes_per_token(config, name)
