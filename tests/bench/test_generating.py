"""The engine's work beside transformers, at toy size: both sides do the same, and each comparison can be formed."""

import pytest
import torch

from llmtrain.bench import generating
from llmtrain.bench.rounds import Rounds
from llmtrain.checkpoint import save_model_folder
from llmtrain.model import ModelConfig, build_model
from llmtrain.tokenizer import byte_tokenizer

pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    shape = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = ModelConfig(**shape, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1024)
    folder = tmp_path_factory.mktemp("bench") / "model"
    state = build_model(config, seed=0).state_dict()
    save_model_folder(folder, config=config, state_dict=state, tokenizer=byte_tokenizer(), info={})
    return generating.GenerationBench(folder, device=torch.device("cpu"), dtype=torch.float32, items=5)


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("unequal", generating.TWIN),
        ("choices", generating.TWIN),
        ("second_turn", generating.WHOLE),
        ("floor", generating.FLOOR),
        ("recording", generating.NEVER),
        ("recording", generating.RECORDED),
    ],
)
def test_both_sides_take_their_turns(work, part, other):
    rounds = getattr(work, part)(Rounds(3, warmup_rounds=0), lambda number, rates: None)
    assert rounds.compare(generating.FRAMEWORK, other).median > 0


def test_the_time_that_samples_take_is_measured_in_seconds(work):
    seconds = work.samples(Rounds(3, warmup_rounds=0))
    assert len(seconds) == 3
    assert all(0 < each < 10 for each in seconds)
