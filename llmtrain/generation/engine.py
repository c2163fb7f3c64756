"""The engine, as its users see it: check a request, submit it, collect what comes out.

`generate`, `stream` and `score` are thin collectors over the one decode loop (`loop.py`). Knows a model and its
tokenizer; does not know files, servers, tasks, chat templates or how the model was made.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llmtrain.generation.loop import DecodeLoop
from llmtrain.generation.observing import StepObserver
from llmtrain.generation.params import SamplingParams
from llmtrain.generation.request import GenerationRequest, Request, ScoreRequest
from llmtrain.generation.results import Completion, EngineStats, Event, Score
from llmtrain.generation.rows import fitting_length
from llmtrain.model import KVCache, ModelDelta, Transformer
from llmtrain.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class Engine:
    """Generates and scores text with one model, many requests at a time.

    An engine is made for weights as they are: it keeps what it read with them, so one that trains on needs a new one.
    Prompt and answer share the context: generation ends with the reason "context" when together they have `max_length`
    tokens, and a prompt that leaves no room is refused. Not safe for several threads: one thread owns an engine.

    Args:
        model: The transformer; its dtype and device are used as they are.
        tokenizer: The tokenizer that the model was trained with.
        max_rows: The most requests that run at once; more wait.
        max_length: The most tokens of prompt and answer together; None takes the model's context, or what the cache's
            memory holds if that is less (with a warning).
        cache_bytes: The most memory for keys and values, where `max_length` is None; None is a quarter of what is free.
        eos_ids: The ids that end an answer; None takes the tokenizer's end-of-text and end-of-turn ids.
        trained_length: The sequence length that the model was trained on; text that grows beyond it gives one warning.
        prefill_tokens: The most prompt tokens read in one forward pass; longer prompts are read in pieces, and other
            requests generate in between.
        compile: Compile the decode step now (CPU only): some ten seconds, less when torch has it on disk. Requests
            with an adapter are read as before.

    Raises:
        ValueError: A size is out of range, the model has fewer ids than the tokenizer, or it cannot be compiled here.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        max_rows: int = 16,
        max_length: int | None = None,
        cache_bytes: int | None = None,
        eos_ids: Sequence[int] | None = None,
        trained_length: int | None = None,
        prefill_tokens: int = 2048,
        compile: bool = False,
    ):
        if max_rows < 1 or prefill_tokens < 1:
            raise ValueError(f"max_rows and prefill_tokens must be at least 1, got {max_rows} and {prefill_tokens}")
        config, weight = model.config, next(model.parameters())
        if config.vocab_size < tokenizer.vocab_size:
            raise ValueError(
                f"the model has {config.vocab_size} token ids and the tokenizer {tokenizer.vocab_size}: "
                "they do not belong together; load the tokenizer from the model's own folder"
            )
        if max_length is None:
            max_length = fitting_length(config, max_rows, weight.dtype, weight.device, cache_bytes)
        own_eos = (tokenizer.eos_id, tokenizer.end_id) if eos_ids is None else eos_ids
        self.model = model
        self.tokenizer = tokenizer
        self.max_rows = max_rows
        self.max_length = max_length
        self._adapters: dict[str, tuple[ModelDelta, frozenset[int]]] = {}  # with the ids that end its answers, too
        self.eos_ids = frozenset(each for each in own_eos if each is not None)
        # Ids that only fill the vocabulary up to a round size, and padding (unless a family pads with end-of-text).
        excluded = [*range(tokenizer.vocab_size, config.vocab_size), *({tokenizer.pad_id} - self.eos_ids)]
        self._special_ids = frozenset(tokenizer.special_ids.values())
        self._loop = DecodeLoop(
            model,
            KVCache.allocate(config, max_rows, max_length, dtype=weight.dtype, device=weight.device),
            excluded_ids=excluded,
            prefill_tokens=prefill_tokens,
            trained_length=trained_length,
            compile=compile,
        )

    # Collecting

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        candidates: int = 0,
        logprobs: bool = False,
        adapter: str | None = None,
    ) -> list[Completion]:
        """Continue every prompt, as many at once as there are rows.

        Args:
            prompts: Texts or token ids, one request each. A text begins as its tokenizer says; ids are taken as given.
            sampling: One for all, or one for each. Requests that share a seed draw the same random numbers.
            candidates: Report the k most likely tokens of every step.
            logprobs: Report every token's log-probability.
            adapter: The adapter that all are answered with.

        Returns:
            Completions in the order of the prompts. A request that cannot run has `finish_reason` "error" and says why
            in `error`; the others are not affected.
        """
        if isinstance(prompts, str):
            raise ValueError("generate takes a list of prompts: put the one prompt into a list")
        params = [sampling] * len(prompts) if sampling is None or isinstance(sampling, SamplingParams) else sampling
        if len(params) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts need as many sampling settings (or one for all), got {len(params)}"
            )
        requests: list[GenerationRequest] = []
        outcome: list[GenerationRequest | Completion] = []
        for prompt, each in zip(prompts, params, strict=True):
            try:
                requests.append(self.submit(prompt, each, candidates=candidates, logprobs=logprobs, adapter=adapter))
                outcome.append(requests[-1])
            except ValueError as error:
                outcome.append(Completion("", [], "error", 0, None, error=str(error)))
        self._run(requests)
        return [each if isinstance(each, Completion) else each.result() for each in outcome]

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        candidates: int = 0,
        logprobs: bool = False,
        adapter: str | None = None,
    ) -> Stream:
        """Continue one prompt, token by token.

        The joined `text` of the events is the completion's text; the last event carries the completion.

        Raises:
            ValueError: The request cannot run; at the call, not at the first event.
        """
        return self.events(
            self.submit(prompt, sampling, candidates=candidates, logprobs=logprobs, streamed=True, adapter=adapter)
        )

    def events(self, request: GenerationRequest) -> Stream:
        """The events of a request that was submitted with `streamed=True`; runs the engine as far as needed."""
        if request.events is None:
            raise ValueError("only a request submitted with streamed=True keeps its events")
        return Stream(self, request)

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, adapter: str | None = None) -> list[Score]:
        """How likely the model finds each continuation after its context.

        Args:
            pairs: (context ids, continuation ids), each at least one id, taken as given; what `Tokenizer.begin` puts in
                front, or else end-of-text, stands for an empty context.
            adapter: The adapter that all are scored with.

        Returns:
            One score per pair, in order; a pair that cannot be scored says why in `error`.
        """
        requests: list[ScoreRequest] = []
        outcome: list[ScoreRequest | Score] = []
        for context, continuation in pairs:
            try:
                requests.append(self.submit_score(context, continuation, adapter=adapter))
                outcome.append(requests[-1])
            except ValueError as error:
                outcome.append(Score(-float("inf"), len(continuation), False, str(error)))
        self._run(requests)
        return [each if isinstance(each, Score) else each.result() for each in outcome]

    # Requests

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        candidates: int = 0,
        logprobs: bool = False,
        streamed: bool = False,
        adapter: str | None = None,
        observer: StepObserver | None = None,
    ) -> GenerationRequest:
        """Put one prompt into the queue; its `completion` is set when it is finished. An `observer` sees each step.

        Raises:
            ValueError: The prompt is empty, too long, or has ids outside the vocabulary; a setting does not fit; or the
                adapter is unknown.
        """
        params = SamplingParams() if sampling is None else sampling
        ids = self.tokenizer.begin(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise ValueError(
                "the prompt has no tokens: give at least one (the end-of-text token begins a new document)"
            )
        self._check_ids("the prompt", ids)
        self._check_ids("stop_ids", params.stop_ids)
        if len(ids) >= self.max_length:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and leaves no room for an answer in a context of {self.max_length}: "
                f"shorten it to at most {self.max_length - 1}"
            )
        if not 0 <= candidates <= self.tokenizer.vocab_size:
            raise ValueError(f"candidates must lie in 0 … {self.tokenizer.vocab_size}, got {candidates}")
        delta, taught = self._adapter(adapter)
        request = GenerationRequest(
            ids,
            params,
            stop_ids=frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else self.eos_ids | taught),
            context=self.max_length,
            token_bytes=self.tokenizer.token_bytes,
            silent_ids=self._special_ids,
            adapter=delta,
            candidates=candidates,
            logprobs=logprobs,
            streamed=streamed,
            observer=observer,
        )
        self._loop.waiting.append(request)
        return request

    def submit_score(
        self, context: Sequence[int], continuation: Sequence[int], *, adapter: str | None = None
    ) -> ScoreRequest:
        """Put one pair into the queue; its `score` is set when it is finished.

        Raises:
            ValueError: A part is empty or has ids outside the vocabulary, or both together are too long.
        """
        for name, ids in (("the context", context), ("the continuation", continuation)):
            if not len(ids):
                raise ValueError(f"{name} to be scored has no tokens: give at least one")
            self._check_ids(name, ids)
        total = len(context) + len(continuation)
        if total - 1 > self.max_length:
            raise ValueError(
                f"context and continuation have {total} tokens, and at most {self.max_length + 1} can be scored: "
                "cut the context from the left"
            )
        request = ScoreRequest(context, continuation, self._adapter(adapter)[0])
        self._loop.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Drop a request, waiting or running, and free its row at once; nothing happens if it is finished."""
        if self._loop.drop(request):
            request.cancel()

    def step(self) -> bool:
        """One round of the decode loop, for callers that submit requests themselves; returns whether any is left.

        If it raises, the requests that were running have ended with that error; those that wait stay.
        """
        with self._evaluation_mode():
            return self._loop.step()

    # Adapters

    def add_adapter(self, name: str, delta: ModelDelta, *, eos_ids: Sequence[int] = ()) -> None:
        """Makes an adapter known, for requests that name it; rows with different adapters run together.

        Args:
            name: What requests call it.
            delta: The adapter laid onto this engine's model (`llmtrain.adapters.lay_onto`).
            eos_ids: The ids that end its answers besides the engine's own.

        Raises:
            ValueError: The name is taken, or an id is outside the vocabulary.
        """
        self._check_ids("eos_ids", eos_ids)
        if name in self._adapters:
            raise ValueError(f"there is an adapter {name!r} already: give this one another name")
        self._adapters[name] = delta, frozenset(eos_ids)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that requests can name."""
        return tuple(self._adapters)

    def _adapter(self, name: str | None) -> tuple[ModelDelta | None, frozenset[int]]:
        if name is None:
            return None, frozenset()
        if name not in self._adapters:
            raise ValueError(f"there is no adapter {name!r}: choose one of {', '.join(self._adapters) or '(none)'}")
        return self._adapters[name]

    # Figures

    @property
    def num_waiting(self) -> int:
        """Requests that have no row yet."""
        return len(self._loop.waiting)

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return self._loop.running

    @property
    def stats(self) -> EngineStats:
        """Times and counts since the engine was made or `reset_stats` was called."""
        return self._loop.stats

    def reset_stats(self) -> None:
        """Start counting anew."""
        self._loop.stats = EngineStats(cache_bytes=self._loop.stats.cache_bytes)

    def _run(self, requests: Sequence[Request]) -> None:
        """Step until these requests are done; when something breaks, they are dropped."""
        try:
            with self._evaluation_mode():
                while not all(request.done for request in requests):
                    self._loop.step()
        finally:
            for request in requests:
                self.cancel(request)

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """Dropout off, and afterwards as it was: in the middle of training the model comes in training mode."""
        training = self.model.training
        if training:
            self.model.eval()
        try:
            yield
        finally:
            if training:
                self.model.train()

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        size = self.tokenizer.vocab_size
        for each in ids:
            if not 0 <= each < size:
                raise ValueError(f"{name} has the token id {each}, outside the vocabulary 0 … {size - 1}")


class Stream(Iterator[Event]):
    """The events of one request, in order; asking for the next one runs the engine as far as needed.

    Closing it, or letting go of it, drops the request.
    """

    def __init__(self, engine: Engine, request: GenerationRequest):
        assert request.events is not None
        self.request = request
        self._engine, self._events = engine, request.events
        self.close = weakref.finalize(self, engine.cancel, request)
        self.close.atexit = False

    def __next__(self) -> Event:
        while not self._events:
            if self.request.done:
                raise StopIteration
            self._engine.step()
        return self._events.popleft()
