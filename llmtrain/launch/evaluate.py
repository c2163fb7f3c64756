"""`llmtrain evaluate`: bits per byte on token shards, scores on tasks and on lm-eval's, of any model folder or adapter.

Finds out what to measure on, joins the parts, and prints the table; measuring is `llmtrain.evaluation`'s.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.launch import harness
from llmtrain.launch.inference import load_model, make_engine
from llmtrain.launch.measured_text import data_of, shards_from, task_names
from llmtrain.launch.task_examples import NOT_THE_TASKS
from llmtrain.launch.teaming import check_team, working_together

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.checkpoint import LoadedModel
    from llmtrain.data.questions import Question
    from llmtrain.data.shards import ShardSet
    from llmtrain.data.tasks import Item, Task
    from llmtrain.evaluation import BitsPerByte, ItemResult, TaskResult, Team

logger = logging.getLogger(__name__)

DEFAULT_TASK = "zh_number"
# What the remembered settings of a task hold besides what says which items it has.
_NOT_THE_ITEMS = (*NOT_THE_TASKS, "data_dir")
_FIGURES = ("metric", "score", "interval", "chance", "n", "stopped", "errors", "metrics")


@dataclass(frozen=True)
class _Asked:
    """What is to be scored: a task's items, and by what; for questions with choices there is no metric to choose."""

    name: str
    items: Sequence[Item | Question]
    metrics: tuple[str, ...] = ()
    guess: str | None = None
    baselines: Mapping[str, Sequence[str]] | None = None


def run(settings: DictConfig, run_dir: Path) -> dict[str, Any]:
    """Measures one model; every answer to a task goes to `items-<task>.jsonl` in the run folder.

    Returns:
        `val_bpb` and `val_loss` (None when nothing was measured on), `tasks`: per task its score, interval, chance, and
        more, and `harness`: lm-eval's figures by task.

    Raises:
        ValueError: The model, the shards or a task is not there, or they do not belong together.
    """
    started = time.perf_counter()
    _check(settings)
    place = check_team(settings)
    loaded = load_model(settings, local_rank=place.local_rank or 0)
    shards = shards_from(settings, loaded)
    tasks = [*_tasks(settings, loaded), *_own_files(settings)]
    _check_names([*(task.name for task in tasks), *settings.harness.tasks], settings)
    foreign = harness.find_tasks(settings.harness)
    with working_together(settings, run_dir) as team:
        measured = _bits_per_byte(settings, loaded, shards, team) if shards else None
        results = {task.name: _score(settings, loaded, task, team) for task in tasks}
        theirs = harness.evaluate(settings, loaded, foreign, team) if foreign else harness.Outcome()
    if team.rank:
        return {}
    scores = {task.name: _figures(task, results[task.name]) for task in tasks}
    if run_dir.is_dir():
        for name, result in results.items():
            _write_items(run_dir / f"items-{name}.jsonl", result["items"])
        for name, items in theirs.items.items():
            _write_items(run_dir / f"items-{name}.jsonl", items)
    logger.info(_table(measured, scores, theirs.figures))
    return {
        "command": "evaluate",
        "model": str(loaded.adapter_folder or loaded.folder),
        "shards": str(shards.folder) if shards else None,
        "val_bpb": measured and measured["bpb"],
        "val_bpb_interval": measured and measured["interval"],
        "val_loss": measured and measured["loss"],
        "val_tokens": measured and measured["tokens"],
        "val_bytes": measured and measured["bytes"],
        "tasks": scores,
        "harness": theirs.figures,
        "processes": team.size,
        "seconds": round(time.perf_counter() - started, 2),
    }


def _check(settings: DictConfig) -> None:
    """Everything that can be checked without the model: raises `ValueError` in the first second."""
    names = settings.tasks.names
    unknown = [name for name in ([names] if isinstance(names, str) else names) if name not in (*_known(), "auto")]
    if unknown:
        raise ValueError(f"there is no task {unknown[0]!r}: choose one of {', '.join(_known())}")
    if settings.shards_dir not in (None, "auto"):
        if settings.get("data") is not None:
            raise ValueError("both shards_dir and data say what to measure on: give one of them")
        if not Path(settings.shards_dir).is_dir():
            raise ValueError(f"no token shards at {settings.shards_dir}: run `llmtrain prepare` to make them")
    from llmtrain.evaluation.metrics import find_metric

    for metric in [*filter(None, [settings.tasks.metric]), *settings.tasks.also]:
        find_metric(metric)
    harness.check(settings.harness)


def _known() -> tuple[str, ...]:
    from llmtrain.data.tasks import TASKS

    return tuple(TASKS)


def _check_names(names: Sequence[str], settings: DictConfig) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ValueError(
            f"two of the tasks are called {twice}, and files of tasks.files={list(settings.tasks.files)} are called by "
            "their names: rename one, or evaluate them one after the other"
        )


# Bits per byte


