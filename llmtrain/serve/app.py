"""The routes: a request is read, checked, turned into jobs for the runner, and answered, whole or streamed.

Knows the runner, the schema and the tokenizer. Does not know sockets, signals or settings' names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from llmtrain.generation import SamplingParams
from llmtrain.serve import page
from llmtrain.serve.answering import Answer
from llmtrain.serve.answers import Form
from llmtrain.serve.conversation import turn_markers
from llmtrain.serve.documents import describe
from llmtrain.serve.guard import Guard, read_body
from llmtrain.serve.inside import Inside
from llmtrain.serve.runner import Job, Runner
from llmtrain.serve.schema import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    TokenizeRequest,
    read,
)
from llmtrain.tokenizer import render_chat

logger = logging.getLogger(__name__)

LONG_TEXT = 4096
"""Text of more characters is tokenized beside the event loop, which others wait for."""


@dataclass(frozen=True)
class Limits:
    """What one request may ask for.

    Attributes:
        max_body_bytes: The size of a body.
        max_tokens: The tokens of an answer, and how many it may have unless the request says so.
        request_timeout: Seconds from a request to the end of its answer.
    """

    max_body_bytes: int = 2**20
    max_tokens: int = 1024
    request_timeout: float = 600.0


class Server:
    """What the routes share.

    Args:
        runner: The engine's.
        models: The name of the base model, then those of the adapters.
        limits: For each request.
        created: When the models are said to have been made, in seconds since 1970.
        inside: Records answers for those who want to look into them; None does not.
    """

    def __init__(
        self, runner: Runner, models: Sequence[str], limits: Limits, created: int, inside: Inside | None = None
    ):
        self.runner, self.models, self.limits, self.created = runner, list(models), limits, created
        self.inside = inside
        self.tokenizer = runner.engine.tokenizer
        self.draining = False

    # Routes

    async def health(self) -> Response:
        """Whether the server takes requests."""
        state = "draining" if self.draining else "ok" if self.runner.alive else "stopped"
        return JSONResponse({"status": state}, status_code=200 if state == "ok" else 503)

    async def metrics(self) -> Response:
        """Figures for Prometheus."""
        running = min(self.runner.open, self.runner.engine.max_rows)
        waiting = self.runner.open - running
        text = self.runner.metrics.text(waiting=waiting, running=running, rows=self.runner.engine.max_rows)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def list_models(self) -> Response:
        """The base model and the adapters."""
        shown = {"object": "list", "data": [self._model(name) for name in self.models]}
        return JSONResponse(shown | ({"inspect": True} if self.inside is not None else {}))

    async def show_model(self, name: str) -> Response:
        """One of them."""
        return JSONResponse(self._model(self._known(name)))

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        form, jobs, choices = await self._chat(request)
        return Answer(self.runner, form, jobs, choices, self.limits.request_timeout)

    async def complete(self, request: Request) -> Response:
        """Continue texts."""
        form, jobs, choices = await self._completion(request)
        return Answer(self.runner, form, jobs, choices, self.limits.request_timeout)

    async def look_into_chat(self, request: Request) -> Response:
        """Answer a conversation and say where the page of what happened is."""
        form, jobs, _ = await self._chat(request)
        return self._inside().answer(form, jobs, self.limits.request_timeout)

    async def look_into_completion(self, request: Request) -> Response:
        """Continue a text and say where the page of what happened is."""
        form, jobs, _ = await self._completion(request)
        return self._inside().answer(form, jobs, self.limits.request_timeout)

    async def show_inside(self, key: str) -> Response:
        """Such a page."""
        return self._inside().show(key)

    async def _chat(self, request: Request) -> tuple[Form, list[Job], int]:
        asked: ChatRequest = await self._read(ChatRequest, request)
        model = self._known(asked.model)
        ids = await self._conversation(asked.messages)
        logprobs = bool(asked.logprobs or asked.top_logprobs)
        ends = () if asked.ignore_eos else turn_markers(self.tokenizer)
        jobs = self._jobs(asked, model, [ids], logprobs=logprobs, candidates=asked.top_logprobs or 0, ends=ends)
        form = Form(
            chat=True, model=model, token_bytes=self.tokenizer.token_bytes, logprobs=logprobs,
            include_usage=asked.include_usage,
        )  # fmt: skip
        return form, jobs, asked.choices

    async def _completion(self, request: Request) -> tuple[Form, list[Job], int]:
        asked: CompletionRequest = await self._read(CompletionRequest, request)
        model = self._known(asked.model)
        if asked.echo and asked.logprobs is not None:
            raise ApiError(400, "echo together with logprobs is not supported: leave one out", param="echo")
        prompts = await self._prompts(asked)
        logprobs = asked.logprobs is not None
        jobs = self._jobs(asked, model, prompts, logprobs=logprobs, candidates=asked.logprobs or 0)
        echoes = [self.tokenizer.decode(ids) for ids in prompts for _ in range(asked.choices)] if asked.echo else ()
        form = Form(
            chat=False, model=model, token_bytes=self.tokenizer.token_bytes, logprobs=logprobs,
            include_usage=asked.include_usage, echoes=echoes,
        )  # fmt: skip
        return form, jobs, asked.choices

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text or of a conversation."""
        asked: TokenizeRequest = await self._read(TokenizeRequest, request)
        self._known(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError(400, "give one of prompt and messages", param="prompt")
        if asked.messages is not None:
            ids = await self._conversation(asked.messages, answer=asked.add_generation_prompt is not False)
        else:
            ids = self.tokenizer.begin(await self._encode(asked.prompt or ""))
        texts = [self.tokenizer.token_bytes(each).decode("utf-8", "replace") for each in ids]
        length = self.runner.engine.max_length
        return JSONResponse({"tokens": ids, "token_strs": texts, "count": len(ids), "max_model_len": length})

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens, special ones by their names."""
        asked: DetokenizeRequest = await self._read(DetokenizeRequest, request)
        self._known(asked.model)
        self._check_ids(asked.tokens, "tokens")
        return JSONResponse({"prompt": self.tokenizer.decode(asked.tokens, skip_special=False)})

    # Parts

    async def _read(self, kind: Any, request: Request) -> Any:
        return read(kind, await read_body(request.headers, request.receive, self.limits.max_body_bytes))

    def _inside(self) -> Inside:
        if self.inside is None:
            raise ApiError(404, "this server records no answers: start it with inspect=true")
        return self.inside

    def _known(self, name: str | None) -> str:
        if name is None:
            return self.models[0]
        if name not in self.models:
            shown = name if len(name) <= 60 else f"{name[:60]}…"
            raise ApiError(
                404, f"there is no model {shown!r}; GET /v1/models lists them", param="model", code="model_not_found"
            )
        return name

    def _model(self, name: str) -> dict[str, Any]:
        parent = None if name == self.models[0] else self.models[0]
        length = self.runner.engine.max_length
        return {
            "id": name, "object": "model", "created": self.created, "owned_by": "llmtrain", "parent": parent,
            "max_model_len": length,
        }  # fmt: skip

    def _check_ids(self, ids: Sequence[int], field: str) -> None:
        size = self.tokenizer.vocab_size
        wrong = next((each for each in ids if each >= size), None)
        if wrong is not None:
            raise ApiError(400, f"{field}: {wrong} is outside the vocabulary 0 … {size - 1}", param=field)

    async def _encode(self, text: str) -> list[int]:
        if len(text) > LONG_TEXT:
            return await asyncio.to_thread(self.tokenizer.encode, text)
        return self.tokenizer.encode(text)

    async def _conversation(self, messages: Sequence[Message], *, answer: bool = True) -> list[int]:
        plain = [message.plain() for message in messages]

        def render() -> list[int]:
            return render_chat(plain, self.tokenizer, add_generation_prompt=answer)[0]

        long = sum(len(each["content"]) for each in plain) > LONG_TEXT or len(plain) > 64
        try:
            return await asyncio.to_thread(render) if long else render()
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from None

    async def _prompts(self, asked: CompletionRequest) -> list[list[int]]:
        prompt = asked.prompt
        if isinstance(prompt, str):
            return [self.tokenizer.begin(await self._encode(prompt))]
        if isinstance(prompt[0], int):
            prompt = [prompt]
        many = [
            self.tokenizer.begin(await self._encode(each)) if isinstance(each, str) else list(each) for each in prompt
        ]
        for ids in many:
            self._check_ids(ids, "prompt")
        return many

    def _jobs(
        self,
        asked: Any,
        model: str,
        prompts: Sequence[Sequence[int]],
        *,
        logprobs: bool,
        candidates: int,
        ends: Sequence[int] = (),
    ) -> list[Job]:
        try:
            params: SamplingParams = asked.sampling(self.limits.max_tokens, self.limits.max_tokens)
            seeds = [None if params.seed is None else params.seed + i for i in range(asked.choices)]
            each_choice = [replace(params, seed=seed, stop_ids=tuple(ends)) for seed in seeds]
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        if len(prompts) * asked.choices > self.runner.capacity:
            raise ApiError(
                400, f"{len(prompts)} prompts of {asked.choices} choices are more than the {self.runner.capacity} that "
                "this server holds: divide the request", param="n",
            )  # fmt: skip
        adapter = None if model == self.models[0] else model
        return [
            Job(ids, choice, candidates, logprobs, bool(asked.stream), adapter)
            for ids in prompts
            for choice in each_choice
        ]


def create_app(
    runner: Runner,
    *,
    models: Sequence[str],
    limits: Limits | None = None,
    api_key: str | None = None,
    hosts: Collection[str] | None = None,
    created: int = 0,
    inside: Inside | None = None,
) -> FastAPI:
    """The application, with its guard; `app.state.server` is what the routes share.

    Args:
        runner: Started and stopped with the application.
        models: The name of the base model, then those of the engine's adapters.
        limits: For each request.
        api_key: What requests must carry; None asks for nothing.
        hosts: The names under which the server may be addressed; None takes any.
        created: When the models are said to have been made, in seconds since 1970.
        inside: Records answers for those who want to look into them; None does not.
    """
    server = Server(runner, models, limits or Limits(), created, inside)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        runner.start()
        yield
        await runner.stop()

    # No /docs: that page of FastAPI's takes its scripts from elsewhere.
    app = FastAPI(title="llmtrain", docs_url=None, redoc_url=None, lifespan=lifespan, redirect_slashes=False)
    app.state.server = server
    _add_routes(app, server)
    describe(
        app, server.models, max_tokens=server.limits.max_tokens, max_choices=runner.capacity,
        vocab_size=server.tokenizer.vocab_size,
    )  # fmt: skip
    app.add_exception_handler(ApiError, _show_error)
    app.add_exception_handler(HTTPException, _show_http_error)
    app.add_exception_handler(Exception, _show_fault)
    app.add_middleware(Guard, api_key=api_key, hosts=hosts, draining=lambda: server.draining)
    return app


def _page_route(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
    data = (page.FOLDER / name).read_bytes()

    async def show() -> Response:
        return Response(data, media_type=f"{kind}; charset=utf-8", headers=page.HEADERS)

    return show


def _add_routes(app: FastAPI, server: Server) -> None:
    for path, (name, kind) in page.FILES.items():
        app.add_api_route(path, _page_route(name, kind), methods=["GET"], include_in_schema=False)
    app.add_api_route("/health", server.health, methods=["GET"])
    app.add_api_route("/metrics", server.metrics, methods=["GET"])
    app.add_api_route("/v1/models", server.list_models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", server.show_model, methods=["GET"])
    app.add_api_route("/v1/chat/completions", server.chat, methods=["POST"])
    app.add_api_route("/v1/completions", server.complete, methods=["POST"])
    app.add_api_route("/inspect/chat/completions", server.look_into_chat, methods=["POST"], include_in_schema=False)
    app.add_api_route("/inspect/completions", server.look_into_completion, methods=["POST"], include_in_schema=False)
    app.add_api_route("/inspect/{key}", server.show_inside, methods=["GET"], include_in_schema=False)
    app.add_api_route("/tokenize", server.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", server.detokenize, methods=["POST"])


async def _show_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


async def _show_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: "there is no such path", 405: "this path does not take that method"}
    shown = ApiError(
        error.status_code, what.get(error.status_code, str(error.detail)), headers=dict(error.headers or {})
    )
    return await _show_error(request, shown)


async def _show_fault(request: Request, error: Exception) -> Response:
    logger.error("a request failed by a fault of the server's", exc_info=error)
    return await _show_error(request, ApiError(500, "the server failed at this request; its log says more"))
