"""From a model back to text: sampling, the one decode loop, streaming. Nothing here reads files or settings.

`Engine` is what everybody uses; `SamplingParams` says how; the rest is what comes out. The engine is imported when
it is first asked for: settings and prompts are refused without torch, whose import takes a second.
"""

from typing import TYPE_CHECKING, Any

from llmtrain.generation.params import SamplingParams

if TYPE_CHECKING:
    from llmtrain.generation.engine import Engine, Prompt
    from llmtrain.generation.request import GenerationRequest, ScoreRequest
    from llmtrain.generation.results import Candidate, Completion, EngineStats, Event, FinishReason, Score

__all__ = [
    "Candidate",
    "Completion",
    "Engine",
    "EngineStats",
    "Event",
    "FinishReason",
    "GenerationRequest",
    "Prompt",
    "SamplingParams",
    "Score",
    "ScoreRequest",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from llmtrain.generation import engine, request, results

    return next(getattr(module, name) for module in (engine, request, results) if hasattr(module, name))
