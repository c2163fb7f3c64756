"""A server in this process over a tiny model: in a thread of its own, on a free port."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from llmtrain.generation import Engine
from llmtrain.model import build_model
from llmtrain.serve.app import Limits, create_app
from llmtrain.serve.runner import Runner
from llmtrain.serve.server import bind, served


@dataclass
class Served:
    """A running server, and what is behind it."""

    url: str
    app: Any
    runner: Runner
    engine: Engine
    alone: Engine  # over the same model, for comparison

    def client(self, **settings: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=settings.pop("api_key", "none"), **settings)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60)

    def figure(self, name: str) -> float:
        """One sample of /metrics."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(f"{name} ")).rpartition(" ")[2])


@pytest.fixture(scope="session")
def start(tiny_config, byte_tok) -> Iterator[Callable[..., Served]]:
    """`start(max_rows=2, api_key="k")`: one more server, until the end of the session."""
    with ExitStack() as stack:

        def make(
            *,
            max_rows: int = 16,
            max_waiting: int = 64,
            max_length: int = 256,
            limits: Any = None,
            models: Any = ("tiny",),
            **settings: Any,
        ) -> Served:
            config = tiny_config(max_position_embeddings=max(256, max_length))
            model = build_model(config, seed=0).eval()
            engine = Engine(model, byte_tok, max_rows=max_rows, max_length=max_length)
            runner = Runner(engine, max_waiting=max_waiting)
            limits = limits or Limits(max_tokens=200, max_body_bytes=100_000)
            app = create_app(runner, models=models, limits=limits, **settings)
            url = stack.enter_context(served(app, bind("127.0.0.1", 0)))
            return Served(url, app, runner, engine, Engine(model, byte_tok, max_rows=max_rows, max_length=max_length))

        yield make


@pytest.fixture(scope="session")
def server(start) -> Served:
    """The usual one."""
    return start()


@pytest.fixture(scope="session")
def small(start) -> Served:
    """One row, one place to wait."""
    return start(max_rows=1, max_waiting=1)
