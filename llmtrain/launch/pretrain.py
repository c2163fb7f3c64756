"""`llmtrain pretrain`: text to a model folder, through tokenizer and token shards.

Joins the parts: what a run starts from (`starting`), training, and what is said at its end (`finished`); how they do it
is theirs to know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.launch.finished import conclude
from llmtrain.launch.fitting import check_folder, checked_length, end_if_stopped, fit_arguments, tell_fresh_start
from llmtrain.launch.inference import sampling_params
from llmtrain.launch.provenance import provenance
from llmtrain.launch.report import beginning, source_facts, tokenizer_facts, writer
from llmtrain.launch.starting import Start, check_anywhere, check_settings, model_config, prepare_start

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.data.prepare import PreparedCorpus
    from llmtrain.generation import SamplingParams
    from llmtrain.model import ModelConfig
    from llmtrain.training.fit import FitResult
    from llmtrain.training.geometry import BatchGeometry, RunLength

logger = logging.getLogger(__name__)

_OPENING_TOKENS = 8  # of a held-out text, to prompt with
_OPENINGS = 3


def check(settings: DictConfig, run_dir: Path, *, here: bool) -> None:
    """Everything that can be refused without text, for a run that is to be started later.

    Args:
        settings: Those of the command.
        run_dir: The run folder, which need not exist.
        here: Whether this machine is the one to train.

    Raises:
        ValueError: A setting that cannot work, or a folder that holds another run.
    """
    if here:
        rows = check_settings(settings).rows
    else:
        rows = check_anywhere(settings)
        checked_length(settings, rows=rows, row_tokens=settings.data.sequence_length)
    check_folder(settings, run_dir, _known(settings, rows))


def run(settings: DictConfig, run_dir: Path, accept: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Train a model from the settings; returns the results for the last line.

    Args:
        settings: Those of the command.
        run_dir: The run folder.
        accept: Called when nothing can be refused any more, before anything is written there.

    Raises:
        ValueError: A setting that cannot work, before anything is built.
        Ended: With `REQUEUE_EXIT_CODE` when a signal ended the run early.
    """
    sampling = sampling_params(settings.sampling)
    batch = check_settings(settings)
    check_folder(settings, run_dir, _known(settings, batch.rows))
    tell_fresh_start(settings, run_dir)
    start = prepare_start(settings)
    length = _run_length(settings, batch, start.prepared)
    prompts = _prompts(settings.callbacks.prompts, start)
    _announce(settings, start, batch, length)
    result = _fit(settings, run_dir, start, batch, length, prompts, sampling, accept)
    if not result.is_main:
        return {}
    end_if_stopped("pretrain", run_dir, result)
    return conclude(settings, run_dir, start.prepared, result, prompts, sampling)


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
    from llmtrain.training.optim import AUTO_WARMUP, resolve_warmup

    plan = plan_of(settings, start.model.config, batch, length, epoch_rows=_epoch_rows(settings, start.prepared))
    logger.info("%s", "\n".join(short_form(plan)))
    warmup = resolve_warmup(settings.optim.warmup_steps, length.steps)
    if settings.optim.warmup_steps == "auto" and warmup < AUTO_WARMUP:
        logger.info("the learning rate rises in the first %d of %d steps: a tenth of a short run", warmup, length.steps)
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
    accept: Callable[[], None] = lambda: None,
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
        accept=beginning(accept, settings, run_dir, "pretrain", lambda: _facts(start)),
        report=writer(run_dir),
        **fit_arguments(settings, length.steps),
    )


def _info(settings: DictConfig, start: Start) -> dict[str, Any]:
    """What `llmtrain.json` remembers of a run."""
    return {
        "data_fingerprint": start.prepared.fingerprint,
        "trained_length": settings.data.sequence_length,
        "never_seen": start.never_seen,
        **provenance(settings),
    }


def _facts(start: Start) -> dict[str, Any]:
    """What the run's report says of its start."""
    return {
        **source_facts(start.prepared.train),
        "held_out_tokens": start.prepared.val.num_tokens,
        "tokenizer": tokenizer_facts(start.tokenizer),
        "trainable_parameters": sum(parameter.numel() for parameter in start.model.parameters()),
    }


def _fixed(settings: DictConfig, start: Start, batch: BatchGeometry) -> dict[str, Any]:
    """What a resumed run must share with the run that it continues."""
    return {
        "the tokenizer's hash": start.tokenizer.hash,
        "the data's fingerprint": start.prepared.fingerprint,
        **_known(settings, batch.rows),
        **_shape(start.model.config),
    }


def _known(settings: DictConfig, rows: int) -> dict[str, Any]:
    """As much of it as the settings say."""
    known = {"data.sequence_length": settings.data.sequence_length, "the number of windows per step": rows}
    if settings.init is not None:
        return known
    shape = _shape(model_config(settings, vocab_size=1))
    if settings.model.get("vocab_size") is None:
        del shape["model.vocab_size"]  # the tokenizer's
    return known | shape


def _shape(config: ModelConfig) -> dict[str, Any]:
    return {f"model.{name}": value for name, value in config.to_dict().items() if name != "dropout"}
