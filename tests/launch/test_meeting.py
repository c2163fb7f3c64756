"""How ranks come to one folder: torchrun's store, Slurm's job, a disk that is not shared."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.launch import meeting
from llmtrain.training.placement import BY_HAND, SLURM, TORCHRUN, Placement


def test_the_folder_of_a_slurm_job_has_its_number():
    place = Placement(SLURM, True)
    assert meeting.job_name(place, {"SLURM_JOB_ID": "77"}) == "slurm-77"
    assert meeting.job_name(place, {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}) == "slurm-77"
    assert meeting.job_name(place, {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2"}) == "slurm-77-2"
    assert meeting.job_name(Placement(BY_HAND, True), {"SLURM_JOB_ID": "77"}) is None


def test_torchrun_s_store_tells_the_other_ranks_and_the_next_attempt():
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True)  # the agent's
    place = Placement(TORCHRUN, True, rank=0, main_address="127.0.0.1", main_port=store.port)
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    learned = []

    def other_rank() -> None:
        learned.append(meeting.learn(replace(place, rank=1), environment, rank=1, timeout=20.0))

    waiting = threading.Thread(target=other_rank)
    waiting.start()
    assert meeting.former(place, environment) is None
    meeting.tell(place, Path("/跑 $x"), environment)
    waiting.join(30)
    assert learned == [Path("/跑 $x")]
    again = environment | {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert meeting.former(place, again) == Path("/跑 $x")
    with pytest.raises(ValueError, match="rank 0 has not said within 1 s where the run folder is"):
        meeting.learn(place, again, rank=1, timeout=1.0)


def test_a_folder_that_does_not_appear_is_on_another_disk(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(meeting, "LONG_WAIT", 0.05)
    meeting.wait_for(tmp_path, rank=1, timeout=0.0)
    assert capsys.readouterr().err == ""
    with pytest.raises(ValueError, match=r"rank 3 on .* does not see the run folder .*/none of rank 0 after 0.2 s"):
        meeting.wait_for(tmp_path / "none", rank=3, timeout=0.2)
    said = capsys.readouterr().err
    assert said.count("[rank 3] waits for rank 0 to make") == 1, "it says what it waits for, before it gives up"
    assert "unset the variables that call it rank 3" in said
