"""A small model with random weights, and a scripted one that says what a test wants to hear."""

import random

import pytest
import torch

from llmtrain.model import ModelConfig, Transformer, build_model
from llmtrain.tokenizer import byte_tokenizer


@pytest.fixture(scope="session")
def tok():
    return byte_tokenizer()


def small_config(**changes):
    values = {
        "vocab_size": 320,  # 262 of the byte tokenizer and 58 that only fill up
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,  # ten times the usual: logits far enough apart that ties are rare
    }
    return ModelConfig(**{**values, **changes})


def random_prompts(count, longest=40, seed=0):
    numbers = random.Random(seed)
    return [[numbers.randrange(6, 262) for _ in range(numbers.randint(1, longest))] for _ in range(count)]


def ids_of(completions):
    return [completion.token_ids for completion in completions]


@pytest.fixture
def model():
    return build_model(small_config(), seed=0).eval()


class ScriptedModel(Transformer):
    """Says a given list of ids, whatever it is asked, to prompts of one token.

    It keeps the cache's lengths as a real model does, and its hidden state is simply the position: so the n-th answer
    token is the n-th of the script, in any batch and after any move of rows.
    """

    def __init__(self, script, *, confidence=50.0, **changes):
        super().__init__(small_config(num_hidden_layers=1, **changes))
        self.script = list(script)
        self.confidence = confidence
        self.eval()

    def hidden_states(self, input_ids, *, cache=None, rows=None, new_lengths=None, document_ids=None, deltas=None):
        start, stop = rows
        count = input_ids.shape[1]
        before = torch.tensor(cache.lengths[start:stop])
        for row in range(start, stop):
            cache.lengths[row] += count if new_lengths is None else new_lengths[row - start]
        return (before[:, None] + torch.arange(count))[..., None].float()  # (B, T, 1)

    def logits(self, hidden, deltas=None):
        wanted = torch.tensor([self.script[min(int(p), len(self.script) - 1)] for p in hidden.flatten()])
        logits = torch.zeros(*hidden.shape[:-1], self.config.vocab_size)
        logits.view(len(wanted), -1)[torch.arange(len(wanted)), wanted] = self.confidence
        return logits


@pytest.fixture
def scripted():
    return ScriptedModel
