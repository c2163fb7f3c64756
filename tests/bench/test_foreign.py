"""litgpt and llama.cpp beside us: what is written for them, the pipe to them, and both where installed."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from llmtrain.bench import foreign, foreign_side
from llmtrain.bench.rounds import Rounds
from llmtrain.checkpoint import save_model_folder
from llmtrain.launch import bench_peers
from llmtrain.model import build_model

PEERS = Path(__file__).resolve().parents[2] / ".venv-peers" / "bin" / "python"
ECHO = """
import json, sys
print(json.dumps({"version": json.loads(sys.stdin.readline())["side"]}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["prompt"] == [13]:
        sys.exit("thirteen")
    print(json.dumps({"tokens": request["prompt"] * request["new_tokens"]}), flush=True)
"""


def test_where_nothing_is_installed_the_remedy_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match="`make bench-peers` installs"):
        bench_peers.check(str(tmp_path / "python"))


def test_query_and_key_rows_become_neighbours() -> None:
    weight = np.arange(8)[:, None]  # two heads of four rows: 0 1 | 2 3 are the halves of the first
    assert foreign_side.interleave_heads(weight, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_every_weight_has_its_name_in_gguf(tiny_model) -> None:
    weights = {name: weight.numpy() for name, weight in tiny_model.state_dict().items()}
    found = dict(foreign_side.gguf_tensors(weights, tiny_model.config.to_hf()))
    tied = tiny_model.config.tie_word_embeddings and "lm_head.weight" in weights
    assert len(found) == len(weights) - tied
    assert found["blk.1.ffn_down.weight"].shape == (64, 128)


def test_an_error_of_the_other_side_is_answered() -> None:
    replies = io.StringIO()
    foreign_side.answer(io.StringIO(json.dumps({"side": "x"})), replies, {})
    assert json.loads(replies.getvalue()) == {"error": "KeyError: 'x'"}


@pytest.mark.medium
def test_a_process_answers_until_it_ends(tmp_path) -> None:
    script = tmp_path / "echo.py"
    script.write_text(ECHO, encoding="utf-8")
    wanted = {"side": "echo", "threads": 1}
    with foreign.ForeignSide(Path(sys.executable), wanted, log=tmp_path / "log", script=script) as side:
        assert side.version == "echo"
        assert side.decode([1, 2], 2) == [1, 2, 1, 2]
        with pytest.raises(foreign.ForeignError, match="thirteen"):
            side.decode([13], 1)


@pytest.mark.slow
@pytest.mark.skipif(not PEERS.exists(), reason="make bench-peers has not been called")
def test_the_others_say_the_same(tmp_path, tiny_config, byte_tok) -> None:
    config = tiny_config(initializer_range=0.2)
    state = build_model(config, seed=0).state_dict()
    state["model.embed_tokens.weight"][byte_tok.vocab_size :] = 0
    state["model.embed_tokens.weight"][byte_tok.pad_id] = 0
    save_model_folder(tmp_path / "model", config=config, state_dict=state, tokenizer=byte_tok, info={})
    peers = foreign.PeersBench(tmp_path / "model", work=tmp_path, python=PEERS, prompt_tokens=5, new_tokens=12)
    result = peers.measure(torch.float32, Rounds(3), compiled=False)
    assert result.peers
    assert all(result.agreement[name] == 1.0 for name in result.peers)
