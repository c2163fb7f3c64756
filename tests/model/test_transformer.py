"""Transformer, cache and positions: what is computed, and that the cache computes the same."""

import pytest
import torch

from llmtrain.model import KVCache, ModelConfig, Transformer, build_model
from llmtrain.model.positions import rotary_table, rotate

VARIANTS = {
    "llama": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 32},
    "multi-head, untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "one key head": {"num_key_value_heads": 1},
    "sinusoidal": {"position": "sinusoidal"},
}


def make(seed: int = 0, **changes) -> Transformer:
    shape = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    return build_model(ModelConfig(**{**shape, **changes}), seed=seed).eval()


def ids(batch: int, time: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (batch, time), generator=torch.Generator().manual_seed(seed))


def test_state_dict_has_hugging_face_llama_keys():
    model = make(num_hidden_layers=1)
    assert sorted(model.state_dict()) == sorted(
        [
            "lm_head.weight",
            "model.embed_tokens.weight",
            "model.norm.weight",
            *(f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkvo"),
            *(f"model.layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
            "model.layers.0.input_layernorm.weight",
            "model.layers.0.post_attention_layernorm.weight",
        ]
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight
    untied = make(tie_word_embeddings=False)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_initialisation_follows_the_documented_table():
    config = ModelConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        attention_bias=True,
    )
    model = build_model(config, seed=3)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.all(parameter == 1)
        elif name.endswith("bias"):
            assert torch.all(parameter == 0)
        else:
            expected = 0.02 / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.02), name
    again, other = build_model(config, seed=3), build_model(config, seed=4)
    assert torch.equal(model.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_building_a_model_leaves_the_global_random_state_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    make()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_token_never_sees_what_comes_after_it(variant):
    model = make(**VARIANTS[variant])
    tokens = ids(2, 12)
    changed = tokens.clone()
    changed[:, 7:] = ids(2, 5, seed=9)
    with torch.inference_mode():
        before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :7], after[:, :7], atol=1e-6)
    assert not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_logits_equal_uncached_for_unequal_rows(variant):
    model = make(**VARIANTS[variant])
    tokens = ids(4, 20)
    lengths = [16, 13, 7, 1]
    cache = KVCache.allocate(model.config, 4, 32)
    with torch.inference_mode():
        expected = model(tokens)
        first = model(tokens[:, :16], cache=cache, new_lengths=lengths)
        for row, length in enumerate(lengths):
            assert torch.allclose(first[row, :length], expected[row, :length], atol=1e-5)
        while min(cache.lengths) < 20:  # every row continues at its own position, finished rows stand still
            at = list(cache.lengths)
            step = torch.stack([tokens[row, min(at[row], 19)] for row in range(4)])[:, None]
            new = [int(n < 20) for n in at]
            logits = model(step, cache=cache, new_lengths=new)
            for row in range(4):
                if new[row]:
                    assert torch.allclose(logits[row, 0], expected[row, at[row]], atol=5e-5)
    assert cache.lengths == [20] * 4


def test_a_chunked_prefill_equals_one_forward():
    model = make()
    tokens = ids(1, 24)
    cache = KVCache.allocate(model.config, 3, 32)
    with torch.inference_mode():
        expected = model(tokens)
        parts = [model(part, cache=cache, rows=(1, 2)) for part in tokens.split([9, 8, 7], dim=1)]
    assert torch.allclose(torch.cat(parts, dim=1), expected, atol=1e-5)
    assert cache.lengths == [0, 24, 0]


def test_rows_can_be_moved_cut_and_freed():
    model = make()
    tokens = ids(2, 10)
    cache = KVCache.allocate(model.config, 3, 16)
    with torch.inference_mode():
        expected = model(tokens)
        model(tokens[:, :9], cache=cache, rows=(1, 3))
        cache.swap_rows(2, 0)
        assert cache.lengths == [9, 9, 0]
        cache.copy_row(0, 2, 5)
        assert cache.lengths == [9, 9, 5]
        cache.truncate(0, 5)
        replay = model(tokens[1:, 5:], cache=cache, rows=(0, 1)), model(tokens[1:, 5:], cache=cache, rows=(2, 3))
    for part in replay:
        assert torch.allclose(part, expected[1:, 5:], atol=1e-5)
    cache.reset(1)
    assert cache.lengths == [10, 0, 10]
    with pytest.raises(ValueError, match="cannot copy 11 tokens of row 0, which holds 10"):
        cache.copy_row(0, 1, 11)
    with pytest.raises(ValueError, match="cannot cut row 0 of 10 tokens to 11"):
        cache.truncate(0, 11)


