"""What commands that train hand to `training.fit` alike: the sections optim, strategy, trainer and logger.

Knows the names of settings and of `fit`'s arguments, and nothing of models or data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.training.geometry import RunLength

# Keys of `optim` that are arguments of `fit`; the others are the optimiser's own.
_SCHEDULE = ("lr", "schedule", "warmup_steps", "min_lr_ratio", "decay_fraction", "grad_clip")
_TRAINER = ("accelerator", "devices", "num_nodes", "precision", "gradient_checkpointing", "log_every", "val_every")
_SAVING = ("checkpoint_every", "keep_last", "max_skipped_steps", "spike_alarm")


def fit_arguments(settings: DictConfig) -> dict[str, Any]:
    """The arguments of `fit` that do not depend on the command."""
    optim, trainer, strategy = settings.optim, settings.trainer, settings.strategy
    return {
        **{key: optim[key] for key in _SCHEDULE},
        **{key: trainer[key] for key in (*_TRAINER, *_SAVING)},
        "seed": settings.seed,
        "optimizer": optim.name,
        "optimizer_options": {key: value for key, value in optim.items() if key not in ("name", *_SCHEDULE)},
        "strategy": strategy.name,
        "strategy_options": {key: value for key, value in strategy.items() if key != "name"},
        "compile_model": trainer.compile,
        "wandb": _wandb(settings),
        "resume": settings.resume,
    }


def checked_length(settings: DictConfig, *, rows: int, epoch_rows: int, row_tokens: int | None = None) -> RunLength:
    """How many steps the run takes; the schedule is checked against them.

    Args:
        settings: Those of the command.
        rows: Rows of one step.
        epoch_rows: Rows of one epoch.
        row_tokens: Tokens of one row, where all rows have the same.

    Raises:
        ValueError: Nothing says when to stop, or the schedule does not fit into the steps.
    """
    from llmtrain.training.geometry import run_length
    from llmtrain.training.optim import schedule

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
        warmup_steps=optim.warmup_steps,
        min_lr_ratio=optim.min_lr_ratio,
        decay_fraction=optim.decay_fraction,
    )
    return length


def _wandb(settings: DictConfig) -> dict[str, Any] | None:
    from omegaconf import OmegaConf

    if settings.logger.kind == "csv":
        return None
    return {
        "project": settings.logger.project,
        "mode": settings.logger.mode,
        "name": settings.name,
        "config": OmegaConf.to_container(settings, resolve=True),
    }
