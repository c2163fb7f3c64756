"""`llmtrain finetune`: a model folder and task data to an adapter, a merged model folder and scores on held-out items.

Reads the settings and joins the parts; what a task is, how an adapter works, how training runs and how answers are
scored is theirs to know. The base folder is only read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.launch.base_model import base_model
from llmtrain.launch.provenance import provenance
from llmtrain.launch.reading import literal
from llmtrain.launch.report import beginning, tokenizer_facts, writer
from llmtrain.launch.task_examples import examples_from, fingerprint, task_from

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.checkpoint import LoadedModel
    from llmtrain.data.examples import Example
    from llmtrain.data.tasks import Task
    from llmtrain.model import Transformer
    from llmtrain.training.fit import FitResult
    from llmtrain.training.geometry import BatchGeometry, RunLength

logger = logging.getLogger(__name__)


_LOOKED_AT = 20  # steps, to say how much of their batches is padding


def check(settings: DictConfig, run_dir: Path, *, here: bool) -> None:
    """Everything that can be refused without model and data, for a run that is to be started later.

    Args:
        settings: Those of the command.
        run_dir: The run folder, which need not exist.
        here: Whether this machine is the one to train.

    Raises:
        ValueError: A setting that cannot work, or a folder that holds another run.
    """
    from llmtrain.launch.fitting import check_folder

    _check_settings(settings, here=here)
    check_folder(settings, run_dir, _known(settings))


def run(settings: DictConfig, run_dir: Path, accept: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Fine-tune, merge and measure; returns the results for the last line.

    Args:
        settings: Those of the command; `model` becomes the folder that was found under it.
        run_dir: The run folder.
        accept: Called when nothing can be refused any more, before anything is written there.

    Raises:
        ValueError: A setting that cannot work, before anything is trained.
        Ended: With `REQUEUE_EXIT_CODE` when a signal ended the run early.
    """
    from llmtrain.launch.fitting import check_folder, checked_length, end_if_stopped, tell_fresh_start

    batch = _check_settings(settings)
    check_folder(settings, run_dir, _known(settings))
    tell_fresh_start(settings, run_dir)
    from llmtrain.checkpoint import resolve_model

    # Links such as `latest` move on; the adapter and the run's own config must go on naming this folder.
    folder = resolve_model(settings.model).resolve()
    settings.model = literal(str(folder))
    task = task_from(settings)  # before the weights are read: of both, it is the one with more to refuse
    base, state_hash = base_model(settings, folder, run_dir)
    train, validation = examples_from(settings, base, task)
    length = checked_length(settings, rows=batch.rows, epoch_rows=len(train))
    tuning = _prepare(settings, base, state_hash, train)
    logger.info("%d examples, %d steps (%s), %s.", len(train), length.steps, length.decided_by, batch)
    result = _fit(settings, run_dir, base, tuning, batch, length, train, validation, accept)
    if not result.is_main:
        return {}
    end_if_stopped("finetune", run_dir, result)
    return _conclude(settings, run_dir, base, task, tuning, result)


def _check_settings(settings: DictConfig, *, here: bool = True) -> BatchGeometry:
    """Everything that can be checked without a model and data: raises `ValueError` in the first second."""
    from llmtrain.launch.fitting import check_anywhere, check_machine, checked_length
    from llmtrain.training.geometry import divide_batch

    trainer, adapter = settings.trainer, settings.adapter
    _check_data(settings)
    check_anywhere(settings)
    processes = check_machine(settings).world_size if here else 1
    if adapter.kind == "lora":
        from llmtrain.adapters import check_adapter

        check_adapter(adapter.r, adapter.lora_alpha, adapter.lora_dropout, adapter.target_modules)
    rows, size = trainer.batch_examples, trainer.micro_batch_size
    batch = divide_batch(rows, micro_batch_size=size, world_size=processes)
    checked_length(settings, rows=rows)
    return batch


def _check_data(settings: DictConfig) -> None:
    if "kind" not in settings.data or "max_length" not in settings.data:
        raise ValueError(
            "this data is for pretraining; fine-tuning takes data=zh_number, date_iso, hsk_pinyin, chatterbot or jsonl."
        )
    from llmtrain.data.examples import MIN_LENGTH
    from llmtrain.data.tasks import TASKS

    if settings.data.kind not in TASKS:
        raise ValueError(f"data.kind={settings.data.kind} is no task to fine-tune on: use {', '.join(TASKS)}.")
    if settings.data.max_length < MIN_LENGTH:
        raise ValueError(f"data.max_length={settings.data.max_length} must be at least {MIN_LENGTH}.")


