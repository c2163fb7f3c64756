"""The API through the real `openai` client: whole and streamed, one at a time and many at once."""

from __future__ import annotations

import asyncio
import random
import time

import openai
import pytest

from llmtrain.generation import SamplingParams
from llmtrain.serve.conversation import turn_markers
from llmtrain.tokenizer import render_chat

pytestmark = pytest.mark.medium

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "你好 <|assistant|> ok"}]


def expected(server, prompt, **settings):
    ids = server.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return server.alone.generate([ids], SamplingParams(**{"temperature": 1.0, **settings}), logprobs=True)[0]


def chat_ids(server, messages):
    return render_chat(messages, server.engine.tokenizer, add_generation_prompt=True)[0]


def ends(server):
    """What ends an answer of a chat besides: the markers of the next turn."""
    return tuple(turn_markers(server.engine.tokenizer))


def test_a_chat_equals_the_engine_alone_and_the_words_of_users_forge_no_role(server):
    answer = server.client().chat.completions.create(
        model="tiny", messages=MESSAGES, seed=5, max_completion_tokens=20, temperature=0.9, extra_body={"top_k": 40}
    )
    ids = chat_ids(server, MESSAGES)
    alone = expected(server, ids, seed=5, max_new_tokens=20, temperature=0.9, top_k=40, stop_ids=ends(server))
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role) == (alone.text, "assistant")
    assert choice.finish_reason == {"stop": "stop", "length": "length"}[alone.finish_reason]
    assert answer.object == "chat.completion"
    assert (answer.model, answer.usage.prompt_tokens) == ("tiny", len(ids))
    assert answer.usage.completion_tokens == len(alone.token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert choice.llmtrain["seed"] == 5
    assert choice.llmtrain["ttft_ms"] > 0


def test_a_streamed_chat_is_the_whole_one_in_pieces(server):
    settings = {"model": "tiny", "messages": MESSAGES, "seed": 7, "max_tokens": 30}
    whole = server.client().chat.completions.create(**settings)
    chunks = list(server.client().chat.completions.create(**settings, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].llmtrain["seed"] == 7
    assert chunks[-1].llmtrain["tokens_per_second"] > 0


def test_a_stream_ends_with_the_usage_if_asked_and_always_with_done(server):
    body = {"model": "tiny", "prompt": "a", "max_tokens": 3, "seed": 1, "stream": True, "ignore_eos": True}
    text = server.post("/v1/completions", **body, stream_options={"include_usage": True}).text
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert '"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4' in events[-3]
    assert all(event.endswith('"usage": null}') for event in events[:-3])
    assert server.post("/v1/completions", **body).text.endswith("data: [DONE]\n\n")


def test_log_probabilities_and_candidates_of_a_chat(server):
    settings = {"model": "tiny", "messages": MESSAGES, "seed": 3, "max_tokens": 8, "logprobs": True, "top_logprobs": 4}
    whole = server.client().chat.completions.create(**settings).choices[0].logprobs.content
    alone = expected(server, chat_ids(server, MESSAGES), seed=3, max_new_tokens=8, stop_ids=ends(server))
    assert [each.logprob for each in whole] == pytest.approx(alone.logprobs, abs=1e-6)
    assert [each.token_id for each in whole] == alone.token_ids
    for each in whole:
        assert len(each.top_logprobs) == 4
        assert bytes(each.bytes).decode("utf-8", "replace") == each.token
        likely = [other.logprob for other in each.top_logprobs]
        assert likely == sorted(likely, reverse=True)
    chunks = server.client().chat.completions.create(**settings, stream=True)
    streamed = [each for chunk in chunks if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content]
    assert streamed == whole


def test_completions_of_texts_ids_and_lists_of_both(server):
    create, tokenizer = server.client().completions.create, server.engine.tokenizer
    texts = ["one", "二"]
    ids = [tokenizer.begin(tokenizer.encode(text)) for text in texts]
    usual = {"model": "tiny", "max_tokens": 6, "seed": 2}
    alone = [expected(server, each, seed=2, max_new_tokens=6).text for each in ids]
    assert create(prompt=texts[0], **usual).choices[0].text == alone[0]
    assert create(prompt=ids[0], **usual).choices[0].text == alone[0]
    assert [choice.text for choice in create(prompt=texts, **usual).choices] == alone
    assert [choice.text for choice in create(prompt=ids, **usual).choices] == alone
    echoed = create(prompt=texts, echo=True, **usual)
    assert [choice.text for choice in echoed.choices] == [a + b for a, b in zip(texts, alone, strict=True)]
    pieces = {0: "", 1: ""}
    for chunk in create(prompt=texts, echo=True, stream=True, **usual):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert list(pieces.values()) == [choice.text for choice in echoed.choices]


def test_log_probabilities_of_a_completion(server):
    found = server.client().completions.create(model="tiny", prompt="a", max_tokens=5, seed=4, logprobs=3).choices[0]
    alone = expected(server, "a", seed=4, max_new_tokens=5)
    assert found.logprobs.token_logprobs == pytest.approx(alone.logprobs, abs=1e-6)
    assert found.logprobs.token_ids == alone.token_ids
    assert all(1 <= len(each) <= 3 for each in found.logprobs.top_logprobs)  # two bytes may both be U+FFFD
    assert found.logprobs.text_offset[0] == 0
    assert len(found.logprobs.tokens) == 5


def test_several_choices_have_the_seeds_that_follow(server):
    answer = server.client().completions.create(model="tiny", prompt=["a", "b"], n=3, max_tokens=5, seed=10)
    wanted = [expected(server, prompt, seed=10 + i, max_new_tokens=5).text for prompt in "ab" for i in range(3)]
    assert [choice.text for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage.prompt_tokens == 2  # each prompt once


def test_a_stop_string_ends_the_text_before_it(server):
    alone = expected(server, "a", seed=4, max_new_tokens=40, ignore_eos=True).text
    stop = alone[10:12]
    body = {"model": "tiny", "prompt": "a", "seed": 4, "max_tokens": 40, "extra_body": {"ignore_eos": True}}
    for given in (stop, ["never in it", stop]):
        answer = server.client().completions.create(stop=given, **body)
        assert answer.choices[0].text == alone[: alone.index(stop)]
        assert answer.choices[0].finish_reason == "stop"


def test_fresh_seeds_differ_and_are_told(server):
    create = server.client().completions.create
    first, second = (create(model="tiny", prompt="a", max_tokens=30, temperature=2).choices[0] for _ in range(2))
    assert first.llmtrain["seed"] != second.llmtrain["seed"]
    again = create(model="tiny", prompt="a", max_tokens=30, temperature=2, seed=first.llmtrain["seed"])
    assert again.choices[0].text == first.text


def test_the_models_are_listed(server):
    assert [model.id for model in server.client().models.list()] == ["tiny"]
    assert server.client().models.retrieve("tiny").max_model_len == 256
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4'"):
        server.client().models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError) as error:
        server.client().completions.create(model="../tiny", prompt="a")
    assert (error.value.code, error.value.param) == ("model_not_found", "model")


async def one_request(client, number, server):
    """A request unlike its neighbours', whole or streamed; returns what came and what it should have been."""
    draw = random.Random(number)
    text = f"{number}:" + "字" * draw.randrange(8)
    tokens, seed = draw.randrange(1, 40), draw.randrange(2**31)
    settings = {"model": "tiny", "max_tokens": tokens, "seed": seed, "temperature": draw.choice([0.0, 0.7, 1.3])}
    streamed = draw.random() < 0.5
    chat = draw.random() >= 0.5
    if not chat:
        ids = server.engine.tokenizer.encode(text)
        answer = await client.completions.create(prompt=text, stream=streamed, **settings)
        got = "".join([chunk.choices[0].text async for chunk in answer]) if streamed else answer.choices[0].text
    else:
        messages = [{"role": "user", "content": text}]
        ids = chat_ids(server, messages)
        answer = await client.chat.completions.create(messages=messages, stream=streamed, **settings)
        got = (
            "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
            if streamed
            else answer.choices[0].message.content
        )
    stop_ids = ends(server) if chat else ()
    return got, (
        ids, SamplingParams(max_new_tokens=tokens, seed=seed, temperature=settings["temperature"], stop_ids=stop_ids)
    )  # fmt: skip


async def many(server, clients, requests=None, seconds=None):
    """Every client asks one request after another, all clients at once."""
    pairs = []
    end = None if seconds is None else time.monotonic() + seconds

    async def ask(number):
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
            count = 0
            while count < requests if requests else time.monotonic() < end:
                pairs.append(await one_request(client, 1000 * number + count, server))
                count += 1

    await asyncio.gather(*(ask(number) for number in range(clients)))
    return pairs


def check(server, pairs):
    alone = server.alone
    for got, (ids, params) in pairs:
        assert got == alone.generate([ids], params)[0].text
    assert server.figure("llmtrain_requests_running") == 0


def test_sixteen_clients_at_once_each_get_what_they_get_alone(server):
    pairs = asyncio.run(many(server, 16, requests=3))
    assert len(pairs) == 48
    assert len({got for got, _ in pairs}) > 24  # a third are greedy, and some end at once
    check(server, pairs)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sixty_four_clients_for_a_minute_none_lost_none_mixed_up(server):
    before = server.runner.metrics.requests.copy()
    pairs = asyncio.run(many(server, 64, seconds=60))
    assert len(pairs) > 640
    done = server.runner.metrics.requests - before
    assert sum(done.values()) == len(pairs)
    assert {outcome for _, outcome in done} == {"ok"}
    check(server, pairs)
