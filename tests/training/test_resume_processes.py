"""Resuming with real processes: interrupted equals straight bit for bit; any number of processes goes on from any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmtrain.launch.forecast import checkpoint_bytes
from tests.training.conftest import assert_equal, metrics, samples, tensors
from tests.training.toy import toy_model

pytestmark = [pytest.mark.medium, pytest.mark.distributed]

ROWS = 8  # of a step, whatever the processes and the accumulation
SHORT = {"train_tokens": 1000}  # 31 windows, so that twelve steps of eight go over the text more than three times


def model_folder(run_dir: Path) -> Path:
    return run_dir / ("adapter" if (run_dir / "adapter").exists() else "model")


@pytest.mark.parametrize(
    "setting",
    [
        {"strategy": "deepspeed_1", "optimizer": "muon"},
        {"strategy": "deepspeed_2", "weights": (0.7, 0.3)},
        {"strategy": "deepspeed_3", "lora": True},
        pytest.param({"strategy": "deepspeed_1", "lora": True}, marks=pytest.mark.slow),
        pytest.param({"strategy": "deepspeed_2", "lora": True}, marks=pytest.mark.slow),
        pytest.param({"strategy": "deepspeed_3"}, marks=pytest.mark.slow),
    ],
    ids=["1-muon", "2-mixture", "3-lora", "1-lora", "2-lora", "3"],
)
def test_two_processes_interrupted_three_times_equal_straight(nursery: Any, tmp_path: Path, setting: dict) -> None:
    """With dropout 0.1 and accumulation 2, over more than three epochs.

    A signal in the middle of a window reaches rank 1 alone: both finish a step and save. Then a kill in the middle of a
    window, which is replayed from the last checkpoint, and a signal to both.
    """
    straight, interrupted = tmp_path / "straight", tmp_path / "interrupted"
    common = {"processes": 2, **setting, **SHORT}
    expected = nursery.run(straight, **common)
    first = nursery.run(interrupted, signal={"rank": 1, "step": 3, "micro_batch": 1, "name": "SIGTERM"}, **common)
    assert (first["stopped_by"], first["steps"]) == ("SIGTERM", 5)  # rank 0 learns of it one step later
    killed = nursery.run(
        interrupted,
        resume="auto",
        signal={"rank": 1, "step": 7, "micro_batch": 1, "name": "SIGKILL"},
        fails=True,
        **common,
    )
    assert killed["codes"][1] == -9
    third = nursery.run(
        interrupted, resume="auto", signal={"rank": None, "step": 8, "micro_batch": 0, "name": "SIGTERM"}, **common
    )
    assert (third["resumed_from"], third["steps"]) == (6, 10)
    last = nursery.run(interrupted, resume="auto", **common)
    assert metrics(interrupted) == metrics(straight)
    for name in ("steps", "tokens", "best_step", "val_loss", "last_val_loss"):
        assert last[name] == expected[name], name
    assert_equal(tensors(model_folder(interrupted)), tensors(model_folder(straight)))
    newest = "checkpoints/step-000012/resume"
    assert_equal(tensors(interrupted / newest), tensors(straight / newest))
    seen, replayed = samples(straight), samples(interrupted)
    assert all(ids.total() == ROWS for ids in seen.values())
    assert {step: set(ids) for step, ids in replayed.items()} == {step: set(ids) for step, ids in seen.items()}
    assert {step for step, ids in replayed.items() if ids.total() > ROWS} == {6, 7}  # those that a kill took away


def test_an_adapters_training_state_holds_nothing_else(nursery: Any, tmp_path: Path) -> None:
    nursery.run(tmp_path, processes=2, rows=1, strategy="deepspeed_3", lora=True, steps=3)
    saved = tensors(tmp_path / "checkpoints" / "step-000003" / "resume")
    assert {name.rsplit("/", 1)[1] for name in saved} == {"master", "exp_avg", "exp_avg_sq"}
    assert all("lora_" in name or "trainable_tokens" in name for name in saved)
    assert {path.name for path in (tmp_path / "checkpoints" / "step-000003").iterdir()} == {
        "adapter",
        "resume",
        "checkpoint.json",
    }


OFFLOAD = {"offload_optimizer": True, "offload_parameters": True}
SETTINGS = {
    "single": {"strategy": "single", "rows": 4, "accumulation": 2},
    "zero1": {"strategy": "deepspeed_1", "processes": 2, "rows": 4, "accumulation": 1},
    "zero2": {"strategy": "deepspeed_2", "processes": 2, "rows": 2, "accumulation": 2},
    "zero3": {"strategy": "deepspeed_3", "processes": 2, "rows": 1, "accumulation": 4},
    "zero3 on 4": {"strategy": "deepspeed_3", "processes": 4, "rows": 1, "accumulation": 2},
    "zero2 on 4": {"strategy": "deepspeed_2", "processes": 4, "rows": 2, "accumulation": 1},
    "zero3 offloaded": {
        "strategy": "deepspeed_3", "processes": 2, "rows": 2, "accumulation": 2, "strategy_options": OFFLOAD,
    },
    "zero2 offloaded, bf16": {
        "strategy": "deepspeed_2", "precision": "bf16", "rows": 8, "accumulation": 1,
        "strategy_options": {"offload_optimizer": True},
    },
    "zero1 bf16": {"strategy": "deepspeed_1", "precision": "bf16", "processes": 2, "rows": 2, "accumulation": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def straight(nursery: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`straight("zero2", "adamw")`: the folder of an uninterrupted run that kept its checkpoint of step 6."""
    done: dict[tuple[str, str], Path] = {}

    def run(name: str, optimizer: str) -> Path:
        if (name, optimizer) not in done:
            folder = done[name, optimizer] = tmp_path_factory.mktemp("straight")
            nursery.run(folder, dropout=0.0, keep_last=None, optimizer=optimizer, **SETTINGS[name], **SHORT)
        return done[name, optimizer]

    return run


