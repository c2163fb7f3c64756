"""Training tokens per second: `fit`, as `make pretrain` calls it, beside bare loops over the same model and batches.

`fit` owns its loop, so it cannot be called a few steps at a time. It is halted from below instead: its data loader,
when asked for the first micro-batch of a step, lets the other sides have their turn before it answers. At that moment
the last step is whole, logging and callbacks included, so what lies between two halts is exactly so many steps of the
framework with everything that it does in them. Does not know settings files, nor how a plain loop is written (`bare`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from llmtrain.bench import peers
from llmtrain.bench.bare import BareLoop, our_loss_sum
from llmtrain.bench.rounds import Rounds, quiet_garbage
from llmtrain.data.modules import Batch, PretrainDataModule, TrainLoader
from llmtrain.data.windows import TokenStream
from llmtrain.model import ModelConfig, build_model
from llmtrain.tokenizer import Tokenizer
from llmtrain.training import hardware

logger = logging.getLogger(__name__)

FRAMEWORK, BARE, TWIN = "llmtrain", "PyTorch loop", "transformers"
SETTLING_STEPS = 2  # steps of each turn before the clock runs: its weights come back into the caches


@dataclass(frozen=True)
class TrainingSetup:
    """What is trained, the same for every side.

    Attributes:
        config: The model's shape.
        tokenizer: Goes into `fit`'s model folder.
        streams: Token streams and their weights.
        sequence_length: T.
        micro_batch_size: B.
        accumulation: Micro-batches per step.
        optimizer: `adamw` or `muon`.
        lr: Its learning rate.
        optimizer_options: Further arguments of `build_optimizer`.
        grad_clip: Largest norm of the gradient.
        precision: `auto`, `bf16` or `fp32`.
        accelerator: `auto`, `cpu` or `gpu`.
        compile_model: Every side through `torch.compile`.
        gradient_checkpointing: Every side recomputes activations.
        seed: Of weights and order.
        fit_options: Further arguments of `fit`, such as its strategy and schedule.
    """

    config: ModelConfig
    tokenizer: Tokenizer
    streams: Sequence[tuple[TokenStream, float]]
    sequence_length: int
    micro_batch_size: int
    accumulation: int = 1
    optimizer: str = "adamw"
    lr: float = 1e-3
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    grad_clip: float | None = 1.0
    precision: str = "auto"
    accelerator: str = "auto"
    compile_model: bool = False
    gradient_checkpointing: bool = False
    seed: int = 0
    fit_options: Mapping[str, Any] = field(default_factory=dict)

    SHARED: ClassVar[tuple[str, ...]] = (
        "optimizer",
        "lr",
        "optimizer_options",
        "grad_clip",
        "precision",
        "accelerator",
        "compile_model",
        "gradient_checkpointing",
    )
    """Arguments of `fit` that the bare loops have too."""

    @property
    def tokens_per_step(self) -> int:
        """Trained tokens of one optimiser step."""
        return self.sequence_length * self.micro_batch_size * self.accumulation


def measure_training(
    setup: TrainingSetup,
    rounds: Rounds,
    *,
    steps: int,
    run_dir: Path,
    report: Callable[[int, Mapping[str, float]], None] = lambda number, rates: None,
) -> Rounds:
    """Lets `fit`, the bare loop and the twin's bare loop take turns; rates are trained tokens per second.

    Args:
        setup: What is trained.
        rounds: Where the laps go.
        steps: Optimiser steps of one lap.
        run_dir: An empty folder for `fit`.
        report: Called after each round; see `take_turns`.

    Raises:
        ValueError: A setting that `fit` refuses, or a shape without a twin.
    """
    accelerator = hardware.resolve_accelerator(setup.accelerator)
    precision = hardware.resolve_precision(setup.precision, accelerator)
    device = torch.device("cuda", 0) if accelerator == "gpu" else torch.device("cpu")
    others = _other_sides(setup, device, precision)
    batches = _batches_in_memory(setup, steps=steps + SETTLING_STEPS)
    pace = _Pace(setup, rounds, others, batches, steps=steps, report=report)
    with quiet_garbage(), (run_dir / "screen.txt").open("w", encoding="utf-8") as screen, redirect_stderr(screen):
        _fit(setup, pace, accelerator=accelerator, precision=precision, run_dir=run_dir)
    return rounds


def _fit(setup: TrainingSetup, pace: _Pace, *, accelerator: str, precision: str, run_dir: Path) -> None:
    from llmtrain.training.fit import fit

    options = dict(setup.fit_options)
    if options.get("warmup_steps", 0) > pace.total_steps:
        options["warmup_steps"] = pace.total_steps // 10
    result = fit(
        model=_fresh_model(setup, torch.device("cpu")),
        data=_PacedData(setup, pace),
        tokenizer=setup.tokenizer,
        run_dir=run_dir,
        total_steps=pace.total_steps,
        accumulation=setup.accumulation,
        seed=setup.seed,
        optimizer=setup.optimizer,
        lr=setup.lr,
        optimizer_options=setup.optimizer_options,
        grad_clip=setup.grad_clip,
        accelerator=accelerator,
        devices=1,
        precision=precision,
        compile_model=setup.compile_model,
        gradient_checkpointing=setup.gradient_checkpointing,
        # Not part of a step: these stop `fit`'s own watch too.
        validates=False,
        checkpoint_every=None,
        sample_every=None,
        **options,
    )
    if result.stopped_by is not None:  # `fit` ends well after a signal; here nothing is left to save
        raise KeyboardInterrupt


def _fresh_model(setup: TrainingSetup, device: torch.device) -> Any:
    model = build_model(setup.config, seed=setup.seed, device=device)
    model.gradient_checkpointing = setup.gradient_checkpointing
    return model


def _other_sides(setup: TrainingSetup, device: torch.device, precision: str) -> dict[str, BareLoop]:
    optimizer = {"name": setup.optimizer, "lr": setup.lr, **setup.optimizer_options}
    if setup.optimizer == "muon":
        optimizer.setdefault("muon_dtype", hardware.DTYPES[precision])  # as `fit` does
    ours = _fresh_model(setup, device)
    twin = peers.twin_of(ours)
    if setup.gradient_checkpointing:
        twin.gradient_checkpointing_enable()  # type: ignore[operator]
    if setup.config.dropout:
        logger.warning(
            "model.dropout=%g: the twin in transformers has none, so it does less work.", setup.config.dropout
        )
    return {
        name: BareLoop(
            model,
            loss_sum,
            optimizer=optimizer,
            precision=precision,
            grad_clip=setup.grad_clip,
            compile_model=setup.compile_model,
        )
        for name, model, loss_sum in ((BARE, ours, our_loss_sum), (TWIN, twin, peers.twin_loss_sum))
    }


def _batches_in_memory(setup: TrainingSetup, *, steps: int) -> list[list[Batch]]:
    """The micro-batches of so many steps, read beforehand: the bare loops do not pay for reading them."""
    loader = iter(_data(setup, total_steps=steps).train_dataloader())
    return [[next(loader) for _ in range(setup.accumulation)] for _ in range(steps)]


def _data(setup: TrainingSetup, *, total_steps: int) -> PretrainDataModule:
    return PretrainDataModule(**_data_arguments(setup, total_steps))


def _data_arguments(setup: TrainingSetup, total_steps: int) -> dict[str, Any]:
    return {
        "train": setup.streams,
        "val": None,
        "eos_id": setup.tokenizer.eos_id,
        "sequence_length": setup.sequence_length,
        "micro_batch_size": setup.micro_batch_size,
        "accumulation": setup.accumulation,
        "total_steps": total_steps,
        "seed": setup.seed,
    }


class _Pace:
    """Hands out `fit`'s micro-batches, runs its clock, and gives the other sides their turns in between."""

    def __init__(
        self,
        setup: TrainingSetup,
        rounds: Rounds,
        others: Mapping[str, BareLoop],
        batches: Sequence[Sequence[Batch]],
        *,
        steps: int,
        report: Callable[[int, Mapping[str, float]], None],
    ) -> None:
        self._setup, self._rounds, self._others, self._batches = setup, rounds, others, batches
        self._steps, self._report = steps, report

    @property
    def total_steps(self) -> int:
        """Steps of `fit`: all its turns, and one more, whose first request ends the last turn."""
        return self._rounds.total * (SETTLING_STEPS + self._steps) + 1

    def __call__(self, source: Iterator[Batch], steps_done: Callable[[], int]) -> Iterator[Batch]:
        """The micro-batches of `source`, with halts between some of them.

        Args:
            source: The real loader's iterator.
            steps_done: The trainer's own count, to prove that it stands where the clock supposes.
        """
        amount = self._steps * self._setup.tokens_per_step
        for number in range(self._rounds.total):
            yield from self._some(source, SETTLING_STEPS)
            self._rounds.start()
            yield from self._some(source, self._steps)
            rates = {FRAMEWORK: self._rounds.stop(FRAMEWORK, amount)}
            expected = (number + 1) * (SETTLING_STEPS + self._steps)
            assert steps_done() == expected, f"the trainer has taken {steps_done()} steps, not {expected}"
            for name, loop in self._others.items():
                rates[name] = self._turn(name, loop, amount)
            self._report(number + 1 - self._rounds.warmup_rounds, rates)
        yield from source

    def _some(self, source: Iterator[Batch], steps: int) -> Iterator[Batch]:
        for _ in range(steps * self._setup.accumulation):
            yield next(source)

    def _turn(self, name: str, loop: BareLoop, amount: int) -> float:
        for step in self._batches[:SETTLING_STEPS]:
            loop.step(step)
        self._rounds.start()
        for step in self._batches[SETTLING_STEPS:]:
            loop.step(step)
        return self._rounds.stop(name, amount)


class _PacedData(PretrainDataModule):
    """Pretraining data whose loader halts `fit` between rounds."""

    def __init__(self, setup: TrainingSetup, pace: _Pace) -> None:
        super().__init__(**_data_arguments(setup, pace.total_steps))
        self._pace = pace

    def train_dataloader(self) -> TrainLoader:
        """The real loader, paced."""
        return _PacedLoader(super().train_dataloader(), self)

    def paced(self, source: Iterator[Batch]) -> Iterator[Batch]:
        """What the loader yields."""
        trainer = self.trainer
        assert trainer is not None
        return self._pace(source, lambda: trainer.global_step)


class _PacedLoader(TrainLoader):
    """A loader in the place of another. It has a length, so that Lightning asks for nothing ahead of time."""

    def __init__(self, loader: TrainLoader, data: _PacedData) -> None:
        self._loader, self._data = loader, data

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        return self._data.paced(iter(self._loader))
