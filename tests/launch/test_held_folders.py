"""A folder that holds a run: what is refused leaves no trace there, and one process at a time writes there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.test_pretrain import REFUSED_LIGHTLY, ended, program, wait_for_step
from tests.launch.test_pretrain import corpus as corpus

program = program

pytestmark = pytest.mark.medium


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def healthy(fake, tmp_path) -> Path:
    """The folder of a run that came to something, and another one after it, which `latest` points to."""
    for name in ("healthy", "later"):
        assert fake("pretrain", f"name={name}", "seed=3", "mode=chatter").code == 0
    return tmp_path / "runs" / "pretrain" / "healthy"


@pytest.mark.parametrize(("mode", "code"), [("mistake", 2), ("full", 2), ("fault", 1), ("interrupt", 130)])
def test_a_command_that_was_not_accepted_leaves_a_run_as_it_was(fake, healthy, mode, code):
    before = content(healthy)
    done = fake("pretrain", "name=healthy", "seed=4", f"mode={mode}")
    assert done.code == code
    assert content(healthy) == before
    assert (healthy.parent / "latest").resolve().name == "later"
    log = (healthy.parent / "failed.log").read_text()
    assert ("Traceback" in log) == (mode != "interrupt")
    if mode == "fault":
        assert done.stderr.splitlines()[-1].endswith("the log is runs/pretrain/failed.log")


def test_an_accepted_command_has_its_settings_log_and_pointer_there(fake, healthy):
    (healthy.parent / "failed.log").unlink(missing_ok=True)
    done = fake("pretrain", "name=healthy", "seed=4", "mode=accepted mistake")
    assert done.code == 2
    assert "seed: 4" in (healthy / "config.yaml").read_text()
    log = (healthy / "log.txt").read_text()
    assert "our sentence" in log  # of the first session
    assert log.rstrip().endswith("give a word without slashes, not 'latest'")
    assert (healthy.parent / "latest").resolve() == healthy  # training may have gone on for days
    assert not (healthy.parent / "failed.log").exists()


def test_what_is_logged_before_is_in_the_log_once_the_command_is_accepted(fake, healthy):
    before = (healthy / "log.txt").read_text()
    assert fake("pretrain", "name=healthy", "mode=chatter").code == 0
    log = (healthy / "log.txt").read_text()
    assert log.startswith(before)
    for line in ("library info", "print of a library", "descriptor 1", "a child process", "our sentence"):
        assert line in log[len(before) :]


def test_a_rank_above_zero_leaves_no_log_where_it_was_refused(fake, healthy):
    before = content(healthy)
    assert fake("pretrain", "name=healthy", "mode=mistake", env={"RANK": "1"}).code == 2
    assert content(healthy) == before
    assert fake("pretrain", "name=healthy", "mode=chatter", env={"RANK": "1"}).code == 0
    assert "our sentence" in (healthy / "log-rank1.txt").read_text()


HOLDER = """
import os, sys, time
from pathlib import Path
from llmtrain.launch.occupied import occupy
occupy(Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path, fake_environment) -> Iterator[tuple[subprocess.Popen, int]]:
    """A process that writes into `runs/pretrain/one`, and one that it has forked, which outlives it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "runs/pretrain/one")],
        env=fake_environment, stdout=subprocess.PIPE, encoding="utf-8",
    )  # fmt: skip
    child = int(process.stdout.readline())
    yield process, child
    process.kill()
    os.kill(child, signal.SIGKILL)  # it holds the pipe as well
    process.communicate()


def test_a_second_process_is_refused_and_gets_in_as_soon_as_the_first_was_killed(fake, holder, tmp_path):
    process, _ = holder
    run = tmp_path / "runs/pretrain/one"
    before = content(run)
    for arguments in (["name=one"], [f"paths.run_dir={run}"]):
        done = fake("pretrain", *arguments)
        assert (done.code, done.stdout) == (2, "")
        (sentence,) = done.stderr.splitlines()
        assert sentence.startswith(f"error: another process (process {process.pid} on ")
        assert sentence.endswith(
            f"is writing into {run}: wait until it has ended, or give another name=… or paths.run_dir=…"
        )
        assert content(run) == before
    process.kill()
    process.wait()
    assert fake("pretrain", "name=one").code == 0
    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "log.txt", "results.json"]


@pytest.mark.parametrize("mode", ["chatter", "mistake"])
def test_no_lock_is_left_behind(fake, tmp_path, mode):
    fake("pretrain", "name=one", f"mode={mode}")
    assert not list(tmp_path.rglob(".lock"))


def test_what_a_folder_holds_is_said_before_lightning_and_before_the_corpus(tmp_path, fake_environment):
    (tmp_path / "held" / "model").mkdir(parents=True)
    (tmp_path / "held" / "results.json").touch()
    checkpoint = tmp_path / "other" / "checkpoints" / "step-000003"
    checkpoint.mkdir(parents=True)
    shared = {"seed": 1, "optim.name": "muon", "model.hidden_size": 64, "the data's fingerprint": "abc"}
    marker = {"version": 2, "step": 3, "tokens": 1, "train_seconds": 1.0, "fixed": shared}
    (checkpoint / "checkpoint.json").write_text(json.dumps(marker))
    cases = [
        ("now torch",), ("pretrain",), ("pretrain", "resume=auto"), ("pretrain", "resume=held/model"),
        ("pretrain", "resume=other"), ("finetune", "model=held"),
    ]  # fmt: skip
    run = [sys.executable, "-c", REFUSED_LIGHTLY.format(cases=cases)]
    done = subprocess.run(run, cwd=tmp_path, env=fake_environment, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    plain, auto, model, other, tuned = done.stdout.splitlines()
    assert plain == tuned
    assert plain.startswith(
        "held holds another run (model and results.json) and no checkpoint that it could go on from;"
    )
    assert ", so resume=auto would replace it; name=… or paths.run_dir=… starts one elsewhere" in auto
    assert model.startswith("resume=held/model: no whole checkpoint there (a folder step-… with checkpoint.json)")
    assert other.startswith("held holds another run (model and results.json)")
    (tmp_path / "held" / "model").rmdir()
    (tmp_path / "held" / "results.json").unlink()
    run = [sys.executable, "-c", REFUSED_LIGHTLY.format(cases=[("now torch",), ("pretrain", "resume=other")])]
    done = subprocess.run(run, cwd=tmp_path, env=fake_environment, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cannot resume from other/checkpoints/step-000003: ")
    assert {"seed was 1 and is 0", "model.hidden_size was 64 and is 192"} <= set(done.stdout[50:].split("; "))
    assert not (tmp_path / "data").exists()


def test_resume_auto_says_that_there_is_nothing_to_go_on_from(tmp_path, caplog):
    from llmtrain.training.former import tell_fresh_start

    tell_fresh_start(tmp_path / "typo", resume=None)
    tell_fresh_start(tmp_path / "typo", resume="auto")
    (tmp_path / "metrics.csv").touch()
    tell_fresh_start(tmp_path, resume="auto")
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"resume=auto: there is no run in {tmp_path}/typo yet; a new one starts",
        f"resume=auto: the run in {tmp_path} was ended before its first checkpoint; it starts afresh, and metrics.csv "
        "come again",
    ]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_real_run_is_not_disturbed_by_what_is_refused(program, tmp_path):
    """One run of two processes: others of its name are refused while it trains; it ends by a signal, and goes on."""
    run = tmp_path / "runs" / "pretrain" / "twin"
    more = ["name=twin", "trainer.devices=2", "trainer.max_steps=100000", "trainer.val_every=null"]
    first = program(*more)
    wait_for_step(first, run, 3)
    for resume in ("null", "auto"):
        second = program(*more, f"resume={resume}")
        _, err = second.communicate(timeout=120)
        assert (second.returncode, len(err.splitlines())) == (2, 1), err
        assert f"is writing into {run}: wait until it has ended" in err
    first.send_signal(signal.SIGTERM)
    assert ended(first) == 75
    before = content(run)
    refused = program(*more, "resume=auto", "data.validation_fraction=0.5")
    _, err = refused.communicate(timeout=120)
    assert refused.returncode == 2, err
    assert "the data's fingerprint was" in err.splitlines()[-1]
    assert content(run) == before


def rank_1_of(first: int) -> int | None:
    for child in Path(f"/proc/{first}/task/{first}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if b"LOCAL_RANK=1" in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return int(child)
    return None


@pytest.mark.distributed
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_while_a_run_starts_asks_to_be_queued_again(program, tmp_path, number):
    """To the first process before it has read its settings, and to another rank before it has met the first."""
    process = program("name=early", "trainer.devices=2", "resume=auto")
    log = tmp_path / "runs" / "pretrain" / "early" / "log.txt"
    while not log.exists():
        time.sleep(0.02)
    target = process.pid
    if number == signal.SIGUSR1:
        while not (other := rank_1_of(process.pid)):
            time.sleep(0.02)
        target = other
    os.kill(target, number)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (75, ""), err
    assert "before the first step of this session: nothing is lost" in err
    assert "is gone" not in err
    assert (
        f"warning: resume=auto: there is no run in {log.parent} yet; a new one starts" in err
        or number == signal.SIGTERM
    )
    assert not (log.parent / "results.json").exists()
