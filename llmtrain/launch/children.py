"""Commands of ours as processes of their own: how they are called, and what their last line says.

For commands that run others (`smoke`, `verify-resume`, several runs in one). Knows nothing of what they do.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmtrain.training import placement


def command_line(command: str, overrides: Sequence[str]) -> list[str]:
    """The words that run a command of ours with this interpreter."""
    return [sys.executable, "-m", "llmtrain", command, *overrides]


def environment(*, same_place: bool = False) -> dict[str, str]:
    """This process's variables, so that the package is found when only a script was started.

    Args:
        same_place: The command takes this process's place among those of its launcher; otherwise it is started here
            once, whatever started this process.
    """
    inherited = dict(os.environ) if same_place else placement.unplaced(os.environ)
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return inherited | {"PYTHONPATH": path}


def split_output(stdout: str) -> tuple[str, dict[str, Any] | None]:
    """What a command wrote: the text before its last line, and that line's JSON; None if it left none."""
    text, _, line = stdout.rstrip("\n").rpartition("\n")
    try:
        results = json.loads(line)
    except ValueError:
        return stdout, None
    return (text + "\n" if text else ""), results if isinstance(results, dict) else None
