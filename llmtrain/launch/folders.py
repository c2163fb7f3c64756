"""The folder of one run: made by rank 0, found by the others, pointed to, and taken back if nothing came of it.

A folder that holds a run already is left as it is until the command has accepted its settings: log, config.yaml and
`latest` wait so long. Knows settings by name, ranks and paths; not what a command does, nor how the processes tell each
other (`meeting`).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.launch import meeting, occupied, runs
from llmtrain.launch.terminal import Terminal
from llmtrain.training import placement
from llmtrain.training.placement import Placement

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.launch.edge import Command

FAILED_LOG = "failed.log"  # beside the run folders: of the last command that came to nothing
_CONFIG = "config.yaml"
_EDGE_FILES = frozenset({"log.txt", _CONFIG, occupied.LOCK_FILE})


def open_folder(command: Command, settings: DictConfig, terminal: Terminal) -> RunFolder:
    """The run folder of these settings, on every rank; only rank 0 writes there, but for the others' logs.

    Raises:
        ValueError: A rank above 0 has no way to know the folder, or does not see it; another process writes there.
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
        log = f"log-rank{terminal.rank}.txt" if command.keeps_folder and not place.started_by_first else ""
    else:
        if not known:
            meeting.check_tellable(place, environment)
            run_dir = meeting.former(place, environment) if resume == "auto" else None
        path = runs.choose_run_dir(runs_dir, command.name, name=name, run_dir=run_dir, resume=resume).absolute()
        kept = command.keeps_folder or name is not None or run_dir is not None
        log = "log.txt" if kept else ""
    folder = RunFolder(path, kept=kept, runs_dir=runs_dir, command=command.name, log=log)
    if not terminal.rank:
        meeting.tell(place, path, environment)
    environment[placement.RUN_DIR_VARIABLE] = str(path)
    return folder


def _others_folder(
    command: Command, settings: DictConfig, terminal: Terminal, place: Placement, *, known: bool, name: str | None
) -> Path:
    """On a rank above 0: the folder, once it is there."""
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
    return path


class RunFolder:
    """The folder of this run as far as the edge goes.

    Args:
        path: The folder.
        kept: This process makes it, alone writes into it, and holds it until it ends; else it only knows of it.
        runs_dir: The folder of all runs.
        command: The command, whose runs `latest` is among.
        log: Name of this process's log there; empty keeps none.
        listed: Whether `latest` may point to it.

    Raises:
        ValueError: Another process writes into it.
    """

    def __init__(
        self, path: Path, *, kept: bool, runs_dir: Path, command: str, log: str = "log.txt", listed: bool = True
    ) -> None:
        self.path = path
        self.kept = kept
        self._new = kept and not path.exists()
        self._log = log
        self._all = runs_dir / command
        self._listed = listed and self._all in path.parents
        self._former = runs.latest_run(runs_dir, command)
        self._accepted = False
        self._settings: DictConfig | None = None
        self._terminal: Terminal | None = None
        if kept:
            occupied.occupy(path)

    def begin(self, settings: DictConfig, terminal: Terminal) -> None:
        """The command starts: what is new belongs to it at once, what holds a run only when it is accepted."""
        self._settings, self._terminal = settings, terminal
        if not self._log:
            return
        if self.empty:
            self.accept()
        else:
            terminal.hold_log()

    def accept(self) -> None:
        """Puts log, settings as they are now, and the pointer `latest` in place; may be called again."""
        assert self._terminal is not None
        if self._log and not self._accepted:
            self._terminal.keep_log(self.path / self._log)
        self._accepted = True
        if self.kept:
            self._write_settings()
            if self._listed:
                runs.point_latest(self.path, self._all)

    def _write_settings(self) -> None:
        from omegaconf import OmegaConf

        beside = self.path / f".{_CONFIG}.writing"
        OmegaConf.save(OmegaConf.create(OmegaConf.to_container(self._settings, resolve=True)), beside)
        beside.replace(self.path / _CONFIG)

    @property
    def log_file(self) -> Path | None:
        """Where this process's log is, or goes when it fails; None if it keeps none."""
        if not self._log:
            return None
        return self.path / self._log if self._accepted or not self.kept else self._all / FAILED_LOG

    @property
    def empty(self) -> bool:
        """Whether the run has left nothing there yet but what the edge itself writes."""
        names = {entry.name for entry in self.path.iterdir() if not entry.name.startswith("log-rank")}
        return names <= _EDGE_FILES

    @property
    def filled(self) -> bool:
        """Whether this command has done something there."""
        return self.kept and self._accepted and not self.empty

    def take_back(self) -> None:
        """After a mistake of the user's: no litter, and `latest` is what it was; the log stays as failed.log.

        A folder that a run has begun to fill or to go on with stays, and `latest` too: training may have gone on for
        days.
        """
        if not self.kept or self.filled:
            return
        if not self._accepted and self._listed:
            self.rescue_log()
        elif self._listed and self._former is not None:
            runs.point_latest(self._former, self._all)
        if self._new:
            log = self.path / self._log
            if self._listed and log.exists():
                log.replace(self._all / FAILED_LOG)
            shutil.rmtree(self.path)
            pointer = self._all / runs.LATEST
            if self._former is None and pointer.is_symlink():
                pointer.unlink()

    def rescue_log(self) -> None:
        """Of a command that ended before it was accepted: rank 0's log goes beside the run folders."""
        if self._accepted or not self._log or self._terminal is None:
            return
        if self.kept:
            (self._all / FAILED_LOG).unlink(missing_ok=True)
        self._terminal.keep_log(self._all / FAILED_LOG if self.kept else self.path / self._log)

    def leave(self) -> None:
        """At the end of the command: another one may write here."""
        if self.kept and self.path.is_dir():
            occupied.leave(self.path)
