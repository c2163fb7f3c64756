"""What `verify-resume` asks of a run by environment variables: the samples of each step, and a signal at one."""

from __future__ import annotations

import pytest

from llmtrain.training.witness import SAMPLES_FILE, SAMPLES_VARIABLE, SIGNAL_VARIABLE, witnesses


def test_nothing_unless_asked(tmp_path):
    assert witnesses(tmp_path, resumed_step=0, environment={}) == []


@pytest.mark.parametrize("wanted", ["SIGKILL", "SIGNOTHING@3", "9@3", "SIGTERM@x"])
def test_a_signal_that_cannot_be_read_is_refused(tmp_path, wanted):
    with pytest.raises(ValueError, match="must be a signal and a step, such as SIGKILL@7"):
        witnesses(tmp_path, resumed_step=0, environment={SIGNAL_VARIABLE: wanted})


def test_the_samples_of_every_step_over_two_sessions(train, micro_batches, tmp_path, monkeypatch):
    monkeypatch.setenv(SAMPLES_VARIABLE, "1")
    monkeypatch.setenv(SIGNAL_VARIABLE, "SIGTERM@5")
    first = train(tmp_path, steps=8)
    assert (first.stopped_by, first.steps) == ("SIGTERM", 5)
    lines = (tmp_path / SAMPLES_FILE).read_text()
    (tmp_path / SAMPLES_FILE).write_text(f"{lines}6,1,2\n")  # of a step that a kill would have lost
    monkeypatch.delenv(SIGNAL_VARIABLE)
    train(tmp_path, steps=8, resume="auto")
    expected = {}
    for step, _, ids in micro_batches:
        expected.setdefault(step + 1, []).extend(ids)
    lines = (tmp_path / SAMPLES_FILE).read_text().splitlines()
    assert [list(map(int, line.split(","))) for line in lines] == [[step, *ids] for step, ids in expected.items()]
