"""The engine: the same text alone and in company, cached and not, streamed and collected; one error, one request."""

import logging
import math
import time
from dataclasses import replace
from itertools import islice

import pytest
import torch

from llmtrain.generation import Engine, SamplingParams
from llmtrain.model import build_model
from tests.generation.conftest import ids_of, random_prompts

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20)


def differs_without_cache(model, tok, prompts, completions):
    """The prompts whose answer is not what the model says without any cache, and those that hang on a tie.

    The whole text is read at once. By induction the answer is the uncached one exactly if every token of it is the most
    likely one after the text before it. A gap below 1e-5 between the two best logits counts as a tie.
    """
    texts = [[*prompt, *each.token_ids] for prompt, each in zip(prompts, completions, strict=True)]
    width = max(map(len, texts))
    with torch.no_grad():
        logits = model(torch.tensor([text + [0] * (width - len(text)) for text in texts]))[..., : tok.vocab_size]
    logits[..., tok.pad_id] = -math.inf
    best, chosen = logits.topk(2)
    different, tied = [], []
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        asked = slice(len(prompt) - 1, len(text) - 1)
        gaps = best[row, asked, 0] - best[row, asked, 1]
        if gaps.min() < 1e-5:
            tied.append(row)
        elif chosen[row, asked, 0].tolist() != text[len(prompt) :]:
            different.append(row)
    return different, tied


@pytest.mark.medium
def test_a_text_is_continued_from_its_start_and_ids_as_they_are(model, tok, llama_tok):
    """In families with a begin-of-text token that stands in front; the continuation is that of those ids."""
    engine = Engine(model, llama_tok)
    ids = [llama_tok.special_ids["<s>"], *llama_tok.encode("ab")]
    assert engine.submit("ab").input_ids == ids
    assert engine.submit(ids[1:]).input_ids == ids[1:]
    assert Engine(model, tok).submit("ab").input_ids == tok.encode("ab")
    text, given, without = ids_of(Engine(model, llama_tok).generate(["ab", ids, ids[1:]], GREEDY))
    assert text == given != without


def test_cached_uncached_alone_batched_and_streamed_agree_for_64_unequal_prompts(model, tok):
    """A gap below 1e-5 between the two best logits counts as a tie and is reported."""
    prompts = random_prompts(64)
    params = SamplingParams(temperature=0.0, max_new_tokens=128)
    batched = Engine(model, tok, max_rows=64).generate(prompts, params)
    few_rows = Engine(model, tok, max_rows=5, prefill_tokens=16).generate(prompts, params)
    alone_engine = Engine(model, tok, max_rows=1)
    alone = [alone_engine.generate([prompt], params)[0] for prompt in prompts[:16]]
    streamed = [list(alone_engine.stream(prompt, params)) for prompt in prompts]
    different, ties = differs_without_cache(model, tok, prompts, batched)
    if ties:
        print(f"ties in prompts {ties}")
    assert different == []
    assert len(ties) < 8
    for row in set(range(64)) - set(ties):
        expected = batched[row].token_ids
        assert few_rows[row].token_ids == expected
        assert row >= len(alone) or alone[row].token_ids == expected
        assert [event.token_id for event in streamed[row]] == expected
        assert "".join(event.text for event in streamed[row]) == batched[row].text


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 4},
        {"position": "sinusoidal"},
        {"qk_norm": True},
        {"attention_bias": True, "tie_word_embeddings": False},
    ],
)
def test_every_shape_of_model_says_the_same_with_and_without_a_cache(tok, changes):
    from tests.generation.conftest import small_config

    model = build_model(small_config(**changes), seed=1).eval()
    prompts = random_prompts(6)
    completions = Engine(model, tok, max_rows=4).generate(prompts, GREEDY)
    assert differs_without_cache(model, tok, prompts, completions) == ([], [])


