"""`llmtrain report RUN…`: one page of one run or of several, from what they left in their folders.

Also what commands that train do for their reports: the facts that they write down when they begin, and the page at the
end. Knows settings and what began a run; what the page looks like is `llmtrain.report`'s.
"""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.report import Run
    from llmtrain.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_LIBRARIES = ("torch", "lightning", "deepspeed", "peft", "tokenizers", "safetensors", "matplotlib")
_LONGEST_PIECES = 16
_OWN = ("paths", "name", "resume")


def run(settings: DictConfig, run_dir: Path) -> dict[str, Any]:
    """Writes the page.

    Raises:
        ValueError: No run was named, or a folder is that of no training run.
    """
    from llmtrain.report import write_report

    folders = [settings.runs] if isinstance(settings.runs, str) else list(settings.runs)
    if not folders:
        raise ValueError("runs=[], and report takes run folders: llmtrain report runs/pretrain/latest")
    try:
        file = write_report(folders, settings.out, differs=differs_now)
    except OSError as error:
        where = f"runs={folders}" + (f", out={settings.out}" if settings.out else "")
        raise ValueError(
            f"{where}: {error.strerror or error}; give folders that can be read, and a file that can be written"
        ) from None
    logger.info("report: %s", file)
    return {"command": "report", "runs": [str(folder) for folder in folders], "report": str(file)}


def leave(run_dir: Path) -> None:
    """The page at the end of a run; what goes wrong with it is a warning."""
    from llmtrain.report import write_report

    try:
        logger.info("report: %s", write_report([run_dir], differs=differs_now))
    except Exception as error:
        logger.warning("no report of this run: %s: %s", type(error).__name__, error)


def writer(run_dir: Path) -> Callable[[], Any]:
    """Writes the page while the run goes on."""
    from llmtrain.report import write_report

    return lambda: write_report([run_dir])


def differs_now(run: Run) -> dict[str, list[Any]]:
    """The settings of a run that differ from this version's defaults, as pairs of default and value."""
    from llmtrain.launch.composing import compose

    return _differing(compose(run.command, []).settings, run.config)


def beginning(
    accept: Callable[[], None],
    settings: DictConfig,
    run_dir: Path,
    command: str,
    facts: Callable[[], Mapping[str, Any]],
) -> Callable[[], None]:
    """`accept`, after which the facts of the run are written down on the first process."""

    def accept_and_note() -> None:
        accept()
        from llmtrain.training import placement

        if placement.here().is_first:
            try:
                _note(settings, run_dir, command, facts())
            except Exception as error:
                logger.warning("the report will lack facts: %s: %s", type(error).__name__, error)

    return accept_and_note


def _note(settings: DictConfig, run_dir: Path, command: str, facts: Mapping[str, Any]) -> None:
    from omegaconf import OmegaConf

    from llmtrain.launch.composing import compose
    from llmtrain.report import FACTS_FILE

    file = run_dir / FACTS_FILE
    commands = []
    if settings.get("resume") is not None and file.is_file():
        commands = list(json.loads(file.read_text(encoding="utf-8")).get("commands", []))
    resolved: dict[str, Any] = OmegaConf.to_container(settings, resolve=True)  # type: ignore[assignment]
    flat = _flat({key: value for key, value in resolved.items() if key not in _OWN})
    written = {
        "command": command,
        "commands": [*commands, _typed(command)],
        "differs": _differing(compose(command, []).settings, flat),
        "machine": _machine(),
        "versions": _versions(),
        **facts,
    }
    run_dir.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.writing")
    beside.write_text(json.dumps(written, ensure_ascii=False, indent=1, default=str) + "\n", encoding="utf-8")
    beside.replace(file)


def _typed(command: str) -> str:
    """The command line, as it would be typed."""
    arguments = sys.argv[1:]
    if arguments[:1] == [command]:
        arguments = arguments[1:]
    return shlex.join(["llmtrain", command, *arguments])


def _differing(defaults: DictConfig, flat: Mapping[str, Any]) -> dict[str, list[Any]]:
    from omegaconf import OmegaConf

    usual: dict[str, Any] = OmegaConf.to_container(defaults, resolve=True)  # type: ignore[assignment]
    usual = _flat({key: value for key, value in usual.items() if key not in _OWN})
    return {key: [usual.get(key), value] for key, value in flat.items() if usual.get(key) != value}


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= _flat(inner, f"{prefix}{key}.") if isinstance(inner, dict) and inner else {f"{prefix}{key}": inner}
    return found


def _machine() -> dict[str, Any]:
    import os
    import platform

    import torch

    found: dict[str, Any] = {"system": platform.platform(), "processors": os.cpu_count()}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found["memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    if torch.cuda.is_available():
        found["GPUs"] = ", ".join(torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count()))
    return found


def _versions() -> dict[str, Any]:
    import platform
    from importlib import metadata

    import llmtrain
    from llmtrain.launch.provenance import git_commit

    found = {"llmtrain": llmtrain.__version__, "commit": git_commit(), "Python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {key: value for key, value in found.items() if value is not None}


def tokenizer_facts(tokenizer: Tokenizer) -> dict[str, Any]:
    """Its ids, and the longest pieces that are whole text."""
    pieces: set[str] = set()
    for number in set(range(tokenizer.vocab_size)) - set(tokenizer.special_ids.values()):
        try:
            pieces.add(tokenizer.token_bytes(number).decode())
        except ValueError:  # part of a character, or an id without a piece
            continue
    longest = sorted(pieces, key=lambda piece: (-len(piece), piece))[:_LONGEST_PIECES]
    return {"ids": tokenizer.vocab_size, "longest": longest}


def source_facts(train: Sequence[tuple[Any, float]]) -> dict[str, Any]:
    """Of the shards that are trained on: what each source has, and its share of the training.

    Args:
        train: A shard set per source, and its weight.
    """
    whole = sum(weight for _, weight in train) or 1.0
    sources = [
        {
            "name": ", ".join(each["name"] for each in shards.manifest.get("sources", [])) or shards.folder.name,
            "share": weight / whole,
            "tokens": shards.num_tokens,
            "documents": shards.num_documents,
            "characters": shards.characters,
            "bytes": shards.utf8_bytes,
        }
        for shards, weight in train
    ]
    tokens = sum(each["tokens"] for each in sources) or 1
    return {
        "sources": sources,
        "chars_per_token": sum(each["characters"] for each in sources) / tokens,
        "bytes_per_token": sum(each["bytes"] for each in sources) / tokens,
    }
