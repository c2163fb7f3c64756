"""`llmtrain smoke`: the whole line once at toy size, each stage as the command that a user would type.

Starts processes, looks at what they left and adds up the times; knows no more of a stage than its last line of JSON.
"""

from __future__ import annotations

import json
import logging
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.launch import children

if TYPE_CHECKING:
    from omegaconf import DictConfig

logger = logging.getLogger(__name__)

# What each stage must have left or said, beyond ending well.
_PROOFS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "prepare": lambda results: results["train_tokens"] > 0 and Path(results["shards"]).is_dir(),
    "tokenizer": lambda results: results["vocab_size"] > 0,
    "pretrain": lambda results: results["val_bpb"] > 0 and (Path(results["model"]) / "model.safetensors").is_file(),
    "finetune": lambda results: {"base", "finetuned", "chance"} <= results["scores"].keys(),
    "evaluate": lambda results: results["val_bpb"] > 0,
    "generate": lambda results: results["completions"][0]["tokens"] > 0,
}


def run(settings: DictConfig, run_dir: Path) -> dict[str, Any]:
    """Runs the stages in their order, all below `run_dir`.

    Returns:
        `seconds` in all, and for each stage its own seconds and last line.

    Raises:
        RuntimeError: A stage did not leave what it should.
        SystemExit: A stage failed, with its exit code; it has said why.
    """
    folders = [f"paths.runs_dir={run_dir / 'runs'}", f"paths.data_dir={run_dir / 'data'}"]
    stages: dict[str, Any] = {}
    began = time.monotonic()
    for name, overrides in settings.stages.items():
        started = time.monotonic()
        results = run_stage(str(name), [*overrides, *folders])
        if not _PROOFS[str(name)](results):
            raise RuntimeError(f"{name} ended well, and yet its results are not what they should be: {results}")
        seconds = round(time.monotonic() - started, 1)
        logger.info("%s: %.1f s", name, seconds)
        stages[str(name)] = {"seconds": seconds, "results": results}
    total = round(time.monotonic() - began, 1)
    logger.info("The whole line works; it took %.0f s.", total)
    return {"command": "smoke", "run_dir": str(run_dir), "seconds": total, "stages": stages}


def run_stage(command: str, overrides: list[str]) -> dict[str, Any]:
    """Runs one command in a process of its own and returns its last line.

    Raises:
        SystemExit: It did not end with code 0.
    """
    # Threads that wait for each other cost a toy model more than they give.
    environment = {"OMP_NUM_THREADS": "1"} | children.environment()
    done = subprocess.run(
        children.command_line(command, overrides),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment,
        encoding="utf-8",
        check=False,
    )
    if done.returncode:
        logger.error("%s ended with code %d; the line stops here.", command, done.returncode)
        raise SystemExit(done.returncode)
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results