def test_a_sampled_text_does_not_depend_on_its_company(model, tok):
    prompts = random_prompts(32)
    params = [
        SamplingParams(
            temperature=1.0, seed=seed, max_new_tokens=12 + seed % 9, top_k=seed % 3 * 20, top_p=1 - seed % 2 / 9
        )
        for seed in range(32)
    ]
    together = Engine(model, tok, max_rows=32).generate(prompts, params)
    queued = Engine(model, tok, max_rows=3).generate(prompts, params)
    engine = Engine(model, tok, max_rows=1)
    alone = [engine.generate([prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
    assert ids_of(together) == ids_of(alone) == ids_of(queued)


def test_repetition_penalties_follow_their_row_when_rows_move(model, tok):
    prompts = random_prompts(9)
    params = [
        SamplingParams(temperature=0.0, repetition_penalty=1.0 + (row % 3) * 4, max_new_tokens=3 + 12 * (row % 4))
        for row in range(9)
    ]
    engine = Engine(model, tok, max_rows=1)
    alone = [engine.generate([prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
    assert ids_of(Engine(model, tok, max_rows=4).generate(prompts, params)) == ids_of(alone)
    unpenalized = engine.generate(prompts, [replace(each, repetition_penalty=1.0) for each in params])
    assert ids_of(alone)[::3] == ids_of(unpenalized)[::3]
    assert ids_of(alone) != ids_of(unpenalized)


def test_a_long_prompt_read_in_pieces_gives_the_same_text(model, tok):
    prompts = random_prompts(5, longest=150)
    whole = Engine(model, tok).generate(prompts, GREEDY)
    pieces = Engine(model, tok, prefill_tokens=7).generate(prompts, GREEDY)
    assert ids_of(whole) == ids_of(pieces)


def test_running_requests_go_on_while_a_long_prompt_is_read(model, tok):
    engine = Engine(model, tok, max_rows=2, prefill_tokens=10)
    stream = engine.submit([10], GREEDY, streamed=True)
    engine.step()
    engine.submit([11] * 100, GREEDY)
    before = len(stream.token_ids)
    for _ in range(5):
        engine.step()
    assert len(stream.token_ids) == before + 5


def test_a_finished_row_is_taken_by_the_next_request_at_once(scripted, tok):
    """Three answers of 1, 40 and 40 tokens in two rows take 40 rounds, not 80."""
    engine = Engine(scripted([70]), tok, max_rows=2)
    for count in (2, 40, 39):
        engine.submit([10], SamplingParams(max_new_tokens=count))
    rounds = 1
    while engine.step():
        rounds += 1
    assert rounds <= 41
    assert engine.stats.decode_tokens == 1 + 39 + 38
    assert engine.stats.first_tokens == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_and_ids_beyond_the_tokenizer_are_never_chosen(model, tok, temperature):
    model = build_model(
        model.config.__class__(**{**model.config.to_dict(), "tie_word_embeddings": False}), seed=0
    ).eval()
    with torch.no_grad():
        model.lm_head.weight[tok.vocab_size :] *= 100
        model.lm_head.weight[tok.pad_id] *= 100
    completions = Engine(model, tok).generate(
        random_prompts(16), SamplingParams(temperature=temperature, seed=0, max_new_tokens=30)
    )
    chosen = {token_id for completion in completions for token_id in completion.token_ids}
    assert max(chosen) < tok.vocab_size
    assert tok.pad_id not in chosen


def test_the_first_tokens_of_many_seeds_are_distributed_as_the_model_says(model, tok):
    """3,000 requests with the seeds 0…2999: the numbers are the same in every run."""
    from tests.generation.test_sampling import chi_square_limit

    count = 3000
    params = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=1) for seed in range(count)]
    completions = Engine(model, tok, max_rows=500).generate([[50]] * count, params)
    with torch.no_grad():
        logits = model(torch.tensor([[50]]))[0, 0, : tok.vocab_size]
    logits[tok.pad_id] = -math.inf
    wanted = (logits.softmax(-1) * count).tolist()
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in completions]), minlength=len(wanted)).tolist()
    rare = [
        index for index, want in enumerate(wanted) if want < 5
    ]  # chi-square needs 5 in each cell: one for all rare ones
    cells = [(counts[i], wanted[i]) for i in range(len(wanted)) if i not in rare]
    cells.append((sum(counts[i] for i in rare), sum(wanted[i] for i in rare)))
    chi_square = sum((found - want) ** 2 / want for found, want in cells if want)
    assert chi_square < chi_square_limit(len(cells) - 1)


# Seeds


def test_seeds_are_fresh_by_default_reported_and_repeatable(model, tok):
    """A fixed default would give one answer for ever."""
    engine = Engine(model, tok)
    free = SamplingParams(temperature=1.0)
    first, second = engine.generate([[10], [10]], free)
    assert first.seed != second.seed
    assert first.text != second.text
    again = engine.generate([[10]], SamplingParams(temperature=1.0, seed=first.seed))[0]
    assert again.token_ids == first.token_ids


# Ends


def test_streaming_keeps_spaces_and_whole_characters(scripted, tok):
    text = "naïve 你好 🌍  x"
    engine = Engine(scripted([*tok.encode(text), tok.eos_id]), tok)
    events = list(engine.stream([10], SamplingParams(temperature=0.0)))
    assert "".join(event.text for event in events) == text == events[-1].completion.text
    assert not any("\ufffd" in event.text for event in events)
    assert events[-1].completion.finish_reason == "stop"
    assert events[-1].token_id == tok.eos_id
    assert all(event.completion is None for event in events[:-1])


def test_a_stop_string_ends_the_text_and_neither_it_nor_what_follows_leaks(scripted, tok):
    """The stop string begins inside a run of its own first letter."""
    engine = Engine(scripted(tok.encode("aaab and more")), tok)
    events = list(engine.stream([10], SamplingParams(temperature=0.0, stop=("aab",))))
    assert "".join(event.text for event in events) == "a"
    completion = events[-1].completion
    assert (completion.text, completion.finish_reason) == ("a", "stop")
    assert completion.token_ids == tok.encode("aaab")


def test_a_stop_string_that_does_not_come_true_is_given_out_at_the_end(scripted, tok):
    engine = Engine(scripted(tok.encode("xaa")), tok)
    completion = engine.generate([[10]], SamplingParams(temperature=0.0, stop=("aab",), max_new_tokens=3))[0]
    assert (completion.text, completion.finish_reason) == ("xaa", "length")


def test_half_a_character_at_the_end_is_one_replacement_character(scripted, tok):
    engine = Engine(scripted(tok.encode("你")[:2]), tok)
    completion = engine.generate([[10]], SamplingParams(temperature=0.0, max_new_tokens=2))[0]
    assert completion.text == "\ufffd"
    assert completion.text == tok.decode(completion.token_ids)


@pytest.mark.parametrize("name", ["eos_id", "end_id"])
def test_both_end_tokens_end_an_answer_and_are_no_text(scripted, tok, name):
    engine = Engine(scripted([*tok.encode("ab"), getattr(tok, name), *tok.encode("c")]), tok)
    completion = engine.generate([[10]], GREEDY)[0]
    assert (completion.text, completion.finish_reason) == ("ab", "stop")
    assert completion.token_ids[-1] == getattr(tok, name)


def test_ignore_eos_goes_on_and_special_tokens_are_no_text(scripted, tok):
    engine = Engine(scripted([*tok.encode("ab"), tok.eos_id, *tok.encode("c")]), tok)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=4)
    completion = engine.generate([[10]], params)[0]
    assert (completion.text, completion.finish_reason) == ("abc", "length")


