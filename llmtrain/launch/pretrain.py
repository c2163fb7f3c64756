"""`llmtrain pretrain`: text to a model folder, through tokenizer and token shards.

Reads the settings, checks them before any work starts, and joins the parts; how text becomes shards, how training runs
and how text is generated is theirs to know.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.launch.finished import conclude
from llmtrain.launch.fitting import check_training, checked_length, end_if_stopped, fit_arguments
from llmtrain.launch.inference import sampling_params
from llmtrain.launch.prepare import corpus_from, report, tokenizer_from
from llmtrain.launch.provenance import provenance

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.data.prepare import PreparedCorpus
    from llmtrain.generation import SamplingParams
    from llmtrain.model import ModelConfig, Transformer
    from llmtrain.tokenizer import Tokenizer
    from llmtrain.training.fit import FitResult
    from llmtrain.training.geometry import BatchGeometry, RunLength

logger = logging.getLogger(__name__)

_OPENING_TOKENS = 8  # of a held-out text, to prompt with
_OPENINGS = 3


@dataclass(frozen=True)
class Start:
    """What a run starts from: a model, its tokenizer, the text, and the ids that no training has seen."""

    model: Transformer
    tokenizer: Tokenizer
    prepared: PreparedCorpus
    never_seen: list[int]


def run(settings: DictConfig, run_dir: Path) -> dict[str, Any]:
    """Train a model from the settings; returns the results for the last line.

    Raises:
        ValueError: A setting that cannot work, before anything is built.
        Ended: With `REQUEUE_EXIT_CODE` when a signal ended the run early.
    """
    sampling = sampling_params(settings.sampling)
    batch = _check_settings(settings)
    start = _start(settings)
    length = _run_length(settings, batch, start.prepared)
    prompts = _prompts(settings.callbacks.prompts, start)
    _announce(settings, start, batch, length)
    result = _fit(settings, run_dir, start, batch, length, prompts, sampling)
    if not result.is_main:
        return {}
    end_if_stopped("pretrain", run_dir, result)
    return conclude(settings, run_dir, start.prepared, result, prompts, sampling)


def _check_settings(settings: DictConfig) -> BatchGeometry:
    """Everything that can be checked without text: raises `ValueError` in the first second."""
    from llmtrain.training.geometry import divide_batch, rows_per_step

    if "sequence_length" not in settings.data:
        raise ValueError(
            f"data={settings.data.get('kind')} is a task for fine-tuning; pretraining takes data=sanguo, kjv, "
            "python_docs, files or huggingface."
        )
    trainer, length = settings.trainer, settings.data.sequence_length
    rows = rows_per_step(trainer.batch_tokens, length)
    if settings.init is not None and not Path(settings.init).exists():
        raise ValueError(f"init={settings.init} does not exist; give a model folder, a run or a checkpoint.")
    machine = check_training(settings)
    if settings.init is None:
        _model_config(settings, vocab_size=settings.tokenizer.get("vocab_size") or 64)
        _check_context(length, settings.model.max_position_embeddings)
    batch = divide_batch(rows, micro_batch_size=trainer.micro_batch_size, world_size=machine.world_size)
    checked_length(settings, rows=rows, row_tokens=length)
    return batch


def _check_context(sequence_length: int, context: int) -> None:
    if sequence_length > context:
        raise ValueError(
            f"data.sequence_length={sequence_length} exceeds the model's context of {context} tokens; "
            "lower it or raise model.max_position_embeddings."
        )


def _model_config(settings: DictConfig, *, vocab_size: int) -> ModelConfig:
    from omegaconf import OmegaConf

    from llmtrain.model import ModelConfig, padded_vocab_size

    values: dict[str, Any] = OmegaConf.to_container(settings.model, resolve=True)  # type: ignore[assignment]
    given = values.get("vocab_size")
    if given is not None and given < vocab_size:
        raise ValueError(
            f"model.vocab_size={given} is less than the tokenizer's {vocab_size} ids; raise it, or null takes those."
        )
    return ModelConfig.from_dict({**values, "vocab_size": given or padded_vocab_size(vocab_size)})


def _start(settings: DictConfig) -> Start:
    """The corpus as shards, and a model with random weights or that of `init`."""
    from llmtrain.data.prepare import prepare
    from llmtrain.model import build_model

    corpus = corpus_from(settings)
    if settings.init is not None:
        return _start_from_model(settings, corpus)
    length = settings.data.sequence_length
    tokenizer, _ = tokenizer_from(settings, corpus, sequence_length=length)
    config = _model_config(settings, vocab_size=tokenizer.vocab_size)
    prepared = prepare(corpus, tokenizer, data_dir=settings.paths.data_dir, sequence_length=length)
    report(prepared)
    return Start(build_model(config, seed=settings.seed), tokenizer, prepared, _never_seen(prepared))


def _start_from_model(settings: DictConfig, corpus: Any) -> Start:
    import torch

    from llmtrain.checkpoint import load_model_folder
    from llmtrain.data.prepare import prepare

    loaded = load_model_folder(settings.init, dtype=torch.float32)
    logger.info(
        "init: the shape and the tokenizer are those of %s; model.* and tokenizer.* are not used", loaded.folder
    )
    _check_context(settings.data.sequence_length, loaded.config.max_position_embeddings)
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


def _epoch_rows(settings: DictConfig, prepared: PreparedCorpus) -> int:
    return sum(shards.num_tokens // settings.data.sequence_length for shards, _ in prepared.train)


def _run_length(settings: DictConfig, batch: BatchGeometry, prepared: PreparedCorpus) -> RunLength:
    return checked_length(
        settings,
        rows=batch.rows,
        epoch_rows=_epoch_rows(settings, prepared),
        row_tokens=settings.data.sequence_length,
    )


def _prompts(setting: str | Sequence[str], start: Start) -> list[str]:
    """The fixed prompts, checked; `auto` takes the openings of held-out texts."""
    if setting != "auto":
        if isinstance(setting, str):
            raise ValueError(f"callbacks.prompts={setting!r} must be auto or a list of texts.")
        for text in setting:
            if not start.tokenizer.encode(text):
                raise ValueError(f"callbacks.prompts: {text!r} has no tokens; leave it out.")
        return list(setting)
    val, openings = start.prepared.val, []
    for index in range(min(_OPENINGS, val.num_documents)):
        text = start.tokenizer.decode(val.document(index)[:_OPENING_TOKENS].tolist()).split("\ufffd")[0]
        openings += text.strip().splitlines()[:1]
    return openings


def _announce(settings: DictConfig, start: Start, batch: BatchGeometry, length: RunLength) -> None:
    """The short form of the plan, and a warning if the memory will not do."""
    from llmtrain.launch.plan import plan_of
    from llmtrain.launch.plan_text import short_form, shortage

    plan = plan_of(settings, start.model.config, batch, length, epoch_rows=_epoch_rows(settings, start.prepared))
    logger.info("%s", "\n".join(short_form(plan)))
    if (warning := shortage(plan)) is not None:
        logger.warning("%s", warning)


def _fit(
    settings: DictConfig,
    run_dir: Path,
    start: Start,
    batch: BatchGeometry,
    length: RunLength,
    prompts: list[str],
    sampling: SamplingParams,
) -> FitResult:
    """Train through the one path of `training.fit`."""
    from dataclasses import replace

    from llmtrain.data.modules import PretrainDataModule
    from llmtrain.model import flops_per_token
    from llmtrain.training.fit import fit

    prepared = start.prepared
    data = PretrainDataModule(
        prepared.train,
        prepared.val,
        eos_id=start.tokenizer.eos_id,
        sequence_length=settings.data.sequence_length,
        micro_batch_size=batch.micro_batch_size,
        accumulation=batch.accumulation,
        total_steps=length.steps,
        seed=settings.seed,
    )
    return fit(
        model=start.model,
        data=data,
        tokenizer=start.tokenizer,
        run_dir=run_dir,
        total_steps=length.steps,
        accumulation=batch.accumulation,
        tokens_per_byte=prepared.val.num_tokens / prepared.val.utf8_bytes,
        sample_every=settings.trainer.sample_every,
        sample_prompts=prompts,
        sampling=replace(sampling, max_new_tokens=settings.callbacks.max_new_tokens, seed=settings.seed),
        flops_per_position=flops_per_token(start.model.config, settings.data.sequence_length),
        info=_info(settings, start),
        fixed=_fixed(settings, start, batch),
        **fit_arguments(settings),
    )


def _info(settings: DictConfig, start: Start) -> dict[str, Any]:
    """What `llmtrain.json` remembers of a run."""
    return {
        "data_fingerprint": start.prepared.fingerprint,
        "trained_length": settings.data.sequence_length,
        "never_seen": start.never_seen,
        **provenance(settings),
    }


def _fixed(settings: DictConfig, start: Start, batch: BatchGeometry) -> dict[str, Any]:
    """What a resumed run must share with the run that it continues."""
    shape = {f"model.{name}": value for name, value in start.model.config.to_dict().items() if name != "dropout"}
    return {
        "the tokenizer's hash": start.tokenizer.hash,
        "the data's fingerprint": start.prepared.fingerprint,
        "data.sequence_length": settings.data.sequence_length,
        "the number of windows per step": batch.rows,
        **shape,
    }
