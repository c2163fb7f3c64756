"""What needs a card: the engine answers there as on the CPU, in fp32 token for token, in bf16 to its end."""

from __future__ import annotations

import copy

import pytest
import torch

from llmtrain.generation import Engine, SamplingParams
from llmtrain.model import build_model

pytestmark = pytest.mark.gpu

PROMPTS = ["a", "曹操", "The quick brown fox " * 3]


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0, max_new_tokens=32), SamplingParams(seed=1)])
def test_a_gpu_gives_the_text_of_the_cpu(tiny_config, byte_tok, sampling):
    model = build_model(tiny_config(initializer_range=0.2), seed=0).eval()
    expected = Engine(model, byte_tok).generate(PROMPTS, sampling)
    got = Engine(copy.deepcopy(model).cuda(), byte_tok).generate(PROMPTS, sampling)
    assert [completion.token_ids for completion in got] == [completion.token_ids for completion in expected]


def test_bf16_on_a_gpu_generates_and_scores(tiny_config, byte_tok):
    model = build_model(tiny_config(), seed=0, device="cuda", dtype=torch.bfloat16).eval()
    engine = Engine(model, byte_tok)
    sampling = SamplingParams(max_new_tokens=16, ignore_eos=True)
    assert [len(completion.token_ids) for completion in engine.generate(PROMPTS, sampling)] == [16] * 3
    (score,) = engine.score([(byte_tok.encode("ab"), byte_tok.encode("cd"))])
    assert score.logprob_sum < 0
