"""`llmtrain tokenizer`: learn the vocabulary of a corpus, or take one, and show what it makes of the held-out text."""

from __future__ import annotations

import logging
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.launch.prepare import corpus_from, tokenizer_from

if TYPE_CHECKING:
    from omegaconf import DictConfig

logger = logging.getLogger(__name__)

SAMPLE_PIECES = 64  # enough of the held-out text for a figure with two decimals


def run(settings: DictConfig, run_dir: Path) -> dict[str, Any]:
    """Makes the tokenizer of the settings unless it is there.

    Returns:
        `tokenizer` (its folder), `kind`, `vocab_size`, `hash`, and on text that it was not learned from
        `characters_per_token` and `bytes_per_token`.

    Raises:
        ValueError: A corpus, tokenizer or setting that does not do.
    """
    from llmtrain.data.prepare import held_out_texts

    corpus = corpus_from(settings)
    tokenizer, folder = tokenizer_from(settings, corpus)
    texts = list(islice(held_out_texts(corpus), SAMPLE_PIECES))
    tokens = sum(len(ids) for ids in tokenizer.encode_batch(texts))
    characters = sum(map(len, texts)) / tokens
    size = sum(len(text.encode()) for text in texts) / tokens
    logger.info(
        "%d ids; %.2f characters and %.2f bytes per token of held-out text: %s",
        tokenizer.vocab_size,
        characters,
        size,
        folder,
    )
    return {
        "command": "tokenizer",
        "tokenizer": folder,
        "kind": settings.tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "hash": tokenizer.hash,
        "characters_per_token": characters,
        "bytes_per_token": size,
    }
