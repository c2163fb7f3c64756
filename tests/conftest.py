"""Fixtures that every package's tests share: the smallest model that still has every part, and a byte tokenizer.

It is model T of the tests (2 layers, hidden 64, 4 heads over 2 key/value heads, tied embeddings, fp32, CPU), with
room in its vocabulary for the byte tokenizer's special tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from llmtrain.model import ModelConfig, Transformer
    from llmtrain.tokenizer import Tokenizer

# Before torch is imported, and for every process that a test starts: matrices of 64 columns are not worth sharing, and
# threads that wait for each other crawl on a busy machine.
os.environ["OMP_NUM_THREADS"] = "1"

# A property is no matter of speed: how long one example takes on a busy machine says nothing.
hypothesis.settings.register_profile("llmtrain", deadline=None)
hypothesis.settings.load_profile("llmtrain")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The README's commands first: at full size they take twenty minutes, and no worker should end alone with them."""
    items.sort(key=lambda item: item.path.name != "test_readme.py")


@pytest.fixture(scope="session", autouse=True)
def placement_before_anything() -> None:
    """A process reads once where it stands; strategies that tests set up here change the variables."""
    from llmtrain.training import placement

    placement.here()


@pytest.fixture(autouse=True)
def nobodys_place() -> None:
    """What a training in this process has written into the environment is not for the processes of the next test."""
    from llmtrain.training import placement

    for name in placement.VARIABLES:
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., ModelConfig]:
    """`tiny_config(dropout=0.1)`: the configuration of model T, with changes."""
    from llmtrain.model import ModelConfig

    def make(**changes: Any) -> ModelConfig:
        values: dict[str, Any] = {
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
        }
        return ModelConfig(**(values | changes))

    return make


@pytest.fixture
def tiny_model(tiny_config: Callable[..., ModelConfig]) -> Transformer:
    """Model T with random weights of seed 0, in evaluation mode; a new one for each test."""
    from llmtrain.model import build_model

    return build_model(tiny_config(), seed=0).eval()


def llama_bytes() -> Any:
    """Bytes with `<s>` and `</s>`, as a `tokenizers.Tokenizer` that puts nothing in front of a text yet."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {character: 2 + number for number, character in enumerate(alphabet)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in ("<s>", "</s>")])
    return inner


@pytest.fixture(scope="session")
def llama_tok() -> Tokenizer:
    """Bytes and the role markers in the manner of Llama: `<s>` stands in front of every text."""
    from tokenizers import processors

    from llmtrain.tokenizer import Tokenizer

    inner = llama_bytes()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(inner.to_str(), bos_token="<s>").with_special_tokens()


@pytest.fixture(scope="session")
def byte_tok() -> Tokenizer:
    """The byte tokenizer: 256 bytes and the special tokens."""
    from llmtrain.tokenizer import byte_tokenizer

    return byte_tokenizer()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests for a GPU are passed over where there is none, unless they were asked for."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if torch.cuda.is_available():
        return
    if item.config.option.markexpr == "gpu":
        pytest.exit(f"torch {torch.__version__} sees no CUDA device: there is nothing to run these tests on", 2)
    pytest.skip("torch sees no CUDA device")
