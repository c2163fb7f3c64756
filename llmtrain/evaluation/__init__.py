"""How good a model is: bits per byte of a text, scores on tasks, and figures about what it writes.

Measures and returns numbers; prints nothing, reads no settings, and generates only through `llmtrain.generation`.
"""

from llmtrain.evaluation.answers import answer_loss
from llmtrain.evaluation.bpb import BitsPerByte, bits_per_byte, nats_and_tokens
from llmtrain.evaluation.metrics import METRICS, Metric
from llmtrain.evaluation.samples import SampleReport, sample_report
from llmtrain.evaluation.tasks import TaskResult, score_task
from llmtrain.evaluation.text_statistics import CopiedSpan, distinct_n, longest_copied_span

__all__ = [
    "METRICS",
    "BitsPerByte",
    "CopiedSpan",
    "Metric",
    "SampleReport",
    "TaskResult",
    "answer_loss",
    "bits_per_byte",
    "distinct_n",
    "longest_copied_span",
    "nats_and_tokens",
    "sample_report",
    "score_task",
]
