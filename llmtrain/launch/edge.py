"""Runs one command: composes its settings, makes its run folder, and turns what happens into an exit code.

The commands themselves are `run(settings, run_dir) -> results` in modules of their own and know nothing of this file.
Exit codes: 0; 1 a fault of ours, with a traceback; 2 a mistake of the user's, with one sentence; 130 interrupted; and
whatever a command asks for by `SystemExit` (training asks to be queued again).
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import shlex
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.launch import runs
from llmtrain.launch.terminal import Terminal, to_json

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.launch.composing import Composed

logger = logging.getLogger(__name__)

Run = Callable[["DictConfig", Path], dict[str, Any]]

_PACKAGE = Path(__file__).resolve().parents[1]
_EDGE_FILES = frozenset({"log.txt", "config.yaml"})
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

_BAD_NAMES = (errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS)

_PATH_ERRORS = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)


@dataclass(frozen=True)
class Command:
    """One command of the console: its module is `llmtrain.launch.<module>`, its root file `configs/<name>.yaml`.

    Attributes:
        name: What the user types.
        summary: One line for the help.
        positional: The key that arguments without `=` go to; None refuses them.
        text_on_stdout: What the command prints is its product and goes to stdout, before the JSON.
        keeps_folder: A run folder is always made; otherwise only when `name` or `paths.run_dir` is given.
    """

    name: str
    summary: str
    positional: str | None = None
    text_on_stdout: bool = False
    keeps_folder: bool = True

    @property
    def module(self) -> str:
        return "llmtrain.launch." + self.name.replace("-", "_")


def launch(
    command: Command,
    overrides: Sequence[str],
    *,
    configs: Path | None = None,
    run: Run | None = None,
) -> int:
    """Runs a command in this process, which it takes over (descriptors, logging, warnings).

    Args:
        command: Which one.
        overrides: Its `key=value` arguments.
        configs: The folder of the YAML files; the package's own unless given.
        run: The function to run; the command's module has it unless given.

    Returns:
        The exit code of the process.
    """
    runs.end_with_rank_0()
    terminal = Terminal(text_on_stdout=command.text_on_stdout, rank=runs.process_rank())
    folder: _RunFolder | None = None
    try:
        composed, folder = _prepare(command, overrides, configs, terminal)
        run = run or importlib.import_module(command.module).run
        results = run(composed.settings, folder.path)
        if folder.kept:
            (folder.path / "results.json").write_text(to_json(results) + "\n", encoding="utf-8")
        terminal.finish(results)
    except KeyboardInterrupt:
        done = folder is not None and folder.kept and not folder.empty
        if folder is not None and not done:
            folder.take_back()
        terminal.say("interrupted" + (f"; what was done is in {_near(folder.path)}" if folder and done else ""))
        return 130
    except BrokenPipeError:  # the reader of our output went away, as with `| head`
        terminal.abandon()
        return 141
    except Exception as error:
        return _report(error, command, folder, terminal)
    return 0


class _RunFolder:
    """The folder of this run as far as the edge goes: made, pointed to, and taken back if nothing came of it."""

    def __init__(self, path: Path, *, kept: bool, runs_dir: Path, command: str) -> None:
        self.path = path
        self.kept = kept
        self._new = kept and not path.exists()
        self._listed = path.parent == runs_dir / command
        self._former = runs.latest_run(runs_dir, command)
        if kept:
            path.mkdir(parents=True, exist_ok=True)
            if self._listed:
                runs.point_latest(path)

    @property
    def empty(self) -> bool:
        """Whether the run has left nothing there yet but what the edge itself writes."""
        return {entry.name for entry in self.path.iterdir()} <= _EDGE_FILES

    def take_back(self) -> None:
        """After a mistake of the user's: no litter, and `latest` is what it was; the log stays as failed.log.

        A new folder that a run has begun to fill stays, and `latest` too: training may have gone on for days.
        """
        if not self.kept or (self._new and not self.empty):
            return
        if self._listed and self._former is not None:
            runs.point_latest(self._former)
        if self._new and self.empty:
            log = self.path / "log.txt"
            if self._listed and log.exists():
                log.replace(self.path.parent / "failed.log")
            shutil.rmtree(self.path)
            pointer = self.path.parent / runs.LATEST
            if self._former is None and pointer.is_symlink():
                pointer.unlink()


def _prepare(
    command: Command, overrides: Sequence[str], configs: Path | None, terminal: Terminal
) -> tuple[Composed, _RunFolder]:
    from omegaconf import OmegaConf

    from llmtrain.launch.composing import UnknownKeyError, compose

    try:
        composed = compose(command.name, overrides, configs)
    except UnknownKeyError as error:
        if command.positional is None:
            raise
        as_text = f"llmtrain {command.name} -- {shlex.quote(error.argument)}"
        raise ValueError(f"{error}; if it is the {command.positional}: {as_text}") from error
    settings = composed.settings
    runs.check_folders(settings.paths)
    folder = _open_folder(command, settings, terminal.rank)
    OmegaConf.update(settings, "paths.run_dir", str(folder.path).replace("${", r"\${"))
    if folder.kept:
        terminal.keep_log(folder.path / "log.txt")
        if terminal.rank == 0:
            resolved = OmegaConf.create(OmegaConf.to_container(settings, resolve=True))
            OmegaConf.save(resolved, folder.path / "config.yaml")
    terminal.say(describe(command, composed, folder.path if folder.kept else None))
    return composed, folder


def _open_folder(command: Command, settings: DictConfig, rank: int) -> _RunFolder:
    paths = settings.paths
    runs_dir = Path(paths.runs_dir)
    given = os.environ.get(runs.RUN_DIR_VARIABLE) if rank else None
    name, resume = settings.get("name"), settings.get("resume")
    run_dir = paths.run_dir or given
    if rank:
        if run_dir is None and name is None:
            raise ValueError(
                f"rank {rank} does not know the run folder, since its launcher is not ours: "
                "give all ranks the same one with paths.run_dir=… or name=…"
            )
        path = runs.choose_run_dir(runs_dir, command.name, name=name, run_dir=run_dir)
        return _RunFolder(path, kept=False, runs_dir=runs_dir, command=command.name)
    path = runs.choose_run_dir(runs_dir, command.name, name=name, run_dir=run_dir, resume=resume).absolute()
    kept = command.keeps_folder or name is not None or run_dir is not None
    os.environ[runs.RUN_DIR_VARIABLE] = str(path)
    return _RunFolder(path, kept=kept, runs_dir=runs_dir.absolute(), command=command.name)


def describe(command: Command, composed: Composed, folder: Path | None) -> str:
    """What the command is about to do: the output folder, then a line or two for each section of the settings."""
    from omegaconf import OmegaConf

    resolved: dict[str, Any] = OmegaConf.to_container(composed.settings, resolve=True)  # type: ignore[assignment]
    lines = [f"llmtrain {command.name} → {_near(folder)}" if folder else f"llmtrain {command.name}"]
    single = {key: value for key, value in resolved.items() if not isinstance(value, dict)}
    if single:
        lines += _section("", None, single)
    for key, value in resolved.items():
        if isinstance(value, dict) and key != "paths":
            lines += _section(key, composed.choices.get(key), value)
    return "\n".join(lines)


def _near(path: Path) -> Path:
    """A path as short as it can be typed here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _section(name: str, choice: str | None, values: dict[str, Any]) -> list[str]:
    pairs = " ".join(f"{key}={_shown(value)}" for key, value in values.items() if value is not None)
    text = f"{choice}: {pairs}" if choice and pairs else choice or pairs
    if not text:
        return []
    width = max(60, _columns() - 1)
    lead = f"  {name:<12}" if name else "  "
    return textwrap.wrap(
        text,
        width,
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _columns() -> int:
    try:
        return os.get_terminal_size(2).columns
    except OSError:  # not a terminal
        return 111


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in value.items() if item is not None) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_shown(item) for item in value) + "]"
    text = repr(value) if isinstance(value, str) and (not value.isprintable() or not value) else str(value)
    text = {"True": "true", "False": "false"}.get(text, text)
    return text if len(text) <= 60 else text[:57] + "…"


