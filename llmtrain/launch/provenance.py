"""Where a model folder comes from, as its `llmtrain.json` remembers it: settings and the commit of the code.

Knows the checkout that this package lies in; not what the settings mean.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig


def provenance(settings: DictConfig) -> dict[str, Any]:
    """`config`, the resolved settings of a command, and `git_commit`."""
    from omegaconf import OmegaConf

    return {"config": OmegaConf.to_container(settings, resolve=True), "git_commit": git_commit()}


def git_commit() -> str | None:
    """The commit of the checkout that this package lies in, with `-dirty` behind it if files were changed."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, encoding="utf-8", timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
