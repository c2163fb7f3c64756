"""The table of `llmtrain bench which=[equality]`."""

from __future__ import annotations

import pytest

from llmtrain.bench import equality
from llmtrain.bench.equality import Case, Row


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_ours_equals_plain_pytorch_and_lightnings_gradient_is_a_quarter(tmp_path, caplog):
    """With accumulation 4."""
    from llmtrain.launch import bench
    from llmtrain.launch.composing import compose

    paths = [f"paths.runs_dir={tmp_path / 'runs'}", f"paths.data_dir={tmp_path / 'data'}"]
    with caplog.at_level("INFO", "llmtrain.launch.bench"):
        results = bench.run(compose("bench", ["which=[equality]", *paths]).settings, tmp_path / "run")
    assert results["met"] is True
    assert results["comparisons"] == {}
    ours = [row for row in results["equality"] if row["scaling"] == equality.OURS]
    theirs = [row for row in results["equality"] if row["scaling"] == equality.LIGHTNINGS]
    assert {(row["strategy"].split()[0], row["processes"]) for row in ours} >= {
        (f"deepspeed_{stage}", processes) for stage in (1, 2, 3) for processes in (1, 2)
    }
    assert [row["gradient"] for row in ours] == pytest.approx([1.0] * len(ours), abs=1e-5)
    assert [row["gradient"] for row in theirs] == pytest.approx([0.25] * 3, abs=1e-5)
    assert all(row["loss"] > 1e-3 and row["weights"] > 1e-3 for row in theirs)
    assert "Lightning's own" in caplog.text


def test_a_row_is_equal_within_all_limits():
    assert Row("s", 1, equality.OURS, 1.0, 1e-6, 1e-5).equal
    assert Row("s", 1, equality.OURS, 1 - 9e-6, 1e-6, 1e-5).equal
    assert not Row("s", 1, equality.OURS, 1 + 2e-5, 0.0, 0.0).equal
    assert not Row("s", 1, equality.OURS, 0.25, 0.0, 0.0).equal
    assert not Row("s", 1, equality.OURS, float("nan"), 0.0, 0.0).equal
    assert not Row("s", 1, equality.OURS, 1.0, 2e-6, 1e-7).equal
    assert not Row("s", 1, equality.OURS, 1.0, 1e-7, 2e-5).equal
    text = equality.table([Row("deepspeed_3", 2, equality.OURS, 0.25, 1e-3, 2e-3)])
    assert text.splitlines()[1].split() == ["deepspeed_3", "2", "llmtrain", "0.2500", "1.0e-03", "2.0e-03"]


def test_names_of_cases_tell_them_apart():
    cases = [
        Case("deepspeed_2"), Case("deepspeed_2", 2), Case("deepspeed_2", 1, 2), Case("deepspeed_2", clip=1.0),
        Case("deepspeed_2", lora=True), Case("deepspeed_2", lightnings=True), Case("deepspeed_2", options={"a": True}),
    ]  # fmt: skip
    assert len({case.name for case in cases}) == len(cases)
