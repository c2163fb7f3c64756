"""The real command started by torchrun, as Slurm would, and by its own launcher; what it writes, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch.test_pretrain import ROOT, TOY, figures, wait_for_step

pytestmark = [pytest.mark.medium, pytest.mark.distributed]

SCRIPT = str(ROOT / "scripts" / "pretrain.py")
FILES = {"config.yaml", "log.txt", "metrics.csv", "samples.md", "results.json", "model", "checkpoints"}
FILES |= {"facts.json", "report.html"}
CORPUS = ["data=python_docs", "trainer.precision=fp32"]
FOREVER = ["trainer.max_steps=100000", "trainer.val_every=null", "trainer.sample_every=null"]


@pytest.fixture
def start(tmp_path: Path, fake_environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen]]:
    """`start("name=a", by=[…], env={…})` starts `scripts/pretrain.py` at toy size in `tmp_path`, by these words."""
    started: list[subprocess.Popen] = []

    def run(*overrides: str, by: tuple[str, ...] = (), env: dict[str, str] | None = None) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, *by, SCRIPT, *TOY, *CORPUS, *overrides],
            cwd=tmp_path,
            env=fake_environment | {"OMP_NUM_THREADS": "1"} | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def slurm(rank: int) -> dict[str, str]:
    """What `srun -n 2` sets for a process, as far as it is read."""
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
    return job | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}


def test_torchrun_starts_one_run_in_one_folder(start, tmp_path):
    """Nobody names the folder, nor the number of processes."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    out, err = start(by=torchrun).communicate(timeout=240)
    (run_dir,) = [path for path in (tmp_path / "runs" / "pretrain").iterdir() if not path.is_symlink()]
    assert {path.name for path in run_dir.iterdir()} == FILES | {"log-rank1.txt"}
    assert out.count("\n") == 1, err
    assert json.loads(out)["run_dir"] == str(run_dir)
    assert "8 rows per step = 4 per micro-batch × 2 processes" in err
    assert [int(row["step"]) for row in figures(run_dir)] == list(range(1, 21))
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "data"}


@pytest.mark.slow
def test_a_slurm_job_is_stopped_queued_again_and_loses_a_process(start, tmp_path):
    """SIGUSR1, as `--signal=USR1@120` sends it; the job's number is the folder; no process hangs after another died."""
    run_dir = tmp_path / "runs" / "pretrain" / f"slurm-{os.getpid()}"
    first, second = (start("resume=auto", *FOREVER, env=slurm(rank)) for rank in range(2))
    wait_for_step(first, run_dir, 3)
    for process in (first, second):
        process.send_signal(signal.SIGUSR1)
    out, err = first.communicate(timeout=120)
    assert first.returncode == 75, err
    results = json.loads(out)
    steps = len(figures(run_dir))
    assert (results["stopped_by"], results["step"]) == ("SIGUSR1", steps)
    assert results["run_dir"] == str(run_dir)
    assert second.communicate(timeout=60)[0] == ""
    assert json.loads((run_dir / "results.json").read_text()) == results

    first, second = (start("resume=auto", *FOREVER, env=slurm(rank)) for rank in range(2))
    wait_for_step(first, run_dir, steps + 3)
    second.kill()
    began = time.monotonic()
    _, err = first.communicate(timeout=120)
    assert first.returncode == 1
    assert time.monotonic() - began < 60
    assert err.splitlines()[-1].startswith("error: rank 1 is gone, and the others cannot go on without it; resume=auto")
    assert "Traceback" not in err
    assert [int(row["step"]) for row in figures(run_dir)] == list(range(1, len(figures(run_dir)) + 1))
    assert {path.name for path in run_dir.iterdir()} <= FILES | {"log-rank1.txt"}


@pytest.mark.parametrize(
    ("rank", "code", "sentence"),
    [
        (1, 1, "error: rank 1 was ended by SIGKILL, as the system does when memory runs out, and the others cannot go"),
        (0, -9, "error: rank 0 is gone, and the others cannot go on without it"),
    ],
)
def test_a_process_of_our_own_that_dies_ends_the_others(start, tmp_path, rank, code, sentence):
    killed = {"LLMTRAIN_SIGNAL_AT": f"SIGKILL@5:{rank}"}
    process = start("name=a", "trainer.devices=2", *FOREVER, env=killed)
    process.wait(240)
    began = time.monotonic()
    out, err = process.communicate(timeout=60)  # until the last process has closed it
    assert (process.returncode, out) == (code, "")
    assert sentence in err.splitlines()[-1]
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_a_process_that_hangs_is_taken_for_lost_after_the_timeout(start, tmp_path):
    process = start("name=a", "trainer.devices=2", "trainer.timeout=40", *FOREVER,
                    env={"LLMTRAIN_SIGNAL_AT": "SIGSTOP@5:1"})  # fmt: skip
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "error: rank 1 has not answered for 40 s (trainer.timeout)" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("overrides", "variables", "sentence"),
    [
        ([], {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "rank 1 does not know the run folder"),
        ([], {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "the other ranks cannot know the run folder"),
        (["trainer.num_nodes=2", "name=a"], {}, "nobody says which of them this machine is"),
        (
            ["trainer.devices=4", "name=a"],
            {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            "trainer.devices=4 does not fit what torchrun says: 2 processes on each machine; give trainer.devices=2",
        ),
    ],
)
def test_a_launcher_that_does_not_fit_is_refused_at_once(start, overrides, variables, sentence):
    process = start(*overrides, env=variables)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert sentence in err.splitlines()[-1]
