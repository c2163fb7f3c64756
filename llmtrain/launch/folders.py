"""The folder of one run: made by rank 0, found by the others, pointed to, and taken back if nothing came of it.

Knows settings by name, ranks and paths; not what a command does, nor how the processes tell each other (`meeting`).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.launch import meeting, runs
from llmtrain.launch.terminal import Terminal
from llmtrain.training import placement
from llmtrain.training.placement import Placement

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.launch.edge import Command

_EDGE_FILES = frozenset({"log.txt", "config.yaml"})


def open_folder(command: Command, settings: DictConfig, terminal: Terminal) -> RunFolder:
    """The run folder of these settings, on every rank; only rank 0 writes there, but for the others' logs.

    Raises:
        ValueError: A rank above 0 has no way to know the folder, or does not see it.
    """
    place, paths, environment = placement.here(), settings.paths, os.environ
    runs_dir = Path(paths.runs_dir).absolute()
    name, run_dir, resume = settings.get("name"), paths.run_dir, settings.get("resume")
    if name is None and run_dir is None and resume in (None, "auto"):
        name = meeting.job_name(place, environment)
    known = name is not None or run_dir is not None or resume not in (None, "auto")
    if terminal.rank:
        path = _others_folder(command, settings, terminal, place, known=known, name=name)
        kept = False
    else:
        if not known:
            meeting.check_tellable(place, environment)
            run_dir = meeting.former(place, environment) if resume == "auto" else None
        path = runs.choose_run_dir(runs_dir, command.name, name=name, run_dir=run_dir, resume=resume).absolute()
        kept = command.keeps_folder or name is not None or run_dir is not None
    folder = RunFolder(path, kept=kept, runs_dir=runs_dir, command=command.name)
    if not terminal.rank:
        meeting.tell(place, path, environment)
    environment[placement.RUN_DIR_VARIABLE] = str(path)
    return folder


def _others_folder(
    command: Command, settings: DictConfig, terminal: Terminal, place: Placement, *, known: bool, name: str | None
) -> Path:
    """On a rank above 0: the folder, once it is there; its log goes there too unless it shares that of rank 0."""
    trainer = settings.get("trainer") or {}
    devices, timeout = trainer.get("devices", 1), trainer.get("timeout", meeting.LONGEST_WAIT)
    rank, _, _ = place.ranks(place.local_size or (devices if isinstance(devices, int) and devices > 0 else 1))
    terminal.rank = rank or terminal.rank
    if place.started_by_first:
        return Path(os.environ[placement.RUN_DIR_VARIABLE])
    if known:
        path = runs.choose_run_dir(
            Path(settings.paths.runs_dir), command.name, name=name, run_dir=settings.paths.run_dir,
            resume=settings.get("resume"),
        ).absolute()  # fmt: skip
    else:
        path = meeting.learn(place, os.environ, rank=terminal.rank, timeout=timeout)
    if command.keeps_folder:
        meeting.wait_for(path, rank=terminal.rank, timeout=timeout)
        terminal.keep_log(path / f"log-rank{terminal.rank}.txt")
    return path


class RunFolder:
    """The folder of this run as far as the edge goes.

    Args:
        path: The folder.
        kept: This process makes it and writes into it; else it only knows of it.
        runs_dir: The folder of all runs.
        command: The command, whose runs `latest` is among.
        listed: Whether `latest` may point to it.
    """

    def __init__(self, path: Path, *, kept: bool, runs_dir: Path, command: str, listed: bool = True) -> None:
        self.path = path
        self.kept = kept
        self._new = kept and not path.exists()
        self._all = runs_dir / command
        self._listed = listed and self._all in path.parents
        self._former = runs.latest_run(runs_dir, command)
        if kept:
            path.mkdir(parents=True, exist_ok=True)
            if self._listed:
                runs.point_latest(path, self._all)

    @property
    def empty(self) -> bool:
        """Whether the run has left nothing there yet but what the edge itself writes."""
        names = {entry.name for entry in self.path.iterdir() if not entry.name.startswith("log-rank")}
        return names <= _EDGE_FILES

    def take_back(self) -> None:
        """After a mistake of the user's: no litter, and `latest` is what it was; the log stays as failed.log.

        A new folder that a run has begun to fill stays, and `latest` too: training may have gone on for days.
        """
        if not self.kept or (self._new and not self.empty):
            return
        if self._listed and self._former is not None:
            runs.point_latest(self._former, self._all)
        if self._new:
            log = self.path / "log.txt"
            if self._listed and log.exists():
                log.replace(self._all / "failed.log")
            shutil.rmtree(self.path)
            pointer = self._all / runs.LATEST
            if self._former is None and pointer.is_symlink():
                pointer.unlink()