def _bits_per_byte(settings: DictConfig, loaded: LoadedModel, shards: ShardSet, team: Team) -> BitsPerByte:
    from llmtrain.evaluation import bits_per_byte

    context = loaded.config.max_position_embeddings
    length = settings.sequence_length or loaded.info.get("trained_length") or context
    if not 1 <= length <= context:
        raise ValueError(f"sequence_length must lie in 1 … {context}, the model's context, got {length}")
    logger.info("bits per byte on %s, windows of %d tokens …", shards.folder, length)
    tokenizer = loaded.tokenizer
    special = set(tokenizer.special_ids.values())
    return bits_per_byte(
        loaded.model,
        shards,
        sequence_length=length,
        eos_id=tokenizer.eos_id,
        batch_size=settings.batch_size,
        token_bytes=[
            0 if each in special else len(tokenizer.token_bytes(each)) for each in range(tokenizer.vocab_size)
        ],
        team=team,
    )


# Tasks


def _tasks(settings: DictConfig, loaded: LoadedModel) -> Iterator[_Asked]:
    for name, values in _task_settings(settings, loaded):
        task = _task(name, values, settings)
        metric = settings.tasks.metric or task.metric
        baselines = task.baselines if metric == task.metric else None
        items = list(task.test)[: settings.tasks.examples]
        yield _Asked(task.name, items, (metric, *settings.tasks.also), task.guess, baselines)


def _task_settings(settings: DictConfig, loaded: LoadedModel) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tasks to score and what each is built with.

    A task that the model was fine-tuned on is built as it was then: otherwise other items would be held out, and the
    model would be asked what it was trained on.
    """
    from omegaconf import OmegaConf

    own = data_of(loaded.info) or {}
    names: Any = OmegaConf.to_container(settings.tasks, resolve=True)["names"]  # type: ignore[call-overload,index]
    if names == "auto":
        names = [own["kind"]] if own.get("kind") in task_names() else [DEFAULT_TASK]
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


def _own_files(settings: DictConfig) -> Iterator[_Asked]:
    """The user's own items, all of which are asked: each file is a task, called as the file is."""
    from llmtrain.data.files import find_files
    from llmtrain.data.json_values import SUFFIXES
    from llmtrain.data.questions import read_questions

    for file in find_files(list(settings.tasks.files), SUFFIXES) if settings.tasks.files else []:
        conversations, questions = read_questions(file)
        if conversations and questions:
            raise ValueError(
                f"{file} holds {len(questions)} items with choices and {len(conversations)} without, which are scored "
                "by different metrics: give two files"
            )
        name = file.name.partition(".")[0]
        if questions:
            yield _Asked(name, questions[: settings.tasks.examples])
        else:
            metrics = (settings.tasks.metric or "exact_match", *settings.tasks.also)
            yield _Asked(name, conversations[: settings.tasks.examples], metrics)


def _score(settings: DictConfig, loaded: LoadedModel, asked: _Asked, team: Team) -> TaskResult:
    from llmtrain.evaluation import score_choices, score_task

    logger.info("%s: %d items …", asked.name, len(asked.items))
    engine = make_engine(loaded, max_rows=min(settings.max_rows, max(1, len(team.deal(asked.items)))))
    items: Any = asked.items
    if not asked.metrics:
        return score_choices(engine, items, team=team)
    return score_task(engine, items, metric=asked.metrics, guess=asked.guess, team=team)


def _figures(asked: _Asked, result: TaskResult) -> dict[str, Any]:
    from llmtrain.evaluation import score_answers

    figures: dict[str, Any] = {key: result[key] for key in _FIGURES}  # type: ignore[literal-required]
    if asked.baselines:
        references = [item["reference"] for item in result["items"]]
        figures["baselines"] = {
            name: score_answers(result["metric"], answers[: len(references)], references)
            for name, answers in asked.baselines.items()
        }
    return figures


def _write_items(file: Path, items: Iterable[ItemResult | Mapping[str, Any]]) -> None:
    with file.open("w", encoding="utf-8") as opened:
        opened.writelines(json.dumps(item, ensure_ascii=False) + "\n" for item in items)


def _table(
    measured: BitsPerByte | None, scores: Mapping[str, Mapping[str, Any]], theirs: Mapping[str, Mapping[str, Any]]
) -> str:
    lines = []
    if measured:
        low, high = measured["interval"]
        lines.append(
            f"{'bits per byte':<28}{measured['bpb']:8.4f}   {low:.4f} … {high:.4f} on {measured['bytes']:,} bytes"
        )
        lines.append(f"{'loss (nats per token)':<28}{measured['loss']:8.4f}   on {measured['tokens']:,} tokens")
    if scores:
        lines.append(f"{'task':<28}{'score':>8}{'95 % interval':>17}{'chance':>9}{'items':>7}   measure")
    for name, result in scores.items():
        for metric, found in result["metrics"].items():
            low, high = found["interval"]
            shown = name if metric == result["metric"] else ""
            lines.append(
                f"{shown:<28}{found['score']:8.3f}{low:9.3f} … {high:.3f}{found['chance']:9.3f}{result['n']:7d}   "
                f"{metric.replace('_', ' ')}"
            )
        for baseline, score in result.get("baselines", {}).items():
            lines.append(f"{'  ' + baseline.replace('_', ' '):<28}{score:8.3f}")
    for name, figures in theirs.items():
        for metric, value in figures.items():
            if isinstance(value, float | int) and "stderr" not in metric:
                lines.append(f"{name:<28}{value:8.4g}   lm-eval's {metric}")
    return "\n".join(lines) or "nothing was measured: give data=…, shards_dir=… or tasks=…"
