"""A scheduler's signal before the first step: nothing is lost by ending at once, with the code to be queued again.

A process that starts up may wait inside a library (for the other ranks, for a tokenizer that is learned), where Python
calls no handler; so a thread is told by the system and ends the process. Knows signals; nothing of what starts up.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from llmtrain.training import placement

REQUEUE_EXIT_CODE = 75
"""What a command ends with after a signal: the run is saved and may be queued again (sysexits' EX_TEMPFAIL)."""
SCHEDULERS = (signal.SIGUSR1, signal.SIGUSR2)  # what Slurm is usually told to send, and what submitit tells it
SIGNALS = (signal.SIGTERM, *SCHEDULERS)  # not SIGINT: who sits at the terminal has the usual end

_former: dict[int, Any] = {}
_before: list[Callable[[], None]] = []


def arm() -> None:
    """From now until `disarm` a signal ends this process; in the main thread."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    for number in SIGNALS:
        _former[number] = signal.signal(number, lambda *_: None)  # the thread does what there is to do
    signal.set_wakeup_fd(write)
    os.register_at_fork(after_in_child=_give_back)  # a pool ends its workers by SIGTERM, which is their own affair
    threading.Thread(target=_watch, args=(read,), name="watch-early-signals", daemon=True).start()


def disarm() -> dict[int, Any]:
    """Signals are somebody else's again; returns the handlers of before, if there was anything to disarm."""
    former = dict(_former)
    if _former:
        signal.set_wakeup_fd(-1)
        _former.clear()
    return former


def _give_back() -> None:
    for number, handler in disarm().items():
        signal.signal(number, handler)


def is_armed() -> bool:
    """Whether the first step is still to come."""
    return bool(_former)


def before_end(act: Callable[[], None]) -> None:
    """Something to do before the process ends early, such as ending those that it started."""
    _before.append(act)


def end(what: str) -> None:
    """Ends this process, at once."""
    for act in _before:
        act()
    if placement.here().is_first:
        text = f"\n{what} before the first step of this session: nothing is lost; the same command with resume=auto "
        os.write(2, f"{text}starts or goes on.\n".encode())
    os._exit(REQUEUE_EXIT_CODE)


def _watch(pipe: int) -> None:
    while True:
        (number,) = os.read(pipe, 1)
        if number in _former:
            end(signal.Signals(number).name)
