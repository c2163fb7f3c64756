"""The loss on held-out answers is that of fine-tuning: the same tokens, the same sum."""

import logging

import pytest
import torch

from llmtrain.data.examples import encode_examples
from llmtrain.evaluation import answer_loss
from llmtrain.generation import Engine

ITEMS = [
    {"prompt": "你好", "completion": "嗨"},
    {"prompt": "how are you?", "completion": "fine, thanks"},
    {"prompt": "x", "completion": "y", "system": "s"},
]


def test_it_is_the_loss_of_training(tiny_model, byte_tok):
    examples, _ = encode_examples(ITEMS, byte_tok, max_length=128)
    total = count = 0.0
    with torch.no_grad():
        for example in examples:
            logits = tiny_model(torch.tensor([example.input_ids]))[0].float()
            labels = torch.tensor(example.labels)
            total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100).item()
            count += example.trained_tokens
    assert answer_loss(Engine(tiny_model, byte_tok), ITEMS) == pytest.approx(total / count, rel=1e-5)


def test_what_does_not_fit_is_left_out_and_said(tiny_model, byte_tok, caplog):
    engine = Engine(tiny_model, byte_tok, max_length=40)
    long = {"prompt": "p" * 60, "completion": "c"}
    with caplog.at_level(logging.WARNING):
        assert answer_loss(engine, [*ITEMS, long]) == answer_loss(engine, ITEMS)
    assert "the loss leaves 1 of 4 items out: context and continuation have" in caplog.text
    assert answer_loss(engine, [long]) is None