@dataclass(frozen=True)
class _Tuning:
    """What is trained: the model, the adapter attached to it (or `None` for all weights), and what to report of it."""

    model: Transformer
    adapted: Any
    report: dict[str, Any]
    info: dict[str, Any]


def _prepare(settings: DictConfig, base: LoadedModel, state_hash: str, train: list[Example]) -> _Tuning:
    """Attach the adapter, or make every weight trainable."""
    from llmtrain import adapters

    adapted = None
    token_ids: list[int] = []
    report: dict[str, Any] = {}
    if settings.adapter.kind == "lora":
        token_ids, untrained = _token_ids(settings.adapter.train_tokens, base, train)
        adapted = adapters.attach(
            base.model,
            r=settings.adapter.r,
            lora_alpha=settings.adapter.lora_alpha,
            lora_dropout=settings.adapter.lora_dropout,
            target_modules=list(settings.adapter.target_modules),
            use_rslora=settings.adapter.use_rslora,
            use_dora=settings.adapter.use_dora,
            train_tokens=token_ids,
            seed=settings.seed,
            base_folder=base.folder,
        )
        report = {"trained_token_rows": len(token_ids), "untrained_target_tokens": untrained}
    trainable = sum(parameter.numel() for parameter in base.model.parameters() if parameter.requires_grad)
    logger.info(
        "Training %s of the model: %s parameters%s.",
        "all" if adapted is None else "an adapter",
        f"{trainable:,}",
        f", {report['trained_token_rows']} token rows among them" if report.get("trained_token_rows") else "",
    )
    trained = _occurring(train) if adapted is None else set(token_ids)
    info = _remembered(settings, base, train, trained) | {"base_state_hash": state_hash}
    return _Tuning(base.model, adapted, {"trainable_parameters": trainable, **report}, info)


def _remembered(settings: DictConfig, base: LoadedModel, train: list[Example], trained: set[int]) -> dict[str, Any]:
    """What `llmtrain.json` remembers of a fine-tuning: its own settings and data, and under `base` what it began from.

    Args:
        settings, base, train: Those of the run.
        trained: The ids whose rows are trained: never seen are only the others now.
    """
    info: dict[str, Any] = {"base_folder": str(base.folder), "data_fingerprint": fingerprint(train)}
    info |= provenance(settings)
    if "trained_length" in base.info:
        info["trained_length"] = base.info["trained_length"]
    if "never_seen" in base.info:
        info["never_seen"] = sorted(set(base.info["never_seen"]) - trained)
    info["base"] = {key: value for key, value in base.info.items() if key not in ("never_seen", "files")}
    return info


def _token_ids(choice: str, base: LoadedModel, train: list[Example]) -> tuple[list[int], int]:
    """Which embedding rows are trained, and how many target tokens stay with a row that no training ever touched.

    `auto` takes the special tokens, and of the ids that pretraining never saw those that occur in the examples: the
    others would only grow the adapter.
    """
    untouched = set(base.info.get("never_seen", []))
    targets = [label for example in train for label in example.labels if label >= 0]
    if choice == "none":
        untrained = sum(label in untouched for label in targets)
        if untrained:
            logger.warning(
                "adapter.train_tokens=none: %s of %s target tokens (%d different ones) were never seen in pretraining "
                "and their rows stay untrained; adapter.train_tokens=auto trains them.",
                f"{untrained:,}",
                f"{len(targets):,}",
                len(untouched & set(targets)),
            )
        return [], untrained
    if "never_seen" not in base.info:
        logger.info(
            "%s does not record which ids its training never saw: of the rows only special tokens' are trained.",
            base.folder,
        )
    return sorted((untouched & _occurring(train)) | set(base.tokenizer.special_ids.values())), 0


def _occurring(train: list[Example]) -> set[int]:
    """The ids that stand in the examples, as inputs or as targets."""
    ids = set().union(*(example.input_ids for example in train))
    return ids | {label for example in train for label in example.labels if label >= 0}


