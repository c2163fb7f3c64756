"""What a run folder holds of former sessions, and whether a session that does not go on from there may begin in it.

Nothing that a run has come to is replaced without being asked. What a run leaves that was ended before its first
checkpoint, the model of a first validation included, is replaced when `resume=auto` asks for the run to go on: its
steps come again. Knows names of files; not what is in them, nor how training resumes. Imports no Lightning, so that all
this is said in the first second.
"""

from __future__ import annotations

import logging
from pathlib import Path

from llmtrain.training.checkpointing import FOLDER, Checkpoint, list_checkpoints

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.csv"
RESULTS_FILE = "results.json"
"""Written at the end of a run."""
LEFT = ("model", "adapter", RESULTS_FILE, METRICS_FILE)
"""What a run leaves beside checkpoints; the first two from its first validation on."""


def make_way(run_dir: Path, *, resume: str | Path | None, checkpoint: Checkpoint | None) -> None:
    """Refuses to begin where results of another session would be replaced; on rank 0, before anything is written.

    Args:
        run_dir: this run's folder, which need not exist.
        resume: as it was given.
        checkpoint: what the session goes on from; `None` for a fresh start.

    Raises:
        ValueError: the folder holds what is not a part of the run that goes on.
    """
    if checkpoint is not None and run_dir.resolve() in checkpoint.path.resolve().parents:
        return
    elsewhere = "name=… or paths.run_dir=… starts one elsewhere"
    if list_checkpoints(run_dir):
        raise ValueError(f"{run_dir} holds another run; resume=auto continues it, {elsewhere}.")
    there = _left(run_dir)
    if there and (str(resume) != "auto" or RESULTS_FILE in there):
        replaced = "" if resume is None else f", so resume={resume} would replace it"
        again = "removing the folder" if RESULTS_FILE in there else "resume=auto"
        raise ValueError(
            f"{run_dir} holds another run ({' and '.join(there)}) and no checkpoint that it could go on from"
            f"{replaced}; {elsewhere}, and {again} starts it again (trainer.checkpoint_every=… saves checkpoints)."
        )


def check_no_run(folder: Path) -> None:
    """Refuses a folder for several runs that holds one itself.

    Raises:
        ValueError: it does.
    """
    there = [name for name in _left(folder) if name != RESULTS_FILE] + [FOLDER] * (folder / FOLDER).is_dir()
    if there:
        raise ValueError(f"{folder} holds a run ({' and '.join(there)}), not several; name=… takes another folder.")


def tell_fresh_start(run_dir: Path, *, resume: str | Path | None) -> None:
    """Says of `resume=auto` that nothing is there to go on from, so that a mistyped name does not go unseen."""
    if str(resume) != "auto" or list_checkpoints(run_dir):
        return
    if there := _left(run_dir):
        log.warning(
            "resume=auto: the run in %s was ended before its first checkpoint; it starts afresh, and %s come again",
            run_dir,
            " and ".join(there),
        )
    else:
        log.warning("resume=auto: there is no run in %s yet; a new one starts", run_dir)


def _left(run_dir: Path) -> list[str]:
    return [name for name in LEFT if (run_dir / name).exists()]
