"""Small models of every shape, and one that says what a test wants to look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llmtrain.generation import Engine
from llmtrain.model import build_model

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "ungrouped": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
    "one layer": {"num_hidden_layers": 1},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16},
    "norms": {"qk_norm": True, "tie_word_embeddings": False},
    "bias": {"attention_bias": True},
    "sinusoidal": {"position": "sinusoidal"},
    "yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
}


@pytest.fixture
def make_engine(tiny_config, byte_tok) -> Callable[..., Engine]:
    """`make_engine(num_hidden_layers=1)`: an engine of a model with random weights, large enough to differ."""

    def make(**changes: Any) -> Engine:
        model = build_model(tiny_config(**{"initializer_range": 0.2, **changes}), seed=0).eval()
        return Engine(model, byte_tok, max_rows=2)

    return make


@pytest.fixture
def engine(make_engine) -> Engine:
    return make_engine()
