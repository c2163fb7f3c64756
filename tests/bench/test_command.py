"""`llmtrain bench` from settings to the last line, at toy size; and that it measures what `make pretrain` runs."""

from __future__ import annotations

import json
import os

import pytest
import torch

from llmtrain.launch import bench, bench_models, pretrain, starting
from llmtrain.launch.composing import compose

TOY = [
    "pretrain=[data=python_docs, model=tiny, tokenizer.vocab_size=512, data.sequence_length=32, "
    "trainer.batch_tokens=64, trainer.accelerator=cpu]",
    "rounds=3", "steps=2", "prompt_tokens=4", "new_tokens=6", "batch_sizes=[1,2]", "megabytes=0.1",
    "memory_megabytes=[0.1,0.2]",
]  # fmt: skip


@pytest.fixture(autouse=True)
def unchanged_process(monkeypatch):
    """The command sets threads for its whole process; other tests share this one."""
    monkeypatch.setenv("RAYON_NUM_THREADS", os.environ.get("RAYON_NUM_THREADS", "2"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def settings_of(tmp_path, *overrides: str):
    paths = [f"paths.runs_dir={tmp_path / 'runs'}", f"paths.data_dir={tmp_path / 'data'}"]
    return compose("bench", [*TOY, *paths, *overrides]).settings


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:You have overridden `transfer_batch_to_device`:UserWarning")
def test_everything_is_measured_once(tmp_path, caplog) -> None:
    run_dir = tmp_path / "run"
    with caplog.at_level("INFO", "llmtrain.launch.bench"):
        results = bench.run(settings_of(tmp_path, "which=[memory,prepare,decode,train]", "threads=1"), run_dir)
    assert list(results["ratios"]) == [
        "train_vs_torch", "train_vs_transformers", "decode_batch_1", "decode_batch_2", "prepare_vs_encode_batch",
        "prepare_vs_encode_batch_fast", "prepare_memory",
    ]  # fmt: skip
    assert json.loads(json.dumps(results)) == results
    for name, found in results["comparisons"].items():
        assert found["min"] <= found["median"] <= found["max"]
        assert len(found["per_round"]) == (1 if name == "prepare_memory" else 3)
        assert results["ratios"][name] == found["median"]
    assert results["machine"]["threads"] == 1
    assert results["training"]["strategy"] == "deepspeed_1"
    assert results["training"]["batch"] == [1, 2, 32]
    assert results["decoding"]["dtype"] == "float32"
    assert "training against a bare PyTorch loop" in caplog.text
    assert not (run_dir / "work").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_gpu_is_measured(tmp_path, precision) -> None:
    changes = (
        f"{TOY[0].removesuffix('trainer.accelerator=cpu]')}trainer.accelerator=gpu, trainer.precision={precision}]"
    )
    results = bench.run(settings_of(tmp_path, changes, "which=[train,decode]"), tmp_path / "run")
    assert results["training"]["device"] == results["decoding"]["device"] == "cuda:0"
    assert all(ratio > 0 for ratio in results["ratios"].values())


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "which=[train,fly]",
            "which='fly' is nothing that can be measured: use train, decode, generate, prepare, memory",
        ),
        ("which=[]", "measures nothing"),
        ("rounds=2", "rounds=2 must be at least 3"),
        ("steps=0", "steps=0 must be a whole number of at least 1"),
        ("threads=0", "threads=0 must be a whole number from 1 to 4,096, or null"),
        ("batch_sizes=[]", "batch_sizes=[] must be a list of at least one"),
        ("memory_megabytes=[5,5]", "must be two sizes, the smaller one first"),
        ("model=nowhere", "model=nowhere does not exist"),
        ("pretrain=[trainer.batch_tokens=100]", "trainer.batch_tokens=100 is not a multiple of data.sequence_length"),
        ("pretrain=[trainer.batch_size=100]", "unknown key 'trainer.batch_size'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_done(tmp_path, override, sentence) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (compared as text: the sentences hold brackets)
        bench.run(settings_of(tmp_path, override), tmp_path / "run")
    assert sentence in str(error.value)
    assert not (tmp_path / "data").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.medium
def test_the_latest_run_is_decoded_and_random_weights_stand_in_for_none(tmp_path, tiny_config, byte_tok) -> None:
    from llmtrain.checkpoint import save_model_folder
    from llmtrain.launch.runs import point_latest
    from llmtrain.model import build_model

    def folder_in(work):
        return bench_models.model_folder(bench.Bench(settings_of(tmp_path), work))

    (tmp_path / "work").mkdir()
    assert folder_in(tmp_path / "work") == tmp_path / "work" / "model"
    run = tmp_path / "runs" / "pretrain" / "mine"
    run.mkdir(parents=True)
    point_latest(run)
    (tmp_path / "again").mkdir()
    assert folder_in(tmp_path / "again") == tmp_path / "again" / "model", "a run that has no model yet"
    config = tiny_config()
    state = build_model(config, seed=0).state_dict()
    save_model_folder(run / "model", config=config, state_dict=state, tokenizer=byte_tok, info={})
    assert folder_in(tmp_path / "unused") == run / "model"


@pytest.mark.medium
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_what_is_measured_is_what_pretrain_runs(tmp_path, monkeypatch, optimizer) -> None:
    """Every argument that `make pretrain` gives to `fit` is the bench's too, or is named here as one that is not."""
    from llmtrain.training import fit as fit_module

    given: dict = {}
    monkeypatch.setattr(fit_module, "fit", lambda **arguments: given.update(arguments))
    changes = f"pretrain=[optim={optimizer},data=python_docs,tokenizer=byte,model=tiny]"
    measured = bench.Bench(settings_of(tmp_path, changes), tmp_path)
    settings, start = measured.pretrain, measured.start
    batch = starting.check_settings(settings)
    length = pretrain._run_length(settings, batch, start.prepared)
    pretrain._fit(settings, tmp_path, start, batch, length, [], pretrain.sampling_params(settings.sampling))

    setup = measured._training_setup()
    ours = {**setup.fit_options, **{name: getattr(setup, name) for name in setup.SHARED}}
    others = {
        "model", "data", "tokenizer", "run_dir", "total_steps", "accumulation", "seed", "devices", "num_nodes",
        # Outside of steps, or of no cost in them.
        "tokens_per_byte", "val_every", "checkpoint_every", "keep_last", "sample_every", "sample_prompts", "sampling",
        "wandb", "resume", "info", "fixed", "accept", "report",
    }  # fmt: skip
    assert {name: value for name, value in given.items() if name not in others} == ours
    assert (setup.micro_batch_size, setup.accumulation) == (batch.micro_batch_size, batch.accumulation)
