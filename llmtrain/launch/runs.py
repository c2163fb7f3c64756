"""The run folder: `runs/<command>/<name or time>/`, and the pointer `latest` beside it.

Rank 0 makes the folder and tells the processes that it starts by `LLMTRAIN_RUN_DIR`; how others learn of it is in
`meeting`. Knows nothing of what a command puts into it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from llmtrain.training.placement import Placement

LATEST = "latest"


def end_with_first_process(place: Placement) -> threading.Event:
    """In a process that another one of the run started: ends when that one has gone, instead of waiting without end.

    Returns:
        To be set when this process has done its part: then it ends without a word.
    """
    done = threading.Event()
    if not place.started_by_first:
        return done
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        time.sleep(2.0)  # a collective that has failed says more
        if not done.is_set():
            first = f"the first process of machine {place.node_rank}" if place.node_rank else "rank 0"
            text = f"[local rank {place.local_rank}] error: {first} is gone, and the others cannot go on without it\n"
            os.write(2, text.encode())
        os._exit(1)  # the main thread may wait inside a collective, where no exception reaches it

    threading.Thread(target=watch, name="watch-first-process", daemon=True).start()
    return done


def check_folders(paths: Mapping[str, str | None]) -> None:
    """Refuses settings of the section `paths` that name no folder, nor one that could be made.

    Raises:
        ValueError: There is a file in its place, or in the place of a folder above it.
    """
    for key, value in paths.items():
        if value is None:
            continue
        path = Path(value)
        there = next((folder for folder in (path, *path.parents) if folder.exists()), path.parent)
        if not there.is_dir():
            what = "is a file" if there == path else f"lies below {there}, which is a file"
            raise ValueError(f"paths.{key}={value} {what}: give a folder")


def choose_run_dir(
    runs_dir: Path, command: str, *, name: str | None = None, run_dir: str | None = None, resume: str | None = None
) -> Path:
    """Where a run goes; makes nothing.

    Args:
        runs_dir: The folder of all runs.
        command: The command, which is the folder below it.
        name: A name of the user's, in place of the time; an existing folder of that name is used again.
        run_dir: The folder itself, which overrides everything else.
        resume: `auto` continues the latest run, a path the run that holds it.

    Raises:
        ValueError: The name is not a single folder name.
    """
    if run_dir is not None:
        return Path(run_dir)
    if name is not None:
        if name in ("", ".", "..", LATEST) or any(character in name for character in "/\\\0\n"):
            raise ValueError(f"name={name!r} cannot name a folder; give a word without slashes, not {LATEST!r}")
        return runs_dir / command / name
    if resume == "auto":
        former = latest_run(runs_dir, command)
        if former is not None:
            return former
    elif resume is not None:
        for folder in [Path(resume), *Path(resume).parents]:
            if (folder / "config.yaml").is_file():
                return folder.resolve() if folder.name == LATEST else folder  # the link may move on while it runs
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    folder, count = runs_dir / command / stamp, 2
    while folder.exists():
        folder, count = runs_dir / command / f"{stamp}-{count}", count + 1
    return folder


def point_latest(run_dir: Path, folder: Path | None = None) -> None:
    """Makes `latest` point to a run folder: a symbolic link, or a text file where there are none.

    Args:
        run_dir: The run folder.
        folder: Where `latest` is, a folder above it; the one just above unless given.
    """
    folder = folder or run_dir.parent
    pointer, beside = folder / LATEST, folder / f".{LATEST}-{os.getpid()}"
    if run_dir.name == LATEST or (pointer.is_dir() and not pointer.is_symlink()):
        return  # the pointer itself, or a folder of the user's own
    with contextlib.suppress(FileNotFoundError):
        beside.unlink()
    try:
        beside.symlink_to(run_dir.relative_to(folder), target_is_directory=True)
    except OSError:
        beside.write_text(f"{run_dir.relative_to(folder)}\n", encoding="utf-8")
    beside.replace(pointer)


def latest_run(runs_dir: Path, command: str) -> Path | None:
    """The run that `latest` points to, or None when there is none (or it is gone)."""
    pointer = runs_dir / command / LATEST
    if pointer.is_symlink():
        folder = pointer.parent / pointer.readlink()
    elif pointer.is_file():
        folder = pointer.parent / pointer.read_text(encoding="utf-8").strip()
    else:
        return None
    return folder if folder.is_dir() else None
