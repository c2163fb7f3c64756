"""Conversations with a model, for people and for programs: the rule of a full context, and one engine behind an API in
the shape of OpenAI's, with a page to chat on.

    conversation.py turns, and what of them fits the context
    runner.py    the engine in a thread of its own; requests go in, events come out
    schema.py    what a request may say, and the errors
    documents.py what an answer looks like, as the OpenAPI document tells it
    answers.py   from events to the bytes of an answer, whole or streamed
    answering.py waits for engine, clock and client, and sends
    guard.py     key, host, size and shutting down, before any route is reached
    metrics.py   figures, in the text format of Prometheus
    page/        the page's files
    app.py       the routes
    server.py    socket, signals, the end

The only package that knows FastAPI, and only some of its modules do: each is imported where it is used. Knows no
settings and no files: a request names a model by a word that is looked up in a table, and nothing in it becomes a path.
"""
