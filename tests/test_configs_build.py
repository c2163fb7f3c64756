"""Every option of every group builds what it configures: its keys are those that the thing takes, its values do.

A group whose section is handed on whole (a model's shape, an optimiser, a corpus, …) is handed on here, too, so a key
that the thing does not know fails. A group that is read key by key (trainer, callbacks, logger, paths) is checked
against what the commands read.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from llmtrain.launch import catalogue
from llmtrain.launch.composing import compose

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
# What has no default and must be given.
GIVEN = {("tokenizer", "file"): ["tokenizer.path=tokenizer.json"]}


def options(group: str) -> tuple[str, ...]:
    return catalogue.group_options(CONFIGS, group)


def section(root: str, group: str, option: str) -> dict[str, Any]:
    from omegaconf import OmegaConf

    settings = compose(root, [f"{group}={option}", *GIVEN.get((group, option), [])], CONFIGS).settings
    return OmegaConf.to_container(settings[group], resolve=True)  # type: ignore[return-value]


def parameters(function: Callable) -> set[str]:
    return set(inspect.signature(function).parameters)


@pytest.mark.parametrize("option", options("model"))
def test_a_model(option):
    from llmtrain.model import ModelConfig

    config = ModelConfig.from_dict({**section("pretrain", "model", option), "vocab_size": 4096})
    assert config.num_attention_heads % config.num_key_value_heads == 0


@pytest.mark.parametrize("root", ["pretrain", "finetune"])
@pytest.mark.parametrize("option", options("optim"))
def test_an_optimiser(option, root, tiny_model):
    from llmtrain.launch import fitting
    from llmtrain.training.optim import build_optimizer, resolve_warmup, schedule

    values = section(root, "optim", option)
    timing = {key: values.pop(key) for key in fitting._SCHEDULE if key != "lr"}
    timing.pop("grad_clip")
    timing["warmup_steps"] = resolve_warmup(timing["warmup_steps"], 1000)
    assert build_optimizer(tiny_model, **values).param_groups
    assert schedule(timing.pop("schedule"), step=0, total_steps=1000, **timing) >= 0


@pytest.mark.parametrize("option", options("strategy"))
def test_a_strategy(option):
    from llmtrain.training.deepspeed.config import check_strategy

    check_strategy(**section("pretrain", "strategy", option))


@pytest.mark.parametrize("option", options("sampling"))
def test_a_way_of_sampling(option):
    from llmtrain.generation import SamplingParams

    assert SamplingParams(**section("generate", "sampling", option)).max_new_tokens > 0


@pytest.mark.parametrize("option", options("tokenizer"))
def test_a_tokenizer(option):
    from llmtrain.data.prepare import corpus_tokenizer

    values = section("prepare", "tokenizer", option)
    assert values["kind"] in ("bpe", "characters", "byte", "file")
    assert set(values) <= parameters(corpus_tokenizer)


@pytest.mark.parametrize("option", options("data"))
def test_data(option):
    from llmtrain.data import corpora
    from llmtrain.data.tasks import TASKS

    values = section("finetune", "data", option)
    kind = values.pop("kind")
    if "max_length" in values:  # a task
        assert set(values) - {"max_length"} <= parameters(TASKS[kind])
    else:
        assert set(values) - {"sequence_length"} <= corpora.corpus_settings(kind)


@pytest.mark.parametrize("option", options("adapter"))
def test_an_adapter(option, tiny_model):
    from llmtrain import adapters

    values = section("finetune", "adapter", option)
    kind, train_tokens = values.pop("kind"), values.pop("train_tokens", None)
    if kind == "none":
        assert not values
        return
    assert train_tokens in ("auto", "none")
    assert adapters.attach(tiny_model, **values) is not None


@pytest.mark.parametrize("option", options("tasks"))
def test_tasks(option):
    from llmtrain.data.tasks import TASKS

    values = section("evaluate", "tasks", option)
    assert values["names"] in ("auto", "all") or set(values["names"]) <= set(TASKS)
    assert set(values) <= keys_read_of("tasks")


@cache
def keys_read_of(name: str) -> set[str]:
    """The keys that commands read of a section: `settings.trainer.x`, `trainer.x`, `trainer["x"]`, names in a loop."""
    found: set[str] = set()
    for path in (ROOT / "llmtrain" / "launch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and is_section(node.value, name):
                found.add(node.attr)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
                found |= {
                    a.value for a in node.args[:1] if isinstance(a, ast.Constant) and is_section(node.func.value, name)
                }
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                found.add(str(node.slice.value))  # of a section as a dictionary
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):  # names that are read in a loop
                found |= {e.value for e in node.value.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)}
    return found


def is_section(node: ast.AST, name: str) -> bool:
    """Whether an expression is `name`, or ends in `.name`."""
    return (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)


@pytest.mark.parametrize("group", ["trainer", "callbacks", "logger", "paths"])
def test_a_group_that_is_read_key_by_key(group):
    for option in options(group):
        keys = set(section("pretrain", group, option)) - {"run_dir"}  # the edge fills it in
        assert keys <= keys_read_of(group), f"{group}={option}: nothing reads {sorted(keys - keys_read_of(group))}"


def test_a_key_that_is_not_read_is_noticed():
    assert "max_steps" in keys_read_of("trainer")
    assert "max_stepz" not in keys_read_of("trainer")
    assert "micro_batch_size" not in keys_read_of("callbacks")


def test_every_group_is_looked_at_here():
    groups = {path.name for path in CONFIGS.iterdir() if path.is_dir()} - {"experiment", "hydra"}
    named = Path(__file__).read_text(encoding="utf-8")
    assert not [group for group in groups if f'"{group}"' not in named]
