"""The OpenAPI document tells the truth: schemathesis tries it with its whole set of checks."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest

from llmtrain.serve import page
from llmtrain.serve.app import Limits

PROGRAM = """
import schemathesis
from schemathesis.cli import schemathesis as main

@schemathesis.hook
def filter_case(context, case):
    # Each is within the document's bounds; of the product of two numbers it can say nothing.
    body = case.body if isinstance(case.body, dict) else {}
    prompts, choices = body.get("prompt"), body.get("n")
    whole = isinstance(choices, (int, float)) and isinstance(prompts, list) and not isinstance(choices, bool)
    return not whole or len(prompts) * choices <= 80

main()
"""


@pytest.mark.medium
def test_the_document_knows_this_servers_models_and_limits(server):
    document = httpx.get(server.url + "/openapi.json").json()
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields["model"]["anyOf"][0]["enum"] == ["tiny"]
    assert fields["max_tokens"]["anyOf"][0]["maximum"] == 200
    assert fields["n"]["anyOf"][0]["maximum"] == 80
    assert document["components"]["schemas"]["DetokenizeRequest"]["properties"]["tokens"]["items"] == {
        "type": "integer", "minimum": 0, "exclusiveMaximum": server.engine.tokenizer.vocab_size,
    }  # fmt: skip
    routes = {route.path.replace("{name:path}", "{name}") for route in server.app.routes if hasattr(route, "methods")}
    inside = {each for each in routes if each.startswith("/inspect/")}  # of the page, and only where it is switched on
    assert routes - inside - {*page.FILES, "/openapi.json"} == set(document["paths"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_schemathesis_finds_nothing(start, tmp_path):
    """Valid requests are answered, invalid ones refused, all in the stated shapes, and none with a 500."""
    # Room for all that the document allows, and for one message too many: a context or a body is no part of it.
    server = start(max_length=2**14, limits=Limits(max_tokens=50, max_body_bytes=2**24))
    program = [sys.executable, "-c", PROGRAM]
    arguments = ["run", f"{server.url}/openapi.json", "-c", "all", "-n", "200", "--continue-on-failure", "--no-color"]
    settings = ["--no-shrink", "--max-time", "120", "--report-dir", str(tmp_path)]
    done = subprocess.run([*program, *arguments, *settings], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "8 passed" in done.stdout
    assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