def test_stop_ids_of_a_request_end_it_and_are_no_text(scripted, tok):
    a, b = tok.encode("ab")
    engine = Engine(scripted([a, b, a]), tok)
    completion = engine.generate([[10]], SamplingParams(temperature=0.0, stop_ids=(b,)))[0]
    assert (completion.text, completion.finish_reason) == ("a", "stop")


def test_eos_ids_of_the_folder_replace_the_tokenizers(scripted, tok):
    (a,) = tok.encode("a")
    engine = Engine(scripted([tok.end_id, a]), tok, eos_ids=[a])
    completion = engine.generate([[10]], GREEDY)[0]
    assert completion.token_ids == [tok.end_id, a]


def test_an_answer_ends_when_the_context_is_full(model, tok):
    engine = Engine(model, tok, max_length=32)
    params = SamplingParams(temperature=0.0, max_new_tokens=100, ignore_eos=True)
    short, full, exact = engine.generate([[10] * 20, [10] * 31, [10] * 32], params)
    assert (len(short.token_ids), short.finish_reason) == (12, "context")
    assert (len(full.token_ids), full.finish_reason) == (1, "context")
    assert exact.finish_reason == "error"
    assert "32 tokens and leaves no room for an answer in a context of 32: shorten it to at most 31" in exact.error


def test_text_beyond_the_trained_length_gives_one_warning(model, tok, caplog):
    engine = Engine(model, tok, trained_length=25)
    with caplog.at_level(logging.WARNING):
        engine.generate([[10] * 5], SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True))
        assert not caplog.records
        engine.generate([[10] * 5, [10] * 30], SamplingParams(temperature=0.0, max_new_tokens=21, ignore_eos=True))
    assert [record.message[:45] for record in caplog.records] == ["the text is now longer than the 25 tokens tha"]


