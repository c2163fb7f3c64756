"""Lines that a person types, or that come through a pipe.

On a terminal a line can be edited, former ones come back with the arrow keys (those of this session: nothing is kept
on the disk), and a paste of several lines is one message. Ctrl-C drops what is typed, twice at an empty prompt it ends,
and during an answer it asks for its end only. Through a pipe there is neither prompt nor colour. Knows nothing of what
lines mean.
"""

from __future__ import annotations

import codecs
import contextlib
import locale
import logging
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any

logger = logging.getLogger(__name__)

_PROMPT = "› "
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


class Console:
    """Reads standard input, which belongs to a person if it and standard output are terminals."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._lines = 0
        self._warned = False
        self._typed = False
        self._readline: ModuleType | None = None
        self._prompt = _PROMPT
        if self.interactive:
            self._readline = _line_editor()
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
            if self._readline and "NO_COLOR" not in os.environ and os.environ.get("TERM", "dumb") != "dumb":
                # Between \x01 and \x02 stands what takes no column; readline counts the others.
                self._prompt = f"\x01{_BOLD}\x02{_PROMPT}\x01{_PLAIN}\x02"

    def read(self) -> str | None:
        """The next line without its end; several if they were pasted as one; None when there are no more."""
        return self._typed_line() if self.interactive else self._piped_line()

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[list[bool]]:
        """While an answer comes: the list that is given is no longer empty once somebody pressed Ctrl-C.

        Through a pipe Ctrl-C ends the program as it ends others.
        """
        asked: list[bool] = []
        if not self.interactive:
            yield asked
            return
        former = signal.signal(signal.SIGINT, lambda number, frame: asked.append(True))
        try:
            yield asked
        finally:
            signal.signal(signal.SIGINT, former)

    def _piped_line(self) -> str | None:
        while line := sys.stdin.buffer.readline():
            self._lines += 1
            try:
                text = line.removeprefix(codecs.BOM_UTF8).decode("utf-8")
            except UnicodeDecodeError as error:
                logger.warning("line %d is not UTF-8 at byte %d and is left out", self._lines, error.start)
                continue
            return text.rstrip("\r\n")
        return None

    def _typed_line(self) -> str | None:
        while True:
            former = signal.signal(signal.SIGINT, self._interrupt)
            try:
                with _terminal_as_descriptor_1():
                    line = input(self._prompt)
                self._warned = False
                return line
            except EOFError:
                print(flush=True)
                return None
            except KeyboardInterrupt:
                print(flush=True)
                if self._warned and not self._typed:
                    return None
                self._warned = not self._typed
                if self._warned:
                    print("(Ctrl-C again, or Ctrl-D, ends)", flush=True)
            finally:
                signal.signal(signal.SIGINT, former)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._typed = bool(self._readline and self._readline.get_line_buffer())
        raise KeyboardInterrupt


@contextlib.contextmanager
def foreground() -> Iterator[None]:
    """Meanwhile Ctrl-C at the terminal is heard by this process only, and no more by the `make` that started it.

    `make` would go on until its command ends, and then report an interrupt however well that ended. It cannot be
    stopped and continued in the meantime: Ctrl-Z does nothing. Without `make`, or without a terminal, all stays as it
    is.
    """
    group = os.getpgrp()
    started = "MAKELEVEL" in os.environ and group != os.getpid() and sys.stdin.isatty()
    if not started or os.tcgetpgrp(sys.stdin.fileno()) != group:
        yield
        return
    former = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTSTP, signal.SIGTTOU)}
    os.setpgid(0, 0)
    os.tcsetpgrp(sys.stdin.fileno(), os.getpgrp())
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # `make` was killed, or the terminal is gone
            os.tcsetpgrp(sys.stdin.fileno(), group)
            os.setpgid(0, group)
        for number, handler in former.items():
            signal.signal(number, handler)


def _line_editor() -> Any:
    """The module readline, counting columns in UTF-8 and taking pastes whole; None where Python was built without."""
    if locale.nl_langinfo(locale.CODESET).upper() != "UTF-8":
        # It reads the environment when it is imported, and would take each byte of a character for a column.
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
            os.environ["LC_ALL"] = "C.UTF-8"
    try:
        import readline
    except ImportError:
        return None
    readline.parse_and_bind("set enable-bracketed-paste on")  # which Python turns off for its own prompt
    readline.set_completer(None)
    readline.parse_and_bind("tab: self-insert")
    return readline


@contextlib.contextmanager
def _terminal_as_descriptor_1() -> Iterator[None]:
    """`input` edits lines only if standard output is descriptor 1, which commands otherwise turn away."""
    shown = sys.stdout
    shown.flush()
    held = os.dup(1)
    os.dup2(shown.fileno(), 1)
    sys.stdout = sys.__stdout__
    try:
        yield
    finally:
        sys.stdout = shown
        os.dup2(held, 1)
        os.close(held)
