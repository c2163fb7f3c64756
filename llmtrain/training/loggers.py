"""Where figures go: `metrics.csv` always, Weights & Biases if asked for.

Knows names, numbers and steps. It does not know what the figures mean or when they are due. Only rank 0 writes.
"""

from __future__ import annotations

import csv
import io
import logging
import os
import secrets
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from llmtrain.training import placement, wandb_server

log = logging.getLogger(__name__)

STEP = "step"
_UNWRITTEN_SECONDS = 30.0  # twice W&B's interval
_RUN_ID_FILE = "wandb_run_id.txt"


class MetricsCsv(Logger):
    """One row per step in a CSV file that a resumed run continues.

    Lightning's own CSVLogger deletes an existing file when it opens the folder, and writes one row per call. Here the
    figures of one step (training and validation) share a row, a row is on disk once `save` is called or the next
    step's figures come, and opening at step N drops the rows after N: the run is about to produce them again.

    Args:
        path: the file; created with its first row.
        resumed_step: rows after this step are dropped; 0 starts afresh.
    """

    def __init__(self, path: str | Path, *, resumed_step: int = 0) -> None:
        super().__init__()
        self.path = Path(path)
        self._columns: list[str] = [STEP]
        self._row: dict[str, Any] = {}
        self._written: int | None = None  # step of the last row in the file
        self._writes = placement.here().is_first
        if self._writes:
            self._truncate(resumed_step)

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name

    @property
    def version(self) -> str:
        """Not versioned: one file per run folder."""
        return ""

    @property
    def save_dir(self) -> str:
        """The folder of the file."""
        return str(self.path.parent)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the resolved config is a file of its own."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Adds figures to the row of a step."""
        assert step is not None
        if not self._writes:
            return
        if self._row and self._row[STEP] != step:
            self.save()
        self._row[STEP] = step
        self._row.update(metrics)

    def save(self) -> None:
        """Writes the current row."""
        if not self._row:
            return
        row = {name: _text(value) for name, value in self._row.items()}
        new = [name for name in row if name not in self._columns]
        again = self._row[STEP] == self._written  # a validation that a resumed run makes up for
        if new or again:
            self._columns += new
            rows = read_rows(self.path)
            if again:
                rows[-1] |= row
            self._write_all(rows)
        if not again:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns).writerow(row)
        self._written = self._row[STEP]
        self._row = {}

    def finalize(self, status: str) -> None:
        """Writes what is left, however the run ended."""
        self.save()

    def _truncate(self, resumed_step: int) -> None:
        if not self.path.exists():
            return
        rows = [row for row in read_rows(self.path) if int(row[STEP]) <= resumed_step]
        if not rows:
            self.path.unlink()
            return
        self._columns = list(rows[0])
        self._written = int(rows[-1][STEP])
        self._write_all(rows)

    def _write_all(self, rows: list[dict[str, str]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
        beside = self.path.with_name(f".{self.path.name}.writing")
        beside.write_text(text.getvalue(), encoding="utf-8", newline="")
        beside.replace(self.path)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The whole rows of a metrics file; a last line that a kill cut short is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    return list(csv.DictReader(io.StringIO(whole, newline="")))


def _text(value: Any) -> Any:
    """Nine significant digits hold an fp32 number exactly; counts stay whole."""
    return f"{value:.9g}" if isinstance(value, float) else value


def run_id(run_dir: Path) -> str | None:
    """The W&B run id of a run folder; `None` if it has none."""
    path = run_dir / _RUN_ID_FILE
    return path.read_text(encoding="utf-8").strip() if path.exists() else None


def _make_run_id(run_dir: Path) -> str:
    """The run id, created on first use, so that it is on disk before the first step."""
    known = run_id(run_dir)
    if known is not None:
        return known
    alphabet = string.ascii_lowercase + string.digits
    new = "".join(secrets.choice(alphabet) for _ in range(8))
    (run_dir / _RUN_ID_FILE).write_text(new + "\n", encoding="utf-8")
    return new


def build_wandb(
    run_dir: Path,
    *,
    project: str,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    mode: str = "auto",
) -> Logger | None:
    """A W&B logger that never prompts and never waits for a network that is not there; `None` where W&B is disabled.

    Args:
        run_dir: the run folder; W&B's own files go to `<run_dir>/wandb`, the run id to `wandb_run_id.txt`.
        project: W&B project.
        name: shown name; the run folder's name by default.
        config: the run's resolved settings.
        mode: `auto`, `online` or `offline`, see `wandb_server.resolve_mode`.

    Raises:
        ValueError: for an unknown mode, or `online` where that cannot be.
    """
    if mode == "auto" and os.environ.get("WANDB_MODE") == "disabled":
        log.info("WANDB_MODE=disabled: nothing goes to W&B")
        return None
    from lightning.pytorch.loggers import WandbLogger

    if not placement.here().is_first:
        return WandbLogger(project=project)  # writes nothing
    resolved = wandb_server.resolve_mode(mode)
    import wandb

    # The run is begun here, as Lightning would pass on a setting that W&B warns of. What stands on the terminal is the
    # command's business (console), and an offline run opens no connection, not even to report its errors.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    run = wandb.init(
        project=project,
        name=name or run_dir.name,
        id=_make_run_id(run_dir),
        dir=str(run_dir),
        config=dict(config or {}),
        mode=resolved,
        resume="allow" if resolved == "online" else None,
        settings=wandb.Settings(silent=True, console="off"),
    )
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return WandbLogger(experiment=run)


def repeat_last(logger: Logger, rows: Sequence[Mapping[str, str]]) -> None:
    """Gives a resumed W&B run the last rows of `metrics.csv` once more, of which a kill may have lost some.

    W&B writes what it is given every 15 seconds. What it gets twice has the same values under the same step.

    Args:
        logger: of the resumed run.
        rows: of the file, up to the step that is resumed from.
    """
    clock = [float(row.get("seconds") or "nan") for row in rows]
    since = max((seconds for seconds in clock if seconds == seconds), default=0.0) - _UNWRITTEN_SECONDS
    first = next((number for number, seconds in enumerate(clock) if seconds >= since), len(rows))
    for row in rows[first:]:
        figures = {name: float(value) for name, value in row.items() if value and name != STEP}
        logger.log_metrics(figures, step=int(row[STEP]))


def close(loggers: Sequence[Logger]) -> None:
    """Ends a W&B run that `build_wandb` began, so that it is whole on disk (and uploaded, if online)."""
    for logger in loggers:
        if placement.here().is_first and hasattr(logger, "experiment"):
            logger.experiment.finish()
