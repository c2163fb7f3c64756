"""Figures of the server, in the text format that Prometheus reads.

Kept by the event loop alone, so nothing is locked. Knows completions; does not know HTTP or the engine's inside.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from llmtrain.generation.results import Completion

FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
REQUEST_SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
WINDOW_SECONDS = 10.0


class Histogram:
    """How many values lie at or below each bound.

    Args:
        bounds: Ascending.
    """

    def __init__(self, bounds: Sequence[float]):
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        place = next((i for i, bound in enumerate(self._bounds) if value <= bound), len(self._bounds))
        self._counts[place] += 1
        self._sum += value

    def lines(self, name: str) -> list[str]:
        """Its samples, cumulative as Prometheus wants them."""
        total, lines = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum:.6f}", f"{name}_count {total}"]


class Rate:
    """Tokens per second over the last ten seconds.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._recent: deque[tuple[float, int]] = deque()  # one entry for each tenth of a second, at most

    def add(self, tokens: int) -> None:
        """Count tokens that came now."""
        now = self._clock()
        if self._recent and now - self._recent[-1][0] < 0.1:
            self._recent[-1] = (self._recent[-1][0], self._recent[-1][1] + tokens)
        else:
            self._recent.append((now, tokens))
            self._forget(now)

    def per_second(self) -> float:
        """The rate; 0 when nothing came lately."""
        self._forget(self._clock())
        return sum(tokens for _, tokens in self._recent) / WINDOW_SECONDS

    def _forget(self, now: float) -> None:
        while self._recent and now - self._recent[0][0] > WINDOW_SECONDS:
            self._recent.popleft()


class Metrics:
    """What the server counts."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # by (endpoint, outcome)
        self.finished: Counter[str] = Counter()  # completions by reason
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.first_token = Histogram(FIRST_TOKEN_SECONDS)
        self.whole = Histogram(REQUEST_SECONDS)
        self.rate = Rate()

    def add_tokens(self, count: int) -> None:
        """Count tokens as they are generated."""
        self.generated_tokens += count
        self.rate.add(count)

    def add_completion(self, completion: Completion) -> None:
        """Count one that has ended."""
        self.finished[completion.finish_reason] += 1
        self.prompt_tokens += completion.num_prompt_tokens
        self.cached_tokens += completion.num_cached_tokens
        if completion.ttft_seconds is not None:
            self.first_token.observe(completion.ttft_seconds)
        self.whole.observe(completion.seconds)

    def text(self, *, waiting: int, running: int, rows: int) -> str:
        """Everything, in Prometheus's text format."""
        lines: list[str] = []

        def add(name: str, kind: str, meaning: str, samples: Sequence[str]) -> None:
            full = f"llmtrain_{name}"
            lines.extend((f"# HELP {full} {meaning}", f"# TYPE {full} {kind}", *samples))

        def single(name: str, kind: str, meaning: str, value: float) -> None:
            add(name, kind, meaning, [f"llmtrain_{name} {value:g}" if kind == "gauge" else f"llmtrain_{name} {value}"])

        single("requests_waiting", "gauge", "Completions that wait for a row.", waiting)
        single("requests_running", "gauge", "Completions that have a row.", running)
        single("rows", "gauge", "Completions that can run at once.", rows)
        single("tokens_per_second", "gauge", "Tokens generated per second, over ten seconds.", self.rate.per_second())
        single("prompt_tokens_total", "counter", "Prompt tokens of finished completions.", self.prompt_tokens)
        single("cached_tokens_total", "counter", "Prompt tokens that were still in a row.", self.cached_tokens)
        single("generated_tokens_total", "counter", "Tokens generated.", self.generated_tokens)
        outcomes, reasons = sorted(self.requests.items()), sorted(self.finished.items())
        add("requests_total", "counter", "HTTP requests for an answer, by outcome.", [
            f'llmtrain_requests_total{{endpoint="{endpoint}",outcome="{outcome}"}} {count}'
            for (endpoint, outcome), count in outcomes
        ])  # fmt: skip
        add("completions_total", "counter", "Completions by the reason of their end.", [
            f'llmtrain_completions_total{{reason="{reason}"}} {count}' for reason, count in reasons
        ])  # fmt: skip
        name = "time_to_first_token_seconds"
        add(name, "histogram", "From submission to the first token.", self.first_token.lines(f"llmtrain_{name}"))
        name = "completion_seconds"
        add(name, "histogram", "From submission to the end.", self.whole.lines(f"llmtrain_{name}"))
        return "\n".join(lines) + "\n"
