"""The Makefile: free text reaches the program whole, and it sets up what a bare machine lacks.

`make` runs for real; only the interpreter of its recipes is replaced, by the double of the commands (see `fake/`).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.medium

ROOT = Path(__file__).resolve().parents[2]
ENTRY = Path(__file__).resolve().parent / "fake" / "entry.py"


@pytest.fixture
def make(tmp_path, fake_environment):
    """`make("generate", PROMPT="…")` in the checkout, writing runs below `tmp_path`."""
    stamp = tmp_path / "stamp"

    def run(*words: str, env: dict[str, str] | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        stamp.touch()
        fixed = {"STAMP": str(stamp), "RUN": f"{shlex.quote(sys.executable)} {shlex.quote(str(ENTRY))}"}
        assignments = [f"{name}={value}" for name, value in (fixed | variables).items()]
        return subprocess.run(
            ["make", *words, *assignments],
            cwd=ROOT,
            env=fake_environment | (env or {}),
            capture_output=True,
            encoding="utf-8",
            timeout=60,
            check=False,
        )

    return run


def results(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "text",
    [
        "话说天下大势，",
        'a=b, it\'s "$HOME" ${x} $(shell touch x) `id` $$ \\ # % *',
        "first line\n\n  second\tline 🌍",
        "$(",
        "trailing  ",
        "-n",
        "???",
    ],
)
def test_a_prompt_arrives_as_typed(make, text):
    assert results(make("generate", PROMPT=text))["prompt"] == text


def test_arguments_are_split_as_a_shell_would(make, tmp_path):
    arguments = (
        f"seed=3 'model=/路径 x/$HOME' files=\"[a b, '，c']\" paths.run_dir={shlex.quote(str(tmp_path / 'r $x'))}"
    )
    done = results(make("pretrain", ARGS=arguments))
    assert (done["seed"], done["model"], done["files"]) == (3, "/路径 x/$HOME", ["a b", "，c"])
    assert (tmp_path / "r $x" / "config.yaml").exists()


def test_prompt_and_arguments_together(make):
    done = results(make("generate", PROMPT="你好", ARGS="temperature=0.5"))
    assert (done["prompt"], done["temperature"]) == ("你好", 0.5)
    assert results(make("tokenize", PROMPT="a=b $x"))["text"] == "a=b $x"
    assert results(make("generate"))["prompt"] == "Once"
    assert results(make("generate", env={"PROMPT": "of the shell, not for us"}))["prompt"] == "Once"


def test_a_mistake_fails_the_target(make):
    done = make("pretrain", ARGS="sed=1")
    assert done.returncode == 2
    assert "error: unknown key 'sed' (did you mean seed?)" in done.stderr
    several = make("pretrain", ARGS="-m 'prompt=a, b' sed=1,2")
    assert (several.returncode, several.stdout) == (2, "")
    assert "error: run sed=1: unknown key 'sed' (did you mean seed?)" in several.stderr


def test_help_lists_every_target_and_is_the_default(make):
    shown = make().stdout
    targets = re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"setup", "pretrain", "smoke", "test-gpu"} <= set(targets)
    assert not [target for target in targets if f"make {target} " not in shown]
    assert make("help").stdout == shown


def test_an_old_or_missing_python_is_refused_in_a_sentence(make, tmp_path):
    old = tmp_path / "python-old"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.9.2" && exit\nexit 1\n')
    old.chmod(0o755)
    new = str(tmp_path / "none")
    refused = make("setup", PYTHON=str(old), STAMP=new)
    assert refused.returncode == 2
    assert f"error: Python 3.11 or newer is needed, and {old} is Python 3.9.2" in refused.stderr
    assert "error: there is no /no/python; install Python 3.11" in make("setup", PYTHON="/no/python", STAMP=new).stderr


@pytest.fixture
def checkout(tmp_path):
    """What set-up needs of a checkout, with a stand-in for pip that writes down its arguments."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def test_setup_creates_the_environment_and_installs_torch_first(checkout, fake_environment):
    def setup(*words):
        done = subprocess.run(
            ["make", "setup", f"PYTHON={sys.executable}", "PIP=@echo pip", *words],
            cwd=checkout, env=fake_environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [line for line in done.stdout.splitlines() if line.startswith("pip ")]

    calls = setup("TORCH_INDEX=https://example.org/cpu index")
    pin = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    assert calls == [f"pip --no-deps --index-url https://example.org/cpu index {pin}", "pip -e .[dev]"]
    assert (checkout / ".venv/bin/python").exists()
    assert setup() == []
    os.utime(checkout / "constraints.txt")
    assert setup() == [f"pip {pin}", "pip -e .[dev]"]


def test_the_constraints_pin_all_and_fit_any_machine():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    names = {line.partition("==")[0].lower() for line in lines}
    assert {"torch", "lightning", "deepspeed", "peft", "transformers", "pytest", "ruff", "mypy", "setuptools"} <= names
    assert not [name for name in names if name.startswith(("nvidia", "triton", "cuda"))]