@pytest.mark.parametrize(
    ("before", "after", "optimizer"),
    [
        ("zero2", "single", "muon"),
        pytest.param("zero2", "zero2 on 4", "muon", marks=pytest.mark.slow),
        ("zero2", "zero3 on 4", "adamw"),
        ("single", "zero2", "muon"),
        ("zero1", "zero3", "adamw"),
        ("zero1 bf16", "single", "adamw"),
        pytest.param("zero3", "zero1", "adamw", marks=pytest.mark.slow),
        pytest.param("zero3 on 4", "zero3 offloaded", "adamw", marks=pytest.mark.slow),
        pytest.param("zero3 offloaded", "single", "adamw", marks=pytest.mark.slow),
        pytest.param("zero2 offloaded, bf16", "zero1 bf16", "adamw", marks=pytest.mark.slow),
    ],
)
def test_any_setting_goes_on_from_any(
    nursery: Any, straight: Any, tmp_path: Path, before: str, after: str, optimizer: str
) -> None:
    """The fp32 weights, the moments and the order of the samples are those of the checkpoint, bit for bit.

    From there on sums are taken in another order. In fp32 six more steps then differ by no more than 1e-5 of the loss,
    in bf16, where a sum's rounding is 65,000 times as coarse, by no more than 1 %.
    """
    checkpoint = straight(before, optimizer) / "checkpoints" / "step-000006"
    result = nursery.run(
        tmp_path,
        dropout=0.0,
        optimizer=optimizer,
        resume=str(checkpoint),
        store_loaded=True,
        **SETTINGS[after],
        **SHORT,
    )
    assert (result["resumed_from"], result["steps"], result["tokens"]) == (6, 12, 12 * ROWS * 32)
    assert_equal(tensors(tmp_path / "loaded"), tensors(checkpoint / "resume"))
    said = checkpoint_bytes(toy_model().config, optimizer=optimizer)  # whatever the strategy and the precision
    for folder in (checkpoint, tmp_path / "checkpoints" / "step-000012"):
        for part in ("model", "resume"):
            found = sum(file.stat().st_size for file in (folder / part).glob("*.safetensors"))
            assert found == pytest.approx(said[part], rel=0.02), f"{part} of {folder}"
    whole = samples(straight(before, optimizer))
    assert samples(tmp_path) == {step: whole[step] for step in range(6, 12)}
    ours, theirs = metrics(tmp_path), metrics(straight(before, optimizer))[6:]
    tolerance = 1e-2 if "bf16" in before + after else 1e-5
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for name in ("train/loss", "train/grad_norm", "train/lr", "tokens", "val/loss"):
        got, expected = ([float(row[name]) for row in rows if row[name]] for rows in (ours, theirs))
        assert got == pytest.approx(expected, rel=tolerance if name.endswith("loss") else 5 * tolerance), name
    printed = (tmp_path / "printed.txt").read_text()
    assert "Resuming with changed settings" in printed or before == after


def test_a_damaged_training_state_stops_all_processes_with_the_same_sentence(nursery: Any, tmp_path: Path) -> None:
    """Rank 1 alone needs the second file's second half; rank 0 must not wait for it."""
    nursery.run(tmp_path, processes=2, strategy="deepspeed_1", steps=3)
    part = tmp_path / "checkpoints" / "step-000003" / "resume" / "state-00002-of-00002.safetensors"
    part.write_bytes(part.read_bytes()[:-1000])
    result = nursery.run(tmp_path, processes=2, strategy="deepspeed_1", steps=6, resume="auto", fails=True)
    assert "state-00002-of-00002.safetensors cannot be read" in result["error"]
