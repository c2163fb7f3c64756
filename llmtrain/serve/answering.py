"""One answer on its way to the client: waits for the engine, the clock and the client's leaving, whichever comes first.

Knows ASGI and the runner; the bytes are made in `answers`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from fastapi.responses import Response

from llmtrain.generation.results import Completion
from llmtrain.serve.answers import Form, StreamEncoder, error_chunk, whole
from llmtrain.serve.guard import Receive, Scope, Send, send_error
from llmtrain.serve.runner import Job, QueueFullError, RefusedError, Runner, Work
from llmtrain.serve.schema import ApiError

RETRY_SECONDS = "1"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class _GoneError(Exception):
    """The client has left."""


class Answer(Response):
    """Runs jobs and sends what comes of them.

    Nothing is sent before the engine has taken the jobs and something came: until then a refusal has a status of its
    own. Later ones end the stream with an error in its last chunk.

    Args:
        runner: The engine's.
        form: What the answer looks like.
        jobs: One for each choice of each prompt.
        choices: Of each prompt.
        timeout: Seconds until it is broken off.
    """

    def __init__(self, runner: Runner, form: Form, jobs: Sequence[Job], choices: int, timeout: float):
        super().__init__()
        self._runner, self._form, self._jobs, self._choices = runner, form, jobs, choices
        self._timeout = timeout
        self._started = False
        self._last = False  # the last bytes are on their way: the client may leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; ASGI's entry."""
        count = self._runner.metrics.requests
        endpoint = "chat" if self._form.chat else "completions"
        try:
            work = self._runner.start_work(self._jobs)
        except QueueFullError:
            count[endpoint, "queue_full"] += 1
            await send_error(_queue_full(), send)
            return
        outcome = "cancelled"
        try:
            outcome = await self._answer(work, receive, send)
        finally:
            self._runner.cancel(work)
            count[endpoint, outcome] += 1

    async def _answer(self, work: Work, receive: Receive, send: Send) -> str:
        task = asyncio.current_task()
        assert task is not None
        left = asyncio.ensure_future(_left(receive))
        # A client that leaves breaks off whatever is awaited here; so does the clock.
        left.add_done_callback(lambda _: None if left.cancelled() or self._last else task.cancel())
        try:
            async with asyncio.timeout(self._timeout):
                await (self._stream(work, send) if self._jobs[0].streamed else self._send_whole(work, send))
            return "ok"
        except TimeoutError:
            error = ApiError(
                408, f"the answer was not finished within {self._timeout:g} s: ask for fewer tokens",
                code="timeout", headers={"x-should-retry": "false"},
            )  # fmt: skip
            await self._fail(error, send)
            return "timeout"
        except RefusedError as refused:
            await self._fail(ApiError(400, str(refused)), send)
            return "refused"
        except ApiError as error:
            await self._fail(error, send)
            return "error"
        except asyncio.CancelledError:
            if not left.done():
                raise
            task.uncancel()
            return "cancelled"
        finally:
            self._last = True
            left.cancel()

    async def _send_whole(self, work: Work, send: Send) -> None:
        while not work.done:
            await work.news()
        body = await self._body(work, _ended(await _all(work)))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        self._last = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _body(self, work: Work, completions: Sequence[Completion]) -> bytes:
        return json.dumps(whole(self._form, completions, self._choices), ensure_ascii=False).encode()

    async def _stream(self, work: Work, send: Send) -> None:
        encoder = StreamEncoder(self._form, self._choices, len(self._jobs))
        while not work.done or work.pending:
            news = await work.news()
            _ended([event.completion for _, event in news if event.completion is not None])
            text = "".join([encoder.chunk(index, event) for index, event in news])
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                await send({"type": "http.response.body", "body": encoder.opening(), "more_body": True})
            if text:
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        self._last = True
        await send({"type": "http.response.body", "body": encoder.closing()})

    async def _fail(self, error: ApiError, send: Send) -> None:
        self._last = True
        if self._started:
            await send({"type": "http.response.body", "body": error_chunk(error.body)})
        else:
            await send_error(error, send)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _all(work: Work) -> list[Completion]:
    await work.news()  # says so if the work was refused
    return [each for each in work.completions if each is not None]


def _ended(completions: Sequence[Completion]) -> Sequence[Completion]:
    """The same, if none of them has failed."""
    for each in completions:
        if each.error is not None:
            raise ApiError(500, each.error, code="engine_error")
        if each.finish_reason == "cancelled":
            raise ApiError(503, "the server is shutting down", headers={"retry-after": "5"})
    return completions


def _queue_full() -> ApiError:
    return ApiError(
        429, "too many requests are waiting: try again later", code="queue_full", headers={"retry-after": RETRY_SECONDS}
    )
