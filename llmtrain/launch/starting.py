"""What a pretraining run starts from: its settings, checked before any work, then shards, tokenizer and model.

`pretrain` trains from here, `plan` reckons with the same settings and `bench` measures the same start; none of them
refuses what another accepts. How text becomes shards is not known here, nor how training runs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.launch import fitting
from llmtrain.launch.inference import sampling_params
from llmtrain.launch.prepare import corpus_from, report, tokenizer_from

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.data.prepare import PreparedCorpus
    from llmtrain.model import ModelConfig, Transformer
    from llmtrain.tokenizer import Tokenizer
    from llmtrain.training.geometry import BatchGeometry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """What a run starts from: a model, its tokenizer, the text, and the ids that no training has seen."""

    model: Transformer
    tokenizer: Tokenizer
    prepared: PreparedCorpus
    never_seen: list[int]


def check_settings(settings: DictConfig) -> BatchGeometry:
    """Everything that can be checked without text, in the first second.

    Raises:
        ValueError: A setting that cannot work on this machine, or at all.
    """
    from llmtrain.training.geometry import divide_batch

    rows = check_anywhere(settings)
    machine = fitting.check_machine(settings)
    batch = divide_batch(rows, micro_batch_size=settings.trainer.micro_batch_size, world_size=machine.world_size)
    fitting.checked_length(settings, rows=rows, row_tokens=settings.data.sequence_length)
    return batch


def check_anywhere(settings: DictConfig) -> int:
    """What needs neither text nor the machine that is to train; returns the rows of a step.

    Raises:
        ValueError: A setting that cannot work anywhere.
    """
    from llmtrain.training.geometry import rows_per_step

    if "sequence_length" not in settings.data:
        raise ValueError(
            f"data={settings.data.get('kind')} is a task for fine-tuning; pretraining takes data=sanguo, kjv, "
            "python_docs, tang, files or huggingface."
        )
    length = settings.data.sequence_length
    rows = rows_per_step(settings.trainer.batch_tokens, length)
    if settings.init is not None and not Path(settings.init).exists():
        raise ValueError(f"init={settings.init} does not exist; give a model folder, a run or a checkpoint.")
    sampling_params(settings.sampling)
    fitting.check_anywhere(settings)
    if settings.init is None:
        model_config(settings, vocab_size=settings.tokenizer.get("vocab_size") or 64)
        check_context(length, settings.model.max_position_embeddings)
    return rows


def init_folder(settings: DictConfig) -> Path:
    """The model folder that `init` means.

    Raises:
        ValueError: There is none.
    """
    from llmtrain.checkpoint import ModelFolderError, resolve_model

    try:
        return resolve_model(settings.init)
    except ModelFolderError as error:  # which calls it model=, as it is called in the other commands
        raise ValueError(str(error).replace("model=", "init=")) from error


def check_context(sequence_length: int, context: int) -> None:
    """Refuses windows that are longer than the model can read.

    Raises:
        ValueError: They are.
    """
    if sequence_length > context:
        raise ValueError(
            f"data.sequence_length={sequence_length} exceeds the model's context of {context} tokens; "
            "lower it or raise model.max_position_embeddings."
        )


def model_config(settings: DictConfig, *, vocab_size: int) -> ModelConfig:
    """The shape of a model with random weights.

    Args:
        settings: Those of the command.
        vocab_size: Ids of the tokenizer.

    Raises:
        ValueError: A shape that cannot be, or with fewer rows than the tokenizer has ids.
    """
    from omegaconf import OmegaConf

    from llmtrain.model import ModelConfig, padded_vocab_size

    values: dict[str, Any] = OmegaConf.to_container(settings.model, resolve=True)  # type: ignore[assignment]
    given = values.get("vocab_size")
    if given is not None and given < vocab_size:
        raise ValueError(
            f"model.vocab_size={given} is less than the tokenizer's {vocab_size} ids; raise it, or null takes those."
        )
    return ModelConfig.from_dict({**values, "vocab_size": given or padded_vocab_size(vocab_size)})


def prepare_start(settings: DictConfig) -> Start:
    """The corpus as shards, and a model with random weights or that of `init`."""
    from llmtrain.data.prepare import prepare
    from llmtrain.model import build_model

    corpus = corpus_from(settings)
    if settings.init is not None:
        return _from_model(settings, corpus)
    length = settings.data.sequence_length
    tokenizer, _ = tokenizer_from(settings, corpus, sequence_length=length)
    config = model_config(settings, vocab_size=tokenizer.vocab_size)
    prepared = prepare(corpus, tokenizer, data_dir=settings.paths.data_dir, sequence_length=length)
    report(prepared)
    return Start(build_model(config, seed=settings.seed), tokenizer, prepared, _never_seen(prepared))


def _from_model(settings: DictConfig, corpus: Any) -> Start:
    import torch

    from llmtrain.checkpoint import load_model_folder
    from llmtrain.data.prepare import prepare

    loaded = load_model_folder(init_folder(settings), dtype=torch.float32)
    logger.info(
        "init: the shape and the tokenizer are those of %s; model.* and tokenizer.* are not used", loaded.folder
    )
    check_context(settings.data.sequence_length, loaded.config.max_position_embeddings)
    prepared = prepare(
        corpus, loaded.tokenizer, data_dir=settings.paths.data_dir, sequence_length=settings.data.sequence_length
    )
    report(prepared)
    unseen = set(_never_seen(prepared))
    earlier = loaded.info.get("never_seen")
    # Of a folder that does not say so every id may have been seen.
    return Start(loaded.model.train(), loaded.tokenizer, prepared, sorted(unseen & set(earlier or [])))


def _never_seen(prepared: PreparedCorpus) -> list[int]:
    """Ids that occur in none of the sources that are trained on."""
    return sorted(set.intersection(*(set(shards.never_seen) for shards, _ in prepared.train)))
