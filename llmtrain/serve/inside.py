"""What happened inside an answer: the request is answered once more with everything recorded, and shown as a page.

The page has an address that cannot be guessed, because a browser's new window sends no API key; the last few are kept,
in memory. Knows the runner and the inspector's names, which it imports when first asked; does not know HTTP's requests.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi.responses import HTMLResponse, Response

from llmtrain.generation.results import Completion
from llmtrain.serve.answering import Answer
from llmtrain.serve.answers import Form
from llmtrain.serve.guard import INSPECT_PATH
from llmtrain.serve.runner import Job, Runner, Work
from llmtrain.serve.schema import ApiError

KEPT = 16
"""Pages that are kept; each is one to six megabytes."""


class Inside:
    """Records answers and keeps their pages.

    Args:
        runner: The engine's.
        facts: What the pages say of where a model came from, by the name that requests call it by.
    """

    def __init__(self, runner: Runner, facts: Mapping[str, Mapping[str, Any]]):
        self.runner, self._facts = runner, facts
        self._pages: OrderedDict[str, str] = OrderedDict()

    def answer(self, form: Form, jobs: Sequence[Job], timeout: float) -> Response:
        """One answer to a request, recorded; its body says where the page is.

        Raises:
            ApiError: More than one answer is asked for.
        """
        from llmtrain.inspector import Recorder

        if len(jobs) != 1:
            raise ApiError(
                400, f"one answer can be looked into, not {len(jobs)}: ask for one prompt and n=1", param="n"
            )
        recorder = Recorder()
        job = replace(jobs[0], observer=recorder, streamed=False)
        return _RecordedAnswer(self, form, job, recorder, timeout)

    def show(self, key: str) -> Response:
        """A page that was made.

        Raises:
            ApiError: There is none, or no longer.
        """
        page = self._pages.get(key)
        if page is None:
            raise ApiError(404, f"there is no such page; the last {KEPT} are kept")
        return HTMLResponse(page, headers={"cache-control": "no-store", "referrer-policy": "no-referrer"})

    async def page_of(self, work: Work, recorder: Any, model: str) -> str:
        """Makes the page of a work that has ended; returns its path."""
        from llmtrain.inspector import document, recording_of
        from llmtrain.inspector.page import render

        def tell() -> dict[str, Any]:
            recording = recording_of(work.requests[0], recorder)
            return document(self.runner.engine, recording, facts=self._facts.get(model), measure=False)

        try:
            found = await self.runner.call(tell)
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        key = secrets.token_urlsafe(32)
        self._pages[key] = await asyncio.to_thread(render, found)
        while len(self._pages) > KEPT:
            self._pages.popitem(last=False)
        return INSPECT_PATH + key


class _RecordedAnswer(Answer):
    """An answer whose body is the path of its page."""

    def __init__(self, inside: Inside, form: Form, job: Job, recorder: Any, timeout: float):
        super().__init__(inside.runner, form, [job], 1, timeout)
        self._inside, self._recorder = inside, recorder

    async def _body(self, work: Work, completions: Sequence[Completion]) -> bytes:
        path = await self._inside.page_of(work, self._recorder, self._form.model)
        return json.dumps({"object": "inspect", "path": path}).encode()
