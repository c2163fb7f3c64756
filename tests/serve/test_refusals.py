"""What is refused, and how: always in the API's own shape, never a 500, and never a file."""

from __future__ import annotations

import asyncio
import json
import re
import socket

import httpx
import openai
import pytest

from llmtrain.serve.app import Limits
from llmtrain.serve.guard import read_body
from llmtrain.serve.schema import ApiError

pytestmark = pytest.mark.medium
JSON = {"content-type": "application/json"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "a"}]


def refused(response: httpx.Response, status: int = 400) -> dict:
    """The error of a response, whose shape is checked."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


BODIES = {
    "nothing": b"",
    "no JSON": b"{prompt: 1}",
    "cut off": b'{"prompt": "a"',
    "a list": b"[]",
    "null": b"null",
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": 1e999}',
    "minus infinity": b'{"prompt": "a", "top_p": -Infinity}',
    "a huge number": b'{"prompt": "a", "max_tokens": 1' + b"0" * 30 + b"}",
    "an endless number": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "a lone surrogate": b'{"prompt": "\\ud800"}',
    "a surrogate the wrong way": b'{"prompt": "\\udc00\\ud800"}',
    "bytes that are no UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "too deep": b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "a true number": b'{"prompt": "a", "max_tokens": true}',
    "a number in words": b'{"prompt": "a", "max_tokens": "5"}',
    "an unknown field": b'{"prompt": "a", "promt": "b"}',
    "a field of ours below zero": b'{"prompt": "a", "top_k": -1}',
    "no prompt": b"{}",
    "an empty prompt": b'{"prompt": ""}',
    "no ids": b'{"prompt": []}',
    "no ids in a list": b'{"prompt": [[]]}',
    "an id below zero": b'{"prompt": [-1]}',
    "an id above all": b'{"prompt": [99999]}',
    "an id above all in 64 bits": b'{"prompt": [99999999999999999999]}',
    "ids and texts": b'{"prompt": [1, "a"]}',
    "a prompt beyond the context": json.dumps({"prompt": "a" * 5000}).encode(),
    "too many tokens": b'{"prompt": "a", "max_tokens": 100000}',
    "no tokens": b'{"prompt": "a", "max_tokens": 0}',
    "an empty stop": b'{"prompt": "a", "stop": ""}',
    "too many stops": json.dumps({"prompt": "a", "stop": ["x"] * 100}).encode(),
    "a seed below zero": b'{"prompt": "a", "seed": -1}',
    "seeds that run over": b'{"prompt": "a", "n": 2, "seed": 9223372036854775807}',
    "too hot": b'{"prompt": "a", "temperature": 3}',
    "more choices than there is room": b'{"prompt": ["a", "b"], "n": 128}',
    "endless choices": b'{"prompt": "a", "n": 1000000000}',
    "best of two": b'{"prompt": "a", "best_of": 2}',
    "an echo with probabilities": b'{"prompt": "a", "echo": true, "logprobs": 1}',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_a_bad_body_is_a_400_that_says_why(server, body):
    error = refused(httpx.post(server.url + TEXT, content=body, headers=JSON))
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 400
    refused(httpx.post(server.url + CHAT, content=body, headers=JSON))


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        (CHAT, {"tools": [{"type": "function"}]}, "tools", "tools is not supported here: leave it out"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "tool_choice is not supported"),
        (CHAT, {"functions": [{}]}, "functions", "functions is not supported"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format", "response_format is not supported"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities", "modalities is not supported"),
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort", "reasoning_effort is not supported"),
        (CHAT, {"audio": {}}, "audio", "audio is not supported"),
        (CHAT, {"logit_bias": {"5": 1}}, "logit_bias", "logit_bias is not supported"),
        (TEXT, {"presence_penalty": 0.5}, "presence_penalty", r"presence_penalty .* \(repetition_penalty is\)"),
        (TEXT, {"frequency_penalty": -1}, "frequency_penalty", "frequency_penalty is not"),
        (TEXT, {"suffix": "z"}, "suffix", "suffix is not supported"),
        (TEXT, {"max_completion_tokens": 5}, "max_completion_tokens", "there is no field max_completion_tokens"),
        (TEXT, {"top_p": 0}, "top_p", "top_p: Input should be greater than 0"),
        (CHAT, {"max_tokens": 201}, "max_tokens", "max_tokens=201 is more than this server gives, 200"),
        (CHAT, {"n": 81}, "n", "81 choices are more than the 80 that this server holds"),
        (CHAT, {"stop": ["a", ""]}, "stop.1", "stop.1: String should have at least 1 character"),
        (CHAT, {"messages": []}, "messages", "messages: List should have at least 1 item"),
        (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role", "'system', 'developer', 'user'"),
        (CHAT, {"messages": [*USER, {"role": "system", "content": ""}]}, "messages", "system message must come first"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content", "Field required"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.0.content", "content"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages.0.x", "there is no field"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "messages.0.content.0"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 300}]}, None, "has 302 tokens and leaves no room"),
        ("/tokenize", {}, "prompt", "give one of prompt and messages"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt", "give one of prompt and messages"),
        ("/detokenize", {"tokens": [99999]}, "tokens", "99999 is outside the vocabulary"),
    ],
)
def test_the_message_names_the_field(server, path, fields, param, message):
    body = {CHAT: {"messages": USER}, TEXT: {"prompt": "a"}}.get(path, {}) | fields
    error = refused(server.post(path, **body))
    assert param is None or error["param"] == param
    assert re.search(message, error["message"]), error["message"]


def test_what_would_change_nothing_is_accepted(server):
    harmless = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "n": 1, "logit_bias": {},
        "presence_penalty": 0, "frequency_penalty": 0.0, "tools": [], "tool_choice": "none", "seed": None,
        "response_format": {"type": "text"}, "modalities": ["text"], "parallel_tool_calls": True, "stop": None,
        "temperature": 1, "max_tokens": 3,
    }  # fmt: skip
    answer = server.client().chat.completions.create(model="tiny", messages=USER, **harmless)
    message = answer.choices[0].message.model_dump()
    again = [
        *USER,
        message,
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
    ]
    assert server.client().chat.completions.create(model="tiny", messages=again, max_tokens=3).usage.completion_tokens


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", CHAT, 405), ("POST", "/health", 405), ("DELETE", "/v1/models/tiny", 405)],
)
def test_unknown_paths_and_methods_have_the_apis_shape(server, method, path, status):
    response = httpx.request(method, server.url + path)
    refused(response, status)
    assert status != 405 or response.headers["allow"]


def test_a_body_that_is_too_large_or_no_json_is_not_read(server):
    body = b'{"prompt": "' + b"a" * 5_000_000 + b'"}'
    assert refused(httpx.post(server.url + TEXT, content=body, headers=JSON), 413)["code"] == "body_too_large"

    def pieces():
        for _ in range(50):
            yield b"a" * 100_000

    assert refused(httpx.post(server.url + TEXT, content=pieces(), headers=JSON), 413)["code"] == "body_too_large"
    assert refused(httpx.post(server.url + TEXT, content=b"{}", headers={"content-type": "text/plain"}), 415)
    assert refused(httpx.post(server.url + TEXT, data={"prompt": "a"}), 415)


@pytest.mark.parametrize("length", [None, "300"])
@pytest.mark.parametrize(("pieces", "read"), [(30, 30), (1000, 81)])
def test_a_client_may_send_all_of_a_body_that_is_too_large(length, pieces, read):
    """Closing on it while it sends would break its connection before it sees the answer; there is an end to it, too."""
    calls = 0

    async def receive():
        nonlocal calls
        calls += 1
        return {"type": "http.request", "body": b"a" * 10, "more_body": calls < pieces}

    with pytest.raises(ApiError, match="larger than 100 bytes") as error:
        asyncio.run(read_body(JSON | ({"content-length": length} if length else {}), receive, 100))
    assert error.value.status == 413
    assert calls == read


PATHS = [
    "/../../etc/passwd", "/..%2f..%2f..%2fetc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/index.html",
    "/page/index.html", "/static/../../setup.py", "/..\\..\\setup.py", "/v1/models/../../setup.py", "/%00",
    "/v1/models/%2e%2e%2f%2e%2e%2fsetup.py", "/v1/models//etc/passwd", "/v1/models/tiny%00", "/v1/models/%ff",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_no_path_of_a_request_reaches_a_file(server, path):
    """By a bare socket: a client would tidy the path up."""
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        request = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        connection.sendall(request.encode("latin-1"))
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.split(b" ", 2)[1] in (b"404", b"400")
    assert b"root:" not in body
    assert b"setuptools" not in body


@pytest.mark.parametrize("name", ["../../etc", "/etc/passwd", "tiny/../tiny", "", "tiny ", "ti\u0000ny", "x" * 9999])
def test_no_model_name_of_a_request_reaches_a_file(server, name):
    for path, body in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        error = refused(server.post(path, model=name, **body), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert len(error["message"]) < 200


def test_the_key_is_asked_for_everywhere_but_at_the_page_and_the_health(start):
    locked = start(api_key="s3cret", max_rows=1)
    for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere", "/v1/models/tiny"):
        response = httpx.get(locked.url + path)
        assert refused(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    for key in ("x", "s3cre", "s3cret2", "S3CRET", "s3cret\xe9", "Bearer s3cret"):
        headers = {**JSON, "authorization": f"Bearer {key}".encode("latin-1")}
        refused(httpx.post(locked.url + TEXT, json={"prompt": "a"}, headers=headers), 401)
    refused(httpx.get(locked.url + "/v1/models", headers={"authorization": "Basic czNjcmV0"}), 401)
    assert httpx.get(locked.url + "/health").json() == {"status": "ok"}
    assert httpx.get(locked.url + "/").status_code == 200
    with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
        locked.client(api_key="wrong").models.list()
    assert locked.client(api_key="s3cret").completions.create(model="tiny", prompt="a", max_tokens=1).usage


def test_another_sites_name_for_this_machine_is_refused_and_no_site_may_read(start):
    local = start(hosts=["localhost", "127.0.0.1", "::1", "box.example"], max_rows=1)
    for host in ("localhost", "127.0.0.1:8000", "[::1]:80", "BOX.example:1"):
        assert httpx.get(local.url + "/health", headers={"host": host}).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.", "[::2]", ""):
        assert refused(httpx.get(local.url + "/v1/models", headers={"host": host}))["code"] == "host"
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    response = httpx.options(local.url + CHAT, headers=asked)
    refused(response, 405)
    answer = httpx.get(local.url + "/v1/models", headers={"origin": "https://evil.example"})
    assert not [name for name in (*response.headers, *answer.headers) if name.startswith("access-control")]


def test_the_page_is_served_with_a_strict_policy(server):
    page = httpx.get(server.url + "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.text.startswith("<!doctype html>")


def test_an_answer_that_takes_too_long_is_broken_off(start):
    hasty = start(limits=Limits(max_tokens=250, request_timeout=0.02), max_rows=1)
    body = {"prompt": "a", "max_tokens": 250, "ignore_eos": True}
    response = hasty.post(TEXT, **body)
    assert refused(response, 408)["code"] == "timeout"
    assert response.headers["x-should-retry"] == "false"
    endless = {"prompt": "a", "max_tokens": 250, "stream": True, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APIError, match=r"not finished within 0\.02 s"):
        list(hasty.client().completions.create(model="tiny", **endless))
