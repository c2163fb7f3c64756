"""What a fine-tuning run trains on and chooses its step by, from the settings: a task, and its examples as token ids.

Knows settings by name; the model only as far as examples must fit it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.checkpoint import LoadedModel
    from llmtrain.data.examples import Example
    from llmtrain.data.tasks import Task

logger = logging.getLogger(__name__)

VAL_EXAMPLES = 128
"""As many training examples are set aside at most, where the settings do not say."""

# What the settings of a task hold besides the arguments of its function.
NOT_THE_TASKS = ("kind", "max_length")


def task_from(settings: DictConfig) -> Task:
    """The task that the section `data` describes."""
    from omegaconf import OmegaConf

    from llmtrain.data.tasks import build_task
    from llmtrain.evaluation.metrics import find_metric

    values: dict[str, Any] = OmegaConf.to_container(settings.data, resolve=True)  # type: ignore[assignment]
    find_metric(values.get("metric", "exact_match"))
    return build_task(values["kind"], **{key: value for key, value in values.items() if key not in NOT_THE_TASKS})


def examples_from(settings: DictConfig, base: LoadedModel, task: Task) -> tuple[list[Example], list[Example]]:
    """Training and validation examples. Validation chooses the step to keep, so it has none of the test's items."""
    from llmtrain.data.examples import encode_examples

    limit = min(settings.data.max_length, base.config.max_position_embeddings)
    if limit < settings.data.max_length:
        logger.warning("data.max_length=%d is beyond the model's context: %d is used.", settings.data.max_length, limit)
    examples, report = encode_examples(task.train, base.tokenizer, max_length=limit)
    for line in [*(task.report.lines() if task.report else []), *report.lines()]:
        logger.warning(line)
    longest = max(len(example.input_ids) for example in examples)
    trained_length = base.info.get("trained_length")
    if trained_length and longest > trained_length:
        logger.warning("Examples have up to %d tokens; the base was trained on %d at most.", longest, trained_length)
    count = settings.trainer.val_examples
    if count is None:
        count = min(VAL_EXAMPLES, len(examples) // 10)
    if not 0 <= count < len(examples):
        usable = f"{len(examples)} usable training example{'s' if len(examples) > 1 else ''}"
        raise ValueError(
            f"trainer.val_examples={count} must lie between 0 and {len(examples) - 1}: of the {usable} at least one is "
            "to be trained on; lower it or add examples."
        )
    chosen = set(random.Random(f"validation {settings.data.seed}").sample(range(len(examples)), count))
    train = [example for number, example in enumerate(examples) if number not in chosen]
    if task.exercises is not None:
        items = [{"prompt": example.prompt, "completion": example.completion} for example in train]
        further = task.exercises(items)
        train += encode_examples(further, base.tokenizer, max_length=limit)[0] if further else []
    return train, [example for number, example in enumerate(examples) if number in chosen]


def fingerprint(examples: list[Example]) -> str:
    """Differs as soon as one token of one example does."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps([example.input_ids, example.labels]).encode())
    return digest.hexdigest()
