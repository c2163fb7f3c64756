"""lm-eval's tasks as part of `evaluate`: which ones, asked of the engine, and their figures and items as ours are kept.

Beside the adapter itself and its measurement only this module knows lm-eval, which is imported when a task of its is
asked for. Knows settings by name; how a model is asked is `llmtrain.evaluation.harness`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.checkpoint import LoadedModel
    from llmtrain.evaluation import Team

logger = logging.getLogger(__name__)

_RIGHT_OR_WRONG = ("acc", "exact_match")  # of a task's metrics, those that two models are compared by first


@dataclass(frozen=True)
class Outcome:
    """Figures by task and metric as lm-eval names them (`acc`, `acc_stderr`, …), and the items of each task."""

    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    items: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


def check(section: DictConfig) -> None:
    """Refuses what cannot work before anything is loaded.

    Raises:
        ValueError: lm-eval is not installed, or a folder of tasks is not there.
    """
    if not section.tasks:
        return
    if find_spec("lm_eval") is None:
        raise ValueError(
            f"harness.tasks={list(section.tasks)} needs lm-eval, which is not installed: pip install "
            "'llmtrain[harness]'"
        )
    if section.include_path is not None and not Path(section.include_path).is_dir():
        raise ValueError(
            f"harness.include_path={section.include_path} is no folder: give one with lm-eval's task files"
        )


def find_tasks(section: DictConfig) -> Any:
    """lm-eval's manager of tasks that knows all that were asked for, or None if none were.

    Its own tasks are looked through only for names that the user's folder does not have; there are thousands.

    Raises:
        ValueError: There is no task of that name.
    """
    if not section.tasks:
        return None
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=section.include_path, include_defaults=False)
    if set(section.tasks) <= set(manager.all_tasks) | set(manager.all_groups) | set(manager.all_tags):
        return manager
    manager = TaskManager(include_path=section.include_path)
    missing = sorted(name for name in section.tasks if not manager.match_tasks([name]))
    if missing:
        where = f" in {section.include_path} or" if section.include_path else ""
        raise ValueError(
            f"there is no task {missing[0]!r}{where} among lm-eval's own: `lm-eval ls tasks` lists them; your own are "
            "YAML files in harness.include_path=<folder>"
        )
    return manager


def evaluate(settings: DictConfig, loaded: LoadedModel, manager: Any, team: Team) -> Outcome:
    """Asks every task; on rank 0 the outcome, elsewhere an empty one.

    Raises:
        ValueError: A task cannot be asked of this model.
    """
    from lm_eval import simple_evaluate

    from llmtrain.evaluation.harness import EngineLM
    from llmtrain.launch.inference import make_engine

    if team.rank:  # which would only say again what rank 0 says
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
    section = settings.harness
    engine = make_engine(loaded, max_rows=settings.max_rows)
    name = str(loaded.adapter_folder or loaded.folder)
    found = simple_evaluate(
        EngineLM(engine, name=name.replace("/", "__"), rank=team.rank, world_size=team.size),
        tasks=list(section.tasks),
        task_manager=manager,
        limit=section.limit,
        num_fewshot=section.num_fewshot,
        apply_chat_template=section.chat,
        bootstrap_iters=1000,
        log_samples=True,
    )
    if found is None:
        return Outcome()
    figures = {task: _plain(values) for task, values in found["results"].items()}
    return Outcome(figures, {task: [_item(each) for each in samples] for task, samples in found["samples"].items()})


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of one task; a filter's name stays behind the metric's if there is one."""
    numbers = {key.removesuffix(",none"): value for key, value in values.items() if "," in key}
    return {key: float(value) for key, value in numbers.items() if not isinstance(value, str)}


def _item(sample: Mapping[str, Any]) -> dict[str, Any]:
    """One of lm-eval's samples as `llmtrain.evaluation` has its items."""
    metric = next((name for name in sample["metrics"] if name in _RIGHT_OR_WRONG), sample["metrics"][0])
    value = sample[metric]
    points, possible = value if isinstance(value, Sequence) and len(value) == 2 else (value, 1)
    return {
        "prompt": sample["arguments"][0][0],
        "reference": str(sample["target"]),
        "prediction": sample["filtered_resps"],
        "metric": metric,
        "points": float(points),
        "possible": float(possible),
        "also": {name: sample[name] for name in sample["metrics"] if name != metric},
        "details": {"doc_id": sample["doc_id"], "filter": sample["filter"], "arguments": sample["arguments"]},
        "finish_reason": None,
        "error": None,
    }
