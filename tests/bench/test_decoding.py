"""Both sides decode the same folder, the same prompts and so many tokens; and in fp32 they say the same."""

import pytest
import torch

from llmtrain.bench.decoding import FRAMEWORK, TWIN, DecodingPair, agreement
from llmtrain.bench.rounds import Rounds
from llmtrain.checkpoint import save_model_folder
from llmtrain.model import build_model

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path, tiny_config, byte_tok):
    # Ten times the usual spread, so that the greedy token is clear.
    config = tiny_config(initializer_range=0.2)
    state = build_model(config, seed=0).state_dict()
    # Our engine never says padding, nor the ids that fill up the vocabulary; transformers would.
    state["model.embed_tokens.weight"][byte_tok.vocab_size :] = 0
    state["model.embed_tokens.weight"][byte_tok.pad_id] = 0
    save_model_folder(tmp_path / "model", config=config, state_dict=state, tokenizer=byte_tok, info={})
    return tmp_path / "model"


def test_agreement_counts_up_to_the_first_difference() -> None:
    assert agreement([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]]) == 6 / 8
    assert agreement([[1]], [[2]]) == 0


@pytest.mark.medium
@pytest.mark.parametrize("batch_size", [1, 3])
def test_sides_take_turns_and_agree(folder, batch_size) -> None:
    pair = DecodingPair(folder, device=CPU, prompt_tokens=5, new_tokens=12)
    result = pair.measure(batch_size, Rounds(3))
    assert pair.dtype == "float32"
    assert len(result.rounds.compare(FRAMEWORK, TWIN).per_round) == 3
    assert result.agreement == 1.0


@pytest.mark.medium
def test_what_exceeds_the_context_is_refused(folder) -> None:
    with pytest.raises(ValueError, match=r"prompt_tokens=200 and new_tokens=100 .* at most 256, the context"):
        DecodingPair(folder, device=CPU, prompt_tokens=200, new_tokens=100)
