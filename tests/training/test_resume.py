"""A run that was interrupted and resumed equals the run that was not, and what may not be resumed."""

from __future__ import annotations

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from llmtrain.training import checkpointing, fit, placement
from llmtrain.training.checkpointing import RunState
from llmtrain.training.placement import BY_HAND, Placement
from tests.training.conftest import assert_equal, metrics, tensors


def weights(run_dir):
    return load_file(run_dir / "model" / "model.safetensors")


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [("single", "fp32"), pytest.param("deepspeed_1", "fp32", marks=pytest.mark.medium)],
)
def test_interrupted_twice_equals_straight(train, signal_at, micro_batches, tmp_path, strategy, precision):
    """With dropout 0.1 and accumulation 2: the same samples, losses, figures, validation steps and final weights."""
    train_tokens = 500  # 15 windows: twelve steps of four go over the text more than three times
    train = partial(train, strategy=strategy, precision=precision, train_tokens=train_tokens)
    straight = train(tmp_path / "straight")
    expected = list(micro_batches)
    micro_batches.clear()

    interrupted = tmp_path / "interrupted"
    stops = []
    for stop in (3, 8, None):
        signal_at(stop)
        result = train(interrupted, resume="auto")
        stops.append((result.resumed_from, result.steps, result.stopped_by))
    assert stops == [(0, 4, "SIGTERM"), (4, 9, "SIGTERM"), (9, 12, None)]
    assert micro_batches == expected
    assert metrics(interrupted) == metrics(tmp_path / "straight")
    assert (result.tokens, result.val_loss, result.best_step) == (
        straight.tokens,
        straight.val_loss,
        straight.best_step,
    )
    ours, theirs = weights(interrupted), weights(tmp_path / "straight")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_counters_after_a_resume_in_the_middle_of_everything(train, signal_at, micro_batches, tmp_path):
    """Accumulation 2, validation every 5 steps, stop at 7 → micro-batch 14, step 7 → 8, validation at 10."""
    signal_at(6)
    assert train(tmp_path, steps=20).steps == 7
    assert [row["step"] for row in metrics(tmp_path) if row["val/loss"]] == ["5"]
    micro_batches.clear()
    signal_at(10)
    train(tmp_path, steps=20, resume="auto")
    assert micro_batches[0][:2] == (7, 0)
    assert len(micro_batches) == 2 * (11 - 7)
    assert [int(row["step"]) for row in metrics(tmp_path)] == list(range(1, 12))
    assert [row["step"] for row in metrics(tmp_path) if row["val/loss"]] == ["5", "10"]


def test_the_resumed_checkpoint_stays_and_foreign_folders_too(train, signal_at, tmp_path):
    signal_at(6)
    train(tmp_path, steps=20, keep_last=1)
    foreign = tmp_path / "checkpoints" / "step-000001"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    signal_at(None)
    train(tmp_path, steps=20, keep_last=1, resume="auto")
    assert [each.step for each in checkpointing.list_checkpoints(tmp_path)] == [7, 20]
    assert (foreign / "notes.txt").read_text() == "mine"


def test_an_older_checkpoint_sets_the_later_ones_aside(train, tmp_path):
    train(tmp_path, steps=9, keep_last=None)
    middle = tmp_path / "checkpoints" / "step-000003"
    result = train(tmp_path, steps=6, keep_last=None, resume=middle)
    assert (result.resumed_from, result.steps) == (3, 6)
    assert [each.step for each in checkpointing.list_checkpoints(tmp_path)] == [3, 6]
    assert {path.name for path in middle.parent.glob("*.superseded")} == {
        "step-000006.superseded",
        "step-000009.superseded",
    }
    assert [int(row["step"]) for row in metrics(tmp_path)] == list(range(1, 7))


def test_samples_that_come_again_stand_once(train, tmp_path):
    from llmtrain.generation import SamplingParams

    settings = {"steps": 9, "sample_every": 2, "sample_prompts": ["ab"], "keep_last": None}
    settings["sampling"] = SamplingParams(max_new_tokens=5, seed=1)
    train(tmp_path, **settings)
    straight = (tmp_path / "samples.md").read_text(encoding="utf-8")
    assert straight.count("## step") == 4
    train(tmp_path, resume=tmp_path / "checkpoints" / "step-000003", **settings)
    assert (tmp_path / "samples.md").read_text(encoding="utf-8") == straight


