"""`llmtrain evaluate`: bits per byte on token shards and scores on tasks, of any model folder or adapter.

Finds out what to measure on, joins the parts, and prints the table; measuring is `llmtrain.evaluation`'s.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.launch.inference import load_model, make_engine
from llmtrain.launch.task_examples import NOT_THE_TASKS

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.checkpoint import LoadedModel
    from llmtrain.data.shards import ShardSet
    from llmtrain.data.tasks import Task
    from llmtrain.evaluation import BitsPerByte

logger = logging.getLogger(__name__)

DEFAULT_TASK = "zh_number"
# What the remembered settings of a task hold besides what says which items it has.
_NOT_THE_ITEMS = (*NOT_THE_TASKS, "data_dir")


def run(settings: DictConfig, run_dir: Path) -> dict[str, Any]:
    """Measures one model; every answer to a task goes to `items-<task>.jsonl` in the run folder.

    Returns:
        `val_bpb` and `val_loss` (None when nothing was measured on) and `tasks`: per task its score, chance, and more.

    Raises:
        ValueError: The model, the shards or a task is not there, or they do not belong together.
    """
    started = time.perf_counter()
    _check(settings)
    loaded = load_model(settings)
    shards = _shards(settings, loaded)
    tasks = [_task(name, values, settings) for name, values in _task_settings(settings, loaded)]
    measured = _bits_per_byte(settings, loaded, shards) if shards else None
    scores = {task.name: _score(settings, loaded, task, run_dir) for task in tasks}
    logger.info(_table(measured, scores))
    return {
        "command": "evaluate",
        "model": str(loaded.adapter_folder or loaded.folder),
        "shards": str(shards.folder) if shards else None,
        "val_bpb": measured and measured["bpb"],
        "val_loss": measured and measured["loss"],
        "val_tokens": measured and measured["tokens"],
        "val_bytes": measured and measured["bytes"],
        "tasks": scores,
        "seconds": round(time.perf_counter() - started, 2),
    }


def _check(settings: DictConfig) -> None:
    """Everything that can be checked without the model: raises `ValueError` in the first second."""
    from llmtrain.data.tasks import TASKS

    names = settings.tasks.names
    unknown = [name for name in ([names] if isinstance(names, str) else names) if name not in (*TASKS, "auto")]
    if unknown:
        raise ValueError(f"there is no task {unknown[0]!r}: choose one of {', '.join(TASKS)}")
    if settings.shards_dir not in (None, "auto"):
        if settings.get("data") is not None:
            raise ValueError("both shards_dir and data say what to measure on: give one of them")
        if not Path(settings.shards_dir).is_dir():
            raise ValueError(f"no token shards at {settings.shards_dir}: run `llmtrain prepare` to make them")
    if settings.tasks.metric is not None:
        from llmtrain.evaluation.metrics import find_metric

        find_metric(settings.tasks.metric)


# Bits per byte


def _shards(settings: DictConfig, loaded: LoadedModel) -> ShardSet | None:
    """The shards to measure on: those named, those of the corpus named, or the model's own validation text."""
    from llmtrain.data.shards import ShardSet

    if settings.shards_dir is None:
        return None
    if settings.shards_dir != "auto":
        folder = Path(settings.shards_dir)
        shards = ShardSet.open(folder / "val" if (folder / "val").is_dir() else folder)
    elif settings.get("data") is not None:
        shards = _prepared(settings, settings.data, loaded)
    else:
        found = _own_shards(settings, loaded)
        if found is None:
            return None
        shards = found
    shards.check_tokenizer(loaded.tokenizer)
    return shards


def _own_shards(settings: DictConfig, loaded: LoadedModel) -> ShardSet | None:
    """The validation text of the model's pretraining: found by its fingerprint, or prepared again."""
    from omegaconf import OmegaConf

    from llmtrain.data.shards import ShardSet

    pretraining = _pretraining(loaded.info)
    fingerprint = pretraining.get("data_fingerprint")
    if fingerprint:
        folders = sorted((Path(settings.paths.data_dir) / "shards").glob(f"*-{fingerprint[:12]}/val/manifest.json"))
        for folder in folders:
            shards = ShardSet.open(folder.parent)
            if shards.manifest["tokenizer_hash"] == loaded.tokenizer.hash:
                return shards
    data = _data_of(pretraining)
    if data and data.get("kind") not in _task_names():
        return _prepared(settings, OmegaConf.create(dict(data)), loaded)
    logger.warning(
        "%s does not say what text it was trained on, so there are no bits per byte: give data=… or shards_dir=…",
        loaded.folder,
    )
    return None


