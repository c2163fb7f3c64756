"""What reaches the screen, what reaches stdout, and what only reaches the log file.

stdout carries one thing: the line of JSON at the end (and, for commands whose product is text, that text before it).
Everything else that is written to descriptor 1 — by Python, by C++ libraries, by child processes — goes to the log
file, or to stderr where a command keeps no log. On stderr our own messages appear as plain sentences, and warnings;
the libraries' INFO lines, tips and deprecations are for the log. Does not know settings or commands.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import math
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

_OWN_MODULES = ("llmtrain", "__main__")
# Not for the reader of the screen: what a library will change some day, and what it thinks might be faster.
_PACKAGE = Path(__file__).parents[1]
_QUIET_WARNINGS = (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ImportWarning, ResourceWarning)
_QUIET_NAMES = ("PossibleUserWarning",)  # Lightning's advice; by name, so as not to import Lightning
# Warnings of a library about what we do on purpose (the tests prove that it is right) or say ourselves, and better.
_CHATTER = ("You are using ZeRO with an untested optimizer", "OVERFLOW! Skipping step")
# Libraries that hang their own handler on their logger when they are imported, and stop propagation.
_SELF_LOGGING = ("DeepSpeed", "transformers", "lightning", "lightning.pytorch", "lightning.fabric")

# Control characters but tab and newline, overrides of the writing direction, and bytes that were no text.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class OutputError(ValueError):
    """What a command prints cannot be written; the message is one sentence for the user."""


@contextlib.contextmanager
def whole_output(descriptor: int, name: str = "standard output") -> Iterator[None]:
    """Around writing: a stream that takes no more is a sentence, and what is still buffered goes nowhere.

    Raises:
        OutputError: The descriptor could not be written, as with a full disk.
        BrokenPipeError: Its reader went away, as with `| head`.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        discard(descriptor)
        raise OutputError(
            f"{name} cannot be written ({error.strerror or error}): free space where it goes, or send it elsewhere"
        ) from error


def discard(descriptor: int) -> None:
    """From now on what is written to a descriptor goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def visible(text: str, stream: TextIO | None = None) -> str:
    """Text for a stream, stdout unless given; a pipe or a file gets it as it is.

    On a terminal control characters, which could move the cursor or worse, appear as `\\x1b` and the like.
    """
    if not (stream or sys.stdout).isatty():
        return text
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class _HarnessedLogger(logging.Logger):
    """A logger that stays under the root logger's handlers whatever its library does when imported."""

    def addHandler(self, hdlr: logging.Handler) -> None:
        if not isinstance(hdlr, logging.StreamHandler) or isinstance(hdlr, logging.FileHandler):
            super().addHandler(hdlr)

    @property
    def propagate(self) -> bool:
        return True

    @propagate.setter
    def propagate(self, value: bool) -> None:
        pass


class _LogFile(logging.FileHandler):
    """A log file that keeps quiet where logging's own would print a traceback for every line: on a full disk."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _TerminalFilter(logging.Filter):
    """Our own messages from INFO on; of the libraries only warnings that a reader can act on.

    What one rank of a run warns of, all of them find, and rank 0 says it. A rank above 0 shows what it alone can know:
    errors, and warnings that are logged with `extra={"of_this_rank": True}`.
    """

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self._terminal = terminal

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] == "llmtrain":
            alone = self._terminal.rank == 0 or getattr(record, "of_this_rank", False)
            return record.levelno >= (logging.INFO if alone else logging.ERROR)
        if record.levelno < logging.WARNING or getattr(record, "quiet", False):
            return False
        message = record.getMessage()
        return not any(chatter in message for chatter in _CHATTER)


class _TerminalFormatter(logging.Formatter):
    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self._terminal = terminal

    def format(self, record: logging.LogRecord) -> str:
        message = getattr(record, "short", None) or record.getMessage()
        if record.levelno >= logging.WARNING:
            message = f"{record.levelname.lower()}: {message}"
        message = visible(message, sys.stderr)
        rank = self._terminal.rank
        return f"[rank {rank}] {message}" if rank else message


class _TerminalHandler(logging.StreamHandler):
    """Writes to stderr, above a progress bar when one is drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm = sys.modules.get("tqdm")
        if tqdm is None:
            super().emit(record)
            return
        with tqdm.tqdm.external_write_mode(file=self.stream):
            super().emit(record)


class _Prints(io.TextIOWrapper):
    """Where `print` goes. What a library prints goes to descriptor 1 instead, which means the log.

    It remembers whether the last line was ended, so that JSON gets a line of its own.
    """

    line_open = False
    stream = "standard output"

    def write(self, text: str) -> int:
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] not in _OWN_MODULES:
            _write_all(1, text)
            return len(text)
        if text:
            self.line_open = not text.endswith("\n")
        with whole_output(self.fileno(), self.stream):
            return super().write(text)

    def flush(self) -> None:
        with whole_output(self.fileno(), self.stream):
            super().flush()


