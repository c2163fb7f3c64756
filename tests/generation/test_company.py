"""Requests beside one another: the same text as alone, beginnings that are read once, and adapters in one batch."""

import pytest
import torch

from llmtrain.generation import Engine, SamplingParams
from llmtrain.model import build_model
from tests.generation.conftest import ids_of, random_prompts

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20)


@pytest.mark.medium
@pytest.mark.parametrize("settings", [GREEDY, SamplingParams(seed=5, max_new_tokens=20)], ids=["greedy", "sampled"])
def test_a_text_alone_is_the_text_among_31_others(model, tok, settings):
    """Exact on a CPU in fp32, whatever the others are: long, short, finished early, sharing a beginning, or scored."""
    prompts = random_prompts(32)
    prompts[7] = [*prompts[3], 50, 51]
    alone = [Engine(model, tok, max_rows=1).generate([prompt], settings)[0].token_ids for prompt in prompts]
    for rows in (32, 5):
        engine = Engine(model, tok, max_rows=rows)
        score = engine.submit_score(prompts[0], prompts[1])
        assert ids_of(engine.generate(prompts, settings)) == alone
        assert score.done


def test_a_second_turn_reads_only_what_is_new(model, tok):
    engine = Engine(model, tok, max_rows=4)
    history = random_prompts(1, longest=100, seed=8)[0] + list(range(50, 90))
    [first] = engine.generate([history], GREEDY)
    assert first.num_cached_tokens == 0
    turn = [*history, *first.token_ids, 60, 61, 62]
    engine.reset_stats()
    [second] = engine.generate([turn], GREEDY)
    # The answer's last token was chosen and never read.
    assert second.num_cached_tokens == len(history) + len(first.token_ids) - 1
    assert engine.stats.cached_tokens == second.num_cached_tokens
    assert engine.stats.prefill_tokens == len(turn) - second.num_cached_tokens
    assert [second.token_ids] == ids_of(Engine(model, tok).generate([turn], GREEDY))


def test_two_conversations_in_turn_keep_each_its_own_beginning(model, tok):
    engine = Engine(model, tok, max_rows=4)
    turns = [list(range(50, 100)), list(range(150, 200))]
    known = [0, 0]
    for _ in range(3):
        for speaker in (0, 1):
            [answer] = engine.generate([turns[speaker]], GREEDY)
            assert answer.num_cached_tokens == known[speaker]
            turns[speaker] += answer.token_ids
            known[speaker] = len(turns[speaker]) - 1
            turns[speaker] += [70]


def test_samples_of_one_prompt_read_it_once(model, tok):
    engine = Engine(model, tok, max_rows=8)
    prompt = list(range(50, 150))
    settings = [SamplingParams(seed=seed, max_new_tokens=8) for seed in range(6)]
    answers = engine.generate([prompt] * 6, settings)
    assert [each.num_cached_tokens for each in answers] == [0, *[99] * 5]
    assert ids_of(answers) == [Engine(model, tok).generate([prompt], each)[0].token_ids for each in settings]


def test_choices_of_one_question_read_it_once_and_score_the_same(model, tok):
    questions = [random_prompts(1, longest=80, seed=seed)[0] + list(range(40, 90)) for seed in range(5)]
    pairs = [(question, [choice, choice + 1]) for question in questions for choice in (100, 110, 120, 130)]
    engine = Engine(model, tok, max_rows=8)
    together = engine.score(pairs)
    assert engine.stats.cached_tokens == sum(3 * (len(question) - 1) for question in questions)
    for pair, score in zip(pairs, together, strict=True):
        [alone] = Engine(model, tok).score([pair])
        assert score.logprob_sum == pytest.approx(alone.logprob_sum, abs=1e-5)
        assert score.greedy == alone.greedy


@pytest.mark.medium
def test_rows_of_different_adapters_in_one_batch_say_what_each_merged_model_says(tok):
    from llmtrain.adapters import LowRank, lay_onto, merge_state_dict
    from llmtrain.adapters.deltas import AdapterDeltas
    from tests.generation.conftest import small_config

    model = build_model(small_config(), seed=0).eval()
    prompts = random_prompts(4)
    engine = Engine(model, tok, max_rows=16)
    expected = {None: ids_of(engine.generate(prompts, GREEDY))}
    for number, name in enumerate(("one", "two", "dora")):
        torch.manual_seed(number)
        low_rank = {}
        for layer in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
            rows, columns = model.get_submodule(layer).weight.shape
            magnitude = torch.rand(rows) + 1 if name == "dora" else None
            low_rank[layer] = LowRank(torch.randn(4, columns) * 0.3, torch.randn(rows, 4) * 0.3, 0.7, magnitude)
        table = "model.embed_tokens.weight"
        deltas = AdapterDeltas(low_rank, {table: [7, 60, 61]}, {table: torch.randn(3, 64) * 0.3})
        merged = build_model(small_config(), seed=0).eval()
        weights = {key: value for key, value in model.state_dict().items() if key != "lm_head.weight"}
        merged.load_state_dict(merge_state_dict(weights, deltas), strict=False)
        merged.tie_weights()
        expected[name] = ids_of(Engine(merged, tok).generate(prompts, GREEDY))
        engine.add_adapter(name, lay_onto(model, deltas))
    assert len({str(ids) for ids in expected.values()}) == 4
    asked = [(name, prompt) for prompt in prompts for name in expected]
    requests = [engine.submit(prompt, GREEDY, adapter=name) for name, prompt in asked]
    while engine.step():
        pass
    for name, answers in expected.items():
        assert [each.token_ids for each, (which, _) in zip(requests, asked, strict=True) if which == name] == answers
    scores = {name: engine.score([(prompts[0], [60, 61])], adapter=name)[0].logprob_sum for name in expected}
    assert len(set(scores.values())) == 4
    with pytest.raises(ValueError, match="there is no adapter 'three': choose one of one, two, dora"):
        engine.submit(prompts[0], adapter="three")
    with pytest.raises(ValueError, match="there is an adapter 'one' already"):
        engine.add_adapter("one", lay_onto(model, deltas))


def test_waiting_and_running_requests_are_counted(model, tok):
    engine = Engine(model, tok, max_rows=2)
    for prompt in random_prompts(5):
        engine.submit(prompt, GREEDY)
    assert (engine.num_waiting, engine.num_running) == (5, 0)
    engine.step()
    assert (engine.num_waiting, engine.num_running) == (3, 2)
