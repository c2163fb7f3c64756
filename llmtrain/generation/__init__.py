"""From a model back to text: sampling, the one decode loop, streaming. Nothing here reads files or settings.

`Engine` is what everybody uses; `SamplingParams` says how; the rest is what comes out.
"""

from llmtrain.generation.engine import Engine, Prompt
from llmtrain.generation.params import SamplingParams
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
