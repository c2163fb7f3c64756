"""The HTTP server: one engine behind an API in the shape of OpenAI's, and a page to chat on.

    runner.py    the engine in a thread of its own; requests go in, events come out
    schema.py    what a request may say, and the errors
    documents.py what an answer looks like, as the OpenAPI document tells it
    answers.py   from events to the bytes of an answer, whole or streamed
    answering.py waits for engine, clock and client, and sends
    guard.py     key, host, size and shutting down, before any route is reached
    metrics.py   figures, in the text format of Prometheus
    app.py       the routes
    server.py    socket, signals, the end

The only package that knows FastAPI. Knows no settings and no files: a request names a model by a word that is looked up
in a table, and nothing in it ever becomes a path.
"""

from llmtrain.serve.app import Limits, create_app
from llmtrain.serve.runner import Runner
from llmtrain.serve.server import bind, serve, served

__all__ = ["Limits", "Runner", "bind", "create_app", "serve", "served"]
