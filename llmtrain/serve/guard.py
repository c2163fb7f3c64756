"""What stands before every route: the API key, the host's name, the size of a body, the end of the server.

Plain ASGI, because a streamed answer passes through it chunk by chunk. Knows headers; does not know what a body means.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from llmtrain.serve import page
from llmtrain.serve.schema import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", *page.FILES})
"""What needs no key: the page, which asks for one, and whether the server lives."""
INSPECT_PATH = "/inspect/"
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class Guard:
    """Refuses requests before they reach the application.

    Args:
        app: The application.
        api_key: What requests must carry as `Authorization: Bearer …`; None asks for nothing.
        hosts: The names under which the server may be addressed; None takes any. A page of some other site whose name
            is made to point here (DNS rebinding) is refused by it.
        draining: Says whether the server is shutting down.
    """

    def __init__(self, app: App, *, api_key: str | None, hosts: Collection[str] | None, draining: Callable[[], bool]):
        self._app = app
        self._key = None if api_key is None else f"Bearer {api_key}".encode()
        self._hosts = None if hosts is None else frozenset(name.lower() for name in hosts)
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            await send_error(error, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        if scope["type"] != "http":
            raise ApiError(400, "this server speaks HTTP only")
        headers = dict(scope["headers"])
        if self._hosts is not None and _host_name(headers.get(b"host", b"")) not in self._hosts:
            raise ApiError(400, "this server is not known under that Host: add the name to allowed_hosts", code="host")
        if self._draining() and scope["path"] != "/health" and scope["method"] == "POST":
            raise ApiError(503, "the server is shutting down", headers={"retry-after": "5"})
        if self._key is None or scope["path"] in OPEN_PATHS:
            return
        if scope["method"] == "GET" and scope["path"].startswith(INSPECT_PATH):
            return  # the rest of the path is the key to that page
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._key):
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as Authorization: Bearer …",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


def _host_name(header: bytes) -> str:
    """The name in a Host header, without its port."""
    text = header.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]


async def send_error(error: ApiError, send: Send) -> None:
    """Answer with an error, without a framework."""
    body = json.dumps(error.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


_READ_ON = 8
"""So many times the most bytes are read, and thrown away, before the connection is closed on a client that still
sends: it would see its connection break and not the answer."""


async def read_body(headers: Any, receive: Receive, most: int) -> bytes:
    """The whole body of a request.

    Args:
        headers: Its headers.
        receive: ASGI's.
        most: The most bytes that it may have, and that are ever held.

    Raises:
        ApiError: It is larger, or not said to be JSON (which a form on another site could not do).
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "send the body as application/json", code="content_type")
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > _READ_ON * most:
        raise _too_large(most)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client left before its request was read")
        part = message.get("body", b"")
        size += len(part)
        whole = not message.get("more_body")
        if size > most:
            parts.clear()
            if whole or size > _READ_ON * most:
                raise _too_large(most)
            continue
        parts.append(part)
        if whole:
            return b"".join(parts)


def _too_large(most: int) -> ApiError:
    return ApiError(
        413, f"the body is larger than {most:,} bytes", code="body_too_large", headers={"connection": "close"}
    )