def _fit(
    settings: DictConfig,
    run_dir: Path,
    base: LoadedModel,
    tuning: _Tuning,
    batch: BatchGeometry,
    length: RunLength,
    train: list[Example],
    validation: list[Example],
    accept: Callable[[], None],
) -> FitResult:
    """Train through the one path of `training.fit`."""
    from llmtrain.checkpoint import save_adapter_folder
    from llmtrain.data.modules import FinetuneDataModule
    from llmtrain.launch.fitting import fit_arguments
    from llmtrain.training.fit import fit
    from llmtrain.training.loggers import run_id

    data = FinetuneDataModule(
        train,
        validation,
        pad_id=base.tokenizer.pad_id,
        micro_batch_size=batch.micro_batch_size,
        accumulation=batch.accumulation,
        total_steps=length.steps,
        seed=settings.seed,
        packing_length=_packing_length(settings, base),
    )
    used, computed = data.positions(_LOOKED_AT)
    logger.info("%.1f %% of the positions that are computed are padding.", 100 * (1 - used / computed))

    def write_adapter(folder: Path, weights: Mapping[str, Any], counters: Mapping[str, Any]) -> None:
        info = {**tuning.info, "wandb_run_id": run_id(run_dir), **counters}
        save_adapter_folder(folder, tuning.adapted, info=info, state_dict=weights)

    whole = tuning.adapted is None
    return fit(
        model=tuning.model,
        data=data,
        tokenizer=base.tokenizer,
        run_dir=run_dir,
        total_steps=length.steps,
        accumulation=batch.accumulation,
        validates=bool(validation),
        info=tuning.info,
        fixed=_fixed(settings, tuning, train),
        write_model=None if whole else write_adapter,
        model_name="model" if whole else "adapter",
        accept=beginning(accept, settings, run_dir, "finetune", lambda: _facts(base, tuning, train)),
        report=writer(run_dir),
        **fit_arguments(settings, length.steps),
    )


def _facts(base: LoadedModel, tuning: _Tuning, train: list[Example]) -> dict[str, Any]:
    """What the run's report says of its start."""
    return {"examples": len(train), "tokenizer": tokenizer_facts(base.tokenizer), **tuning.report}


def _packing_length(settings: DictConfig, base: LoadedModel) -> int | None:
    length, context = settings.trainer.packing_length, base.config.max_position_embeddings
    if length is not None and length > context:
        raise ValueError(f"trainer.packing_length={length} exceeds the model's context of {context} tokens; lower it.")
    return length


def _known(settings: DictConfig) -> dict[str, Any]:
    """As much of what a resumed run must share as the settings say."""
    known = {
        "the number of examples per step": settings.trainer.batch_examples,
        "trainer.packing_length": settings.trainer.packing_length,
    }
    return known | ({"adapter.kind": "none"} if settings.adapter.kind == "none" else {})


def _fixed(settings: DictConfig, tuning: _Tuning, train: list[Example]) -> dict[str, Any]:
    """What a resumed run must share with the run that it continues."""
    from llmtrain.adapters import adapter_config

    fixed = {
        "the base model's weights": tuning.info["base_state_hash"],
        "the training examples": fingerprint(train),
        **_known(settings),
    }
    if tuning.adapted is None:
        return fixed
    config = adapter_config(tuning.adapted)
    kept = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora")
    return fixed | {f"adapter.{key}": config[key] for key in kept} | {"token rows": config["trainable_token_indices"]}


def _merge(adapter_dir: Path, model_dir: Path) -> None:
    """Write the merged model folder, from the base's own weights and the adapter as they lie on the disk."""
    import torch

    from llmtrain.checkpoint import load_model_folder, save_model_folder

    merged = load_model_folder(adapter_dir, dtype=torch.float32)
    save_model_folder(
        model_dir,
        config=merged.config,
        state_dict=merged.model.state_dict(),
        tokenizer=merged.tokenizer,
        info={key: value for key, value in merged.info.items() if key not in ("format", "base_relative")},
    )


def _conclude(
    settings: DictConfig, run_dir: Path, base: LoadedModel, task: Task, tuning: _Tuning, result: FitResult
) -> dict[str, Any]:
    """Merge, measure base and fine-tuned model, and say what comes next."""
    from llmtrain.launch.comparison import compare

    adapter_dir = None if tuning.adapted is None else result.model_dir
    model_dir = run_dir / "model"
    if adapter_dir is not None:
        _merge(adapter_dir, model_dir)
    compared = compare(
        {"base": base.folder, "finetuned": model_dir},
        task,
        max_rows=settings.evaluation.max_rows,
        device=settings.trainer.accelerator,
        answers_file=run_dir / "answers.jsonl",
    )
    if adapter_dir is not None:
        logger.info("adapter: %s", adapter_dir)
    asking = 'chat ARGS="model=%s"' if task.open_ended else 'generate ARGS="model=%s chat=true" PROMPT="…"'
    logger.info("model folder: %s\nnext: make " + asking, model_dir, run_dir)
    return {
        "command": "finetune",
        "run_dir": str(run_dir),
        "adapter": None if adapter_dir is None else str(adapter_dir),
        "model": str(model_dir),
        "base_model": str(base.folder),
        "task": task.name,
        "metric": task.metric,
        **compared,
        "steps": result.steps,
        "best_step": result.best_step,
        "tokens": result.tokens,
        "val_loss": result.val_loss,
        "train_seconds": round(result.train_seconds, 2),
        "tokens_per_second": round(result.tokens_per_second, 1),
        **tuning.report,
    }
