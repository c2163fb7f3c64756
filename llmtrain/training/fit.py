"""`fit`: one training run from a plain model and a data module to a model folder. Pretraining and fine-tuning call it.

It joins the module, the strategy, the callbacks and the loggers, and decides nothing about data, tokenizers or where a
setting came from. It knows neither Hydra nor the terminal's last line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger

from llmtrain.checkpoint import save_model_folder
from llmtrain.model import Transformer
from llmtrain.training import checkpointing, former, hardware, placement
from llmtrain.training.callbacks import Accept, Figures, Samples, StopOnSignal
from llmtrain.training.checkpointing import Resumed, RunState
from llmtrain.training.control import RunControl
from llmtrain.training.deepspeed import build_strategy
from llmtrain.training.former import METRICS_FILE
from llmtrain.training.geometry import check_intervals
from llmtrain.training.hardware import Machine
from llmtrain.training.loggers import (
    MetricsCsv,
    build_wandb,
    close,
    read_rows,
    repeat_last,
    run_id,
)
from llmtrain.training.lost import naming_the_lost
from llmtrain.training.module import LanguageModule
from llmtrain.training.progress import ProgressLine
from llmtrain.training.rehearsal import Rehearsal, memory_errors_explained
from llmtrain.training.reporting import Report
from llmtrain.training.saving import Checkpoints, WriteModel
from llmtrain.training.skipping import SkippedSteps
from llmtrain.training.spikes import SpikeAlarm
from llmtrain.training.trainer import build_trainer, library_deprecations_ignored
from llmtrain.training.witness import witnesses

if TYPE_CHECKING:
    from llmtrain.generation import SamplingParams

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FitResult:
    """What a run came to. On every rank; only rank 0 wrote the folders.

    Attributes:
        model_dir: the run's model (or adapter) folder: the best by validation, or the last.
        steps: optimiser steps taken, over all sessions.
        tokens: trained tokens seen, over all sessions and ranks.
        best_step: step of the model in `model_dir`.
        val_loss: its validation loss in nats per token; `None` without validation data.
        val_bpb: its validation bits per byte; `None` where the data is not text.
        last_val_loss: validation loss of the last step; differs from `val_loss` if an earlier step was better.
        tokens_per_second: of this session, over training time alone.
        train_seconds: training time alone, over all sessions.
        resumed_from: step that this session began at.
        stopped_by: name of the signal that ended the run early.
        is_main: whether this is rank 0, which reports.
    """

    model_dir: Path
    steps: int
    tokens: int
    best_step: int
    val_loss: float | None
    val_bpb: float | None
    last_val_loss: float | None
    tokens_per_second: float
    train_seconds: float
    resumed_from: int = 0
    stopped_by: str | None = None
    is_main: bool = True


def fit(
    *,
    model: Transformer,
    data: pl.LightningDataModule,
    tokenizer: Any,
    run_dir: Path,
    total_steps: int,
    accumulation: int = 1,
    seed: int = 0,
    optimizer: str = "adamw",
    lr: float = 1e-3,
    optimizer_options: Mapping[str, Any] | None = None,
    schedule: str = "cosine",
    warmup_steps: int = 0,
    min_lr_ratio: float = 0.1,
    decay_fraction: float = 0.2,
    grad_clip: float | None = 1.0,
    strategy: str = "deepspeed_1",
    strategy_options: Mapping[str, Any] | None = None,
    accelerator: str = "auto",
    devices: int | str = "auto",
    num_nodes: int | str = "auto",
    timeout: float = 1800.0,
    precision: str = "auto",
    compile_model: bool = False,
    gradient_checkpointing: bool = False,
    validates: bool = True,
    tokens_per_byte: float | None = None,
    log_every: int = 10,
    val_every: int | None = None,
    checkpoint_every: int | None = None,
    keep_last: int | None = 2,
    max_skipped_steps: int | None = 5,
    spike_alarm: float | None = None,
    sample_every: int | None = None,
    sample_prompts: Sequence[str] = (),
    sampling: SamplingParams | None = None,
    wandb: Mapping[str, Any] | None = None,
    resume: str | Path | None = None,
    flops_per_position: float | None = None,
    info: Mapping[str, Any] | None = None,
    fixed: Mapping[str, Any] | None = None,
    write_model: WriteModel | None = None,
    model_name: str = "model",
    accept: Callable[[], None] = lambda: None,
    report: Callable[[], Any] | None = None,
    report_every: float | None = None,
) -> FitResult:
    """Trains a model and leaves it in `<run_dir>/model`.

    Args:
        model: the plain transformer, already initialised or loaded; an adapter, if any, attached in place.
        data: yields `total_steps × accumulation` micro-batches per rank; its `start_step` is set on resume.
        tokenizer: the model's `Tokenizer`; handed on to the model folder and to the samples, never looked into.
        run_dir: the run folder, the same on every rank.
        total_steps: optimiser steps of the whole run.
        accumulation: micro-batches per step and rank.
        seed: of dropout.
        optimizer: `adamw` or `muon`.
        lr: peak learning rate of AdamW's groups.
        optimizer_options: further arguments of `build_optimizer`.
        schedule: `cosine`, `wsd` or `constant`, with `warmup_steps`, `min_lr_ratio` and `decay_fraction`.
        grad_clip: largest norm of the gradient; `None` or 0 does not clip.
        strategy: `deepspeed_1`, `deepspeed_2`, `deepspeed_3` or `single`.
        strategy_options: further arguments of `build_strategy`.
        accelerator: `auto`, `cpu` or `gpu`.
        devices: processes on this machine.
        num_nodes: machines, or `auto`: as many as the launcher says.
        timeout: seconds that a process waits for the others before it ends.
        precision: `auto`, `bf16` or `fp32`.
        compile_model: forward and backward through `torch.compile`.
        gradient_checkpointing: recompute activations in backward.
        validates: whether `data` has validation batches.
        tokens_per_byte: validation targets per byte of validation text, for bits per byte.
        log_every, val_every, checkpoint_every, sample_every: in optimiser steps; see `RunControl`.
        keep_last: checkpoints that stay; `None` keeps all.
        spike_alarm: warn of a loss above the mean of the last steps by this share of it; `None` does not.
        max_skipped_steps: so many steps in a row without a finite loss and gradient end the run; `None` goes on.
        sample_prompts: fixed prompts of the samples.
        sampling: how samples are drawn.
        wandb: arguments of `loggers.build_wandb`; `None` logs to `metrics.csv` only.
        resume: `None`, `auto`, or the path of a checkpoint or run.
        flops_per_position: for MFU; `None` leaves it out.
        info: what `llmtrain.json` remembers beside the counters.
        fixed: facts that a resumed run must share, by the name a user knows them under.
        write_model: writes the model folder; default: `save_model_folder` of the plain model.
        model_name: name of the model folder inside the run folder.
        accept: called before the first thing is written into the run folder, when nothing can be refused any more; on
            ranks above 0 once the processes have met.
        report: writes a report of the run so far.
        report_every: seconds between two of its calls, at least; `None` calls it never.

    Raises:
        ValueError: a setting is out of range, or a checkpoint does not fit; raised before anything is trained.
        NonFiniteError: too many steps in a row, or the weights themselves, are not finite.
    """
    machine = hardware.resolve_machine(accelerator, devices, num_nodes, precision)
    intervals = {
        "log_every": log_every, "val_every": val_every, "checkpoint_every": checkpoint_every, "keep_last": keep_last,
        "sample_every": sample_every, "max_skipped_steps": max_skipped_steps,
    }  # fmt: skip
    check_intervals(**intervals)
    if compile_model:
        hardware.check_compiler()
    facts = {**(fixed or {}), "optim.name": optimizer, "seed": seed}
    settings = {
        "strategy": strategy, "the number of processes": machine.world_size,
        "the number of micro-batches per step": accumulation, "the number of steps": total_steps,
        "model.dropout": model.config.dropout, **_named("strategy", strategy_options),
        **_named("optim", {"lr": lr, "schedule": schedule, "warmup_steps": warmup_steps, "min_lr_ratio": min_lr_ratio}),
        **_named("optim", {"decay_fraction": decay_fraction, "grad_clip": grad_clip, **(optimizer_options or {})}),
        **_named("trainer", {"precision": machine.precision, "compile": compile_model, **intervals}),
        "trainer.gradient_checkpointing": gradient_checkpointing,
    }  # fmt: skip
    resumed = _prepare_resume(resume, run_dir, fresh := RunState(0, 0, 0.0, fixed=facts, free=settings), accept)
    state = resumed.state if resumed else fresh
    if resumed and resumed.step >= total_steps:
        return _already_done(run_dir, model_name, resumed)
    data.start_step = state.step  # type: ignore[attr-defined]
    model.train()
    model.gradient_checkpointing = gradient_checkpointing
    module = LanguageModule(
        model, total_steps=total_steps, optimizer=optimizer, lr=lr, schedule_name=schedule, warmup_steps=warmup_steps,
        optimizer_options=_optimizer_options(optimizer, optimizer_options, machine), min_lr_ratio=min_lr_ratio,
        decay_fraction=decay_fraction, seed=seed, tokens_per_byte=tokens_per_byte, compile_model=compile_model,
        tokens_seen=state.tokens,
    )  # fmt: skip
    control = RunControl(
        total_steps=total_steps, accumulation=accumulation, log_every=log_every, val_every=val_every,
        validates=validates, checkpoint_every=checkpoint_every, sample_every=sample_every if sample_prompts else None,
        progress=ProgressLine(total_steps), earlier_seconds=state.train_seconds, skipped_steps=state.skipped_steps,
        skipped_in_a_row=state.skipped_in_a_row,
    )  # fmt: skip
    loggers = _build_loggers(run_dir, state.step, wandb)
    figures = Figures(control, flops_per_position=flops_per_position, precision=machine.precision)
    samples = [Samples(control, run_dir, tokenizer, sample_prompts, sampling)] if sampling and sample_prompts else []
    checkpoints = Checkpoints(
        control, run_dir, fixed=facts, free=settings, keep_last=keep_last, resumed=resumed, model_name=model_name,
        write_model=write_model or _model_writer(model, tokenizer, {**(info or {}), "wandb_run_id": run_id(run_dir)}),
    )  # fmt: skip
    built = build_strategy(
        strategy, devices=machine.devices, accelerator=machine.device_type, precision=machine.precision,
        num_nodes=machine.num_nodes, optimizer=optimizer, timeout=timeout, **(strategy_options or {}),
    )  # fmt: skip
    callbacks = [*_watchers(control, run_dir, max_skipped_steps, spike_alarm, timeout), figures, *samples, checkpoints]
    callbacks += [Accept(accept), *witnesses(run_dir, resumed_step=state.step)]
    callbacks += [Report(control, report, every=report_every)] if report and report_every is not None else []
    with library_deprecations_ignored(), memory_errors_explained(data):
        trainer = build_trainer(built, machine, control, callbacks, loggers, grad_clip=grad_clip, run_dir=run_dir)
        _train(trainer, module, data, timeout=timeout)
    return _result(trainer, module, control, figures, checkpoints)


def _named(section: str, values: Mapping[str, Any] | None) -> dict[str, Any]:
    """Settings by the name a user knows them under."""
    return {f"{section}.{name}": value for name, value in (values or {}).items()}


def _watchers(
    control: RunControl, run_dir: Path, max_skipped_steps: int | None, spike_alarm: float | None, timeout: float
) -> list[pl.Callback]:
    """The callbacks that look after a run; they come before those that log and save what they have looked at."""
    alarms = [] if spike_alarm is None else [SpikeAlarm(control, run_dir, share=spike_alarm)]
    skipped = SkippedSteps(control, run_dir, most_in_a_row=max_skipped_steps)
    return [Rehearsal(), StopOnSignal(control, timeout=timeout), skipped, *alarms]


def _train(trainer: pl.Trainer, module: LanguageModule, data: pl.LightningDataModule, *, timeout: float) -> None:
    """The training itself: what is logged is whole however it ends, and a process that is lost has its name."""
    try:
        with naming_the_lost(trainer, timeout=timeout):
            trainer.fit(module, datamodule=data)
    finally:
        close(trainer.loggers)


def _optimizer_options(optimizer: str, options: Mapping[str, Any] | None, machine: Machine) -> dict[str, Any]:
    """Muon's products are taken in the run's precision unless told otherwise."""
    extra = {"muon_dtype": hardware.DTYPES[machine.precision]} if optimizer == "muon" else {}
    return {**extra, **(options or {})}


def _result(
    trainer: pl.Trainer, module: LanguageModule, control: RunControl, figures: Figures, checkpoints: Checkpoints
) -> FitResult:
    best = checkpoints.best or {}
    return FitResult(
        model_dir=checkpoints.model_dir,
        steps=trainer.global_step,
        tokens=module.tokens_seen,
        best_step=best.get("step", trainer.global_step),
        val_loss=best.get("val_loss"),
        val_bpb=best.get("val_bpb"),
        last_val_loss=module.last_validation.get("val/loss"),
        tokens_per_second=figures.tokens_per_second(module),
        train_seconds=control.train_seconds,
        resumed_from=checkpoints.resumed_from,
        stopped_by=control.stop_signal,
        is_main=trainer.is_global_zero,
    )


def _build_loggers(run_dir: Path, resumed_step: int, wandb: Mapping[str, Any] | None) -> list[Logger]:
    loggers: list[Logger] = [MetricsCsv(run_dir / METRICS_FILE, resumed_step=resumed_step)]
    remote = None if wandb is None else build_wandb(run_dir, **wandb)
    if remote is not None:
        loggers.append(remote)
        if resumed_step and placement.here().is_first:
            repeat_last(remote, read_rows(run_dir / METRICS_FILE))
    return loggers


def _model_writer(model: Transformer, tokenizer: Any, info: Mapping[str, Any]) -> WriteModel:
    def write(folder: Path, weights: Mapping[str, torch.Tensor], counters: Mapping[str, Any]) -> None:
        save_model_folder(
            folder, config=model.config, state_dict=weights, tokenizer=tokenizer, info={**info, **counters}
        )

    return write


def _prepare_resume(
    resume: str | Path | None, run_dir: Path, now: RunState, accept: Callable[[], None] = lambda: None
) -> Resumed | None:
    """The checkpoint to continue from, compared with this run; `None` for a fresh start.

    Raises:
        ValueError: the checkpoint does not fit, or the folder holds another run, which would be replaced.
    """
    checkpoint = checkpointing.find_checkpoint(resume, run_dir)
    resumed = None
    if checkpoint is not None:
        state = checkpoint.state()
        if placement.here().is_first:  # it knows facts that the others do not read: the hash of the base's weights
            checkpointing.check_resumable(checkpoint, state, now)
        log.info("resuming at step %d from %s", state.step, checkpoint.path)
        resumed = Resumed(checkpoint, state)
    if placement.here().is_first:
        former.make_way(run_dir, resume=resume, checkpoint=checkpoint)
        accept()
        checkpointing.tidy(run_dir)
    return resumed


def _already_done(run_dir: Path, model_name: str, resumed: Resumed) -> FitResult:
    """The result of a run that has nothing left to do."""
    state = resumed.state
    log.warning("nothing is left to do: %s is at step %d; raise trainer.max_steps to go on", run_dir, state.step)
    model_dir = run_dir / model_name
    best = state.best or {}
    return FitResult(
        # A run that was killed between its last checkpoint and its end may lack the folder.
        model_dir=model_dir if model_dir.exists() else resumed.checkpoint.path / model_name,
        steps=state.step,
        tokens=state.tokens,
        best_step=best.get("step", state.step),
        val_loss=best.get("val_loss"),
        val_bpb=best.get("val_bpb"),
        last_val_loss=None,
        tokens_per_second=state.tokens / state.train_seconds if state.train_seconds else 0.0,
        train_seconds=state.train_seconds,
        resumed_from=state.step,
        is_main=placement.here().is_first,
    )
