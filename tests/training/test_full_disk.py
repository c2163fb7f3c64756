"""A disk that fills while something is written: one clear sentence, and what was there before stays whole."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.checkpoint import ModelFolderError, atomic
from llmtrain.generation import SamplingParams
from llmtrain.launch.edge import _sentence
from llmtrain.launch.terminal import _LogFile
from llmtrain.training.checkpointing import list_checkpoints
from llmtrain.training.module import LanguageModule
from tests.training.conftest import assert_equal, metrics, tensors

SETTINGS: dict[str, Any] = {"steps": 8, "checkpoint_every": 2, "val_every": 3, "keep_last": 1, "train_tokens": 1000}


def can_mount() -> bool:
    flags = ["-m"] if os.getuid() == 0 else ["-U", "-r", "-m"]
    command = ["unshare", *flags, "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    try:
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except OSError:
        return False


@pytest.mark.medium
def test_a_disk_that_fills_at_any_moment(nursery: Any, tmp_path: Path) -> None:
    """Disks from next to nothing to what the run needs: each stops it with one sentence, which is exit code 2.

    Nothing half-written is left, the newest checkpoint is whole, and with more room the run goes on from there to the
    same end, whatever was being written.
    """
    if not can_mount():
        pytest.skip("this system lets no test mount a small file system")
    nursery.run(tmp_path / "straight", **SETTINGS)
    sentences, newest, size = set(), [], 0
    while True:
        size += 600_000
        folder = tmp_path / str(size) / "run"
        result = nursery.run(folder, disk=size, **SETTINGS)
        assert result["left"] == []
        assert result["steps"] == 8
        copied = folder.with_name("copied")
        assert metrics(copied) == metrics(tmp_path / "straight")
        assert_equal(tensors(copied / "model"), tensors(tmp_path / "straight" / "model"))
        if not result["full"]:
            break
        assert result["sentence"], result["error"]
        assert result["resumed_from"] == result.get("newest", 0)
        newest.append(result.get("newest", 0))
        sentences.add(result["sentence"].replace(str(folder), "…"))
    assert newest[0] == 0
    assert newest[-1] > 0
    ends = ("model", "checkpoints/step-000002", "checkpoints/step-000004")
    assert sentences <= {
        f"The disk ran full while writing …/{end}; the former state is untouched: free some space and run again."
        for end in ends
    }


@pytest.mark.medium
@pytest.mark.distributed
@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full_for_one_process_stops_all(nursery: Any, tmp_path: Path, rank: int) -> None:
    """In the second checkpoint (each process writes about 34 tensors in one); under ZeRO 3 every tensor is gathered."""
    settings = SETTINGS | {"strategy": "deepspeed_3", "rows": 1, "processes": 2}
    result = nursery.run(tmp_path, no_space={"rank": rank, "tensor": 50}, fails=True, **settings)
    assert result["codes"] == [2, 2]
    assert "The disk ran full while writing" in result["error"]
    assert "step-000004; the former state is untouched: free some space and run again." in result["error"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]
    assert nursery.run(tmp_path, resume="auto", **settings)["resumed_from"] == 2


@pytest.mark.medium
@pytest.mark.distributed
def test_a_folder_that_one_process_cannot_make_stops_all(nursery: Any, tmp_path: Path) -> None:
    """Before it has written anything: the others wait in the first of the collectives that gather tensors."""
    settings = SETTINGS | {"strategy": "deepspeed_3", "rows": 1, "processes": 2, "timeout": 60}
    result = nursery.run(tmp_path, no_space={"rank": 1, "folder": "resume"}, fails=True, **settings)
    assert result["codes"] == [2, 2]
    assert "step-000002; the former state is untouched: free some space and run again." in result["error"]


NEEDS_A_FULL_DEVICE = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")


@NEEDS_A_FULL_DEVICE
@pytest.mark.parametrize("name", ["metrics.csv", "samples.md"])
def test_figures_and_samples_that_find_no_room_end_the_run_with_a_sentence(train, tmp_path, monkeypatch, name):
    """And what was saved before goes on."""
    original = LanguageModule.on_train_batch_start

    def fill(self: Any, batch: dict, batch_idx: int) -> None:
        original(self, batch, batch_idx)
        if self.trainer.global_step == 4:
            (tmp_path / "beside").unlink(missing_ok=True)
            (tmp_path / "beside").symlink_to("/dev/full")
            (tmp_path / "beside").replace(tmp_path / name)

    settings = {**SETTINGS, "sample_every": 2, "sample_prompts": ["ab"], "sampling": SamplingParams(max_new_tokens=3)}
    with monkeypatch.context() as patched:
        patched.setattr(LanguageModule, "on_train_batch_start", fill)
        with pytest.raises(OSError, match="No space left") as caught:
            train(tmp_path, **settings)
    assert _sentence(caught.value).startswith("no space left on the disk")
    assert [each.step for each in list_checkpoints(tmp_path)] == [4]
    (tmp_path / name).unlink()
    assert train(tmp_path, resume="auto", **settings).steps == 8


@NEEDS_A_FULL_DEVICE
@pytest.mark.medium
@pytest.mark.distributed
def test_what_rank_0_alone_cannot_write_is_the_reason_that_the_others_give(nursery, tmp_path):
    settings = SETTINGS | {"strategy": "deepspeed_2", "rows": 1, "processes": 2}
    result = nursery.run(tmp_path, no_space={"rank": 0, "file": "metrics.csv", "step": 4}, fails=True, **settings)
    assert result["codes"] == [2, 1]
    assert "No space left" in result["error"]
    said = (tmp_path / "printed.txt").read_text()
    assert "LostProcessError: rank 0 failed ([Errno 28] No space left on device), and the others cannot go on" in said
    assert "rank 0 is gone" not in said


@NEEDS_A_FULL_DEVICE
def test_a_log_file_that_finds_no_room_does_not_shout(capsys):
    """The one sentence is said on the terminal; logging's own handler would print a traceback for every line."""
    handler = _LogFile("/dev/full")
    handler.handle(logging.makeLogRecord({"msg": "text"}))
    with contextlib.suppress(OSError):
        handler.close()
    assert capsys.readouterr().err == ""


def test_too_little_room_is_seen_before_anything_is_written(train, tmp_path, monkeypatch):
    """The estimate is the size of the tensors; headers, tokenizer and JSON come on top and have a margin."""
    asked = []
    monkeypatch.setattr(atomic, "check_free_space", lambda folder, needed: asked.append((folder, needed)))
    train(tmp_path, steps=2, checkpoint_every=2, val_every=None)
    folder = tmp_path / "checkpoints" / "step-000002"
    (needed,) = {needed for place, needed in asked if place == folder.parent}
    size = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    assert needed == pytest.approx(size, rel=0.02)
    monkeypatch.undo()
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda folder: SimpleNamespace(free=size))
    with pytest.raises(ModelFolderError, match=r"No disk space: .* MB are needed in .* and .* MB are free"):
        train(tmp_path, steps=4, checkpoint_every=2, val_every=None, resume="auto")
