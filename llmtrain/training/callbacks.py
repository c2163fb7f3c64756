"""What happens around the steps: figures, samples, signals. Checkpoints have a file of their own (`saving.py`).

Each callback acts after whole optimiser steps only. They share a `RunControl`; none of them knows Hydra or DeepSpeed.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from llmtrain.training import early, hardware, loops
from llmtrain.training.control import RunControl
from llmtrain.training.module import LanguageModule
from llmtrain.training.progress import compact
from llmtrain.training.throughput import Rate

if TYPE_CHECKING:
    from llmtrain.generation import SamplingParams

log = logging.getLogger(__name__)


class Figures(Callback):
    """Logs losses, speed and learning rate, and shows them on the progress line.

    Speed is trained tokens of finished steps over seconds of training alone: validation, checkpoints and samples stop
    the watch. MFU is FLOPs of the positions that were computed, over all processes, per second and peak FLOP/s. Nothing
    bounds it: above 1, which is warned of, the peak was measured too low or the FLOPs are counted wrong.

    Args:
        control: the run's timetable.
        flops_per_position: of forward and backward of one position; `None` leaves MFU out.
        precision: in which the peak is taken.
    """

    def __init__(self, control: RunControl, *, flops_per_position: float | None, precision: str) -> None:
        self._control = control
        self._flops = flops_per_position
        self._precision = precision
        self._peak = 0.0  # of all processes; taken once, so that the figures of a run have one denominator
        self._peak_exceeded = False
        self._tokens = Rate(control.stopwatch)
        self._positions = Rate(control.stopwatch)
        self._shown = ""
        self._session_tokens = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measures the peak, in all processes at once, and starts the watch."""
        assert isinstance(pl_module, LanguageModule)
        if self._flops is not None:
            trainer.strategy.barrier("peak")  # on shared cores each has only its part of the machine while all compute
            mine = hardware.peak_of(self._precision, pl_module.device)
            peak = torch.tensor(mine.flops, dtype=torch.float64, device=pl_module.device)
            self._peak = float(trainer.strategy.reduce(peak, reduce_op="sum"))
            if trainer.is_global_zero:
                rate = f"{self._peak / 1e12:.3g} TFLOP/s in {self._precision}"
                log.info("train/mfu is a share of %s: %d × %s", rate, trainer.world_size, mine.source)
        self._control.stopwatch.start()
        self._tokens.reset(pl_module.tokens_seen)
        self._positions.reset(pl_module.positions_seen)
        self._session_tokens = pl_module.tokens_seen

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs after the steps that are due; the others cost no synchronisation."""
        if not self._control.ends_step(batch_idx):
            return
        assert isinstance(pl_module, LanguageModule)
        step = trainer.global_step
        if self._control.logs_at(step):
            self._log(trainer, pl_module, step)
        if trainer.is_global_zero:
            self._control.progress.show(step, self._shown, left=self._seconds_left(step, trainer))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops the watch."""
        hardware.synchronize(pl_module.device)
        self._control.stopwatch.stop()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs the result; the watch goes on at the next micro-batch, after checkpoints and samples."""
        assert isinstance(pl_module, LanguageModule)
        step = trainer.global_step
        self._write(trainer, pl_module.last_validation, step)
        if trainer.is_global_zero:
            figures = "  ".join(f"{name} {value:.4f}" for name, value in pl_module.last_validation.items())
            self._control.progress.keep(step, figures)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Lets the watch run again if something stopped it."""
        self._control.stopwatch.start()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leaves the last line standing."""
        self._control.stopwatch.stop()
        self._control.progress.close()

    def tokens_per_second(self, module: LanguageModule) -> float:
        """Trained tokens of this session per second of training alone."""
        seconds = self._control.stopwatch.seconds
        return (module.tokens_seen - self._session_tokens) / seconds if seconds > 0 else 0.0

    def _log(self, trainer: pl.Trainer, module: LanguageModule, step: int) -> None:
        loss = module.step_loss()  # waits for the device, so the watch is right
        tokens = module.finished_tokens()
        speed = self._tokens.read(tokens)
        norm = trainer.strategy.last_grad_norm  # type: ignore[attr-defined]
        figures: dict[str, float] = {"train/loss": loss, "train/lr": module.last_lr}
        if norm is not None:
            figures["train/grad_norm"] = float(norm)
        figures["train/tokens_per_second"] = speed
        positions = self._positions.read(module.positions_seen) * trainer.world_size
        if self._flops is not None and self._peak:
            figures["train/mfu"] = self._mfu(trainer, positions * self._flops)
        figures["train/skipped_steps"] = self._control.skipped_steps
        figures["train/memory_bytes"] = float(hardware.peak_memory(module.device))
        figures["tokens"] = tokens
        figures["seconds"] = self._control.train_seconds
        self._shown = f"loss {loss:.3f}  {compact(speed)} tok/s"
        self._write(trainer, figures, step, more=self._control.validates_at(step))

    def _mfu(self, trainer: pl.Trainer, flops: float) -> float:
        """The share of the peak that so many FLOP/s are."""
        share = flops / self._peak
        if share > 1 and trainer.is_global_zero and not self._peak_exceeded:
            self._peak_exceeded = True
            log.warning(
                "train/mfu=%.3g exceeds 1: training does %.3g TFLOP/s, and the peak was taken as %.3g when it began, "
                "perhaps in a busy moment; the other figures do not depend on it",
                share,
                flops / 1e12,
                self._peak / 1e12,
            )
        return share

    def _write(self, trainer: pl.Trainer, figures: dict[str, float], step: int, *, more: bool = False) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=step)
            if not more:
                logger.save()

    def _seconds_left(self, step: int, trainer: pl.Trainer) -> float | None:
        done = trainer.fit_loop.epoch_loop.batch_idx + 1
        if not done or self._control.stopwatch.seconds <= 0:
            return None
        per_batch = self._control.stopwatch.seconds / done
        return per_batch * (self._control.total_steps - step) * self._control.accumulation


class Samples(Callback):
    """Writes what the model says to fixed prompts into `samples.md`, through the shared engine, on rank 0.

    Args:
        control: the run's timetable.
        run_dir: where `samples.md` goes.
        tokenizer: the model's.
        prompts: the fixed prompts.
        sampling: how to sample; a fixed seed makes the texts comparable from step to step.
    """

    def __init__(
        self,
        control: RunControl,
        run_dir: Path,
        tokenizer: Any,
        prompts: Sequence[str],
        sampling: SamplingParams,
    ) -> None:
        self._control = control
        self._path = run_dir / "samples.md"
        self._tokenizer = tokenizer
        self._prompts = list(prompts)
        self._sampling = sampling

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Drops the samples of steps that come again."""
        if not trainer.is_global_zero or not self._path.exists():
            return
        parts = re.split(r"(?m)^(?=## step \d+$)", self._path.read_text(encoding="utf-8"))
        kept = [part for part in parts if part and int(part.split(maxsplit=3)[2]) <= trainer.global_step]
        beside = self._path.with_name(f".{self._path.name}.writing")
        beside.write_text("".join(kept), encoding="utf-8")
        beside.replace(self._path)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Samples after the steps that are due."""
        if not self._control.ends_step(batch_idx) or not self._control.samples_at(trainer.global_step):
            return
        with self._control.stopwatch.paused():
            model = whole_model(trainer, pl_module)  # a collective under ZeRO 3: every rank takes part
            if trainer.is_global_zero and model is not None:
                self._write(trainer.global_step, model)

    def _write(self, step: int, model: Any) -> None:
        from llmtrain.generation import Engine

        was_training = model.training
        model.eval()
        try:
            engine = Engine(model, self._tokenizer, max_rows=len(self._prompts))
            completions = engine.generate(self._prompts, seeded(self._sampling, len(self._prompts)))
        finally:
            model.train(was_training)
        lines = [f"## step {step}", ""]
        for prompt, completion in zip(self._prompts, completions, strict=True):
            lines += [f"**{prompt}**{completion.text}", ""]
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        first = (self._prompts[0] + completions[0].text).replace("\n", " ")
        self._control.progress.write(f"  sample: {first[:100]}")


def seeded(sampling: SamplingParams, count: int) -> list[SamplingParams]:
    """The same settings `count` times, each with a seed of its own: with one for all, the texts resemble each other."""
    if sampling.seed is None:
        return [sampling] * count
    return [replace(sampling, seed=sampling.seed + number) for number in range(count)]


def whole_model(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
    """The plain model with all its weights on rank 0 (other ranks: `None`, or their own). A collective under ZeRO 3."""
    if not getattr(trainer.strategy, "zero_stage_3", False):
        return module.model
    weights = trainer.strategy.fp32_state_dict(module.model)  # type: ignore[attr-defined]
    if not trainer.is_global_zero:
        return None
    from llmtrain.model import Transformer

    assert isinstance(module.model, Transformer)
    model = Transformer(module.model.config)
    if set(weights) != set(model.state_dict()):
        log.warning("no samples under ZeRO 3 while an adapter is attached: the plain model cannot hold its weights")
        return None
    model.load_state_dict(weights)
    return model.to(module.device)


class Accept(Callback):
    """Calls a function once the processes have met: from then on no rank refuses the run any more."""

    def __init__(self, accept: Callable[[], None]) -> None:
        self._accept = accept

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Calls it."""
        self._accept()