# Refusals


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ("", {}, "the prompt has no tokens"),
        ([], {}, "the prompt has no tokens"),
        ([262], {}, "the prompt has the token id 262, outside the vocabulary 0 … 261"),
        ([-1], {}, "the prompt has the token id -1"),
        ([10] * 256, {}, "leaves no room for an answer in a context of 256"),
        ([10], {"stop_ids": (999,)}, "stop_ids has the token id 999"),
    ],
)
def test_a_request_that_cannot_run_is_refused_and_the_others_go_on(model, tok, prompt, settings, message):
    engine = Engine(model, tok)
    with pytest.raises(ValueError, match=message):
        engine.stream(prompt, SamplingParams(**settings))
    params = [GREEDY, SamplingParams(**settings), GREEDY]
    first, refused, last = engine.generate([[10], prompt, [11]], params)
    assert message in refused.error
    assert (refused.finish_reason, refused.text, refused.seed) == ("error", "", None)
    assert ids_of([first, last]) == ids_of(engine.generate([[10], [11]], GREEDY))


def test_nan_fails_its_request_only_and_leaves_nothing_behind(tok):
    """Token 200 is poisoned. Its row's next tenant, and its neighbours, must not notice."""
    from tests.generation.conftest import small_config

    model = build_model(small_config(tie_word_embeddings=False), seed=0).eval()
    prompts = random_prompts(8, longest=8)
    prompts = [[10 if token_id == 200 else token_id for token_id in prompt] for prompt in prompts]
    healthy = Engine(model, tok).generate(prompts, GREEDY)
    assert not any(200 in completion.token_ids for completion in healthy)
    with torch.no_grad():
        model.model.embed_tokens.weight[200] = math.nan
    engine = Engine(model, tok, max_rows=3)
    poisoned = [*prompts[:2], [10, 11, 12, 200] * 8, [200], *prompts[2:]]
    completions = engine.generate(poisoned, GREEDY)
    for bad in (completions.pop(2), completions.pop(2)):
        assert bad.finish_reason == "error"
        assert "scores for token 1 of this request are not finite" in bad.error
    assert ids_of(completions) == ids_of(healthy)


def test_wrong_sizes_and_a_foreign_tokenizer_are_refused(model, tok):
    with pytest.raises(ValueError, match="max_rows and prefill_tokens must be at least 1, got 0"):
        Engine(model, tok, max_rows=0)
    with pytest.raises(ValueError, match="256"):
        Engine(model, tok, max_length=257)
    small = build_model(model.config.__class__(**{**model.config.to_dict(), "vocab_size": 100}), seed=0)
    with pytest.raises(ValueError, match="the model has 100 token ids and the tokenizer 262"):
        Engine(small, tok)
    with pytest.raises(ValueError, match="put the one prompt into a list"):
        Engine(model, tok).generate("text")
    with pytest.raises(ValueError, match="2 prompts need as many sampling settings"):
        Engine(model, tok).generate([[10], [11]], [GREEDY])


def test_a_cache_that_would_not_fit_the_memory_is_made_shorter_and_says_so(model, tok, caplog, monkeypatch):
    monkeypatch.setattr("llmtrain.generation.rows.CACHE_SHARE", 1e-12)
    engine = Engine(model, tok, max_rows=2)
    assert engine.max_length == 1
    assert "limited to 1 of the model's 256 tokens" in caplog.text


# Leaving


def test_closing_a_stream_frees_its_row_at_once(model, tok):
    engine = Engine(model, tok, max_rows=1)
    events = engine.stream([10], GREEDY)
    next(events)
    events.close()
    assert not engine.step()
    assert engine.generate([[10]], GREEDY)[0].finish_reason in ("length", "stop")


def test_cancelling_keeps_what_there_is_and_disturbs_nobody(model, tok):
    engine = Engine(model, tok, max_rows=3)
    requests = [engine.submit(prompt, GREEDY) for prompt in random_prompts(4)]
    for _ in range(3):
        engine.step()
    engine.cancel(requests[1])
    engine.cancel(requests[3])  # still waiting
    while engine.step():
        pass
    assert requests[1].result().finish_reason == "cancelled"
    assert len(requests[1].result().token_ids) == 4
    assert requests[3].result().token_ids == []
    engine.cancel(requests[0])  # finished: nothing happens
    expected = engine.generate(random_prompts(4), GREEDY)
    assert ids_of([requests[0].result(), requests[2].result()]) == ids_of([expected[0], expected[2]])