def test_cache_bounds_are_checked_and_a_refused_call_counts_nothing():
    model = make()
    cache = KVCache.allocate(model.config, 1, 8)
    with torch.inference_mode():
        model(ids(1, 6), cache=cache)
        with pytest.raises(ValueError, match=r"6 cached \+ 3 new tokens exceed the cache's capacity of 8"):
            model(ids(1, 3), cache=cache)
    assert cache.lengths == [6]
    with pytest.raises(ValueError, match=r"exceeds the model's context of 64 \(max_position_embeddings\)"):
        KVCache.allocate(model.config, 1, 65)
    with pytest.raises(ValueError, match="65 tokens exceed the model's context of 64"):
        model(ids(1, 65))
    with pytest.raises(ValueError, match="2 sequences do not fit 1 cache rows"):
        model(ids(2, 1), cache=cache)
    with pytest.raises(ValueError, match=r"rows 0\.\.2 lie outside the cache of 1 rows"):
        model(ids(2, 1), cache=cache, rows=(0, 2))
    with pytest.raises(ValueError, match="do not fit 1 rows of 1 new tokens"):
        model(ids(1, 1), cache=cache, new_lengths=[2])


def test_cache_bytes_are_what_accounting_says():
    from llmtrain.model import kv_cache_bytes_per_token

    config = make().config
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        cache = KVCache.allocate(config, 3, 16, dtype=dtype)
        assert cache.bytes_per_token == kv_cache_bytes_per_token(config, name)
        assert cache.bytes == 3 * 16 * cache.bytes_per_token


def test_rotated_dot_products_depend_on_distance_only():
    config = make().config
    cos, sin = rotary_table(config, 64, torch.device("cpu"))
    q, k = torch.randn(2, config.head_dim)
    dots = [
        (rotate(q[None], cos[p : p + 1], sin[p : p + 1]) @ rotate(k[None], cos[p - 3 : p - 2], sin[p - 3 : p - 2]).T)
        for p in (3, 17, 60)
    ]
    assert torch.allclose(dots[0], dots[1], atol=1e-4)
    assert torch.allclose(dots[0], dots[2], atol=1e-4)


def test_rotary_tables_stay_fp32_in_a_bf16_model():
    model = make().to(torch.bfloat16)
    with torch.inference_mode():
        model(ids(1, 4))
    (tables,) = model.model._tables.values()
    assert all(table.dtype == torch.float32 for table in tables)


def test_dropout_acts_in_training_only_and_follows_the_seed():
    model = make(dropout=0.5)
    tokens = ids(1, 8)
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    torch.manual_seed(5)
    first = model(tokens)
    torch.manual_seed(5)
    assert torch.equal(model(tokens), first)
    assert not torch.equal(model(tokens), first)


def test_gradient_checkpointing_changes_memory_not_numbers():
    tokens = ids(2, 8)
    gradients = []
    for recompute in (False, True):
        model = make(dropout=0.1).train()
        model.gradient_checkpointing = recompute
        torch.manual_seed(0)
        model(tokens).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.allclose(plain, recomputed, rtol=1e-5, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ],
    ids=lambda s: s["rope_type"],
)
def test_scaled_rotary_positions_equal_transformers(scaling):
    from transformers import AutoConfig, AutoModelForCausalLM

    model = make(rope_scaling=scaling, max_position_embeddings=64, rope_theta=500.0)
    values = model.config.to_hf()
    twin = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).eval()
    twin.load_state_dict(model.state_dict())
    tokens = ids(2, 60)
    with torch.inference_mode():
        assert (model(tokens) - twin(tokens).logits).abs().max() < 1e-4
