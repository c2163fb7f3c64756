"""`llmtrain verify-resume` as a program: real runs, killed and stopped; and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.launch.test_pretrain import ROOT, TOY

SMALL = [*TOY, "data=python_docs", "trainer.precision=fp32", "strategy=single", "optim=adamw", "model.dropout=0.1"]


def verify(tmp_path, environment, *overrides):
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "verify_resume.py"), *SMALL, "trainer.micro_batch_size=4", *overrides],
        cwd=tmp_path, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, encoding="utf-8", timeout=280,
        check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_an_interrupted_run_is_the_straight_one(tmp_path, fake_environment):
    done = verify(tmp_path, fake_environment, "verify.kill_at=5", "verify.stop_at=7", "name=v")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    results = json.loads(done.stdout)
    assert (results["equal"], results["first_difference"]) == (True, None)
    assert (results["steps"], results["killed_at"], results["stopped_at"]) == (12, 5, 7)
    compared = results["compared"]
    assert (compared["steps_with_samples"], compared["checkpoints"]) == (12, 4)
    assert compared["figures"] > 12 * 3
    assert min(compared[name] for name in ("weights", "optimizer_tensors", "optimizer_scalars", "counters")) > 0
    assert compared["optimizer_tensors"] == 3 * compared["optimizer_scalars"]  # AdamW: weights, two moments; one count
    assert "equal: the interrupted run is the straight one" in done.stderr
    folder = tmp_path / "runs" / "verify-resume" / "v"
    assert not (folder / "straight" / "checkpoints").exists()
    assert not (tmp_path / "runs" / "pretrain").exists()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["verify.steps=7"], "verify.steps=7 must be at least 8"),
        (["verify.kill_at=6", "verify.stop_at=5"], "verify.kill_at=6 must come before verify.stop_at=5"),
        (["verify.stop_at=11"], "and that at 10 at the latest"),
        (["trainer.num_nodes=2"], "leave launcher and trainer.num_nodes out"),
        (["verify.tolerance=-1"], "verify.tolerance=-1 must be a number of at least 0 and at most 1"),
    ],
)
def test_what_cannot_be_verified_is_refused(overrides, sentence):
    from llmtrain.launch import verify_resume
    from llmtrain.launch.composing import compose

    with pytest.raises(ValueError, match=r".+") as error:
        verify_resume._check(compose("verify-resume", overrides).settings)
    assert sentence in str(error.value)


@pytest.mark.medium
def test_a_mistake_in_the_runs_settings_is_said_in_their_sentence(tmp_path, fake_environment):
    done = verify(tmp_path, fake_environment, "trainer.batch_tokens=100")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("error: trainer.batch_tokens=100 is not a multiple of")


def test_the_steps_are_drawn_so_that_both_interruptions_fall_inside():
    from llmtrain.launch import verify_resume
    from llmtrain.launch.composing import compose

    for steps in (8, 12, 40):
        settings = compose("verify-resume", [f"verify.steps={steps}"]).settings
        for _ in range(200):
            kill_at, stop_at = verify_resume._check(settings)
            assert steps // 4 < kill_at < stop_at <= steps - 2