class Terminal:
    """Takes over stdout, logging and warnings of this process; there is one for each command.

    Args:
        text_on_stdout: `print` reaches the real stdout (for commands whose product is text); otherwise stderr.
        rank: Ranks above 0 show what they alone can know, and keep no log.
        shares_log: Rank 0, or the first process of this machine, has pointed descriptor 1 to its log.
    """

    def __init__(self, *, text_on_stdout: bool = False, rank: int = 0, shares_log: bool = False) -> None:
        self.rank = rank
        self._held: int | None = None
        sys.stdout.flush()
        self._stdout = os.dup(1)
        if not shares_log:
            os.dup2(2, 1)
        sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
        self._prints = _open_prints(self._stdout if shares_log or (text_on_stdout and rank == 0) else 2)
        if not text_on_stdout:
            self._prints.stream = "standard error"
        sys.stdout = self._prints
        self._capture_logging()

    def keep_log(self, log_file: Path) -> None:
        """Sends log lines, stray output and what was captured from now on to a file, which is appended to."""
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab", buffering=0) as file:
            if self._held is not None:
                file.write(os.pread(self._held, os.fstat(self._held).st_size, 0))
                os.close(self._held)
                self._held = None
            os.dup2(file.fileno(), 1)
        self._log_to(log_file)

    def hold_log(self) -> None:
        """Sends them to a file without a name, until `keep_log` says where they belong; else they go nowhere."""
        with tempfile.TemporaryFile() as file:
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
            os.dup2(file.fileno(), 1)
        self._held = os.dup(1)
        self._log_to(Path("/dev/fd") / str(self._held))

    def _log_to(self, path: Path) -> None:
        root = logging.getLogger()
        for former in [each for each in root.handlers if isinstance(each, _LogFile)]:
            root.removeHandler(former)
            former.close()
        handler = _LogFile(path, mode="a", encoding="utf-8", errors="backslashreplace")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)

    def say(self, text: str) -> None:
        """Writes one message to stderr, on rank 0."""
        if self.rank == 0:
            with contextlib.suppress(OSError):  # where nobody can be told, nobody is
                print(visible(text, sys.stderr), file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Writes to the log, on any rank: a process that shares the log of rank 0 has it as descriptor 1."""
        _write_all(1, text)

    def finish(self, results: dict[str, Any]) -> None:
        """Writes the results as the last line of stdout, on rank 0; afterwards nothing of ours reaches stdout."""
        if self.rank == 0:
            line = to_json(results) + "\n"
            if self._prints.line_open:
                self._prints.write("\n")
            self._prints.flush()
            with whole_output(self._stdout):
                _write_all(self._stdout, line)

    def abandon(self) -> None:
        """After the reader of stdout went away: what is still buffered goes nowhere."""
        for descriptor in (self._prints.fileno(), self._stdout):
            discard(descriptor)

    def _capture_logging(self) -> None:
        manager = logging.Logger.manager
        for name in _SELF_LOGGING:
            if name not in manager.loggerDict:
                logger = _HarnessedLogger(name)
                logger.parent, logger.manager = logging.getLogger(), manager
                manager.loggerDict[name] = logger
        terminal = _TerminalHandler(sys.stderr)
        terminal.addFilter(_TerminalFilter(self))
        terminal.setFormatter(_TerminalFormatter(self))
        if self.rank:
            terminal.setLevel(logging.WARNING)
        root = logging.getLogger()
        root.handlers[:] = [terminal]
        root.setLevel(logging.INFO)
        warnings.showwarning = _show_warning


def to_json(results: Any) -> str:
    """One line of strict JSON: paths as text, numbers that JSON lacks (nan, inf) as null, lone surrogates escaped."""
    text = json.dumps(_plain(results), ensure_ascii=False, allow_nan=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        text = json.dumps(_plain(results), allow_nan=False)
    return text


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, str):  # a scalar of numpy or torch
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def _write_all(descriptor: int, text: str) -> None:
    data = memoryview(text.encode("utf-8", errors="surrogateescape"))
    while data:
        data = data[os.write(descriptor, data) :]


def _open_prints(descriptor: int) -> _Prints:
    raw = os.fdopen(os.dup(descriptor), "wb", buffering=0)
    return _Prints(io.BufferedWriter(raw), encoding="utf-8", errors="surrogateescape", line_buffering=True)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    text = str(message).strip()
    ours = Path(filename).is_relative_to(_PACKAGE)  # a checkout, its .venv inside, is often named llmtrain as well
    quiet = not ours and (issubclass(category, _QUIET_WARNINGS) or category.__name__ in _QUIET_NAMES)
    logging.getLogger("py.warnings").warning(
        "%s:%d: %s: %s", filename, lineno, category.__name__, text, extra={"quiet": quiet, "short": text}
    )
