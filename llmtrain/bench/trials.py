"""Short trainings in processes of their own: by how much they grow above the idle process, and how long a step takes.

Each trial is trained for a few steps by the real `fit` on random tokens, after a toy model, so that libraries are
loaded and the process group stands before the idle process is measured (`python -m llmtrain.bench.trials`). Does not
know settings files, nor what the figures are compared with.
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.bench.ranks import Ranks
from llmtrain.training import placement
from llmtrain.training.resident import Growth

LONGEST_SECONDS = 3600.0  # of a trial unless told otherwise: a few steps that take longer tell nobody anything

_TOY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True)
class Trial:
    """What is trained.

    Attributes:
        model: fields of the `ModelConfig`.
        fit: further arguments of `fit`, plain values: strategy, precision, optimizer and so on.
        processes: on this machine.
        micro_batch_size: rows of one process at a time.
        sequence_length: tokens of a row.
        accumulation: micro-batches of a step.
        steps: after the first the optimiser's state is there, after the second heaps have their size.
    """

    model: dict[str, Any]
    fit: dict[str, Any]
    processes: int = 1
    micro_batch_size: int = 1
    sequence_length: int = 128
    accumulation: int = 1
    steps: int = 3

    @property
    def on_cpu(self) -> bool:
        """Whether it is told to train on the CPU."""
        return self.fit.get("accelerator") == "cpu"


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    Attributes:
        growth: bytes at the peak above the idle process, of each process.
        step_seconds: of every step but the first, by `fit`'s own watch.
        mfu: of every step but the first, where it is known.
    """

    growth: list[int]
    step_seconds: list[float]
    mfu: list[float]


@dataclass(frozen=True)
class RandomTokens:
    """A stream of tokens that costs nothing to read and has no end.

    Attributes:
        vocab_size: ids are below it.
        num_tokens: what the stream says it holds.
    """

    vocab_size: int
    num_tokens: int = 1 << 40

    def read(self, start: int, count: int) -> np.ndarray:
        """(count,) int64 ids, the same for the same start."""
        return np.random.default_rng(start).integers(0, self.vocab_size, count)


def run_trial(trial: Trial, *, timeout: float = LONGEST_SECONDS) -> Outcome:
    """Trains in processes of its own.

    Args:
        trial: what is trained.
        timeout: seconds until the processes are ended.

    Raises:
        RuntimeError: a process ended badly, its last lines are in the message; or they took too long.
    """
    with tempfile.TemporaryDirectory(prefix="llmtrain-trial-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "llmtrain.bench.trials", json.dumps(asdict(trial)), name]
        with Ranks(command, trial.processes, folder) as ranks:
            ranks.wait(timeout)
        growth = [int((folder / f"growth-{rank}").read_text()) for rank in range(trial.processes)]
        return Outcome(growth, *_figures(folder / "run-0" / "metrics.csv"))


def _figures(metrics: Path) -> tuple[list[float], list[float]]:
    """Seconds and MFU of the steps after the first."""
    with metrics.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    seconds = [float(row["seconds"]) for row in rows]
    mfu = [float(row["train/mfu"]) for row in rows[1:] if row.get("train/mfu")]
    return [later - earlier for earlier, later in pairwise(seconds)], mfu


def train(trial: Trial, run_dir: Path) -> None:
    """The steps of a trial in this process, as `make pretrain` takes them, and the model folder at the end."""
    from llmtrain.data.modules import PretrainDataModule
    from llmtrain.model import ModelConfig, build_model, flops_per_token
    from llmtrain.tokenizer import byte_tokenizer
    from llmtrain.training.fit import fit

    run_dir.mkdir(parents=True)
    config, tokenizer = ModelConfig(**trial.model), byte_tokenizer()
    data = PretrainDataModule(
        [(RandomTokens(config.vocab_size), 1.0)],
        None,
        eos_id=tokenizer.eos_id,
        sequence_length=trial.sequence_length,
        micro_batch_size=trial.micro_batch_size,
        accumulation=trial.accumulation,
        total_steps=trial.steps,
        seed=0,
    )
    options: dict[str, Any] = {"flops_per_position": flops_per_token(config, trial.sequence_length), **trial.fit}
    fit(
        model=build_model(config, seed=0),
        data=data,
        tokenizer=tokenizer,
        run_dir=run_dir,
        total_steps=trial.steps,
        accumulation=trial.accumulation,
        devices=trial.processes,
        validates=False,
        log_every=1,
        **options,
    )


def main(arguments: Sequence[str]) -> None:
    """Trains `arguments[0]` (a trial as JSON) as one of its processes and writes its growth into `arguments[1]`."""
    trial, folder = Trial(**json.loads(arguments[0])), Path(arguments[1])
    _, rank, _ = placement.here().ranks(trial.processes)
    toy = replace(trial, model=_TOY, micro_batch_size=1, accumulation=1, sequence_length=16, steps=2)
    train(toy, folder / f"toy-{rank}")
    growth = Growth("cpu" if trial.on_cpu else "cuda")
    train(trial, folder / f"run-{rank}")
    (folder / f"growth-{rank}").write_text(str(growth.peak()))


if __name__ == "__main__":
    main(sys.argv[1:])
