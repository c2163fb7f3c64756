"""The sampling settings of one request, checked when they are made.

Knows nothing of tensors, models or tokenizers: limits that depend on those (the context, the vocabulary) are the
engine's to check.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_STOP_STRINGS = 64
"""Every stop string is looked for in every piece of text, so their number is bounded."""

MAX_TEMPERATURE = 1000.0
"""Beyond it all tokens are as good as equally likely, and far beyond it logits vanish in fp32."""

MAX_PENALTY = 100.0
"""A repetition penalty lies between one hundredth and this: logits neither vanish nor become infinite."""

MAX_COUNT = 2**31 - 1
"""The largest number of tokens."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    The order is: repetition penalty, temperature, top-k, top-p (of what top-k left, renormalised), min-p.
    Tokens whose logit ties with the last one kept are kept too.

    Attributes:
        temperature: Divides the logits; 0 takes the most likely token, whatever the other settings say.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of most likely tokens whose probabilities reach this sum; 1 keeps all.
        min_p: Keep tokens at least this fraction as likely as the most likely one; 0 keeps all.
        repetition_penalty: Tokens of the prompt and the answer so far get their logit divided (when positive)
            or multiplied (when negative) by this; 1 changes nothing (CTRL, Keskar et al. 2019).
        max_new_tokens: The most tokens to generate.
        stop: Strings that end the answer; neither they nor anything after them is part of the text.
        stop_ids: Token ids that end the answer, besides the tokenizer's own end tokens.
        seed: The request's own seed; None draws a fresh one, which the completion reports.
        ignore_eos: Do not end at the tokenizer's own end tokens.

    Raises:
        ValueError: A value is outside its limits; the message names it and the limit.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        # A config file has lists where we keep tuples, and one stop string is often written bare.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            _require_number(name, getattr(self, name))
        for name in ("top_k", "max_new_tokens"):
            _require_integer(name, getattr(self, name))
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(f"temperature must lie in [0, {MAX_TEMPERATURE:g}] (0 is greedy), got {self.temperature}")
        if not 0 <= self.top_k <= MAX_COUNT:
            raise ValueError(f"top_k must lie in [0, {MAX_COUNT}] (0 keeps every token), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1] (1 keeps every token), got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1] (0 keeps every token), got {self.min_p}")
        if not 1 / MAX_PENALTY <= self.repetition_penalty <= MAX_PENALTY:
            raise ValueError(
                f"repetition_penalty must lie in [{1 / MAX_PENALTY:g}, {MAX_PENALTY:g}] (1 changes nothing), "
                f"got {self.repetition_penalty}"
            )
        if not 1 <= self.max_new_tokens <= MAX_COUNT:
            raise ValueError(f"max_new_tokens must lie in [1, {MAX_COUNT}], got {self.max_new_tokens}")
        self._check_stops()
        if self.seed is not None:
            _require_integer("seed", self.seed)
            if not 0 <= self.seed < 2**63:
                raise ValueError(f"seed must lie in 0 … 2^63 − 1 (or be left out), got {self.seed}")

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop strings must be non-empty text, got {text!r}")
        for token_id in self.stop_ids:
            _require_integer("stop_ids", token_id)

    @property
    def greedy(self) -> bool:
        """Whether every token is the most likely one."""
        return self.temperature == 0


def _require_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")


def _require_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
