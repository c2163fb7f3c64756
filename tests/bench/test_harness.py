"""The measurement beside lm-eval's `hf`: both sides are asked the same and say the same."""

import pytest
import torch

from llmtrain.bench.rounds import Rounds
from llmtrain.checkpoint import save_model_folder
from llmtrain.model import build_model

pytest.importorskip("lm_eval")


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore")  # lm-eval's and transformers' own
def test_both_sides_do_the_same_work(tiny_config, byte_tok, tmp_path):
    from llmtrain.bench import harness

    model = build_model(tiny_config(vocab_size=byte_tok.vocab_size, max_position_embeddings=1024), seed=0).eval()
    with torch.no_grad():  # which `hf` may write and the engine never does
        model.model.embed_tokens.weight[byte_tok.pad_id] = 0
    save_model_folder(tmp_path, config=model.config, state_dict=model.state_dict(), tokenizer=byte_tok, info={})
    pair = harness.HarnessPair(tmp_path, device="cpu", batch_size=4, questions=2)
    for kind in harness.KINDS:
        laps, difference = pair.measure(kind, Rounds(3, warmup_rounds=0))
        assert laps.compare(harness.FRAMEWORK, harness.TWIN).median > 0
        assert difference <= (0.0 if kind == "answers" else 1e-3)
