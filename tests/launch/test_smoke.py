"""The whole line at toy size, as `make smoke` runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.medium
def test_the_whole_line_runs(tmp_path, fake_environment):
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "smoke.py"), "name=s"],
        cwd=tmp_path,
        env=fake_environment,
        capture_output=True,
        encoding="utf-8",
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    results = json.loads(done.stdout)
    assert list(results["stages"]) == ["prepare", "tokenizer", "pretrain", "finetune", "evaluate", "generate"]
    runs = tmp_path / "runs/smoke/s/runs"
    assert {path.name for path in runs.iterdir()} == {"prepare", "tokenizer", "pretrain", "finetune", "evaluate"}
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
    assert_readable(done.stderr)


def assert_readable(screen: str) -> None:
    """What a newcomer sees: no library talks there, no warning that is only a library's, no traceback."""
    chatter = ("[INFO]", "[WARNING]", "DeepSpeed", "Tip:", "deprecat", "Traceback", "site-packages", "Gloo", "HPU")
    lines = [line for line in screen.splitlines() if any(word in line for word in chatter)]
    assert not lines, "\n".join(lines)
