from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmtrain.launch.runs import choose_run_dir, latest_run, point_latest


def test_a_run_is_named_by_the_time_and_never_twice(tmp_path):
    first = choose_run_dir(tmp_path, "pretrain")
    first.mkdir(parents=True)
    second = choose_run_dir(tmp_path, "pretrain")
    assert first != second
    assert first.parent == second.parent == tmp_path / "pretrain"


def test_name_and_run_dir_override(tmp_path):
    assert choose_run_dir(tmp_path, "pretrain", name="三国") == tmp_path / "pretrain" / "三国"
    assert choose_run_dir(tmp_path, "pretrain", name="x", run_dir="/a b") == Path("/a b")


@pytest.mark.parametrize("name", ["a/b", "", "..", "latest", "a\nb"])
def test_a_name_that_is_no_folder_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="cannot name a folder"):
        choose_run_dir(tmp_path, "pretrain", name=name)


def test_resuming_goes_on_in_the_same_folder(tmp_path):
    run = tmp_path / "pretrain" / "one"
    (run / "checkpoints" / "step-10").mkdir(parents=True)
    (run / "config.yaml").touch()
    point_latest(run)
    assert choose_run_dir(tmp_path, "pretrain", resume="auto") == run
    assert choose_run_dir(tmp_path, "pretrain", resume=str(run / "checkpoints" / "step-10")) == run
    through_latest = tmp_path / "pretrain" / "latest"
    assert choose_run_dir(tmp_path, "pretrain", resume=str(through_latest / "checkpoints" / "step-10")) == run.resolve()
    point_latest(through_latest)
    assert through_latest.resolve() == run.resolve()
    assert choose_run_dir(tmp_path, "finetune", resume="auto").parent == tmp_path / "finetune"


def test_latest_may_be_a_run_among_several(tmp_path):
    run = tmp_path / "pretrain" / "multirun-1" / "seed=2"
    run.mkdir(parents=True)
    point_latest(run, tmp_path / "pretrain")
    assert latest_run(tmp_path, "pretrain") == run
    assert choose_run_dir(tmp_path, "pretrain", resume="auto") == run


def test_latest_is_a_link_or_a_file(tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / "pretrain" / name).mkdir(parents=True)
        point_latest(tmp_path / "pretrain" / name)
        assert latest_run(tmp_path, "pretrain").name == name
        assert (tmp_path / "pretrain" / "latest").is_symlink()

    def refuse(*_, **__):
        raise OSError("no symbolic links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    point_latest(tmp_path / "pretrain" / "one")
    assert (tmp_path / "pretrain" / "latest").read_text() == "one\n"
    assert latest_run(tmp_path, "pretrain").name == "one"
    (tmp_path / "pretrain" / "one").rmdir()
    assert latest_run(tmp_path, "pretrain") is None
    assert sorted(entry.name for entry in (tmp_path / "pretrain").iterdir()) == ["latest", "two"]


def test_a_started_rank_ends_when_rank_0_has_gone(tmp_path):
    """Rank 0 here starts a rank 1 that would sleep for an hour, and dies."""
    child = "from llmtrain.launch import runs; from llmtrain.training import placement; import time; "
    child += "runs.end_with_first_process(placement.here()); print(1, flush=True); time.sleep(3600)"
    parent = (
        "import os, subprocess, sys\n"
        "os.environ.update(LOCAL_RANK='1', LLMTRAIN_RUN_DIR='/')\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.read(1)\n"  # it watches now
        "print(child.pid, flush=True)\n"
    )
    pid = int(subprocess.run([sys.executable, "-c", parent], capture_output=True, check=True, timeout=60).stdout)
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.kill(pid, 9)
    pytest.fail("rank 1 outlived rank 0 by ten seconds")
