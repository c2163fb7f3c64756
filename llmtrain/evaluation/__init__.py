"""How good a model is: bits per byte of a text, scores on tasks with their intervals, two models item by item, and
figures about what a model writes.

Measures and returns numbers; prints nothing, reads no settings, and generates only through `llmtrain.generation`.
`llmtrain.evaluation.harness` lets lm-eval ask a model. What needs torch is imported when it is first asked for: the
name of a metric is refused without it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmtrain.evaluation.answers import answer_loss
    from llmtrain.evaluation.bpb import BitsPerByte, bits_per_byte, nats_and_tokens
    from llmtrain.evaluation.choices import score_choices
    from llmtrain.evaluation.metrics import METRICS, Metric, find_metric, score_answers
    from llmtrain.evaluation.pairing import Comparison, compare_items
    from llmtrain.evaluation.remembered import Recall, recall
    from llmtrain.evaluation.samples import SampleReport, sample_report
    from llmtrain.evaluation.tasks import ItemResult, TaskResult, score_task
    from llmtrain.evaluation.team import ALONE, Team
    from llmtrain.evaluation.text_statistics import CopiedSpan, distinct_n, longest_copied_span

__all__ = [
    "ALONE",
    "METRICS",
    "BitsPerByte",
    "Comparison",
    "CopiedSpan",
    "ItemResult",
    "Metric",
    "Recall",
    "SampleReport",
    "TaskResult",
    "Team",
    "answer_loss",
    "bits_per_byte",
    "compare_items",
    "distinct_n",
    "find_metric",
    "longest_copied_span",
    "nats_and_tokens",
    "recall",
    "sample_report",
    "score_answers",
    "score_choices",
    "score_task",
]

_HOMES = {
    "answers": ("answer_loss",),
    "bpb": ("BitsPerByte", "bits_per_byte", "nats_and_tokens"),
    "choices": ("score_choices",),
    "metrics": ("METRICS", "Metric", "find_metric", "score_answers"),
    "pairing": ("Comparison", "compare_items"),
    "remembered": ("Recall", "recall"),
    "samples": ("SampleReport", "sample_report"),
    "tasks": ("ItemResult", "TaskResult", "score_task"),
    "team": ("ALONE", "Team"),
    "text_statistics": ("CopiedSpan", "distinct_n", "longest_copied_span"),
}


def __getattr__(name: str) -> Any:
    import importlib

    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
