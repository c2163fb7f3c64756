"""What a model's samples look like beside the text it was trained on, counted in characters.

Joins token shards, a tokenizer and the text statistics; does not make the samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypedDict

from llmtrain.data.shards import ShardSet
from llmtrain.evaluation.text_statistics import distinct_n, longest_copied_span
from llmtrain.tokenizer import Tokenizer


class SampleReport(TypedDict):
    """`distinct_4` is in 0 … 1, over all samples together; then the longest span that stands in the training text."""

    distinct_4: float
    longest_copied_characters: int
    longest_copied_text: str


def sample_report(texts: Sequence[str], training: Iterable[ShardSet], tokenizer: Tokenizer) -> SampleReport:
    """Compare samples with the training text, one document in memory at a time (about two million characters a second).

    Args:
        texts: What the model wrote, without its prompts.
        training: The shards it was trained on.
        tokenizer: Their tokenizer.
    """
    copied = longest_copied_span(texts, _documents(training, tokenizer))
    text = texts[copied.sequence][copied.start : copied.start + copied.length] if copied.length else ""
    return {
        "distinct_4": distinct_n(texts, 4),
        "longest_copied_characters": copied.length,
        "longest_copied_text": text,
    }


def _documents(training: Iterable[ShardSet], tokenizer: Tokenizer) -> Iterator[str]:
    for shards in training:
        for index in range(shards.num_documents):
            yield tokenizer.decode(shards.document(index).tolist())
