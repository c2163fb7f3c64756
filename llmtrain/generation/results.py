"""What the engine hands out: completions, events, scores, figures. Plain data, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "context", "cancelled", "error"]
"""Why a request ended: a stop string or id; `max_new_tokens`; the context is full; the caller left; `error` says."""


class Candidate(NamedTuple):
    """One of the most likely next tokens. The probability is the model's own, before temperature and filters."""

    token_id: int
    text: str
    probability: float


@dataclass
class Completion:
    """The answer to one request.

    Attributes:
        text: The text, without stop strings and special tokens.
        token_ids: Every token generated, a stop id or the tokens of a stop string included.
        finish_reason: Why it ended.
        num_prompt_tokens: The prompt's length in tokens.
        num_cached_tokens: Of them, those that did not have to be read because a row still held them.
        seed: The seed that gives this text again; None for a request that was refused.
        ttft_seconds: From submission to the first token, waiting included; None if there was none.
        seconds: From submission to the end.
        logprobs: Per token, the natural logarithm of the model's own probability; None unless asked for.
        candidates: Per token, the most likely next tokens at that step; None unless asked for.
        error: What went wrong when `finish_reason` is "error".
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    num_prompt_tokens: int
    seed: int | None
    num_cached_tokens: int = 0
    ttft_seconds: float | None = None
    seconds: float = 0.0
    logprobs: list[float] | None = None
    candidates: list[list[Candidate]] | None = None
    error: str | None = None


@dataclass(slots=True)
class Event:
    """One token of a streamed request. `text` may be empty (half a character, a possible stop string).

    The last event of a request carries its completion; it has no token when the request failed or was cancelled.
    """

    text: str
    token_id: int | None = None
    logprob: float | None = None
    candidates: list[Candidate] | None = None
    completion: Completion | None = None


@dataclass(frozen=True)
class Score:
    """How likely the model finds a continuation.

    Attributes:
        logprob_sum: Summed natural log-probabilities of its tokens.
        num_tokens: Their number.
        greedy: Whether each of them is the model's most likely one.
        error: What went wrong (then `logprob_sum` is −inf).
    """

    logprob_sum: float
    num_tokens: int
    greedy: bool
    error: str | None = None


@dataclass
class EngineStats:
    """Figures since the engine was made or `reset_stats` was called. Seconds are wall time inside the engine.

    `prefill_tokens` were read, `cached_tokens` of prompts did not have to be.
    """

    prefill_tokens: int = 0
    cached_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    first_tokens: int = 0
    ttft_seconds_sum: float = field(default=0.0, repr=False)
    cache_bytes: int = 0

    @property
    def ttft_seconds(self) -> float | None:
        """Mean time from submission to the first token; None before there was one."""
        return self.ttft_seconds_sum / self.first_tokens if self.first_tokens else None

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens read per second of prefill; None before there was one."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens generated per second of decoding, all rows together; None when only first tokens were made."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else None
