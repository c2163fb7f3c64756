"""Looking into an answer: the same answer once more, recorded, and its page; who may see it, and what is refused."""

import json
import re

import httpx
import pytest

from llmtrain.generation import SamplingParams
from llmtrain.serve import inside as inside_module
from llmtrain.serve.inside import Inside


@pytest.fixture(scope="module")
def open_server(start):
    server = start(api_key="secret", max_rows=2)
    server.app.state.server.inside = Inside(server.runner, {"tiny": {"name": "my <model>"}})
    return server


KEY = {"authorization": "Bearer secret"}


def look(server, path="/inspect/completions", headers=KEY, **body):
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)


def document_of(page):
    [found] = re.findall(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page, flags=re.DOTALL)
    return json.loads(found)


@pytest.mark.medium
def test_the_page_tells_of_the_very_answer_that_was_given(open_server):
    asked = {"prompt": "Hello", "seed": 5, "max_tokens": 7, "temperature": 1.0}
    answered = look(open_server, **asked)
    assert answered.status_code == 200
    page = httpx.get(open_server.url + answered.json()["path"])  # by its address alone, as a browser's window asks
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["cache-control"] == "no-store"
    found = document_of(page.text)
    assert found["schema"] == "llmtrain.inspect/1"
    assert found["model"]["name"] == "my <model>"
    settings = SamplingParams(seed=5, max_new_tokens=7, temperature=1.0)
    prompt = open_server.engine.tokenizer.begin(open_server.engine.tokenizer.encode("Hello"))
    [alone] = open_server.alone.generate([prompt], settings)
    assert [step["token"] for step in found["steps"]] == alone.token_ids
    assert found["measured"] is None


@pytest.mark.medium
def test_a_conversation_is_looked_into_as_it_is_answered(open_server):
    asked = {"messages": [{"role": "user", "content": "<script>alert(1)</script>"}], "seed": 3, "max_tokens": 4}
    headers = KEY | {"content-type": "application/json"}
    told = httpx.post(f"{open_server.url}/v1/chat/completions", json=asked, headers=headers, timeout=60).json()
    page = httpx.get(open_server.url + look(open_server, "/inspect/chat/completions", **asked).json()["path"]).text
    assert "<script>alert" not in page
    assert document_of(page)["answer"] == told["choices"][0]["message"]["content"]


def test_only_the_last_pages_are_kept(open_server, monkeypatch):
    monkeypatch.setattr(inside_module, "KEPT", 1)
    first, second = (look(open_server, prompt="a", max_tokens=1).json()["path"] for _ in range(2))
    assert httpx.get(open_server.url + second).status_code == 200
    gone = httpx.get(open_server.url + first)
    assert gone.status_code == 404
    assert "no such page" in gone.json()["error"]["message"]


def test_what_cannot_be_looked_into_is_refused(open_server, server):
    assert look(open_server, headers={}, prompt="a").status_code == 401
    several = look(open_server, prompt="a", n=2)
    assert several.status_code == 400
    assert "ask for one prompt and n=1" in several.json()["error"]["message"]
    assert look(open_server, prompt="a" * 1000).status_code == 400
    assert httpx.get(f"{open_server.url}/v1/models", headers=KEY).json()["inspect"] is True
    shut = look(server, prompt="a", headers={})
    assert shut.status_code == 404
    assert "start it with inspect=true" in shut.json()["error"]["message"]
    assert "inspect" not in httpx.get(f"{server.url}/v1/models").json()
