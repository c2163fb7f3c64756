"""The OpenAPI document of the server: bodies, answers and errors, with this server's own models and limits in it.

FastAPI reads signatures; our routes read bodies themselves (to bound them, and to refuse in the API's shape), so what
goes in and comes out is said here. Knows shapes only: nothing here runs while a request is answered.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from llmtrain.serve.schema import REQUESTS


class Fault(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every status but 200."""

    error: Fault


class Cached(BaseModel):
    """Tokens of the prompt that a row still held."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of one answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Cached


class Timing(BaseModel):
    """Our extra: how long it took, and the seed that gives the text again."""

    ttft_ms: float | None
    tokens_per_second: float | None
    seconds: float
    seed: int


class Likely(BaseModel):
    """A token that could have come."""

    token: str
    token_id: int
    logprob: float
    bytes: list[int]


class TokenLogprob(Likely):
    """The token that came."""

    top_logprobs: list[Likely]


class ChatLogprobs(BaseModel):
    """Of each token of a chat's answer."""

    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(BaseModel):
    """Of each token of a completion."""

    tokens: list[str]
    token_ids: list[int]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class AnswerMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """One of the answers of a chat."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    llmtrain: Timing


class ChatAnswer(BaseModel):
    """A chat's answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(BaseModel):
    """One of the continuations."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    llmtrain: Timing


class CompletionAnswer(BaseModel):
    """Continuations of texts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(BaseModel):
    """A model that may be asked for."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None
    max_model_len: int


class ModelList(BaseModel):
    """All of them."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(BaseModel):
    """Tokens of a text."""

    tokens: list[int]
    token_strs: list[str]
    count: int
    max_model_len: int


class DetokenizeAnswer(BaseModel):
    """Text of tokens."""

    prompt: str


class Health(BaseModel):
    """Whether requests are taken."""

    status: Literal["ok", "draining", "stopped"]


_ANSWERS: dict[tuple[str, str], type[BaseModel] | None] = {
    ("/health", "get"): Health,
    ("/metrics", "get"): None,
    ("/v1/models", "get"): ModelList,
    ("/v1/models/{name}", "get"): ModelCard,
    ("/v1/chat/completions", "post"): ChatAnswer,
    ("/v1/completions", "post"): CompletionAnswer,
    ("/tokenize", "post"): TokenizeAnswer,
    ("/detokenize", "post"): DetokenizeAnswer,
}
_BODIES = dict(zip(("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"), REQUESTS, strict=True))
_STATUSES = {
    400: "The request cannot be answered; the message says why.",
    401: "The key is missing or wrong.",
    404: "There is no such model.",
    408: "The answer was not finished in time.",
    413: "The body is too large.",
    415: "The body is not said to be JSON.",
    429: "Too many requests are waiting.",
    500: "The engine failed at this request.",
    503: "The server is shutting down.",
}


def describe(app: FastAPI, models: Sequence[str], *, max_tokens: int, max_choices: int, vocab_size: int) -> None:
    """Gives an application its document.

    Args:
        app: With its routes.
        models: The names that may be asked for.
        max_tokens: The most tokens of an answer.
        max_choices: The most answers of one request.
        vocab_size: One more than the largest token id.
    """

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version="1", routes=app.routes)
            parts = _parts()
            for name in {each.__name__ for each in REQUESTS}:
                fields = parts[name]["properties"]
                fields["model"] = {"anyOf": [{"enum": list(models), "type": "string"}, {"type": "null"}]}
                for limited in {"max_tokens", "max_completion_tokens"} & fields.keys():
                    fields[limited]["anyOf"][0]["maximum"] = max_tokens
                if "n" in fields:
                    fields["n"]["anyOf"][0]["maximum"] = min(max_choices, fields["n"]["anyOf"][0]["maximum"])
                for lists in fields.get("prompt", {}).get("anyOf", ()):
                    if lists.get("maxItems"):
                        lists["maxItems"] = min(max_choices, lists["maxItems"])
                if "messages" in fields:
                    _only_the_first_may_be_system(parts, fields["messages"])
                _bound_ids(fields, vocab_size)
            made["components"] = {"schemas": parts}
            made["paths"]["/v1/models/{name}"]["get"]["parameters"][0]["schema"]["enum"] = list(models)
            for (path, method), answer in _ANSWERS.items():
                made["paths"][path][method] |= _operation(path, method, answer)
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _parts() -> dict[str, Any]:
    wanted = [(each, "validation") for each in (*REQUESTS, *(a for a in _ANSWERS.values() if a), ErrorAnswer)]
    _, schemas = models_json_schema(wanted, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    parts: dict[str, Any] = schemas["$defs"]
    return parts


def _only_the_first_may_be_system(parts: dict[str, Any], messages: dict[str, Any]) -> None:
    parts["Turn"] = copy.deepcopy(parts["Message"])
    parts["Turn"]["properties"]["role"]["enum"] = ["user", "assistant"]
    array = messages if "items" in messages else messages["anyOf"][0]
    array |= {"prefixItems": [{"$ref": "#/components/schemas/Message"}]}
    array["items"] = {"$ref": "#/components/schemas/Turn"}


def _bound_ids(schema: Any, vocab_size: int) -> None:
    """Token ids, which the table of fields bounds by 32 bits, end with this server's vocabulary."""
    for each in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        if isinstance(each, dict) and each.get("exclusiveMaximum") == 2**31 and "items" not in each:
            each["exclusiveMaximum"] = vocab_size
        _bound_ids(each, vocab_size)


def _operation(path: str, method: str, answer: type[BaseModel] | None) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}} if answer is None else _json(answer)
    error = _json(ErrorAnswer)
    if answer in (ChatAnswer, CompletionAnswer):
        event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
        content["text/event-stream"] = {"schema": event}
    statuses = {401} if method == "get" else set(_STATUSES)
    statuses |= {404} if "{" in path else set()
    responses: dict[str, Any] = {"200": {"description": "What was asked for.", "content": content}}
    responses |= {str(code): {"description": _STATUSES[code], "content": error} for code in sorted({400, *statuses})}
    if path == "/health":
        responses["503"] = {"description": _STATUSES[503], "content": content}
    if method == "get":
        return {"responses": responses}
    return {"requestBody": {"required": True, "content": _json(_BODIES[path])}, "responses": responses}


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
