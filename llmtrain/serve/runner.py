"""The engine in a thread of its own: jobs go in by a queue, events come out by the event loop.

The engine's thread never waits for the event loop: after a step it hands over all that happened, for all requests, in
one call. When nothing runs it sleeps on its queue. Knows the engine and asyncio; does not know HTTP or JSON.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from llmtrain.generation.results import Completion, Event
from llmtrain.serve.metrics import Metrics

if TYPE_CHECKING:
    from llmtrain.generation import Engine, GenerationRequest, SamplingParams
    from llmtrain.generation.observing import StepObserver

logger = logging.getLogger(__name__)

T = TypeVar("T")

PAUSE = 0.01
"""Tokens wait at most so many seconds for the next ones, to be told and written with them: nobody sees the difference,
and each write costs as much as computing a token does. First and last ones do not wait."""


class QueueFullError(Exception):
    """There is no place for a work now; later there will be."""


class RefusedError(ValueError):
    """The engine does not take a job; the message says why."""


@dataclass(frozen=True, slots=True)
class Job:
    """One completion to be made."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    candidates: int = 0
    logprobs: bool = False
    streamed: bool = False
    adapter: str | None = None
    observer: StepObserver | None = None


def _urgent(request: GenerationRequest) -> bool:
    return request.completion is not None or (len(request.token_ids) == 1 and bool(request.events))


News = tuple[int, Event]
"""The number of a job in its work, and what happened to it. A job that is not streamed has one event, its end."""


