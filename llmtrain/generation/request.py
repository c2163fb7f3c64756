"""One request on its way through the engine: what it asked for, what it has so far, and whether it is finished.

Knows ids, text and clocks. Does not know tensors, cache rows or other requests.
"""

from __future__ import annotations

import math
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence

from llmtrain.generation.detokenizer import StreamingDetokenizer
from llmtrain.generation.observing import StepObserver
from llmtrain.generation.params import SamplingParams
from llmtrain.generation.results import Candidate, Completion, Event, FinishReason, Score
from llmtrain.model import ModelDelta

NOT_FINITE = -1
"""The id that sampling gives a row whose logits hold NaN or infinity."""

Likely = Sequence[tuple[int, float]]
"""Token ids with their probabilities, the most likely first."""


class GenerationRequest:
    """A prompt to be continued.

    Args:
        prompt_ids: The prompt, at least one id.
        params: How to choose tokens and when to end.
        stop_ids: All ids that end this request.
        context: The most tokens that prompt and answer may have together.
        token_bytes: The bytes a token stands for.
        silent_ids: Special tokens, which are no part of the text.
        adapter: The adapter to answer with; None is the model alone.
        candidates: How many most likely tokens to report per step.
        logprobs: Whether to report the log-probability of each token.
        streamed: Whether somebody reads `events`.
        observer: Told of every step.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        stop_ids: frozenset[int],
        context: int,
        token_bytes: Callable[[int], bytes],
        silent_ids: frozenset[int] = frozenset(),
        adapter: ModelDelta | None = None,
        candidates: int = 0,
        logprobs: bool = False,
        streamed: bool = False,
        observer: StepObserver | None = None,
    ):
        self.input_ids = list(prompt_ids)
        self.params = params
        self.candidates = candidates
        self.logprobs = logprobs
        self.observer = observer
        self.token_ids: list[int] = []
        self.adapter = adapter
        self.fed = 0  # prompt tokens that are in the cache
        self.reused = 0  # of them, those that were there before
        self.completion: Completion | None = None
        self.events: deque[Event] | None = deque() if streamed else None
        # 32 bits: enough for fresh answers, short enough to be typed again.
        self.seed = secrets.randbits(32) if params.seed is None else params.seed
        # Python promises the same random() for the same seed in every version; one call per token costs 50 ns.
        self._uniform = random.Random(self.seed).random
        self.stop_ids = stop_ids
        self._room = context - len(self.input_ids)
        self._detokenizer = StreamingDetokenizer(params.stop)
        self._token_bytes = token_bytes
        self._silent_ids = silent_ids
        self._pieces: list[str] = []
        self._logprobs: list[float] = []
        self._candidates: list[list[Candidate]] = []
        self._submitted = time.perf_counter()
        self.ttft_seconds: float | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, one way or another."""
        return self.completion is not None

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error."""
        return self.completion is not None and self.completion.error is not None

    @property
    def wants_details(self) -> bool:
        """Whether anybody is to be told more of this request's steps than the token."""
        return self.logprobs or self.candidates > 0 or self.observer is not None

    @property
    def reusable(self) -> int:
        """Prompt tokens that need not be read if their keys and values are known: all but the last."""
        return len(self.input_ids) - 1

    @property
    def known_ids(self) -> list[int]:
        """Prompt and answer so far."""
        return self.input_ids + self.token_ids

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.input_ids) + len(self.token_ids)

    def uniform(self) -> float:
        """The one random number in [0, 1) of this step; greedy requests draw none."""
        return 0.0 if self.params.greedy else self._uniform()

    def result(self) -> Completion:
        """The completion of a request that has ended."""
        assert self.completion is not None
        return self.completion

    def accept(self, token_id: int, logprob: float = 0.0, likely: Likely = ()) -> bool:
        """Take the chosen token.

        Args:
            token_id: Its id, or `NOT_FINITE`.
            logprob: Its log-probability, if the request wants it.
            likely: The most likely tokens with their probabilities, as many as the request wants.

        Returns:
            Whether the request is now finished.
        """
        if token_id == NOT_FINITE:
            self.fail(
                f"the model's scores for token {len(self.token_ids) + 1} of this request are not finite "
                "(NaN or infinity): check its weights, or load it in fp32"
            )
            return True
        if not self.token_ids:
            self.ttft_seconds = time.perf_counter() - self._submitted
        self.token_ids.append(token_id)
        if self.logprobs:
            self._logprobs.append(logprob)
        candidates = self._named(likely) if self.candidates else None
        if candidates is not None:
            self._candidates.append(candidates)
        text, reason = self._advance(token_id)
        if text:
            self._pieces.append(text)
        if reason is not None:
            self._complete(reason)
        if self.events is not None:
            self.events.append(Event(text, token_id, logprob if self.logprobs else None, candidates, self.completion))
        return reason is not None

    def _advance(self, token_id: int) -> tuple[str, FinishReason | None]:
        """The text that this token makes certain, and why it is the last one, if it is."""
        text = ""
        reason: FinishReason | None = None
        if token_id in self.stop_ids:
            reason = "stop"
        else:
            if token_id not in self._silent_ids:
                text = self._detokenizer.push(self._token_bytes(token_id))
            if self._detokenizer.stopped:
                reason = "stop"
            elif len(self.token_ids) >= self.params.max_new_tokens:
                reason = "length"
            elif len(self.token_ids) >= self._room:
                reason = "context"
        if reason is not None:
            # Half a character at the very end becomes U+FFFD, which may itself complete a stop string.
            text += self._detokenizer.finish()
            reason = "stop" if self._detokenizer.stopped else reason
        return text, reason

    def _named(self, likely: Likely) -> list[Candidate]:
        return [Candidate(i, self._token_bytes(i).decode("utf-8", "replace"), p) for i, p in likely]

    def fail(self, message: str) -> None:
        """End with an error; what was generated before stays."""
        self._end_early("error", message)

    def cancel(self) -> None:
        """End because nobody waits for the rest."""
        self._end_early("cancelled")

    def _end_early(self, reason: FinishReason, message: str | None = None) -> None:
        text = self._detokenizer.finish()
        self._pieces.append(text)
        self._complete(reason, message)
        if self.events is not None:
            self.events.append(Event(text, completion=self.completion))

    def _complete(self, reason: FinishReason, error: str | None = None) -> None:
        self.completion = Completion(
            text="".join(self._pieces),
            token_ids=self.token_ids,
            finish_reason=reason,
            num_prompt_tokens=len(self.input_ids),
            num_cached_tokens=self.reused,
            seed=self.seed,
            ttft_seconds=self.ttft_seconds,
            seconds=time.perf_counter() - self._submitted,
            logprobs=self._logprobs if self.logprobs else None,
            candidates=self._candidates if self.candidates else None,
            error=error,
        )