def test_a_finished_run_has_nothing_left_to_do(train, tmp_path):
    first = train(tmp_path)
    again = train(tmp_path, resume="auto")
    assert (again.steps, again.tokens, again.val_loss) == (first.steps, first.tokens, first.val_loss)
    assert again.model_dir.exists()


def test_a_finished_run_goes_on_with_more_steps(train, tmp_path):
    train(tmp_path, steps=6, schedule="constant")
    assert train(tmp_path, steps=9, schedule="constant", resume="auto").steps == 9
    assert [int(row["step"]) for row in metrics(tmp_path)] == list(range(1, 10))


def test_a_fresh_start_into_a_used_folder_is_refused(train, tmp_path):
    train(tmp_path, steps=3)
    with pytest.raises(ValueError, match="holds another run; resume=auto continues it"):
        train(tmp_path, steps=3)


def test_resume_auto_in_an_empty_folder_starts_afresh(train, tmp_path):
    assert train(tmp_path, steps=2, resume="auto").resumed_from == 0


@pytest.mark.parametrize("lora", [False, True], ids=["model", "adapter"])
def test_resume_auto_after_a_kill_before_the_first_checkpoint_starts_afresh(train, tmp_path, lora):
    """Figures and the model of the first validation come again: a job that is queued again has to get ahead."""
    options = {"steps": 6, "checkpoint_every": None, "lora": lora}
    train(tmp_path, **options)
    expected = metrics(tmp_path)
    name = "adapter" if lora else "model"
    former = tensors(tmp_path / name)
    with pytest.raises(ValueError, match=rf"another run \({name} and metrics.csv\) .*, and resume=auto starts it"):
        train(tmp_path, **options)
    assert train(tmp_path, **options, resume="auto").resumed_from == 0
    assert metrics(tmp_path) == expected
    assert_equal(tensors(tmp_path / name), former)


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("lora", [False, True], ids=["model", "adapter"])
def test_resume_auto_does_not_replace_an_ended_run_without_a_checkpoint(train, tmp_path, lora):
    train(tmp_path, steps=12, checkpoint_every=None, lora=lora)
    (tmp_path / "results.json").write_text("{}")  # as the command leaves it at its end
    before = content(tmp_path)
    sentence = r"another run \((model|adapter) and results.json and metrics.csv\) and no checkpoint.* resume=auto would"
    with pytest.raises(ValueError, match=sentence):
        train(tmp_path, steps=12, checkpoint_every=None, lora=lora, resume="auto")
    assert content(tmp_path) == before


def test_nothing_is_written_before_the_run_is_accepted(train, tmp_path):
    """Nor is it accepted before everything was compared."""
    train(tmp_path, steps=3)
    before, seen = content(tmp_path), []
    with pytest.raises(ValueError, match="seed was 0 and is 1"):
        train(tmp_path, steps=6, seed=1, resume="auto", accept=lambda: seen.append(None))
    assert (content(tmp_path), seen) == (before, [])
    train(tmp_path, steps=6, resume="auto", accept=lambda: seen.append(content(tmp_path)))
    assert seen[0] == before
    assert content(tmp_path) != before


def test_a_checkpoint_of_another_run_does_not_replace_a_run(train, tmp_path):
    """`resume=<path> name=<a run that is there>`: figures of two runs would be mixed, and the model replaced."""
    train(tmp_path / "one", steps=3)
    for every, sentence in (
        (3, "holds another run; resume=auto continues it"),
        (None, r"holds another run \(model and metrics"),
    ):
        other = tmp_path / f"other-{every}"
        train(other, steps=6, checkpoint_every=every)
        before = content(other)
        with pytest.raises(ValueError, match=sentence):
            train(other, steps=9, resume=tmp_path / "one")
        assert content(other) == before
    fresh = tmp_path / "fresh"
    assert train(fresh, steps=6, resume=tmp_path / "one").resumed_from == 3
    assert train(fresh, steps=9, resume="auto").resumed_from == 6


