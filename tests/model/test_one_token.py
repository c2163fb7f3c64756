"""The decode step beside the model's own forward pass: the same numbers, for every shape of model it takes."""

import pytest
import torch

from llmtrain.model import KVCache, OneToken, build_model, can_step
from tests.model.test_transformer import make

SHAPES = [
    {},
    {"num_key_value_heads": 1},
    {"num_key_value_heads": 4},
    {"qk_norm": True},
    {"attention_bias": True},
    {"position": "sinusoidal"},
    {"tie_word_embeddings": False},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"head_dim": 32},
]


def steps(model, lengths, count=3):
    """Logits of `count` steps by both ways, for rows that hold so many tokens each."""
    width, rows = max(lengths), len(lengths)
    torch.manual_seed(1)
    prompt, following = torch.randint(0, 256, (rows, width)), torch.randint(0, 256, (count, rows))
    both = []
    one_token = OneToken(model)
    for by_step in (False, True):
        cache = KVCache.allocate(model.config, rows + 2, 64, dtype=model.lm_head.weight.dtype)
        with torch.inference_mode():
            model(prompt, cache=cache, rows=(0, rows), new_lengths=lengths)
            logits = []
            for ids in following:
                if by_step:
                    logits.append(one_token(ids, cache, rows))
                else:
                    logits.append(model(ids[:, None], cache=cache, rows=(0, rows))[:, 0])
        assert cache.lengths == [length + count for length in lengths] + [0, 0]
        both.append(torch.stack(logits))
    return both


@pytest.mark.parametrize("lengths", [[9], [7, 7, 7], [3, 11, 1, 7]], ids=["one", "equal", "unequal"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: ",".join(shape) or "default")
def test_a_step_equals_the_forward_pass(shape, lengths):
    model = make(**shape)
    with torch.no_grad():
        for parameter in model.parameters():  # norms of 1 and biases of 0 would hide mistakes
            parameter.add_(torch.randn_like(parameter) * 0.05)
    expected, found = steps(model, lengths)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_step_in_bf16_is_as_near_to_fp32_as_the_forward_pass():
    model = make()
    exact = steps(model, [3, 11, 1])[0]
    expected, found = (logits.float() for logits in steps(model.to(torch.bfloat16), [3, 11, 1]))
    assert (found - exact).abs().max() < 2 * (expected - exact).abs().max()


def test_a_step_made_anew_sees_weights_that_training_has_changed():
    model = make()
    OneToken(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    one_token = OneToken(model)
    cache = KVCache.allocate(model.config, 1, 16)
    with torch.inference_mode():
        found = one_token(torch.tensor([5]), cache, 1)
        assert torch.allclose(found, model(torch.tensor([[5]]))[0], atol=1e-5)


def test_a_full_row_is_refused_and_nothing_is_counted():
    model = make()
    cache = KVCache.allocate(model.config, 2, 8)
    cache.lengths = [8, 3]
    with pytest.raises(ValueError, match="a row holds 8 tokens, and the cache's capacity is 8"):
        OneToken(model)(torch.tensor([1, 2]), cache, 2)
    assert cache.lengths == [8, 3]


def test_only_plain_models_of_a_known_dtype_are_stepped():
    model = make()
    assert can_step(model)
    assert not can_step(build_model(model.config, seed=0, dtype=torch.float16))
    model.model.layers[0].self_attn.q_proj = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert not can_step(model)
