"""The YAML files: every one composes, every key is explained and read by somebody, none is left over."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from llmtrain.launch import catalogue
from llmtrain.launch.composing import SettingsError, compose, known_keys
from llmtrain.launch.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
ROOTS = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
# Each option of each group in every command that uses the group.
CHOICES = [
    (root, group.name, option)
    for root in ROOTS
    for group in catalogue.read_groups(CONFIGS, root).values()
    for option in group.options
    if group.name != "experiment"
]


def shown(path: Path) -> str:
    return path.relative_to(CONFIGS).as_posix()


def compose_or_missing(root: str, *overrides: str) -> None:
    """Composes; a key that has no default and must be given is fine."""
    try:
        compose(root, overrides, CONFIGS)
    except SettingsError as error:
        if "has no default and must be given" not in str(error):
            raise


def test_every_command_has_its_root_and_the_other_way_round():
    assert set(ROOTS) == set(COMMANDS)


@pytest.mark.parametrize("root", ROOTS)
def test_every_root_composes_as_the_catalogue_reads_it(root):
    """`--help` reads the files by itself; its keys are exactly those that Hydra composes."""
    settings = compose(root, [], CONFIGS).settings
    composed = known_keys(settings)
    leaves = {key for key in composed if not any(other.startswith(f"{key}.") for other in composed)}
    read = catalogue.read_settings(CONFIGS, root)
    assert {key for key in read if not any(leaf.startswith(f"{key}.") for leaf in leaves)} == {
        leaf for leaf in leaves if not any(leaf.startswith(f"{key}.") for key in read)
    }


@pytest.mark.medium
@pytest.mark.parametrize(("root", "group", "option"), CHOICES, ids="-".join)
def test_every_option_of_every_group_composes_in_every_command(root, group, option):
    compose_or_missing(root, f"{group}={option}")


@pytest.mark.parametrize("option", catalogue.group_options(CONFIGS, "experiment"))
def test_every_experiment_composes_with_the_command_that_it_names(option):
    text = (CONFIGS / "experiment" / f"{option}.yaml").read_text(encoding="utf-8")
    command = re.search(r"llmtrain (\w+) (?:-m )?experiment=" + re.escape(option), text)
    assert command, f"experiment/{option}.yaml does not show how it is called"
    compose_or_missing(command[1], f"experiment={option}")


def test_no_file_is_left_over():
    """Each file is a root, an option of a group that some root uses, such an option's base, or for Hydra itself."""
    groups = {group for root in ROOTS for group in catalogue.read_groups(CONFIGS, root)} | {"hydra/launcher"}
    assert not [shown(path) for path in FILES if path.parent != CONFIGS and shown(path.parent) not in groups]


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_every_key_carries_a_comment(path):
    silent = [
        f"{shown(path)}:{setting.line} {setting.key}" for setting in catalogue.read_file(path) if not setting.comment
    ]
    assert not silent


@cache
def words_of_the_code() -> frozenset[str]:
    """Every name under which the code could read a key: attributes, strings, parameters, fields of a class."""
    words: set[str] = set()
    for path in (ROOT / "llmtrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                words.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.update([node.value] if node.value.isidentifier() else re.findall(r"[\w.]+", node.value)[:1])
            elif isinstance(node, ast.arg):
                words.add(node.arg)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                words.add(node.target.id)
    return frozenset(words)


def unread(keys: list[str]) -> list[str]:
    """The keys whose last part no code names, the keys below a mapping that is passed on whole left out."""
    return [key for key in keys if key.rpartition(".")[2] not in words_of_the_code()]


@pytest.mark.parametrize("path", [path for path in FILES if CONFIGS / "hydra" not in path.parents], ids=shown)
def test_every_key_is_read(path):
    """What is in `hydra/` is read by Hydra's plug-ins; `tests/launch/test_multirun.py` composes it with them."""
    assert not unread([setting.key for setting in catalogue.read_file(path)])


def test_a_key_that_nothing_reads_is_noticed():
    assert unread(["optim.lr", "optim.learning_rat"]) == ["optim.learning_rat"]
