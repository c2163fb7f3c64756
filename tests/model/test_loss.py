"""The loss is a sum over trained tokens, however the tokens are cut up."""

import pytest
import torch
import torch.nn.functional as F

from llmtrain.model import IGNORED, ModelConfig, build_model, loss_sum, token_loss_sum

CONFIG = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (3, 17), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :13] = IGNORED
    labels[2] = IGNORED
    return tokens[:, :-1], labels


def test_sum_and_count_are_those_of_the_trained_tokens():
    model = build_model(CONFIG, seed=0)
    inputs, labels = batch()
    total, count = loss_sum(model, inputs, labels)
    log_probabilities = F.log_softmax(model(inputs).float(), dim=-1)
    by_hand = [-log_probabilities[b, t, labels[b, t]] for b in range(3) for t in range(16) if labels[b, t] != IGNORED]
    assert count.item() == len(by_hand) == 3 + 16
    assert total.item() == pytest.approx(sum(by_hand).item(), rel=1e-6)


@pytest.mark.parametrize("tokens_per_chunk", [1, 5, 48])
def test_chunks_give_the_same_loss_and_gradients(tokens_per_chunk):
    inputs, labels = batch()
    results = []
    for budget in (1 << 30, tokens_per_chunk * 4 * 256):
        model = build_model(CONFIG, seed=0)
        total, _ = loss_sum(model, inputs, labels, logits_budget_bytes=budget)
        total.backward()
        results.append((total.item(), [p.grad for p in model.parameters()]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    for whole, chunked in zip(results[0][1], results[1][1], strict=True):
        assert (whole - chunked).norm() <= 1e-5 * whole.norm()


def test_a_batch_without_trained_tokens_has_loss_zero_and_gradient_zero():
    model = build_model(CONFIG, seed=0)
    inputs, labels = batch()
    total, count = loss_sum(model, inputs, torch.full_like(labels, IGNORED))
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0)
    assert all(torch.all(p.grad == 0) for p in model.parameters())


def test_bf16_logits_are_summed_in_fp32():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4096, 64, generator=generator).bfloat16()
    labels = torch.randint(0, 64, (4096,), generator=generator)
    expected = F.cross_entropy(logits.double(), labels, reduction="sum").item()
    assert token_loss_sum(logits, labels).item() == pytest.approx(expected, rel=1e-6)
