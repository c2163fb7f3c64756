"""Peak memory of training processes above the idle process, beside what `llmtrain.model.training_memory` predicts.

Each case is trained for a few steps by the real `fit` in processes of its own, which first train a toy model, so that
libraries are loaded and the process group stands before the idle process is measured
(`python -m llmtrain.bench.training_memory`). Does not know settings files.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import llmtrain
from llmtrain.training.resident import Growth

STEPS = 3  # the optimiser's state comes with the first; heaps have their size after the second
_TOY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True)
class MemoryCase:
    """What is trained.

    Attributes:
        model: fields of the `ModelConfig`.
        strategy: `single`, `deepspeed_1`, `deepspeed_2` or `deepspeed_3`.
        processes: on this machine.
        precision: `fp32` or `bf16`.
        optimizer: `adamw` or `muon`.
        micro_batch_size: rows of one process at a time.
        sequence_length: tokens of a row.
        accumulation: micro-batches of a step.
        gradient_checkpointing: recompute activations.
        accelerator: `cpu` or `gpu`.
    """

    model: dict[str, Any]
    strategy: str
    processes: int = 1
    precision: str = "fp32"
    optimizer: str = "adamw"
    micro_batch_size: int = 1
    sequence_length: int = 128
    accumulation: int = 1
    gradient_checkpointing: bool = False
    accelerator: str = "cpu"

    @property
    def zero_stage(self) -> int:
        """1, 2 or 3; 0 without DeepSpeed."""
        return 0 if self.strategy == "single" else int(self.strategy[-1])


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


def predicted(case: MemoryCase) -> Any:
    """What the formula says of one process: a `TrainingMemory`."""
    from llmtrain.model import ModelConfig, training_memory

    return training_memory(
        ModelConfig(**case.model),
        micro_batch_size=case.micro_batch_size,
        sequence_length=case.sequence_length,
        precision=case.precision,
        optimizer=case.optimizer,
        zero_stage=case.zero_stage,
        world_size=case.processes,
        on_cpu=case.accelerator == "cpu",
        gradient_checkpointing=case.gradient_checkpointing,
    )


def measure_growth(cases: Sequence[MemoryCase], *, timeout: float | None = None) -> list[int]:
    """Trains each case in processes of its own; bytes that the process which grew most has at its peak above idle.

    Args:
        cases: what is trained, one after the other.
        timeout: seconds for each.

    Raises:
        RuntimeError: a process ended badly; its last lines are in the message.
    """
    return [max(_processes(case, timeout)) for case in cases]


def _processes(case: MemoryCase, timeout: float | None) -> list[int]:
    root = str(Path(llmtrain.__file__).resolve().parents[1])  # a checkout may not be installed
    gone = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LLMTRAIN_RUN_DIR", "DS_ACCELERATOR")
    inherited = {name: value for name, value in os.environ.items() if name not in gone}
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    where = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "PYTHONPATH": path}
    with tempfile.TemporaryDirectory(prefix="llmtrain-memory-") as folder:
        command = [sys.executable, "-m", "llmtrain.bench.training_memory", json.dumps(asdict(case)), folder]
        started = [
            subprocess.Popen(
                command,
                env=inherited | where | {"LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                encoding="utf-8",
            )
            for rank in range(case.processes)
        ]
        try:
            said = [process.communicate(timeout=timeout)[1] for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        for process, text in zip(started, said, strict=True):
            if process.returncode:
                raise RuntimeError(f"{case} ended with code {process.returncode}: {text[-2000:]}")
        return [int((Path(folder) / f"growth-{rank}").read_text()) for rank in range(case.processes)]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def train(case: MemoryCase, run_dir: Path) -> None:
    """A few steps of the case in this process, as `make pretrain` takes them, and the model folder at the end."""
    from llmtrain.data.modules import PretrainDataModule
    from llmtrain.model import ModelConfig, build_model
    from llmtrain.tokenizer import byte_tokenizer
    from llmtrain.training.fit import fit

    run_dir.mkdir(parents=True)
    config, tokenizer = ModelConfig(**case.model), byte_tokenizer()
    data = PretrainDataModule(
        [(RandomTokens(config.vocab_size), 1.0)],
        None,
        eos_id=tokenizer.eos_id,
        sequence_length=case.sequence_length,
        micro_batch_size=case.micro_batch_size,
        accumulation=case.accumulation,
        total_steps=STEPS,
        seed=0,
    )
    fit(
        model=build_model(config, seed=0),
        data=data,
        tokenizer=tokenizer,
        run_dir=run_dir,
        total_steps=STEPS,
        accumulation=case.accumulation,
        optimizer=case.optimizer,
        strategy=case.strategy,
        accelerator=case.accelerator,
        devices=case.processes,
        precision=case.precision,
        gradient_checkpointing=case.gradient_checkpointing,
        validates=False,
    )


def main(arguments: Sequence[str]) -> None:
    """Trains the case `arguments[0]` (JSON) as one of its processes and writes its growth into `arguments[1]`."""
    case, folder = MemoryCase(**json.loads(arguments[0])), Path(arguments[1])
    rank = int(os.environ["LOCAL_RANK"])
    train(replace(case, model=_TOY), folder / f"toy-{rank}")
    growth = Growth("cpu" if case.accelerator == "cpu" else "cuda")
    train(case, folder / f"run-{rank}")
    (folder / f"growth-{rank}").write_text(str(growth.peak()))


if __name__ == "__main__":
    main(sys.argv[1:])
