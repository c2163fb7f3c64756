"""One request through the engine with an observer on it: what the model said at each step, and when.

The request is answered by the engine like any other; the observer copies and changes nothing. Knows the engine; not
what is shown of a recording.

Shapes: V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llmtrain.generation import Completion, Engine, GenerationRequest, SamplingParams
from llmtrain.generation.sampling import penalize_repetition
from llmtrain.model import ModelDelta


@dataclass(frozen=True)
class Step:
    """One choice of a token.

    Attributes:
        logits: (V,) fp32, as the model gave them.
        uniform: The number that was drawn; None for greedy.
        seconds: When the token was chosen, since the recorder was made.
    """

    logits: Tensor
    uniform: float | None
    seconds: float


@dataclass
class Recorder:
    """The observer of one request; to be made just before it is submitted."""

    steps: list[Step] = field(default_factory=list)
    excluded: Tensor | None = None  # (V,), −inf for ids that are never chosen, else 0
    _began: float = field(default_factory=time.perf_counter)

    def __call__(self, logits: Tensor, excluded: Tensor, uniform: float | None) -> None:
        """Copies one step."""
        if self.excluded is None:
            self.excluded = excluded.to("cpu", copy=True)
        self.steps.append(Step(logits.to("cpu", copy=True), uniform, time.perf_counter() - self._began))


@dataclass(frozen=True)
class Recording:
    """A request that has been answered.

    Attributes:
        prompt_ids: What the engine read, at least one id.
        params: How tokens were chosen.
        completion: What the engine answered.
        steps: One for each token of the answer.
        excluded: (V,), −inf for ids that are never chosen, else 0.
        adapter: The adapter that it was answered with.
        stop_ids: All ids that would have ended it.
    """

    prompt_ids: list[int]
    params: SamplingParams
    completion: Completion
    steps: list[Step]
    excluded: Tensor
    adapter: ModelDelta | None = None
    stop_ids: frozenset[int] = frozenset()

    @property
    def ids(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt_ids + self.completion.token_ids

    def choosable(self, step: int) -> Tensor:
        """(V,) fp32: what temperature and filters are applied to, ids that are never chosen and repetition counted."""
        logits = self.steps[step].logits + self.excluded
        if self.params.repetition_penalty == 1:
            return logits
        seen = torch.zeros(logits.shape, dtype=torch.bool)
        seen[torch.tensor(self.prompt_ids + self.completion.token_ids[:step])] = True
        return penalize_repetition(logits, seen, self.params.repetition_penalty)


def record(
    engine: Engine, prompt: str | Sequence[int], sampling: SamplingParams | None = None, *, adapter: str | None = None
) -> Recording:
    """Answers a prompt and records every step.

    Raises:
        ValueError: The request cannot run, or the model's scores are not finite.
    """
    recorder = Recorder()
    request = engine.submit(prompt, sampling, adapter=adapter, streamed=True, observer=recorder)
    for _ in engine.events(request):
        pass
    completion = request.result()
    if completion.error is not None:
        raise ValueError(completion.error)
    return recording_of(request, recorder)


def recording_of(request: GenerationRequest, recorder: Recorder) -> Recording:
    """What was recorded of a request that has ended, for callers that submit it themselves.

    Raises:
        ValueError: It ended before its first token.
    """
    if not recorder.steps or recorder.excluded is None:
        raise ValueError("nothing was recorded: the request ended before its first token")
    completion = request.result()
    return Recording(
        prompt_ids=list(request.input_ids),
        params=request.params,
        completion=completion,
        steps=recorder.steps[: len(completion.token_ids)],
        excluded=recorder.excluded,
        adapter=request.adapter,
        stop_ids=request.stop_ids,
    )
