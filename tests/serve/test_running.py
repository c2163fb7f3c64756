"""What the server does while it runs: clients that leave, a full queue, a failing step, figures."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from llmtrain.generation import Engine, SamplingParams
from llmtrain.serve.runner import Job, Runner

pytestmark = pytest.mark.medium
TEXT = "/v1/completions"
LONG = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "seed": 1}


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def slowed(server, seconds, monkeypatch):
    """The server, whose steps take at least so many seconds."""
    step = server.engine.step

    def slow_step():
        time.sleep(seconds)
        return step()

    monkeypatch.setattr(server.engine, "step", slow_step)
    return server


@pytest.fixture
def slow(small, monkeypatch):
    """One row whose steps take at least 30 ms: 200 tokens take six seconds. Starts from rest."""
    until(lambda: small.runner.open == 0)
    return slowed(small, 0.03, monkeypatch)


@pytest.fixture
def slow_many(server, monkeypatch):
    """The usual server, whose steps take at least 10 ms."""
    return slowed(server, 0.01, monkeypatch)


def ask_and_leave(server, stream):
    """A request whose client hangs up once it runs."""
    body = json.dumps({**LONG, "stream": stream}).encode()
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    if stream:
        assert b"data: " in connection.recv(65536) + connection.recv(65536)
    else:
        until(lambda: server.engine._loop._rows.decoding == 1)
    connection.close()


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_hangs_up_frees_its_row(slow, stream):
    before = slow.runner.metrics.requests["completions", "cancelled"]
    steps = slow.engine.stats.decode_tokens
    ask_and_leave(slow, stream)
    until(lambda: slow.runner.open == 0, 2)
    assert len(slow.engine._loop._rows) == 0
    assert slow.engine.stats.decode_tokens - steps < 60
    assert slow.runner.metrics.requests["completions", "cancelled"] == before + 1
    assert slow.post(TEXT, prompt="a", max_tokens=2).status_code == 200


def test_a_cancelled_work_leaves_before_the_second_next_step(tiny_model, byte_tok):
    """The step that runs when it is cancelled ends; no other does with its row."""
    engine = Engine(tiny_model, byte_tok, max_rows=2)
    steps: list[int] = []
    step = engine.step

    def watched():
        steps.append(len(engine._loop._rows))
        return step()

    engine.step = watched
    runner = Runner(engine, max_waiting=0)

    async def leave():
        runner.start()
        params = SamplingParams(max_new_tokens=200, ignore_eos=True)
        leaving, staying = (runner.start_work([Job([97], params, streamed=True)]) for _ in range(2))
        while len(steps) < 20:
            await leaving.news()
        runner.cancel(leaving)
        told = len(steps)
        while not staying.done:
            await staying.news()
        assert leaving.completions[0].finish_reason == "cancelled"
        assert runner.open == 0
        await runner.stop()
        return told

    told = asyncio.run(leave())
    assert steps[10] == 2
    assert set(steps[told + 1 :]) == {1}


def test_a_client_that_leaves_a_batch_with_penalties_does_no_harm(slow_many):
    """What penalties need is made inside a step; rows are moved outside of one."""
    body = {**LONG, "repetition_penalty": 1.5, "stream": True}
    with ThreadPoolExecutor(1) as pool, httpx.stream("POST", slow_many.url + TEXT, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        staying = pool.submit(slow_many.post, TEXT, **{**body, "stream": False, "max_tokens": 40})
        until(lambda: slow_many.engine._loop._rows.decoding == 2)
        lines.close()  # hangs up
        assert staying.result().json()["usage"]["completion_tokens"] == 40
    until(lambda: slow_many.runner.open == 0, 2)
    assert slow_many.runner.alive


def test_a_full_queue_is_a_429_that_says_when_to_come_again(slow):
    with ThreadPoolExecutor(2) as pool:
        asked = []
        for count in (1, 2):
            asked.append(pool.submit(slow.post, TEXT, **{**LONG, "max_tokens": 20}))
            until(lambda count=count: slow.runner.open == count)
        assert slow.figure("llmtrain_requests_waiting") == 1
        assert slow.figure("llmtrain_requests_running") == 1
        response = slow.post(TEXT, **LONG)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "queue_full"
        with pytest.raises(openai.RateLimitError, match="too many requests are waiting"):
            slow.client(max_retries=0).completions.create(model="tiny", prompt="a")
        # The client comes again by itself, as long as it takes.
        again = slow.client(max_retries=20).completions.create(model="tiny", prompt="a", max_tokens=2)
        assert again.usage.completion_tokens
        first, second = (each.result().json() for each in asked)
    assert first["choices"][0]["text"] == second["choices"][0]["text"]


def test_a_step_that_fails_ends_what_runs_and_the_server_lives_on(slow, monkeypatch):
    decode, fail = slow.engine._loop._decode, threading.Event()

    def failing():
        if fail.is_set():
            fail.clear()
            raise RuntimeError("the device went away")
        decode()

    monkeypatch.setattr(slow.engine._loop, "_decode", failing)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(slow.post, TEXT, **LONG)
        until(lambda: slow.engine._loop._rows.decoding == 1)
        waiting = pool.submit(slow.post, TEXT, prompt="b", max_tokens=3, seed=1, ignore_eos=True)
        until(lambda: slow.runner.open == 2)
        fail.set()
        broken, fine = running.result(), waiting.result()
    assert broken.status_code == 500
    assert broken.json()["error"]["message"] == "the engine was stopped: RuntimeError('the device went away')"
    assert (broken.json()["error"]["type"], broken.json()["error"]["code"]) == ("server_error", "engine_error")
    assert fine.json()["usage"]["completion_tokens"] == 3
    assert slow.runner.open == 0
    stream = slow.client().completions.create(model="tiny", prompt="a", max_tokens=200, stream=True, seed=1)
    next(iter(stream))
    fail.set()
    with pytest.raises(openai.APIError, match="the device went away"):
        list(stream)
    assert httpx.get(slow.url + "/health").status_code == 200


def test_numbers_that_are_not_finite_end_that_request_only(server, monkeypatch):
    choose = server.engine._loop._choose

    def poisoned(rows, logits, settings):
        for row, request in enumerate(server.engine._loop._rows.requests[: len(logits)]):
            if request.seed == 666:
                logits[row] = float("nan")
        return choose(rows, logits, settings)

    monkeypatch.setattr(server.engine._loop, "_choose", poisoned)
    with ThreadPoolExecutor(2) as pool:
        bad = pool.submit(server.post, TEXT, **{**LONG, "seed": 666})
        good = pool.submit(server.post, TEXT, **{**LONG, "max_tokens": 30})
    assert bad.result().status_code == 500
    assert "are not finite" in bad.result().json()["error"]["message"]
    assert good.result().json()["usage"]["completion_tokens"] == 30


def test_an_idle_server_does_nothing(server):
    until(lambda: server.runner.open == 0)
    time.sleep(0.2)
    steps = []
    server.engine.step, step = lambda: steps.append(1) or False, server.engine.step
    try:
        time.sleep(0.3)
        assert len(steps) == 0
    finally:
        server.engine.step = step


def test_metrics_are_prometheus_text_and_count_what_was_done(start):
    fresh = start(max_rows=2)
    fresh.post(TEXT, **{**LONG, "max_tokens": 9})
    list(fresh.client().completions.create(model="tiny", prompt="ab", max_tokens=4, stream=True, seed=1))
    fresh.post(TEXT, prompt="a" * 500)
    fresh.post(TEXT, prompt=5)
    response = httpx.get(fresh.url + "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    kinds = {}
    for line in response.text.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            assert name not in kinds
            kinds[name] = kind
        elif not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            assert name not in samples
            samples[name] = float(value)
    assert {name.partition("{")[0] for name in samples} <= {
        name + end
        for name, kind in kinds.items()
        for end in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))
    }
    assert samples["llmtrain_rows"] == 2
    made = samples["llmtrain_generated_tokens_total"]
    assert 10 <= made <= 13
    assert samples["llmtrain_prompt_tokens_total"] == 3
    assert samples["llmtrain_tokens_per_second"] == pytest.approx(made / 10)
    assert samples['llmtrain_requests_total{endpoint="completions",outcome="ok"}'] == 2
    assert samples['llmtrain_requests_total{endpoint="completions",outcome="refused"}'] == 1
    buckets = [
        value for name, value in samples.items() if name.startswith("llmtrain_time_to_first_token_seconds_bucket")
    ]
    assert buckets == sorted(buckets)
    assert buckets[-1] == samples["llmtrain_time_to_first_token_seconds_count"] == 2
    assert samples["llmtrain_time_to_first_token_seconds_sum"] > 0


def test_tokens_there_and_back(server):
    text = "naïve 你好 🌍"
    found = server.post("/tokenize", prompt=text).json()
    assert found["tokens"] == server.engine.tokenizer.encode(text)
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 256)
    assert len(found["token_strs"]) == found["count"]
    assert server.post("/detokenize", tokens=found["tokens"]).json() == {"prompt": text}
    chat = server.post("/tokenize", messages=[{"role": "user", "content": "<|end|>"}]).json()
    assert chat["token_strs"][0] == "<|user|>"
    assert chat["token_strs"][-1] == "<|assistant|>"
    assert "<|end|>" not in chat["token_strs"]
    without = server.post("/tokenize", messages=[{"role": "user", "content": "a"}], add_generation_prompt=False).json()
    assert without["token_strs"] == ["<|user|>", "a"]
    long = server.post("/tokenize", prompt="字" * 20_000).json()
    assert long["count"] == 60_000


def test_the_model_of_a_request_chooses_the_adapter(start, monkeypatch):
    both = start(max_rows=2, models=["tiny", "日期"])
    submit, asked = both.engine.submit, []

    def watched(*args, adapter=None, **settings):
        asked.append(adapter)
        return submit(*args, **settings)

    monkeypatch.setattr(both.engine, "submit", watched)
    listed = httpx.get(both.url + "/v1/models").json()["data"]
    assert [(each["id"], each["parent"]) for each in listed] == [("tiny", None), ("日期", "tiny")]
    assert httpx.get(both.url + "/v1/models/日期").json() == listed[1]
    for model in ("tiny", "日期", None):
        answer = both.post(TEXT, prompt="a", max_tokens=1, model=model).json()
        assert answer["model"] == (model or "tiny")
    assert asked == [None, "日期", None]
    assert both.post(TEXT, prompt="a", model="日").status_code == 404
