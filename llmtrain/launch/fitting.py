"""What commands that train hand to `training.fit` alike: the sections optim, strategy, trainer and logger.

Knows the names of settings and of `fit`'s arguments, and nothing of models or data.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.launch.ending import Ended

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.training.fit import FitResult
    from llmtrain.training.geometry import RunLength
    from llmtrain.training.hardware import Machine

logger = logging.getLogger(__name__)

# Keys of `optim` that are arguments of `fit`; the others are the optimiser's own.
_SCHEDULE = ("lr", "schedule", "warmup_steps", "min_lr_ratio", "decay_fraction", "grad_clip")
_TRAINER = ("accelerator", "devices", "num_nodes", "precision", "gradient_checkpointing", "log_every", "val_every")
_WAITING = ("timeout",)
_SAVING = ("checkpoint_every", "keep_last", "max_skipped_steps", "spike_alarm")
_NOT_IN_PROJECTS = "/\\#?,%:"
_ENDLESS = 2**62  # rows of an epoch, as long as nobody has counted them


def check_anywhere(settings: DictConfig) -> None:
    """All that `fit` would refuse and that needs neither text, nor a model, nor the machine that is to train.

    Imports no Lightning, which takes seconds.

    Raises:
        ValueError: A setting that cannot work anywhere.
    """
    optim, resume = settings.optim, settings.get("resume")
    _check_logger(settings.logger)
    if resume not in (None, "auto") and not Path(resume).expanduser().exists():
        raise ValueError(f"resume={resume} does not exist; give a run folder, a checkpoint, or auto.")

    from llmtrain.training.optim import check_grad_clip, check_optimizer  # needs torch, whose import takes a second

    check_grad_clip(optim.grad_clip)
    check_optimizer(**{key: value for key, value in optim.items() if key == "lr" or key not in _SCHEDULE})


def check_machine(settings: DictConfig) -> Machine:
    """What depends on the machine that this is; returns it.

    Raises:
        ValueError: A setting that cannot work here.
    """
    from llmtrain.training import hardware, placement, wandb_server
    from llmtrain.training.deepspeed.config import check_strategy

    trainer = settings.trainer
    machine = hardware.resolve_machine(trainer.accelerator, trainer.devices, trainer.num_nodes, trainer.precision)
    check_strategy(
        **settings.strategy,
        devices=machine.devices,
        num_nodes=machine.num_nodes,
        optimizer=settings.optim.name,
        precision=machine.precision,
    )
    if trainer.compile:
        hardware.check_compiler()
    if machine.precision == "bf16" and not hardware.has_native_bf16(machine.accelerator):
        logger.warning("trainer.precision=bf16: this processor has no bf16 arithmetic, so it will be slower than fp32.")
    if settings.logger.get("mode") == "online" and placement.here().is_first:
        wandb_server.resolve_mode("online")  # an hour before the run would find out
    return machine


def check_folder(settings: DictConfig, run_dir: Path, facts: Mapping[str, Any]) -> None:
    """On the first process: whether the run may begin in its folder, or go on from what `resume` says.

    Args:
        settings: Those of the command.
        run_dir: The run folder, which need not exist.
        facts: What a resumed run must share, as far as it is known without text and model.

    Raises:
        ValueError: The folder holds another run, there is no checkpoint, or it is of a run that differs.
    """
    from llmtrain.training import former, placement
    from llmtrain.training.checkpointing import RunState, check_resumable, find_checkpoint

    if not placement.here().is_first:
        return  # the first process may have begun to write there already
    checkpoint = find_checkpoint(settings.resume, run_dir)
    former.make_way(run_dir, resume=settings.resume, checkpoint=checkpoint)
    if checkpoint is not None:
        known = {**facts, "optim.name": settings.optim.name, "seed": settings.seed}
        check_resumable(checkpoint, checkpoint.state(), RunState(0, 0, 0.0, fixed=known))


def tell_fresh_start(settings: DictConfig, run_dir: Path) -> None:
    """On the first process: says it if `resume=auto` finds nothing to go on from."""
    from llmtrain.training import former, placement

    if placement.here().is_first:
        former.tell_fresh_start(run_dir, resume=settings.resume)


def _check_logger(logging_to: DictConfig) -> None:
    project = logging_to.get("project")
    if project is not None and (len(str(project)) > 128 or set(str(project)) & set(_NOT_IN_PROJECTS)):
        raise ValueError(
            f"logger.project={project} must be a name of at most 128 characters without any of "
            f"{' '.join(_NOT_IN_PROJECTS)}, which the server does not take."
        )


def fit_arguments(settings: DictConfig, steps: int) -> dict[str, Any]:
    """The arguments of `fit` that do not depend on the command, for a run of so many steps."""
    from llmtrain.training.optim import resolve_warmup

    optim, trainer, strategy = settings.optim, settings.trainer, settings.strategy
    return {
        **{key: optim[key] for key in _SCHEDULE},
        "warmup_steps": resolve_warmup(optim.warmup_steps, steps),
        **{key: trainer[key] for key in (*_TRAINER, *_WAITING, *_SAVING)},
        "seed": settings.seed,
        "optimizer": optim.name,
        "optimizer_options": {key: value for key, value in optim.items() if key not in ("name", *_SCHEDULE)},
        "strategy": strategy.name,
        "strategy_options": {key: value for key, value in strategy.items() if key != "name"},
        "compile_model": trainer.compile,
        "wandb": _wandb(settings),
        "resume": settings.resume,
        "report_every": settings.get("report_every"),
    }


def checked_length(
    settings: DictConfig, *, rows: int, epoch_rows: int = _ENDLESS, row_tokens: int | None = None
) -> RunLength:
    """How many steps the run takes; the schedule is checked against them.

    Args:
        settings: Those of the command.
        rows: Rows of one step.
        epoch_rows: Rows of one epoch; before they are counted the result is the most steps that the settings allow,
            and what does not fit into those fits into no run.
        row_tokens: Tokens of one row, where all rows have the same.

    Raises:
        ValueError: Nothing says when to stop, or the schedule does not fit into the steps.
    """
    from llmtrain.training.geometry import run_length
    from llmtrain.training.optim import resolve_warmup, schedule

    trainer, optim = settings.trainer, settings.optim
    length = run_length(
        max_steps=trainer.max_steps,
        max_tokens=trainer.get("max_tokens"),
        max_epochs=trainer.max_epochs,
        rows=rows,
        epoch_rows=epoch_rows,
        row_tokens=row_tokens,
    )
    schedule(
        optim.schedule,
        step=0,
        total_steps=length.steps,
        warmup_steps=resolve_warmup(optim.warmup_steps, length.steps),
        min_lr_ratio=optim.min_lr_ratio,
        decay_fraction=optim.decay_fraction,
    )
    return length


def end_if_stopped(command: str, run_dir: Path, result: FitResult) -> None:
    """Says that a signal ended the run, and where it stands.

    Raises:
        Ended: It did; with `REQUEUE_EXIT_CODE`.
    """
    from llmtrain.training.early import REQUEUE_EXIT_CODE

    if result.stopped_by is None:
        return
    logger.warning(
        "stopped by %s after step %d, which is saved; resume=auto goes on from there", result.stopped_by, result.steps
    )
    results = {"command": command, "run_dir": str(run_dir), "stopped_by": result.stopped_by, "step": result.steps}
    raise Ended({**results, "tokens": result.tokens}, REQUEUE_EXIT_CODE)


def _wandb(settings: DictConfig) -> dict[str, Any] | None:
    from omegaconf import OmegaConf

    if settings.logger.kind == "csv":
        return None
    return {
        "project": str(settings.logger.project),
        "mode": settings.logger.mode,
        "name": settings.name,
        "config": OmegaConf.to_container(settings, resolve=True),
    }