class StopOnSignal(Callback):
    """On SIGTERM, SIGINT, SIGUSR1 or SIGUSR2: finishes the step, lets it be saved, and ends. Another one ends at once.

    Ranks agree once per step through a reduction on the host that is started after one step and read after the next, so
    that nothing waits; a signal to any rank stops all of them after the same step.

    Args:
        control: where the wish to stop is noted.
        timeout: seconds that the ranks wait for each other.
    """

    SIGNALS = (signal.SIGINT, *early.SIGNALS)

    def __init__(self, control: RunControl, *, timeout: float = 1800.0) -> None:
        self._control = control
        self._timeout = timedelta(seconds=timeout)
        self._speaks = False
        self._received = 0
        self._former: dict[int, Any] = {}
        self._kill_children: Callable[[int], None] | None = None
        self._group: Any = None
        self._asked: tuple[Any, torch.Tensor] | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes the signals over from Lightning, whose handler runs a collective of its own."""
        if trainer.world_size > 1:
            loops.silence_signal_broadcast(trainer)
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        self._speaks = trainer.local_rank == 0  # on each machine, as the signal may have come to one of them
        launcher = trainer.strategy.launcher
        self._kill_children = getattr(launcher, "kill", None)
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                self._former[number] = signal.signal(number, self._handle)
            self._former |= early.disarm()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a whole step: it is the last one if the run is over or any rank was signalled."""
        if not self._control.ends_step(batch_idx):
            return
        if trainer.global_step >= self._control.total_steps:
            loops.stop_after_this_step(trainer, validate=self._control.validates)
            return
        number = self._agreed()
        if number:
            self._control.stop_signal = signal.Signals(number).name
            loops.stop_after_this_step(trainer, validate=False)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gives the signals back."""
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Gives the signals back, but for SIGTERM: a launcher that ends the others of a dead rank lets them say so."""
        self._restore()
        if trainer.world_size > 1 and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _agreed(self) -> int:
        """The signal that some rank had received when the step before was over (alone: by now); 0 for none."""
        if self._group is None:
            return self._received
        seen = 0
        if self._asked is not None:
            work, answer = self._asked
            work.wait()
            seen = int(answer)
        question = torch.tensor(self._received)
        self._asked = (dist.all_reduce(question, dist.ReduceOp.MAX, group=self._group, async_op=True), question)
        return seen

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._received:
            if number in early.SCHEDULERS:  # which may send it to a step and to each of its processes
                return
            os.write(2, f"\n{name} again: ending at once.\n".encode())
            if self._kill_children is not None:
                self._kill_children(signal.SIGKILL)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._received = number
        if self._speaks:
            os.write(2, f"\n{name}: finishing the step and saving; a second signal ends at once.\n".encode())

    def _restore(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}