class ScoreRequest:
    """A context and its continuation, whose probability is asked for. It is only read, never decoded.

    Args:
        context: At least one id.
        continuation: The ids to be scored, at least one.
        adapter: The adapter to score with; None is the model alone.
    """

    def __init__(self, context: Sequence[int], continuation: Sequence[int], adapter: ModelDelta | None = None):
        ids = [*context, *continuation]
        self.input_ids = self.known_ids = ids[:-1]
        self.adapter = adapter
        self.fed = self.reused = 0
        self.score: Score | None = None
        self._ids = ids
        self._first = len(context) - 1  # the input position that predicts the continuation's first token
        self._sum = 0.0
        self._greedy = True

    @property
    def reusable(self) -> int:
        """Inputs that need not be read if their keys and values are known: those that predict nothing scored."""
        return self._first

    @property
    def done(self) -> bool:
        """Whether it has ended, one way or another."""
        return self.score is not None

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error."""
        return self.score is not None and self.score.error is not None

    def result(self) -> Score:
        """The score of a request that has ended."""
        assert self.score is not None
        return self.score

    def scored_positions(self, start: int, stop: int) -> tuple[range, list[int]]:
        """What reading the inputs start..stop-1 predicts.

        Returns:
            The positions, counted from `start`, whose next token is to be scored, and these tokens.
        """
        first = max(self._first, start)
        return range(first - start, stop - start), self._ids[first + 1 : stop + 1]

    def add(self, logprobs: Sequence[float], greedy: Sequence[bool]) -> None:
        """Count the log-probabilities of scored tokens, in order, and whether each is the most likely one."""
        self._sum += sum(logprobs)
        self._greedy = self._greedy and all(greedy)

    def complete(self) -> None:
        """All inputs have been read."""
        count = len(self._ids) - 1 - self._first
        if math.isnan(self._sum):
            self.fail("the model's scores for this pair are not finite: check its weights, or load it in fp32")
        else:
            self.score = Score(self._sum, count, self._greedy)

    def fail(self, message: str) -> None:
        """End with an error."""
        self.score = Score(-math.inf, len(self._ids) - 1 - self._first, False, message)

    def cancel(self) -> None:
        """End because nobody waits for the result."""
        self.fail("cancelled")


Request = GenerationRequest | ScoreRequest
