"""Bits per byte: every token once, token-weighted, whatever the batches and ranks."""

import math
import random

import pytest
import torch

from llmtrain.data.windows import ValidationWindows
from llmtrain.evaluation import bits_per_byte, nats_and_tokens
from llmtrain.model import build_model

LENGTH = 16


def ids_of(count):
    numbers = random.Random(0)
    return [numbers.randrange(6, 262) for _ in range(count)]


def reference_nats(model, ids, eos_id):
    """Window by window, token by token, in float64: the definition itself."""
    total = 0.0
    for start in range(0, len(ids), LENGTH):
        targets = ids[start : start + LENGTH]
        inputs = [ids[start - 1] if start else eos_id, *targets[:-1]]
        with torch.no_grad():
            logprobs = model(torch.tensor([inputs])).double().log_softmax(-1)[0]
        total -= sum(logprobs[position, target].item() for position, target in enumerate(targets))
    return total


@pytest.mark.parametrize("count", [1, LENGTH, 5 * LENGTH + 3])
@pytest.mark.parametrize("batch_size", [1, 2, 50])
def test_every_token_counts_once(tiny_model, byte_tok, stream, count, batch_size):
    ids = ids_of(count)
    found = bits_per_byte(
        tiny_model, stream(ids, 40), sequence_length=LENGTH, eos_id=byte_tok.eos_id, batch_size=batch_size
    )
    nats = reference_nats(tiny_model, ids, byte_tok.eos_id)
    assert found["loss"] == pytest.approx(nats / count, rel=1e-5)
    assert found["bpb"] == pytest.approx(nats / math.log(2) / 40, rel=1e-5)
    assert (found["tokens"], found["bytes"]) == (count, 40)


@pytest.mark.parametrize("world_size", [2, 3])
def test_parts_of_several_ranks_add_up(tiny_model, byte_tok, stream, world_size):
    text = stream(ids_of(100), 100)
    settings = {"eos_id": byte_tok.eos_id, "sequence_length": LENGTH, "batch_size": 2}
    whole = nats_and_tokens(tiny_model, ValidationWindows(text, **settings))
    parts = [
        nats_and_tokens(tiny_model, ValidationWindows(text, **settings, world_size=world_size, rank=rank))
        for rank in range(world_size)
    ]
    assert sum(nats for nats, _ in parts) == pytest.approx(whole[0], rel=1e-6)
    assert sum(tokens for _, tokens in parts) == whole[1] == 100


def test_logits_are_taken_in_stretches_without_changing_the_result(tiny_model, byte_tok, stream, monkeypatch):
    text = stream(ids_of(100), 100)
    whole = bits_per_byte(tiny_model, text, sequence_length=LENGTH, eos_id=byte_tok.eos_id)
    monkeypatch.setattr("llmtrain.evaluation.bpb.LOGITS_BYTES", 7 * 4 * 320)
    assert bits_per_byte(tiny_model, text, sequence_length=LENGTH, eos_id=0)["loss"] == pytest.approx(whole["loss"])


def test_a_model_in_training_is_measured_without_dropout_and_given_back_as_it_was(tiny_config, byte_tok, stream):
    model = build_model(tiny_config(dropout=0.5), seed=0)
    text = stream(ids_of(50), 50)
    first = bits_per_byte(model, text, sequence_length=LENGTH, eos_id=byte_tok.eos_id)
    assert model.training
    assert bits_per_byte(model, text, sequence_length=LENGTH, eos_id=byte_tok.eos_id) == first
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_uniform_model_needs_eight_bits_for_each_of_256_bytes(tiny_config, byte_tok, stream):
    model = build_model(tiny_config(vocab_size=256), seed=0)
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
    found = bits_per_byte(model, stream(list(range(256)), 256), sequence_length=LENGTH, eos_id=0)
    assert found["bpb"] == pytest.approx(8.0, rel=1e-6)


def test_nothing_to_measure_is_refused(tiny_model, stream):
    with pytest.raises(ValueError, match="holds no text"):
        bits_per_byte(tiny_model, stream([], 0), sequence_length=LENGTH, eos_id=0)
    with pytest.raises(ValueError, match="sequence_length must be at least 1, got 0"):
        bits_per_byte(tiny_model, stream([7], 1), sequence_length=0, eos_id=0)