def test_streams_of_one_engine_may_be_read_by_turns(model, tok):
    engine = Engine(model, tok, max_rows=2)
    *expected, third = ids_of(engine.generate([[10], [11], [12]], GREEDY))
    streams = [engine.stream([10], GREEDY), engine.stream([11], GREEDY), engine.stream([12], GREEDY)]
    heard = [[], [], []]
    while len(heard[0]) < len(expected[0]):
        for number, stream in enumerate(streams):
            if number == 2 and len(heard[2]) == 3:
                stream.close()
            heard[number] += [event.token_id for event in islice(stream, 1)]
    assert heard[:2] == expected
    assert heard[2][:3] == third[:3]
    assert len(heard[2]) == 4, "what was closed says that it has ended, and nothing more"
    assert [next(stream, "end") for stream in streams] == ["end"] * 3
    assert not engine.step()


@pytest.mark.parametrize("leave", [lambda stream: stream.close(), lambda stream: None], ids=["closed", "let go"])
def test_a_stream_that_nobody_began_to_read_leaves_nothing_waiting(model, tok, leave):
    engine = Engine(model, tok, max_rows=1)
    leave(engine.stream([10], GREEDY))
    assert not engine.step()


def test_the_events_of_a_request_that_has_been_heard_are_over(model, tok):
    engine = Engine(model, tok)
    stream = engine.stream([10], GREEDY)
    assert len(list(stream)) > 1
    assert list(engine.events(stream.request)) == []


def test_a_broken_round_ends_what_was_running_and_leaves_an_engine_that_works(model, tok, monkeypatch):
    engine = Engine(model, tok, max_rows=2)
    expected = engine.generate([[12]], GREEDY)[0].token_ids
    requests = [engine.submit([each], GREEDY) for each in (10, 11, 12)]
    score = engine.submit_score([10], [11])

    def broken(*args):
        raise RuntimeError("no more memory")

    with monkeypatch.context() as patch:
        patch.setattr("llmtrain.generation.loop.choose", broken)
        with pytest.raises(RuntimeError):
            engine.step()
    assert [request.done for request in requests] == [True, True, False]
    assert "no more memory" in requests[0].result().error
    while engine.step():
        pass
    assert requests[2].result().token_ids == expected
    assert score.result().error is None


def test_an_interrupt_leaves_an_engine_that_works(model, tok, monkeypatch):
    engine = Engine(model, tok, max_rows=2)
    expected = ids_of(engine.generate(random_prompts(3), GREEDY))
    forward, calls = model.hidden_states, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:  # the third prompt is read while another answer is being written
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "hidden_states", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(random_prompts(3), GREEDY)
    assert not engine.step()
    assert ids_of(engine.generate(random_prompts(3), GREEDY)) == expected


# Training mode, details, figures


def test_in_the_middle_of_training_dropout_is_off_and_the_mode_is_given_back(tok):
    from tests.generation.conftest import small_config

    model = build_model(small_config(dropout=0.5), seed=0)
    engine = Engine(model, tok)
    expected = ids_of(engine.generate([[10]], GREEDY))
    assert model.training
    assert ids_of(engine.generate([[10]], GREEDY)) == expected
    assert [event.token_id for event in engine.stream([10], GREEDY)] == expected[0]
    assert model.training
    request = engine.submit([10], GREEDY)
    while engine.step():
        assert model.training
    assert request.result().token_ids == expected[0]


def test_logprobs_and_candidates_are_the_models_own(model, tok):
    engine = Engine(model, tok)
    params = SamplingParams(temperature=0.3, top_k=2, repetition_penalty=1.3, seed=1, max_new_tokens=10)
    completion = engine.generate([[10, 20]], params, logprobs=True, candidates=4)[0]
    for step, token_id in enumerate(completion.token_ids):
        with torch.inference_mode():
            text = torch.tensor([[10, 20, *completion.token_ids[:step]]])
            probabilities = model(text)[0, -1].softmax(-1)
        assert completion.logprobs[step] == pytest.approx(math.log(probabilities[token_id]), abs=1e-4)
        top = probabilities[: tok.vocab_size].topk(4)
        assert [each.token_id for each in completion.candidates[step]] == top.indices.tolist()
        found = [each.probability for each in completion.candidates[step]]
        assert found == pytest.approx(top.values.tolist(), abs=1e-5)
        assert completion.candidates[step][0].text == tok.token_bytes(top.indices[0]).decode("utf-8", "replace")
    plain = engine.generate([[10, 20]], params)[0]
    assert plain.token_ids == completion.token_ids
    assert plain.logprobs is None
    assert plain.candidates is None