def _pretraining(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is remembered of the pretraining: of a fine-tuned model, that of its base, or of its base's base."""
    while isinstance(info.get("base"), Mapping):
        info = info["base"]
    return info


def _data_of(info: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The section `data` of the settings that a model folder remembers."""
    config = info.get("config")
    data = config.get("data") if isinstance(config, Mapping) else None
    return data if isinstance(data, Mapping) else None


def _prepared(settings: DictConfig, data: DictConfig, loaded: LoadedModel) -> ShardSet:
    """The validation shards of a corpus, made with the model's own tokenizer unless they are there."""
    from omegaconf import OmegaConf

    from llmtrain.data.prepare import prepare
    from llmtrain.launch.prepare import corpus_from

    if data.get("kind") in _task_names():
        raise ValueError(
            f"data={data.kind} is a task and has no text to measure bits per byte on: say tasks={data.kind} instead"
        )
    corpus = corpus_from(OmegaConf.create({"data": data, "paths": settings.paths}))
    return prepare(corpus, loaded.tokenizer, data_dir=settings.paths.data_dir).val


def _bits_per_byte(settings: DictConfig, loaded: LoadedModel, shards: ShardSet) -> BitsPerByte:
    from llmtrain.evaluation import bits_per_byte

    context = loaded.config.max_position_embeddings
    length = settings.sequence_length or loaded.info.get("trained_length") or context
    if not 1 <= length <= context:
        raise ValueError(f"sequence_length must lie in 1 … {context}, the model's context, got {length}")
    logger.info("bits per byte on %s, windows of %d tokens …", shards.folder, length)
    return bits_per_byte(
        loaded.model,
        shards,
        sequence_length=length,
        eos_id=loaded.tokenizer.eos_id,
        batch_size=settings.batch_size,
    )


# Tasks


def _task_names() -> frozenset[str]:
    from llmtrain.data.tasks import TASKS

    return frozenset(TASKS)


def _task_settings(settings: DictConfig, loaded: LoadedModel) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tasks to score and what each is built with.

    A task that the model was fine-tuned on is built as it was then: otherwise other items would be held out, and the
    model would be asked what it was trained on.
    """
    from omegaconf import OmegaConf

    own = _data_of(loaded.info) or {}
    names: Any = OmegaConf.to_container(settings.tasks, resolve=True)["names"]  # type: ignore[call-overload,index]
    if names == "auto":
        names = [own["kind"]] if own.get("kind") in _task_names() else [DEFAULT_TASK]
    given: Any = OmegaConf.to_container(settings.tasks.settings, resolve=True)
    for name in [names] if isinstance(names, str) else names:
        kept = own if own.get("kind") == name else {}
        values = {key: value for key, value in kept.items() if key not in _NOT_THE_ITEMS}
        yield name, values | (given.get(name) or {})
    unused = sorted(set(given) - set([names] if isinstance(names, str) else names))
    if unused:
        logger.warning("tasks.settings.%s is not used: that task is not among those scored", unused[0])


def _task(name: str, values: dict[str, Any], settings: DictConfig) -> Task:
    import inspect

    from llmtrain.data.tasks import TASKS, build_task

    if name in TASKS and "data_dir" in inspect.signature(TASKS[name]).parameters:
        values = {"data_dir": settings.paths.data_dir, **values}
    return build_task(name, **values)


def _score(settings: DictConfig, loaded: LoadedModel, task: Task, run_dir: Path) -> dict[str, Any]:
    """Score one task and keep its answers."""
    from llmtrain.evaluation import score_task

    items = list(task.test)[: settings.tasks.examples]
    metric = settings.tasks.metric or task.metric
    logger.info("%s: %d items …", task.name, len(items))
    engine = make_engine(loaded, max_rows=min(settings.max_rows, len(items)))
    chance = task.chance if metric == task.metric else None  # the task's own is by its own metric
    result = score_task(engine, items, metric=metric, chance=chance)
    if run_dir.is_dir():
        with (run_dir / f"items-{task.name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(item, ensure_ascii=False) + "\n" for item in result["items"])
    figures = {key: result[key] for key in ("metric", "score", "chance", "n", "stopped", "errors")}
    return figures | ({"baselines": dict(task.baselines)} if task.baselines and metric == task.metric else {})


def _table(measured: BitsPerByte | None, scores: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    if measured:
        lines.append(f"{'bits per byte':<28}{measured['bpb']:8.4f}   on {measured['bytes']:,} bytes")
        lines.append(f"{'loss (nats per token)':<28}{measured['loss']:8.4f}   on {measured['tokens']:,} tokens")
    if scores:
        lines.append(f"{'task':<28}{'score':>8}{'chance':>9}{'items':>7}   measure")
    for name, result in scores.items():
        measure = result["metric"].replace("_", " ")
        lines.append(f"{name:<28}{result['score']:8.3f}{result['chance']:9.3f}{result['n']:7d}   {measure}")
        for baseline, score in result.get("baselines", {}).items():
            lines.append(f"{'  ' + baseline.replace('_', ' '):<28}{score:8.3f}")
    return "\n".join(lines) or "nothing was measured: give data=…, shards_dir=… or tasks=…"
