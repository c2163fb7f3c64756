"""Runs the real edge around fake commands, in a process of its own, as it takes over descriptors and logging."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llmtrain.training import placement

ROOT = Path(__file__).resolve().parents[2]
FAKE = Path(__file__).resolve().parent / "fake"


@dataclass(frozen=True)
class Ended:
    """A program that ended: its exit code and what it wrote."""

    code: int
    stdout: str
    stderr: str

    @property
    def results(self) -> dict[str, Any]:
        return json.loads(self.stdout.splitlines()[-1])


@pytest.fixture
def fake_environment() -> dict[str, str]:
    """The environment of this process without what a launcher, make or a former command left in it."""
    gone = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    placeless = placement.unplaced(os.environ)
    kept = {key: value for key, value in placeless.items() if key not in gone and not key.startswith("LLMTRAIN_")}
    return kept | {"PYTHONPATH": str(ROOT)}


@pytest.fixture
def fake(tmp_path: Path, fake_environment: dict[str, str]) -> Callable[..., Ended]:
    """`fake("generate", "prompt=你好")` runs that command of the double through `python -m llmtrain`, in `tmp_path`."""

    def run(command: str, *arguments: str, env: dict[str, str] | None = None, script: bool = False) -> Ended:
        program = [str(ROOT / "scripts" / f"{command}.py")] if script else ["-m", "llmtrain", command]
        done = subprocess.run(
            [sys.executable, str(FAKE / "entry.py"), *program, *arguments],
            cwd=tmp_path,
            env=fake_environment | (env or {}),
            capture_output=True,
            encoding="utf-8",
            timeout=60,
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return run
