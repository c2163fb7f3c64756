"""From an application to a server: the socket, the signals, and an end that loses nobody.

The first SIGTERM or SIGINT refuses new requests and lets those that run finish, for a stated time; a second ends at
once. Knows uvicorn; does not know routes or the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from llmtrain.serve.runner import Runner

logger = logging.getLogger(__name__)

_LAST_WORDS = 2.0  # seconds to tell clients that their answers were broken off
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def bind(host: str, port: int) -> socket.socket:
    """A listening address, taken before a model is loaded for it.

    Raises:
        ValueError: It cannot be taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, protocol)
        try:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
            # From here on the address is ours: whoever comes early waits instead of being turned away.
            taken.listen(2048)
        except OSError:
            taken.close()
            raise
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(
            f"host={host} port={port} cannot be listened on ({why}): choose another port or host"
        ) from None
    return taken


class _Server(uvicorn.Server):
    """uvicorn's, with our signals: its own would close the door before those inside have finished."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(app: FastAPI, taken: socket.socket, *, grace: float, ready: Callable[[], None] | None = None) -> None:
    """Serves until a signal comes.

    Args:
        app: What `create_app` made.
        taken: What `bind` made.
        grace: Seconds that running requests have to finish after a signal.
        ready: Called when requests are taken.
    """
    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, lifespan="on", timeout_graceful_shutdown=1,
        timeout_keep_alive=30, h11_max_incomplete_event_size=32 * 1024, ws="none",
    )  # fmt: skip
    server = _Server(config)
    shared, loop = app.state.server, asyncio.get_running_loop()
    asked = asyncio.Event()

    def stop() -> None:
        if asked.is_set():
            server.should_exit = server.force_exit = True
        shared.draining = True
        asked.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    running = asyncio.ensure_future(server.serve(sockets=[taken]))
    try:
        while not server.started and not running.done():
            await asyncio.sleep(0.01)
        if ready is not None and not running.done():
            ready()
        await asyncio.wait([running, asyncio.ensure_future(asked.wait())], return_when=asyncio.FIRST_COMPLETED)
        await _finish(server, shared.runner, grace)
        await running
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def _finish(server: _Server, runner: Runner, grace: float) -> None:
    """Waits for those that run, as long as they may take."""
    if runner.open:
        logger.info("finishing %d completions, for at most %g s; once more ends at once", runner.open, grace)
    await _until_done(server, runner, grace)
    if runner.open:
        logger.warning("%d completions were broken off", runner.open)
        runner.cancel_all()
        await _until_done(server, runner, _LAST_WORDS)
    server.should_exit = True


async def _until_done(server: _Server, runner: Runner, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while runner.open and not server.force_exit:
                await asyncio.sleep(0.02)


@contextlib.contextmanager
def served(app: FastAPI, taken: socket.socket) -> Iterator[str]:
    """A server in a thread of this process, without signals, for as long as the block takes; gives its address."""
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=1, ws="none"
    )
    server = _Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]}, name="http", daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the server did not start")
            time.sleep(0.01)
        host, port = taken.getsockname()[:2]
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join()
