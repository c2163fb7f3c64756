"""The documents name only what is there: links, paths, make targets, settings, commands, imports, sizes.

The commands of the READMEs are run by `test_readme.py`; those of the other documents are composed here, not run.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from llmtrain.launch import catalogue, main
from llmtrain.launch.composing import compose
from llmtrain.launch.sweeps import read_sweep
from tests.test_readme import command_of, commands

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NAMES = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]
FENCE = re.compile(r"^```.*?^```\n?", re.MULTILINE | re.DOTALL)

each_document = pytest.mark.parametrize("name", NAMES)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def spans(text: str) -> list[str]:
    """What stands between backticks, outside fenced blocks."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


@each_document
def test_every_relative_link_leads_somewhere(name):
    folder = (ROOT / name).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text_of(name))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = folder / path if path else ROOT / name
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), target


@each_document
def test_every_path_of_this_project_exists(name):
    found = re.findall(r"(?<![\w/.-])(?:llmtrain|configs|scripts|tests|docs)/[\w./-]*\w", text_of(name))
    assert not [path for path in found if not (ROOT / path).exists()]


@each_document
def test_every_make_target_exists(name):
    targets = set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)) | set(
        main.COMMANDS
    )
    text = text_of(name)
    named = [span for span in spans(text) if span.startswith("make ")] + re.findall(r"^(make .*)$", text, re.MULTILINE)
    for line in named:
        target = next((word for word in line.split()[1:] if re.fullmatch(r"[a-z][a-z-]*", word)), None)
        assert target is None or target in targets, line


@cache
def known_keys() -> frozenset[str]:
    """Every key of every YAML file under its full name, and the sections above it."""
    keys: set[str] = set()
    for path in CONFIGS.rglob("*.yaml"):
        package = "" if path.parent == CONFIGS else path.parent.name
        for setting in catalogue.read_file(path, package):
            parts = setting.key.split(".")
            keys |= {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return frozenset(keys)


@cache
def groups() -> dict[str, tuple[str, ...]]:
    return {path.name: catalogue.group_options(CONFIGS, path.name) for path in CONFIGS.iterdir() if path.is_dir()}


@each_document
def test_every_setting_exists(name):
    """Spans such as `trainer.max_steps=null` and `data=kjv`; below `tasks.settings` the keys are a task's own."""
    for span in spans(text_of(name)):
        match = re.fullmatch(r"([a-z_]+)((?:\.[a-z_0-9]+)*)(=.*)?", span)
        if match is None or match[1] not in groups() or span.startswith("tasks.settings."):
            continue
        if span.startswith("hydra.") or span.endswith((".json", ".safetensors")):  # Hydra's own; a file
            continue
        key, value = match[1] + match[2], (match[3] or "")[1:]
        if match[2]:
            assert key in known_keys(), span
        elif re.fullmatch(r"\w+", value) and key != "model":
            assert value in groups()[key], span


@pytest.mark.medium
@each_document
def test_every_command_composes(name, monkeypatch):
    """Arguments as the shell and make hand them over; compose refuses unknown keys, options and kinds of values."""
    composed = []

    def only_compose(
        command: main.Command, overrides: list[str], configs: Path | None = None, **several: object
    ) -> int:
        read = read_sweep if several else compose
        composed.append(read(command.name, overrides, CONFIGS))
        return 0

    monkeypatch.setattr(main, "launch", only_compose)
    for line in commands(text_of(name)):
        words = shlex.split(line)
        words = words[: words.index("|")] if "|" in words else words
        command = command_of(shlex.join(words))
        if command not in main.COMMANDS:
            continue
        monkeypatch.delenv(main.PROMPT_VARIABLE, raising=False)
        arguments = words[words.index(next(word for word in words if command in word)) + 1 :]
        if words[0] == "make":
            given = {key: value for key, _, value in (word.partition("=") for word in words[2:])}
            monkeypatch.setenv(main.PROMPT_VARIABLE, given.get("PROMPT", ""))
            arguments = shlex.split(given.get("ARGS", ""))
        assert main.run_command(main.COMMANDS[command], arguments, CONFIGS) == 0, line


@each_document
def test_every_import_of_a_python_block_works(name):
    for block in re.findall(r"^```python\n(.*?)^```", text_of(name), re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llmtrain"):
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_the_sizes_in_the_table_are_those_of_the_configs():
    from llmtrain.model import ModelConfig, parameter_count

    rows = re.findall(r"^\| `(\w+)`.*?\| ([\d.,]+) M \(([\d,]+) ids\)", text_of("docs/model.md"), re.MULTILINE)
    assert {row[0] for row in rows} == set(catalogue.group_options(CONFIGS, "model"))
    for option, millions, ids in rows:
        values = compose("pretrain", [f"model={option}"], CONFIGS).settings.model
        config = ModelConfig.from_dict({**values, "vocab_size": int(ids.replace(",", ""))})
        stated = float(millions.replace(",", ""))
        assert stated == pytest.approx(parameter_count(config) / 1e6, abs=0.5 if stated > 1000 else 0.05), option


def test_the_page_on_gpus_lists_every_file_with_a_check_for_one():
    with_checks = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"pytest\.mark\.gpu\b", path.read_text(encoding="utf-8"))
    } - {"tests/test_docs.py"}
    listed = set(re.findall(r"tests/[\w/]+\.py", text_of("docs/gpu.md")))
    assert with_checks == listed
