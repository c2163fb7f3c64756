"""Runs at toy size, in this process or in forked ones, and what to look at afterwards."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from llmtrain.training import placement
from tests.training.toy import SEQUENCE_LENGTH, RandomTokens, toy_fit

if TYPE_CHECKING:
    from llmtrain.training.fit import FitResult

__all__ = ["SEQUENCE_LENGTH", "RandomTokens"]

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of tiny files would be forced to the disk; surviving a power cut is another test's business."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def train() -> Callable[..., FitResult]:
    """`train(run_dir, steps=12, …)`: one run in this process, see `toy_fit`."""
    return toy_fit


EVENTS = ("signal", "kill_after", "kill_at_change", "store_loaded", "no_space", "disk")
"""What may happen to the nursery's processes, see `_nursery.py`."""


class Nursery:
    """Runs toy fits in processes of their own that are forked, so that each start costs next to nothing."""

    def __init__(self, folder: Path) -> None:
        settings = {"PATH": str(folder / "nothing"), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        placeless = placement.unplaced(os.environ)
        inherited = {name: value for name, value in placeless.items() if name not in ("CXX", "WANDB_SERVICE")}
        self._errors = (folder / "errors.txt").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.training._nursery"],
            env=inherited | settings,
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def run(self, folder: Path, *, processes: int = 1, fails: bool = False, **job: Any) -> dict[str, Any]:
        """Runs one fit; what is not a part of the job (see `_nursery.py`) is an argument of `toy_fit`.

        Returns:
            The fields of the `FitResult`, or `{"error": …}`; and the exit codes by rank as `codes`.
        """
        parts = {name: job.pop(name) for name in EVENTS if name in job}
        result = (folder.parent if "disk" in parts else folder) / "result.json"
        result.unlink(missing_ok=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(
            json.dumps({"processes": processes, "folder": str(folder), "fit": job, **parts}) + "\n"
        )
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, Path(self._errors.name).read_text()[-4000:]
        codes = json.loads(answer)
        if not fails:
            said = [path.read_text()[-4000:] for path in (folder / "printed.txt", result) if path.exists()]
            assert not any(codes), "\n".join(said)
        return {"codes": codes, **(json.loads(result.read_text()) if result.exists() else {})}

    def close(self) -> None:
        self._process.communicate()
        self._errors.close()


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """`nursery.run(folder, processes=2, strategy="deepspeed_2", …)`."""
    started = Nursery(tmp_path_factory.mktemp("nursery"))
    yield started
    started.close()


@pytest.fixture
def micro_batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, list[int]]]:
    """Grows by (step, micro-batch, sample ids) with every training step taken."""
    from llmtrain.training.module import LanguageModule

    seen: list[tuple[int, int, list[int]]] = []
    original = LanguageModule.training_step

    def training_step(self: Any, batch: dict, batch_idx: int) -> Any:
        micro_batch = batch_idx % self.trainer.accumulate_grad_batches
        seen.append((self.trainer.global_step, micro_batch, batch["sample_ids"].tolist()))
        return original(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModule, "training_step", training_step)
    return seen


@pytest.fixture
def signal_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`signal_at(6)`: SIGTERM in the first micro-batch of step 6 (counted from 0); `signal_at(None)`: no more."""
    from llmtrain.training.module import LanguageModule

    original = LanguageModule.on_train_batch_start
    wanted: list[int | None] = [None]

    def on_train_batch_start(self: Any, batch: dict, batch_idx: int) -> None:
        original(self, batch, batch_idx)
        if self.trainer.global_step == wanted[0] and batch_idx % self.trainer.accumulate_grad_batches == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(LanguageModule, "on_train_batch_start", on_train_batch_start)
    return lambda step: wanted.__setitem__(0, step)


def metrics(run_dir: Path) -> list[dict[str, str]]:
    """The rows of `metrics.csv` without the columns that depend on the clock."""
    with (run_dir / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    clocked = ("seconds", "train/tokens_per_second", "train/mfu", "train/memory_bytes")
    return [{name: value for name, value in row.items() if name not in clocked} for row in rows]


def samples(run_dir: Path) -> dict[int, Counter[int]]:
    """How often each step trained on each sample, over all ranks and sessions of the nursery's runs."""
    steps: dict[int, Counter[int]] = {}
    for path in run_dir.glob("seen-*.jsonl"):
        for line in path.read_text().splitlines():
            step, _, ids = json.loads(line)
            steps.setdefault(step, Counter()).update(ids)
    return steps


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in the safetensors files of a folder."""
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Bit for bit, the sign of nought included."""
    assert ours.keys() == theirs.keys()
    assert ours
    for name, value in ours.items():
        assert torch.equal(value.view(torch.int32), theirs[name].view(torch.int32)), name