def test_a_fresh_start_says_whether_there_is_something_to_go_on_from(train, tmp_path):
    train(tmp_path, steps=3, checkpoint_every=None)
    with pytest.raises(ValueError, match=r"and no checkpoint that it could go on from; name=… or paths.run_dir=…"):
        train(tmp_path, steps=3)


def test_half_written_checkpoints_do_not_count(train, tmp_path):
    train(tmp_path, steps=6)
    newest = tmp_path / "checkpoints" / "step-000006"
    (newest / "checkpoint.json").unlink()
    assert checkpointing.find_checkpoint("auto", tmp_path).step == 3
    with pytest.raises(ValueError, match=r"no whole checkpoint there.*this run has .*step-000003"):
        checkpointing.find_checkpoint(newest, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "seed was 0 and is 1; restore it, or start"),
        ({"optimizer": "muon"}, "optim.name was adamw and is muon"),
        ({"fixed": {"the data's fingerprint": "bbb"}}, "the data's fingerprint was aaa and is bbb"),
        (
            {"seed": 1, "fixed": {"the data's fingerprint": "bbb"}, "lr": 0.5, "steps": 6},
            r"fingerprint was aaa and is bbb; seed was 0 and is 1; restore them, .*"
            r"\(also changed, which is allowed: the number of steps was 3 and is 6; optim.lr was 0.001 and is 0.5\)",
        ),
    ],
)
def test_what_may_not_change_is_refused_by_name(train, tmp_path, changes, message):
    train(tmp_path, steps=3, fixed={"the data's fingerprint": "aaa"})
    with pytest.raises(ValueError, match=message):
        train(tmp_path, resume="auto", **({"steps": 3, "fixed": {"the data's fingerprint": "aaa"}} | changes))


def test_only_the_first_process_compares(train, tmp_path, monkeypatch):
    """The others do not read everything that is compared (the base model's weights are hashed once)."""
    facts = {"the base model's weights": "abc"}
    train(tmp_path, steps=3, fixed=facts)
    now = RunState(0, 0, 0.0, fixed={"the base model's weights": ""})
    monkeypatch.setattr(placement, "here", lambda: Placement(BY_HAND, node_rank=1))  # the second of two machines
    assert fit._prepare_resume("auto", tmp_path, now).step == 3
    monkeypatch.undo()
    with pytest.raises(ValueError, match="the base model's weights was abc and is ;"):
        fit._prepare_resume("auto", tmp_path, now)


def test_what_may_change_is_reported_in_one_list(train, tmp_path, caplog):
    train(tmp_path, steps=3, checkpoint_every=1)
    train(
        tmp_path, steps=6, lr=1e-4, rows=4, accumulation=1, log_every=2, optimizer_options={"weight_decay": 0.2},
        precision="bf16", resume="auto",
    )  # fmt: skip
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    for change in (
        "the number of micro-batches per step was 2 and is 1",
        "the number of steps was 3 and is 6",
        "optim.lr was 0.001 and is 0.0001",
        "trainer.precision was fp32 and is bf16",
        "trainer.log_every was 1 and is 2",
        "trainer.checkpoint_every was 1 and is 3",
    ):
        assert change in said
    assert "seed" not in said
    assert float(metrics(tmp_path)[-1]["train/lr"]) == pytest.approx(1e-5)


@pytest.mark.parametrize("strategy", ["single", pytest.param("deepspeed_1", marks=pytest.mark.medium)])
def test_the_optimisers_settings_are_those_of_the_session(train, tmp_path, monkeypatch, strategy):
    """Under every strategy alike: a checkpoint holds moments and no settings."""
    from llmtrain.training.saving import Checkpoints

    seen = []
    original = Checkpoints.on_fit_start

    def on_fit_start(self, trainer, module):
        original(self, trainer, module)
        seen.append([(group["weight_decay"], group["betas"]) for group in trainer.optimizers[0].param_groups])

    monkeypatch.setattr(Checkpoints, "on_fit_start", on_fit_start)
    options = {"weight_decay": 0.25, "betas": (0.8, 0.9)}
    train(tmp_path, steps=3, strategy=strategy)
    train(tmp_path, steps=6, strategy=strategy, optimizer_options=options, resume="auto")
    assert seen[1] == [(0.25, (0.8, 0.9)), (0.0, (0.8, 0.9))]


