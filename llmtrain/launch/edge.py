"""Runs one command: composes its settings, makes its run folder, and turns what happens into an exit code.

The commands themselves are `run(settings, run_dir) -> results` in modules of their own and know nothing of this file.
Exit codes: 0; 1 a fault of ours, with a traceback; 2 a mistake of the user's, with one sentence; 130 interrupted; and
whatever a command asks for by `Ended` (training asks to be queued again) or `SystemExit` (a stage of `smoke`).
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import shlex
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.launch import runs
from llmtrain.launch.ending import Ended
from llmtrain.launch.folders import RunFolder, open_folder
from llmtrain.launch.terminal import Terminal, to_json
from llmtrain.training import early, placement
from llmtrain.training.lost import LostProcessError

if TYPE_CHECKING:
    from llmtrain.launch.composing import Composed

logger = logging.getLogger(__name__)

Run = Callable[..., dict[str, Any]]  # (settings, run folder)
Prepare = Callable[[], "tuple[Composed, RunFolder]"]

_PACKAGE = Path(__file__).resolve().parents[1]
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
        positionals: The keys that arguments without `=` go to one by one, where there are several.
        list_key: The key whose list all arguments without `=` make up.
        text_on_stdout: What the command prints is its product and goes to stdout, before the JSON.
        takes_overrides: Its `run` is also given the arguments as typed, as `overrides`.
        keeps_folder: A run folder is always made; otherwise only when `name` or `paths.run_dir` is given.
        trains: Its `run` is also given `accept`, to be called when nothing can be refused any more: until then a folder
            that holds a run is left as it is. Of the other commands a folder is theirs once they have results.
    """

    name: str
    summary: str
    positional: str | None = None
    positionals: tuple[str, ...] = ()
    list_key: str | None = None
    text_on_stdout: bool = False
    keeps_folder: bool = True
    takes_overrides: bool = False
    trains: bool = False

    @property
    def module(self) -> str:
        return "llmtrain.launch." + self.name.replace("-", "_")


def launch(
    command: Command,
    overrides: Sequence[str],
    *,
    configs: Path | None = None,
    run: Run | None = None,
    prepare: Prepare | None = None,
) -> int:
    """Runs a command in this process, which it takes over (descriptors, logging, warnings).

    Args:
        command: Which one.
        overrides: Its `key=value` arguments.
        configs: The folder of the YAML files; the package's own unless given.
        run: The function to run; the command's module has it unless given.
        prepare: Gives settings and folder in the place of composing `overrides` (several runs in one command).

    Returns:
        The exit code of the process.
    """
    place = _place()
    part_done = runs.end_with_first_process(place)
    if command.trains and prepare is None:
        early.arm()
    # The rank is not always known before the settings are.
    rank = 0 if place.is_first else place.ranks(place.local_size or 1)[0] or 1
    terminal = Terminal(text_on_stdout=command.text_on_stdout, rank=rank, shares_log=place.started_by_first)
    folder: RunFolder | None = None
    code = 0
    try:
        composed, folder = prepare() if prepare else _prepare(command, overrides, configs, terminal)
        _begin(composed, folder, terminal)
        if prepare is not None:
            folder.accept()  # its runs were checked there
        else:
            terminal.say(describe(command, composed, folder.path if folder.kept else None))
        run = run or importlib.import_module(command.module).run
        if command.takes_overrides and prepare is None:
            run = partial(run, overrides=list(overrides))
        if command.trains and prepare is None:
            run = partial(run, accept=folder.accept)
        try:
            results = run(composed.settings, folder.path)
        except Ended as ended:
            results, code = ended.results, ended.code
        folder.accept()
        if folder.kept:
            (folder.path / "results.json").write_text(to_json(results) + "\n", encoding="utf-8")
            if command.trains and place.is_first and (folder.path / "metrics.csv").is_file():
                importlib.import_module("llmtrain.launch.report").leave(folder.path)
        terminal.finish(results)
        part_done.set()
    except KeyboardInterrupt:
        done = f"; what was done is in {_near(folder.path)}" if folder is not None and folder.filled else ""
        if folder is not None:
            folder.take_back()
        terminal.say(f"interrupted{done}")
        return 130
    except BrokenPipeError:  # the reader of our output went away, as with `| head`
        terminal.abandon()
        return 141
    except Exception as error:
        return _report(error, command, folder, terminal)
    finally:
        if folder is not None:
            folder.leave()
    return code


def _place() -> placement.Placement:
    try:
        return placement.here()
    except ValueError:  # said once settings are read
        return placement.Placement()


def _prepare(
    command: Command, overrides: Sequence[str], configs: Path | None, terminal: Terminal
) -> tuple[Composed, RunFolder]:
    from llmtrain.launch.composing import UnknownKeyError, compose

    try:
        composed = compose(command.name, overrides, configs)
    except UnknownKeyError as error:
        if command.positional is None:
            raise
        as_text = f"llmtrain {command.name} -- {shlex.quote(error.argument)}"
        raise ValueError(f"{error}; if it is the {command.positional}: {as_text}") from error
    runs.check_folders(composed.settings.paths)
    return composed, open_folder(command, composed.settings, terminal)


def _begin(composed: Composed, folder: RunFolder, terminal: Terminal) -> None:
    """The settings learn which folder it is; log and settings go there as soon as it is this command's."""
    from omegaconf import OmegaConf

    OmegaConf.update(composed.settings, "paths.run_dir", str(folder.path).replace("${", r"\${"))
    folder.begin(composed.settings, terminal)


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


def _report(error: Exception, command: Command, folder: RunFolder | None, terminal: Terminal) -> int:
    """Tells the user what went wrong, in a sentence where it is a mistake of theirs, and returns the exit code."""
    sentence = _sentence(error)
    if terminal.rank and (folder is not None or sentence is None):
        terminal.note("".join(traceback.format_exception(error)))
    lost = isinstance(error, LostProcessError)
    if terminal.rank and (not isinstance(error, LostProcessError) or error.speaks):
        print(f"[rank {terminal.rank}] error: {sentence or error or repr(error)}", file=sys.stderr, flush=True)
    _log_traceback(error)
    if sentence is not None:
        terminal.say(f"error: {sentence}")
        if folder is not None:
            folder.take_back()
        return 2
    if folder is not None:
        folder.rescue_log()
    if lost:
        terminal.say(f"error: {error}")
        if folder is not None:
            folder.leave()
        logging.shutdown()
        os._exit(1)  # at its exit the interpreter would take leave of processes that do not answer
    if terminal.rank == 0:
        traceback.print_exception(error)
    log = None if folder is None else folder.log_file
    where = "no log was kept" if log is None else f"the log is {_near(log)}"
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
