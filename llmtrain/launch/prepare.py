"""`llmtrain prepare`: text → tokenizer → token shards; and the same two steps for the commands that need them first.

Translates settings into plain arguments. How text is read, tokenized and kept is `llmtrain.data`'s affair.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.data.corpora import Corpus
    from llmtrain.data.prepare import PreparedCorpus
    from llmtrain.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def run(settings: DictConfig, run_dir: Path) -> dict[str, Any]:
    """Prepares the corpus of the settings.

    Returns:
        `tokenizer` and `shards` (folders), `cached`, `fingerprint`, `vocab_size`, and `PreparedCorpus.stats`.

    Raises:
        ValueError: A corpus, tokenizer or setting that does not do; see `open_corpus`, `ensure_tokenizer`, `prepare`.
    """
    tokenizer, tokenizer_folder, prepared = prepare_from(settings)
    return {
        "command": "prepare",
        "tokenizer": tokenizer_folder,
        "shards": prepared.folder,
        "cached": prepared.cached,
        "fingerprint": prepared.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        **prepared.stats,
    }


def prepare_from(settings: DictConfig) -> tuple[Tokenizer, Path, PreparedCorpus]:
    """The tokenizer of the settings, its folder, and the shards, made unless they are there.

    Reads `data`, `tokenizer` and `paths.data_dir`.
    """
    from llmtrain.data.prepare import prepare

    corpus, length = corpus_from(settings), settings.data.get("sequence_length")
    tokenizer, folder = tokenizer_from(settings, corpus, sequence_length=length)
    prepared = prepare(corpus, tokenizer, data_dir=settings.paths.data_dir, sequence_length=length)
    report(prepared)
    return tokenizer, folder, prepared


def corpus_from(settings: DictConfig) -> Corpus:
    """The corpus that `data` describes. Keys of `data` that are about training are left alone."""
    from omegaconf import OmegaConf

    from llmtrain.data.corpora import corpus_settings, open_corpus

    values: dict[str, Any] = OmegaConf.to_container(settings.data, resolve=True)  # type: ignore[assignment]
    kind = values.pop("kind")
    known = corpus_settings(kind)
    return open_corpus(
        kind, data_dir=settings.paths.data_dir, **{key: value for key, value in values.items() if key in known}
    )


def tokenizer_from(
    settings: DictConfig, corpus: Corpus, *, sequence_length: int | None = None
) -> tuple[Tokenizer, Path]:
    """The tokenizer that `tokenizer` describes, for this corpus, and its folder.

    With `sequence_length` none is learned from a corpus that cannot fill one window.
    """
    from omegaconf import OmegaConf

    from llmtrain.data.prepare import corpus_tokenizer

    values: dict[str, Any] = OmegaConf.to_container(settings.tokenizer, resolve=True)  # type: ignore[assignment]
    return corpus_tokenizer(corpus, data_dir=settings.paths.data_dir, sequence_length=sequence_length, **values)


def report(prepared: PreparedCorpus) -> None:
    """Says what there is, and how fast it was made if it was made now."""
    stats = prepared.stats
    speed = (
        "prepared before"
        if prepared.cached
        else f"{stats['seconds']:.1f} s, {stats['tokens_per_second']:,.0f} tokens/s, "
        f"{stats['characters_per_second']:,.0f} characters/s"
    )
    logger.info(
        "%s tokens to train on, %s to validate on; %.2f characters per token (%s): %s",
        f"{stats['train_tokens']:,}",
        f"{stats['val_tokens']:,}",
        stats["characters_per_token"],
        speed,
        prepared.folder,
    )
