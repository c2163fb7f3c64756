"""What the callbacks of one run share: when things are due, the stopwatch, the progress line, and a wish to stop.

Knows step numbers. It does not know Lightning, models or files.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from llmtrain.training.geometry import is_due
from llmtrain.training.progress import ProgressLine
from llmtrain.training.throughput import Stopwatch


@dataclass
class RunControl:
    """The run's timetable and shared instruments.

    Attributes:
        total_steps: last step of the run.
        accumulation: micro-batches per step.
        log_every: steps between logged figures.
        val_every: steps between validations; `None` validates at the end only.
        validates: whether there is anything to validate on.
        checkpoint_every: steps between checkpoints; `None` writes none, except when a signal stops the run.
        sample_every: steps between samples; `None` writes none.
        progress: the progress line.
        stopwatch: runs while steps are taken.
        earlier_seconds: training time of the sessions before this one.
        stop_signal: name of the signal that asked to stop, once all ranks know.
        skipped_steps: steps left out because loss or gradient were not finite, over all sessions.
        skipped_in_a_row: how many of them were the last ones.
    """

    total_steps: int
    accumulation: int
    log_every: int
    val_every: int | None
    validates: bool
    checkpoint_every: int | None
    sample_every: int | None
    progress: ProgressLine
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    earlier_seconds: float = 0.0
    stop_signal: str | None = None
    skipped_steps: int = 0
    skipped_in_a_row: int = 0

    def ends_step(self, batch_idx: int) -> bool:
        """Whether this micro-batch (counted from the start of the session) completes an optimiser step."""
        return (batch_idx + 1) % self.accumulation == 0

    def logs_at(self, step: int) -> bool:
        """Logged figures: every `log_every` steps, the first and the last."""
        return is_due(step, self.log_every) or step in (1, self.total_steps)

    def validation_due(self, step: int) -> bool:
        """Validation: every `val_every` steps and at the end."""
        return self.validates and (is_due(step, self.val_every) or step == self.total_steps)

    def validates_at(self, step: int) -> bool:
        """Validation that is due, unless a signal stops the run: then the resumed run begins with it."""
        return self.validation_due(step) and self.stop_signal is None

    def saves_at(self, step: int) -> bool:
        """Checkpoints: every `checkpoint_every` steps, at the end, and when stopping on a signal."""
        if self.checkpoint_every is None:
            return self.stop_signal is not None
        return is_due(step, self.checkpoint_every) or step == self.total_steps or self.stop_signal is not None

    def samples_at(self, step: int) -> bool:
        """Samples: every `sample_every` steps; the command prints those of the finished model itself."""
        return is_due(step, self.sample_every) and step != self.total_steps

    @property
    def train_seconds(self) -> float:
        """Seconds of training alone, over all sessions."""
        return self.earlier_seconds + self.stopwatch.seconds
