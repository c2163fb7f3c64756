"""What a model can be fine-tuned on: built-in tasks and the user's own files, each as a `Task`.

    task = build_task("zh_number", seed=0)
    task = build_task("jsonl", paths=["mine.jsonl"], test_examples=200)

A task holds text only; `llmtrain.data.examples.encode_examples` makes token ids of it. Deliberately unknown
here: tokenizers, models, and the loop that asks a model and scores its answers (`llmtrain.evaluation`).
"""

import inspect
from collections.abc import Callable
from typing import Any

from llmtrain.data.tasks.chatterbot import chatterbot
from llmtrain.data.tasks.date_iso import date_iso
from llmtrain.data.tasks.hsk_pinyin import hsk_pinyin
from llmtrain.data.tasks.jsonl import jsonl
from llmtrain.data.tasks.task import Item, Task
from llmtrain.data.tasks.zh_number import zh_number

__all__ = ["TASKS", "Item", "Task", "build_task"]

TASKS: dict[str, Callable[..., Task]] = {
    "zh_number": zh_number,
    "date_iso": date_iso,
    "hsk_pinyin": hsk_pinyin,
    "chatterbot": chatterbot,
    "jsonl": jsonl,
}


def build_task(name: str, **settings: Any) -> Task:
    """Build a task by name; `settings` are the keyword arguments of its function.

    Raises:
        ValueError: The name or a setting is unknown, or the task's own complaint about a value.
    """
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}: choose one of {', '.join(TASKS)}")
    accepted = inspect.signature(TASKS[name]).parameters
    unknown = settings.keys() - accepted.keys()
    if unknown:
        raise ValueError(f"task {name} has no setting {', '.join(sorted(unknown))}: it takes {', '.join(accepted)}")
    return TASKS[name](**settings)