def _report(error: Exception, command: Command, folder: _RunFolder | None, terminal: Terminal) -> int:
    """Tells the user what went wrong, in a sentence where it is a mistake of theirs, and returns the exit code."""
    sentence = _sentence(error)
    if terminal.rank:
        print(f"[rank {terminal.rank}] error: {sentence or repr(error)}", file=sys.stderr, flush=True)
    logged = folder is not None and folder.kept
    if logged:
        _log_traceback(error)
    if sentence is not None:
        terminal.say(f"error: {sentence}")
        if folder is not None:
            folder.take_back()
        return 2
    if terminal.rank == 0:
        traceback.print_exception(error)
    where = f"the log is {_near(folder.path / 'log.txt')}" if folder is not None and logged else "no log was kept"
    terminal.say(f"llmtrain {command.name} stopped by a fault that is not yours; {where}")
    return 1


def _log_traceback(error: Exception) -> None:
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            record = logger.makeRecord(
                logger.name, logging.ERROR, __file__, 0, "stopped", (), (type(error), error, error.__traceback__)
            )
            handler.handle(record)


def _sentence(error: Exception) -> str | None:
    """The one sentence for a mistake of the user's; None when the error is a fault of ours.

    A `ValueError` counts as the user's when our own code raised it; one out of a library is a fault that we let pass.
    """
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return f"no space left on the disk{_of_file(error)}; free some, or choose another folder with paths.*"
    if isinstance(error, OSError) and error.errno in _BAD_NAMES and error.filename:
        return f"{error.strerror}{_of_file(error)}; give another path"
    if isinstance(error, _PATH_ERRORS):
        return f"{error.strerror or error}{_of_file(error)}" if error.filename else None
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError) and _is_ours(error):
        return " ".join(str(error).split())
    return None


def _of_file(error: OSError) -> str:
    return f": {os.fsdecode(error.filename)}" if error.filename else ""


def _is_ours(error: Exception) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _PACKAGE in Path(frames[-1].filename).resolve().parents