@dataclass(eq=False)
class Work:
    """The jobs of one HTTP request, as the event loop sees them. `Runner.start_work` makes it."""

    jobs: Sequence[Job]
    completions: list[Completion | None] = field(default_factory=list)
    refusal: str | None = None
    _news: list[News] = field(default_factory=list)
    _waiter: asyncio.Future[None] | None = None
    requests: list[GenerationRequest] = field(default_factory=list)  # the engine thread's

    @property
    def done(self) -> bool:
        """Whether every job has ended."""
        return self.refusal is not None or None not in self.completions

    @property
    def pending(self) -> bool:
        """Whether something has happened that `news` has not told yet."""
        return bool(self._news)

    async def news(self) -> list[News]:
        """What has happened since the last call, at least one event unless all is done.

        Raises:
            RefusedError: The engine does not take one of the jobs; none of them runs.
        """
        if not self._news and not self.done:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.refusal is not None:
            raise RefusedError(self.refusal)
        news, self._news = self._news, []
        return news

    def receive(self, news: list[News]) -> None:
        """Take what has happened; called in the event loop."""
        self._news += news
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Runner:
    """Owns an engine and its thread.

    Args:
        engine: Nobody else may use it from now on.
        max_waiting: The most completions that wait for a row.
        metrics: Where to count.
    """

    def __init__(self, engine: Engine, *, max_waiting: int, metrics: Metrics | None = None):
        self.engine = engine
        self.metrics = metrics or Metrics()
        self.capacity = engine.max_rows + max_waiting
        self.open = 0  # completions that were handed in and have not ended
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._running: dict[GenerationRequest, tuple[Work, int]] = {}  # the engine thread's
        self._handed = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread; called in the event loop that events go to."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread; what still runs is cancelled."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    # In the event loop

    def start_work(self, jobs: Sequence[Job]) -> Work:
        """Hand in the jobs of one HTTP request, all or none.

        Raises:
            QueueFullError: Rows and queue are taken.
        """
        if self.open + len(jobs) > self.capacity:
            raise QueueFullError
        self.open += len(jobs)
        work = Work(jobs, [None] * len(jobs))
        self._commands.put(lambda: self._submit(work))
        return work

    async def call(self, task: Callable[[], T]) -> T:
        """Run something in the engine's thread, between two steps: everybody's answers wait for it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if future.done():  # nobody waits any more
                return
            if error is None:
                future.set_result(result)  # type: ignore[arg-type]  # a T, as there was no error
            else:
                future.set_exception(error)

        def run() -> None:
            try:
                result = task()
            except Exception as error:
                loop.call_soon_threadsafe(settle, None, error)
            else:
                loop.call_soon_threadsafe(settle, result, None)

        self._commands.put(run)
        return await future

    def cancel(self, work: Work) -> None:
        """Free the rows of a work that nobody waits for; they are free before the next step."""
        if not work.done:
            self._commands.put(lambda: self._cancel(work))

    def cancel_all(self) -> None:
        """Break off everything, waiting or running."""
        self._commands.put(self._cancel_all)

    def _receive(self, batch: list[tuple[Work, list[News]]], refused: list[tuple[Work, str]]) -> None:
        tokens = 0
        for work, news in batch:
            for index, event in news:
                tokens += event.token_id is not None and work.jobs[index].streamed
                completion = event.completion
                if completion is not None:
                    tokens += 0 if work.jobs[index].streamed else len(completion.token_ids)
                    work.completions[index] = completion
                    self.open -= 1
                    self.metrics.add_completion(completion)
            work.receive(news)
        if tokens:
            self.metrics.add_tokens(tokens)
        for work, why in refused:
            self.open -= len(work.jobs)
            work.refusal = why
            work.receive([])

    # In the engine's thread

    def _run(self) -> None:
        busy = False
        while True:
            try:
                command = self._commands.get(block=not busy)
            except queue.Empty:
                busy = self._step()
                continue
            if command is None:
                break
            try:
                command()
            except Exception:  # whatever it is, the others' requests go on
                logger.exception("the engine could not be told something")
            busy = True
        self._cancel_all()

    def _step(self) -> bool:
        try:
            busy = self.engine.step()
        except Exception:
            # Those that ran have ended with an error that says so; those that wait have not been touched.
            logger.exception("a step of the engine failed; the requests that were running have ended with an error")
            busy = True
        self._hand_over(at_once=False)
        return busy

    def _hand_over(self, *, at_once: bool = True) -> None:
        """Tell the event loop what has happened; `at_once` or only if it may not wait."""
        now = time.monotonic()
        if not at_once and now - self._handed < PAUSE and not any(map(_urgent, self._running)):
            return
        self._handed = now
        batch: dict[Work, list[News]] = {}
        ended = []
        for request, (work, index) in self._running.items():
            events = request.events
            if events:
                news = batch.setdefault(work, [])
                while events:
                    news.append((index, events.popleft()))
            elif request.completion is not None and events is None:
                batch.setdefault(work, []).append((index, Event("", completion=request.completion)))
            if request.completion is not None:
                ended.append(request)
        for request in ended:
            del self._running[request]
        if batch:
            self._tell(list(batch.items()), [])

    def _tell(self, batch: list[tuple[Work, list[News]]], refused: list[tuple[Work, str]]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._receive, batch, refused)
        except RuntimeError:  # the loop was closed: the process ends
            logger.debug("nobody is left to be told")

    def _submit(self, work: Work) -> None:
        requests: list[GenerationRequest] = []
        try:
            for job in work.jobs:
                requests.append(
                    self.engine.submit(
                        job.prompt_ids,
                        job.params,
                        candidates=job.candidates,
                        logprobs=job.logprobs,
                        streamed=job.streamed,
                        adapter=job.adapter,
                        observer=job.observer,
                    )
                )
        except Exception as error:
            for request in requests:
                self.engine.cancel(request)
            if not isinstance(error, ValueError):
                logger.exception("a request could not be submitted")
            self._tell([], [(work, str(error))])
            return
        work.requests = requests
        self._running.update((request, (work, index)) for index, request in enumerate(requests))

    def _cancel_all(self) -> None:
        for request in list(self._running):
            self.engine.cancel(request)
        self._hand_over()

    def _cancel(self, work: Work) -> None:
        for request in work.requests:
            self.engine.cancel(request)
        self._hand_over()
