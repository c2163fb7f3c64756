"""What a run folder holds of former sessions, and whether a session that does not go on from there may begin in it.

Nothing that training has brought about is replaced without being asked: a model, an adapter, results and checkpoints
refuse a fresh start. Figures alone are left by a run that was killed before it had anything else; its steps come again.
Knows names of files; not what is in them, nor how training resumes.
"""

from __future__ import annotations

import logging
from pathlib import Path

from llmtrain.training.checkpointing import Checkpoint, list_checkpoints
from llmtrain.training.loggers import METRICS_FILE, read_rows

log = logging.getLogger(__name__)

RESULTS = ("model", "adapter", "results.json")
"""What a run leaves when it has come to something; the first two from its first validation on."""


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
    there = [name for name in RESULTS if (run_dir / name).exists()]
    metrics = run_dir / METRICS_FILE
    elsewhere = "name=… or paths.run_dir=… starts one elsewhere"
    if list_checkpoints(run_dir):
        raise ValueError(f"{run_dir} holds another run; resume=auto continues it, {elsewhere}.")
    if there or (resume is None and metrics.exists()):
        what = " and ".join(there or [METRICS_FILE])
        raise ValueError(
            f"{run_dir} holds another run ({what}) and no checkpoint that it could go on from"
            f"{'' if resume is None else f', so resume={resume} would replace it'}; {elsewhere}, and removing the "
            "folder starts it again (trainer.checkpoint_every=… saves checkpoints)."
        )
    if metrics.exists():
        steps = len(read_rows(metrics))
        log.warning("%s: a former session ended before its first checkpoint; its figures (%d rows of %s) come again",
                    run_dir, steps, METRICS_FILE)  # fmt: skip
