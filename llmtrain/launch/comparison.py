"""How two models answer the same held-out items: a table of scores and a few answers side by side.

Knows how results are shown; asking and scoring are `llmtrain.evaluation`'s.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmtrain.data.tasks import Task
    from llmtrain.evaluation import TaskResult

logger = logging.getLogger(__name__)

_SHOWN_ANSWERS = 5
_SHOWN_OPEN_ANSWERS = 20


def compare(
    folders: Mapping[str, Path], task: Task, *, max_rows: int, device: str, answers_file: Path
) -> dict[str, Any]:
    """Ask the models of both folders the task's held-out items; log the table, write down every answer.

    Args:
        folders: The model folders `base` and `finetuned`.
        task: Whose test items are asked.
        max_rows: Items that are answered at once.
        device: `auto`, `cpu` or `gpu`.
        answers_file: Gets one JSON object per item.

    Returns:
        `scores` of `base`, `finetuned` and `chance`, and of the task's own baselines; of both models `held_out_loss`,
        nats per token of the held-out answers and the ends of their turns, and `stopped`, the share of their own
        answers that ended by themselves.
    """
    from llmtrain.checkpoint import load_model_folder
    from llmtrain.evaluation import answer_loss, score_answers, score_task
    from llmtrain.launch.inference import make_engine
    from llmtrain.training.hardware import resolve_accelerator

    torch_device = "cuda" if resolve_accelerator(device) == "gpu" else "cpu"
    results: dict[str, TaskResult] = {}
    losses: dict[str, float | None] = {}
    for name, folder in folders.items():
        engine = make_engine(load_model_folder(folder, device=torch_device), max_rows=max_rows)
        results[name] = score_task(engine, list(task.test), metric=task.metric, guess=task.guess, warns=not results)
        losses[name] = answer_loss(engine, task.test)
    base, finetuned = results["base"], results["finetuned"]
    references = [item["reference"] for item in finetuned["items"]]
    baselines = {name: score_answers(task.metric, answers, references) for name, answers in task.baselines.items()}
    scores = {"base": base["score"], "finetuned": finetuned["score"], "chance": finetuned["chance"], **baselines}
    stopped = {name: result["stopped"] for name, result in results.items()}
    logger.info(_table(task, scores, losses, stopped))
    logger.info(_open_answers(finetuned) if task.open_ended else _answers(base, finetuned))
    with answers_file.open("w", encoding="utf-8") as file:
        for before, after in zip(base["items"], finetuned["items"], strict=True):
            record = {**after, "base_prediction": before["prediction"]}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return {"scores": scores, "held_out_loss": losses, "stopped": stopped}


def _table(
    task: Task, scores: Mapping[str, float], losses: Mapping[str, float | None], stopped: Mapping[str, float]
) -> str:
    names = {"base": "base model", "finetuned": "fine-tuned model", "chance": "chance (one answer to everything)"}
    lines = [f"{task.name}: {task.metric.replace('_', ' ')} on {len(task.test)} held-out items"]
    lines += [f"  {names.get(name, name.replace('_', ' ')):<36}{score:7.3f}" for name, score in scores.items()]
    base, finetuned = losses["base"], losses["finetuned"]
    if base is not None and finetuned is not None:
        lines.append(f"loss on their answers, nats per token: base {base:.3f}, fine-tuned {finetuned:.3f}")
    lines.append("answers that ended by themselves: base {base:.0%}, fine-tuned {finetuned:.0%}".format(**stopped))
    return "\n".join(lines)


def _answers(before: TaskResult, after: TaskResult) -> str:
    """The first answers, and the first wrong one if there is any among the others."""
    pairs = list(zip(before["items"], after["items"], strict=True))
    wrong = [pair for pair in pairs[_SHOWN_ANSWERS:] if pair[1]["points"] < pair[1]["possible"]]
    lines = ["prompt → fine-tuned answer (base answer)"]
    for old, new in pairs[:_SHOWN_ANSWERS] + wrong[:1]:
        right = new["points"] == new["possible"]
        wanted = "" if right else f", wanted {_short(new['reference'])}"
        mark = "✓" if right else "✗"
        lines.append(
            f"  {mark} {_short(new['prompt'])} → {_short(new['prediction'])}{wanted} ({_short(old['prediction'])})"
        )
    return "\n".join(lines)


def _open_answers(result: TaskResult) -> str:
    """The first answers as they are, and how each ended where it did not end by itself; to be read, not marked."""
    lines = ["prompt → fine-tuned answer"]
    for item in result["items"][:_SHOWN_OPEN_ANSWERS]:
        end = "" if item["finish_reason"] == "stop" else f"   ({item['finish_reason']})"
        lines.append(f"  {item['prompt']} → {item['prediction']}{end}".replace("\n", "⏎"))
    return "\n".join(lines)


def _short(text: str, width: int = 60) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"
