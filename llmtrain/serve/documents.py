"""The OpenAPI document of the server: bodies, answers and errors, with this server's own models and limits in it.

FastAPI reads signatures; ours read bodies themselves (to bound them and to refuse in the API's shape), so what a body
and an answer look like is written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from llmtrain.serve.schema import REQUESTS

if TYPE_CHECKING:
    from llmtrain.serve.app import Limits

_BODIES = {
    "/v1/chat/completions": "ChatRequest",
    "/v1/completions": "CompletionRequest",
    "/tokenize": "TokenizeRequest",
    "/detokenize": "DetokenizeRequest",
}


def describe(app: FastAPI, models: Sequence[str], limits: Limits) -> None:
    """Gives an application its document."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version="1", routes=app.routes)
            app.openapi_schema = _completed(made, models, limits)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _completed(document: dict[str, Any], models: Sequence[str], limits: Limits) -> dict[str, Any]:
    _, schemas = models_json_schema(
        [(each, "validation") for each in REQUESTS], ref_template="#/components/schemas/{model}"
    )
    parts = schemas["$defs"]
    document["components"] = {"schemas": parts}
    for path, name in _BODIES.items():
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    return document