def test_requests_with_and_without_details_share_a_batch(model, tok):
    engine = Engine(model, tok)
    with_two = engine.submit([10], GREEDY, candidates=2)
    without = engine.submit([11], GREEDY)
    with_five = engine.submit([12], GREEDY, candidates=5, logprobs=True)
    while engine.step():
        pass
    assert {len(step) for step in with_two.result().candidates} == {2}
    assert with_two.result().logprobs is None
    assert without.result().candidates is None
    assert {len(step) for step in with_five.result().candidates} == {5}
    assert len(with_five.result().logprobs) == len(with_five.result().token_ids)


def test_figures_count_what_was_done(model, tok):
    engine = Engine(model, tok, max_rows=4, max_length=64)
    started = time.perf_counter()
    completions = engine.generate(
        [[10] * 5, [11] * 9], SamplingParams(temperature=0.0, max_new_tokens=7, ignore_eos=True)
    )
    passed = time.perf_counter() - started
    stats = engine.stats
    assert stats.prefill_tokens == 14
    assert stats.decode_tokens == 2 * 6  # the first token of each comes from prefill
    assert 0 < stats.ttft_seconds < passed
    assert stats.prefill_seconds + stats.decode_seconds < passed
    assert stats.decode_tokens_per_second == pytest.approx(12 / stats.decode_seconds)
    assert (
        stats.cache_bytes == 4 * 64 * 2 * 2 * 2 * 16 * 4
    )  # rows · tokens · (k, v) · layers · kv heads · head size · fp32
    assert all(0 < completion.ttft_seconds <= completion.seconds < passed for completion in completions)
    engine.reset_stats()
    assert engine.stats.decode_tokens_per_second is None
    assert engine.stats.cache_bytes == stats.cache_bytes


def test_a_bf16_model_generates_and_samples_in_fp32(model, tok):
    engine = Engine(model.to(torch.bfloat16), tok)
    completions = engine.generate(random_prompts(4), SamplingParams(temperature=1.0, seed=0, max_new_tokens=10))
    assert all(completion.error is None for completion in completions)


# Scoring


def reference_logprobs(model, context, continuation):
    with torch.inference_mode():
        logprobs = model(torch.tensor([[*context, *continuation]])).log_softmax(-1)[0]
    return [logprobs[len(context) - 1 + i, token_id].item() for i, token_id in enumerate(continuation)]


@pytest.mark.parametrize("prefill_tokens", [2048, 11])
def test_scores_are_the_models_log_probabilities(model, tok, prefill_tokens):
    texts = [text for text in random_prompts(20, longest=60) if len(text) > 1]
    pairs = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in texts]
    scores = Engine(model, tok, max_rows=6, prefill_tokens=prefill_tokens).score(pairs)
    for (context, continuation), score in zip(pairs, scores, strict=True):
        assert score.logprob_sum == pytest.approx(sum(reference_logprobs(model, context, continuation)), abs=1e-3)
        assert score.num_tokens == len(continuation)
        assert not score.greedy


def test_the_greedy_continuation_scores_as_greedy_and_as_its_logprobs(model, tok):
    engine = Engine(model, tok)
    completion = engine.generate([[10, 11]], GREEDY, logprobs=True)[0]
    good, bad = engine.score([([10, 11], completion.token_ids), ([10, 11], [*completion.token_ids[:-1], 77])])
    assert good.greedy
    assert not bad.greedy
    assert good.logprob_sum == pytest.approx(sum(completion.logprobs), abs=1e-4)


def test_scoring_and_generating_share_the_rows(model, tok):
    engine = Engine(model, tok, max_rows=3)
    expected = ids_of(engine.generate(random_prompts(5), GREEDY))
    requests = []
    for prompt in random_prompts(5):
        requests.append(engine.submit(prompt, GREEDY))
        engine.submit_score(prompt, [10, 11, 12])
    while engine.step():
        pass
    assert ids_of([request.result() for request in requests]) == expected


def test_a_pair_that_cannot_be_scored_says_why_and_the_others_go_on(model, tok):
    engine = Engine(model, tok)
    scores = engine.score([([], [10]), ([10], []), ([10], [11]), ([10] * 200, [11] * 58), ([10] * 200, [11] * 57)])
    assert "the context to be scored has no tokens" in scores[0].error
    assert "the continuation to be scored has no tokens" in scores[1].error
    assert scores[2].error is None
    assert "have 258 tokens, and at most 257 can be scored" in scores[3].error
    assert scores[4].error is None
