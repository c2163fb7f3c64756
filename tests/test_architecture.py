"""The architecture, frozen: who imports whom, where the heavy libraries may appear, one decode loop.

Read from the source (imports inside functions and under TYPE_CHECKING count too), and for what must stay light by
importing it in a process of its own.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "llmtrain"

ARROWS = {
    "tokenizer": set(),
    "model": set(),
    "adapters": {"model"},
    "checkpoint": {"model", "tokenizer", "adapters"},
    "data": {"tokenizer"},
    "generation": {"model", "tokenizer"},
    "evaluation": {"generation", "tokenizer", "data", "checkpoint"},
    "report": set(),
    "training": {"model", "data", "checkpoint", "adapters", "generation", "evaluation", "report"},
    "inspector": {"generation", "model", "tokenizer"},
    "serve": {"generation", "tokenizer", "inspector"},
}
FREE = {"bench", "launch"}  # may import everything above

# Library → where it may be imported, as paths below the root.
HOMES = {
    "hydra": ("llmtrain/launch/", "scripts/"),
    "omegaconf": ("llmtrain/launch/", "scripts/"),
    "lightning": ("llmtrain/training/", "llmtrain/data/modules.py", "llmtrain/launch/"),
    "deepspeed": ("llmtrain/training/deepspeed/",),
    "peft": ("llmtrain/adapters/attach.py",),
    "transformers": ("llmtrain/bench/",),
    "litgpt": ("llmtrain/bench/foreign_side.py",),
    "llama_cpp": ("llmtrain/bench/foreign_side.py",),
    "gguf": ("llmtrain/bench/foreign_side.py",),
    "fastapi": ("llmtrain/serve/",),
    "starlette": ("llmtrain/serve/",),
    "uvicorn": ("llmtrain/serve/",),
    "pydantic": ("llmtrain/serve/",),
    "lm_eval": ("llmtrain/evaluation/harness.py", "llmtrain/launch/harness.py", "llmtrain/bench/harness.py"),
}


def imports(path: Path) -> Iterator[str]:
    """The full dotted names that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(path: Path) -> str:
    """The package of ours that a file belongs to: `data` for `llmtrain/data/shards.py`."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


SOURCES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))


def test_every_part_is_in_the_architecture():
    parts = {part_of(path) for path in SOURCES} - {"__init__", "__main__"}
    assert parts <= ARROWS.keys() | FREE


@pytest.mark.parametrize("part", sorted(ARROWS))
def test_a_part_imports_only_what_its_arrows_allow(part):
    for path in (path for path in SOURCES if part_of(path) == part):
        for name in imports(path):
            head, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if head == "llmtrain" and target not in ("", "__version__"):
                assert target in ARROWS[part] | {part}, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("library", sorted(HOMES))
def test_a_library_stays_where_it_belongs(library):
    for path in [*SOURCES, *SCRIPTS]:
        place = path.relative_to(ROOT).as_posix()
        if not place.startswith(HOMES[library]):
            names = [name for name in imports(path) if name.partition(".")[0] == library]
            assert not names, f"{place} imports {names[0]}"


@pytest.mark.parametrize(("part", "allowed"), [("tokenizer", {"tokenizers"}), ("model", {"torch"})])
def test_the_lowest_parts_need_one_library_each(part, allowed):
    for path in (path for path in SOURCES if part_of(path) == part):
        heads = {name.partition(".")[0] for name in imports(path)} - {"llmtrain", "__future__"}
        assert heads - set(sys.stdlib_module_names) <= allowed, path


def test_data_needs_torch_only_where_it_says_so():
    text = ast.get_docstring(ast.parse((PACKAGE / "data" / "__init__.py").read_text(encoding="utf-8"))) or ""
    said = set(re.findall(r"`(\w+)`", text.partition("Torch-free except")[2]))
    heavy = {"torch", "lightning"}
    found = {
        path.stem
        for path in (PACKAGE / "data").rglob("*.py")
        if heavy & {name.partition(".")[0] for name in imports(path)}
    }
    assert found == said


@pytest.mark.medium
@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("llmtrain.tokenizer", "torch numpy"),
        ("llmtrain.data.prepare", "torch lightning transformers"),
        ("llmtrain.launch.main", "torch lightning hydra omegaconf numpy"),
        ("llmtrain.launch.edge", "torch lightning hydra omegaconf numpy"),
        ("llmtrain.generation", "lightning peft transformers deepspeed hydra"),
        ("llmtrain.checkpoint", "lightning peft transformers deepspeed hydra"),
        ("llmtrain.evaluation", "lightning peft transformers deepspeed hydra"),
        ("llmtrain.serve", "torch lightning peft transformers deepspeed hydra"),
        ("llmtrain.adapters", "lightning peft transformers deepspeed hydra"),
    ],
)
def test_importing_a_part_stays_light(module, banned):
    code = f"import sys, {module}; print(sorted(set({banned.split()!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_there_is_one_decode_loop():
    """Only one module runs the model over a cache; so sampling, chat, evaluation and serving share its faults."""
    loops = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            passes_cache = isinstance(node, ast.Call) and any(word.arg == "cache" for word in node.keywords)
            if passes_cache and part_of(path) != "model":
                loops.add(path.relative_to(ROOT).as_posix())
    assert loops == {"llmtrain/generation/loop.py"}


def test_no_module_is_named_for_what_it_is_not():
    banned = {"utils", "util", "common", "helpers", "helper", "misc"}
    everything = [*SOURCES, *SCRIPTS, *(ROOT / "tests").rglob("*.py")]
    assert not [path for path in everything if set(path.with_suffix("").parts[len(ROOT.parts) :]) & banned]


def test_files_and_functions_stay_small():
    """A file past about 350 lines, or a function past about 50, is usually two things (docstrings do not count)."""
    for path in SOURCES:
        source = path.read_text(encoding="utf-8")
        assert source.count("\n") <= 385, f"{path.relative_to(ROOT)} has {source.count(chr(10))} lines"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                lines = (node.end_lineno or 0) - first.lineno + 1
                assert lines <= 55, f"{path.relative_to(ROOT)}: {node.name} has {lines} lines"


def test_every_module_says_what_it_does():
    for path in [*SOURCES, *SCRIPTS]:
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path


def test_scripts_are_short_and_safe_to_import():
    for path in SCRIPTS:
        assert path.read_text(encoding="utf-8").count("\n") <= 15, path
        subprocess.run([sys.executable, "-c", f"import runpy; runpy.run_path({str(path)!r})"], check=True, timeout=60)


def test_print_is_for_products_only():
    """Below the edge everything is logged; `print` is left to the modules whose printed text is the product."""
    for path in SOURCES:
        if part_of(path) in FREE | {"__main__"}:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            printed = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            assert not printed, f"{path.relative_to(ROOT)}:{node.lineno} prints"