def test_a_checkpoint_holds_no_pickle(train, tmp_path):
    """JSON, safetensors and a template; the marker says where the run stood."""
    train(tmp_path, steps=3)
    folder = tmp_path / "checkpoints" / "step-000003"
    files = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert files == {".json", ".safetensors", ".jinja"}
    marker = json.loads((folder / "checkpoint.json").read_text())
    assert (marker["step"], marker["tokens"]) == (3, 3 * 2 * 2 * 32)
    parameters = json.loads((folder / "resume" / "state.json").read_text())["parameters"]
    assert "model.embed_tokens.weight" in parameters
    assert "lm_head.weight" not in parameters  # tied: one parameter, one name
    assert all(each["tensors"] == ["master", "exp_avg", "exp_avg_sq"] for each in parameters.values())
    assert all(each["scalars"] == {"step": 3.0} for each in parameters.values())


def test_a_checkpoint_of_another_layout_is_refused(train, tmp_path):
    train(tmp_path, steps=3)
    marker = tmp_path / "checkpoints" / "step-000003" / "checkpoint.json"
    marker.write_text(marker.read_text().replace(f'"version": {checkpointing.VERSION}', '"version": 1'))
    with pytest.raises(ValueError, match=r"version 1 of the checkpoint layout .* use its model/ folder with init="):
        train(tmp_path, steps=6, resume="auto")


def test_another_models_training_state_is_refused(train, tmp_path):
    train(tmp_path, steps=3)
    with pytest.raises(
        ValueError, match=r"another model: .*token_adapter.* is not trained there and of shape \[3, 64\] here"
    ):
        train(tmp_path, steps=6, lora=True, resume="auto")


@pytest.mark.medium
def test_an_adapter_interrupted_equals_straight(train, signal_at, tmp_path):
    """Adapter tensors bit-equal, and the optimiser holds adapter parameters only."""
    straight = train(tmp_path / "straight", lora=True)
    for stop in (4, 7, None):
        signal_at(stop)
        result = train(tmp_path / "interrupted", lora=True, resume="auto")
    assert (result.resumed_from, result.val_loss) == (8, straight.val_loss)
    assert_equal(tensors(tmp_path / "interrupted" / "adapter"), tensors(tmp_path / "straight" / "adapter"))
    newest = "checkpoints/step-000012/resume"
    assert_equal(tensors(tmp_path / "interrupted" / newest), tensors(tmp_path / "straight" / newest))
    assert all("lora_" in name or "trainable_tokens" in name for name in tensors(tmp_path / "straight" / newest))


def test_a_validation_that_a_signal_prevented_is_made_up_for(train, signal_at, tmp_path):
    """Step 5 was to be validated; the resumed run begins with that, and with the model that is the best so far."""
    train(tmp_path / "straight", lr=1e-9)  # nothing is learnt, so that the first model stays the best
    signal_at(4)
    stopped = train(tmp_path / "interrupted", lr=1e-9)
    assert (stopped.steps, stopped.val_loss) == (5, None)
    signal_at(None)
    result = train(tmp_path / "interrupted", lr=1e-9, resume="auto")
    assert metrics(tmp_path / "interrupted") == metrics(tmp_path / "straight")
    assert result.best_step == json.loads((tmp_path / "straight" / "model" / "llmtrain.json").read_text())["step"]


def test_another_runs_checkpoint_continues_in_a_folder_of_its_own(train, tmp_path):
    """Its best model so far is the other run's: the first validation here leaves one, however bad."""
    train(tmp_path / "old", steps=6)
    result = train(tmp_path / "new", steps=9, lr=1e-9, resume=tmp_path / "old")
    assert (result.resumed_from, result.best_step) == (6, 9)
    assert result.model_dir == tmp_path / "new" / "model"
    assert weights(tmp_path / "new")
    assert [int(row["step"]) for row in metrics(tmp_path / "new")] == [7, 8, 9]


def test_a_missing_best_model_is_written_again(train, signal_at, tmp_path):
    signal_at(6)
    train(tmp_path)
    shutil.rmtree(tmp_path / "model")
    signal_at(None)
    result = train(tmp_path, resume="auto")
    assert result.best_step == 12
    assert weights(tmp_path)
