"""Model folders: whole or not there, one key set, every path that a run leaves behind, and clear refusals."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from llmtrain import checkpoint
from llmtrain.checkpoint import (
    ModelFolderError,
    atomic,
    load_model_folder,
    resolve_model,
    save_model_folder,
    verify,
    weights,
)
from llmtrain.model import ModelConfig, Transformer, build_model
from llmtrain.tokenizer import byte_tokenizer

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "llmtrain.json",
}


def tiny(seed: int = 0, **changes) -> Transformer:
    shape = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return build_model(ModelConfig(**(shape | changes)), seed=seed).eval()


def save(folder: Path, model: torch.nn.Module | None = None, **changes) -> Transformer:
    model = model or tiny()
    arguments = {"state_dict": model.state_dict(), "tokenizer": byte_tokenizer(), "info": {"step": 7}}
    save_model_folder(folder, config=model.config, **(arguments | changes))
    return model


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def logits(model: Transformer) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(40).reshape(2, 20))


@pytest.mark.parametrize("tied", [True, False])
def test_saved_and_loaded_models_are_equal(tied, tmp_path):
    model = save(tmp_path / "model", tiny(tie_word_embeddings=tied))
    assert set(names(tmp_path / "model")) == FILES
    assert names(tmp_path) == ["model"]  # nothing is left beside it

    loaded = load_model_folder(tmp_path / "model")
    assert torch.equal(logits(loaded.model), logits(model))
    assert loaded.config == model.config
    assert loaded.tokenizer.hash == byte_tokenizer().hash
    assert (loaded.folder, loaded.adapter_folder) == (tmp_path / "model", None)
    assert loaded.info["step"] == 7
    assert loaded.info["state_hash"] == checkpoint.folder_state_hash(tmp_path / "model")
    assert not loaded.model.training
    assert (loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight) == tied


def test_the_tied_head_is_stored_once_and_stays_tied(tmp_path):
    """A strict load in plain torch finds every key, and head and embedding share storage."""
    save(tmp_path / "model")
    with safe_open(tmp_path / "model/model.safetensors", "pt") as handle:
        assert "lm_head.weight" not in handle.keys()  # noqa: SIM118
        assert handle.metadata() == {"format": "pt"}
    model = load_model_folder(tmp_path / "model").model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    fresh = tiny(seed=1)
    fresh.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(logits(fresh), logits(model))


@pytest.mark.parametrize("inside", ["plain", "compiled", "parallel", "lightning", "compiled in lightning"])
def test_wrapped_models_give_one_key_set(inside, tmp_path):
    """No `_orig_mod.` and no `module.` in any file."""
    model = tiny()
    outer = torch.nn.Module()
    outer.model = torch.compile(model, backend="eager") if inside.startswith("compiled") else model
    state = {
        "plain": model.state_dict,
        "compiled": outer.model.state_dict,
        "parallel": lambda: {f"module.{key}": value for key, value in model.state_dict().items()},
        "lightning": outer.state_dict,
        "compiled in lightning": outer.state_dict,
    }[inside]()
    save(tmp_path / "model", model, state_dict=state)
    with safe_open(tmp_path / "model/model.safetensors", "pt") as handle:
        assert set(handle.keys()) == set(model.state_dict()) - {"lm_head.weight"}
    assert torch.equal(logits(load_model_folder(tmp_path / "model").model), logits(model))


def test_what_does_not_count_is_neither_read_nor_hashed(tmp_path):
    """Old Llama folders store `inv_freq`, and some store a tied head: one and the same model all the same."""
    folder = tmp_path / "model"
    model = save(folder)
    before = checkpoint.folder_state_hash(folder)
    extra = {
        "lm_head.weight": model.lm_head.weight.detach().clone(),
        "model.layers.1.self_attn.rotary_emb.inv_freq": torch.arange(4.0),
    }
    save_file({**load_file(folder / "model.safetensors"), **extra}, folder / "model.safetensors")
    assert checkpoint.folder_state_hash(folder) == before
    assert dict(weights.read_weights(folder)).keys() == weights.expected_shapes(model.config).keys()
    assert torch.equal(logits(load_model_folder(folder).model), logits(model))
    verify(folder)
    save(tmp_path / "again", model, state_dict={**model.state_dict(), **extra})
    assert checkpoint.folder_state_hash(tmp_path / "again") == before


def test_writing_copies_only_what_shares_memory(tmp_path, monkeypatch):
    """A model that fills the memory is written without a second copy of it."""
    table = torch.arange(12.0).reshape(3, 4)
    state = {"table": table, "same": table, "row": table[1], "turned": torch.arange(6.0).reshape(2, 3).t()}
    written = {}
    monkeypatch.setattr(
        weights, "save_file", lambda tensors, *_, **__: written.update(tensors) or save_file(tensors, *_)
    )
    weights.write_weights(tmp_path, state, dtype=torch.float32)
    assert written["table"].data_ptr() == table.data_ptr()
    monkeypatch.undo()
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == state.keys()
    assert all(torch.equal(read[key], state[key]) for key in state)


def test_large_weights_are_sharded(tmp_path, monkeypatch):
    model = tiny()
    monkeypatch.setattr(weights, "write_weights", _small_shards(weights.write_weights))
    save(tmp_path / "model", model)
    monkeypatch.undo()
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    assert {file.name for file in (tmp_path / "model").glob("*.safetensors")} == files
    loaded = load_model_folder(tmp_path / "model")
    assert torch.equal(logits(loaded.model), logits(model))
    save(tmp_path / "whole", model)
    assert loaded.info["state_hash"] == checkpoint.read_info(tmp_path / "whole")["state_hash"]

    (tmp_path / "model" / min(files)).unlink()
    with pytest.raises(ModelFolderError, match=r"1 of \d+ weight files are missing"):
        load_model_folder(tmp_path / "model")


def _small_shards(write):
    return lambda folder, state, *, dtype: write(folder, state, dtype=dtype, shard_bytes=30_000)


def test_bf16_folders_keep_their_dtype_unless_told_otherwise(tmp_path):
    save(tmp_path / "model", dtype="bfloat16")
    assert json.loads((tmp_path / "model/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert next(load_model_folder(tmp_path / "model").model.parameters()).dtype == torch.bfloat16
    wide = load_model_folder(tmp_path / "model", dtype=torch.float32)
    assert {parameter.dtype for parameter in wide.model.parameters()} == {torch.float32}
    with pytest.raises(ModelFolderError, match="dtype='int8' must be one of"):
        save(tmp_path / "model", dtype="int8")


def test_config_has_the_keys_of_transformers_4_and_the_sinusoidal_note(tmp_path):
    save(tmp_path / "model", tiny(rope_scaling={"rope_type": "linear", "factor": 2.0}))
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["rope_theta"] == 10_000.0
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert (config["torch_dtype"], config["architectures"]) == ("float32", ["LlamaForCausalLM"])
    generation = json.loads((tmp_path / "model/generation_config.json").read_text())
    tokenizer = byte_tokenizer()
    assert generation["eos_token_id"] == [tokenizer.eos_id, tokenizer.end_id]

    assert (config["bos_token_id"], generation["bos_token_id"]) == (tokenizer.bos_id, tokenizer.bos_id)

    model = save(tmp_path / "sinusoidal", tiny(position="sinusoidal"))
    assert json.loads((tmp_path / "sinusoidal/config.json").read_text())["model_type"] == "llmtrain"
    loaded = load_model_folder(tmp_path / "sinusoidal")
    assert loaded.info["loadable_by"].startswith("llmtrain only")
    assert torch.equal(logits(loaded.model), logits(model))


def test_the_begin_of_text_of_another_family_is_kept(llama_tok, tmp_path):
    save(tmp_path / "model", tokenizer=llama_tok)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((tmp_path / "model" / name).read_text())
        assert (values["bos_token_id"], llama_tok.eos_id) == (llama_tok.special_ids["<s>"], 1)
    assert json.loads((tmp_path / "model/tokenizer_config.json").read_text())["bos_token"] == "<s>"
    assert load_model_folder(tmp_path / "model").tokenizer.begin([9]) == [0, 9]


def test_a_second_save_replaces_everything(tmp_path):
    """No file of the former model is left."""
    save(tmp_path / "model")
    (tmp_path / "model/left-over.safetensors").write_bytes(b"old")
    new = save(tmp_path / "model", tiny(seed=5, hidden_size=64), info={"step": 8})
    assert set(names(tmp_path / "model")) == FILES
    loaded = load_model_folder(tmp_path / "model")
    assert torch.equal(logits(loaded.model), logits(new))
    assert loaded.info["step"] == 8


def test_a_failed_save_changes_nothing(tmp_path, monkeypatch):
    model = save(tmp_path / "model")
    monkeypatch.setattr(weights, "write_weights", _fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        save(tmp_path / "model", tiny(seed=1))
    assert names(tmp_path) == ["model"]
    assert torch.equal(logits(load_model_folder(tmp_path / "model").model), logits(model))


def _fail(folder: Path, *arguments, **options) -> None:
    (folder / "half").write_bytes(b"half")
    raise RuntimeError("in the middle")


def test_a_full_disk_is_noticed_before_and_during(tmp_path, monkeypatch):
    save(tmp_path / "model")
    before = checkpoint.folder_state_hash(tmp_path / "model")
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**6))
    with pytest.raises(ModelFolderError, match=r"No disk space: \d+ MB are needed in .* and 1 MB are free"):
        save(tmp_path / "model", tiny(seed=1))
    monkeypatch.undo()
    monkeypatch.setattr(weights, "write_weights", _run_full)
    with pytest.raises(ModelFolderError, match="the former state is untouched"):
        save(tmp_path / "model", tiny(seed=1))
    assert checkpoint.folder_state_hash(tmp_path / "model") == before


def _run_full(folder: Path, *arguments, **options) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("at_once", [True, False])
def test_a_folder_that_is_exchanged_while_it_is_read_is_read_again(at_once, tmp_path, monkeypatch):
    """Never the config of one model and the weights of another, and no complaint about files that went with the old."""
    old = save(tmp_path / "model", tiny(initializer_range=0.3))
    new = tiny(seed=1, initializer_range=0.3)
    if not at_once:
        monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    reads = {"read_info": checkpoint.load.read_info, "read_weights": weights.read_weights}
    for owner, name in ((checkpoint.load, "read_info"), (weights, "read_weights")):
        left = [new, old]

        def exchange_first(folder, name=name, left=left):
            if left:  # twice in a row, and then it stays
                save(tmp_path / "model", left.pop(), info={"step": len(left)})
            return reads[name](folder)

        monkeypatch.setattr(owner, name, exchange_first)
        loaded = load_model_folder(tmp_path / "model")
        assert not left
        assert loaded.info["step"] == 0
        assert torch.equal(logits(loaded.model), logits(new))
        monkeypatch.setattr(owner, name, reads[name])


def test_a_folder_that_never_stays_is_given_up(tmp_path, monkeypatch):
    save(tmp_path / "model")
    read = weights.read_weights

    def exchange(folder):
        save(tmp_path / "model", tiny(seed=1))
        return read(folder)

    monkeypatch.setattr(weights, "folder_state_hash", lambda folder: "0" * 64)
    monkeypatch.setattr(atomic.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(weights, "read_weights", exchange)
    with pytest.raises(ModelFolderError, match="was exchanged for another 5 times while it was read"):
        load_model_folder(tmp_path / "model")


def test_the_hash_is_of_one_folder_too(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    save(folder)
    new = save(tmp_path / "new", tiny(seed=1))
    expected = checkpoint.folder_state_hash(tmp_path / "new")
    opened, left = weights._opened, [1]

    def exchange_first(file):
        handle = opened(file)
        if left and file.parent == folder:
            left.pop()
            save(folder, new)
        return handle

    monkeypatch.setattr(weights, "_opened", exchange_first)
    assert checkpoint.folder_state_hash(folder) == expected
    assert not left


def test_foreign_folders_are_never_replaced(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/precious.txt").write_text("mine")
    with pytest.raises(ModelFolderError, match="files that llmtrain did not write"):
        save(tmp_path / "notes")
    with pytest.raises(ModelFolderError, match="is a file where a folder is to be written"):
        save(tmp_path / "notes/precious.txt")
    assert (tmp_path / "notes/precious.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty")


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path):
    """Of another machine's processes nobody knows: what they have not touched for an hour is given up."""
    host, dead = socket.gethostname(), 2**22 + 1  # beyond the largest process id
    names = {
        f".a.writing-{host}-{dead}": False,
        f".a.removing-{host}-{os.getpid()}": False,
        f".a.writing-{host}-{os.getppid()}": True,
        f".a.writing-elsewhere-{dead}": True,
        f".b.writing-elsewhere-{dead}": False,
        ".mine": True,
        "a": True,
    }
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    for path in (tmp_path / f".b.writing-elsewhere-{dead}", tmp_path / f".b.writing-elsewhere-{dead}" / "file"):
        os.utime(path, (1e9, 1e9))
    atomic.remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {name for name, stays in names.items() if stays}


def test_a_folder_that_was_moved_away_for_a_new_one_comes_back(tmp_path):
    """Where names cannot be exchanged, a kill may fall between the two renames."""
    old = tmp_path / f".model.old-{socket.gethostname()}-{2**22 + 1}"
    old.mkdir()
    atomic.remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_without_an_atomic_exchange_the_folder_is_replaced_too(tmp_path, monkeypatch):
    save(tmp_path / "model")
    monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    model = save(tmp_path / "model", tiny(seed=1))
    assert names(tmp_path) == ["model"]
    assert torch.equal(logits(load_model_folder(tmp_path / "model").model), logits(model))


KILLED_WRITER = """
import os, signal, sys
from llmtrain.checkpoint.atomic import whole_folder
with whole_folder(sys.argv[1], marker="llmtrain.json") as folder:
    (folder / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.medium
def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    model = save(tmp_path / "model")
    killed = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(tmp_path / "model")], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 2
    assert torch.equal(logits(load_model_folder(tmp_path / "model").model), logits(model))
    save(tmp_path / "model")
    assert names(tmp_path) == ["model"]


@pytest.fixture
def run(tmp_path) -> Path:
    """A run folder as pretraining leaves it, inside runs/pretrain/ with a `latest` link."""
    run = tmp_path / "runs/pretrain/first"
    save(run / "model")
    save(run / "checkpoints/step-000010/model")
    (run / "checkpoints/step-000010/resume").mkdir()
    (run / "metrics.csv").write_text("step\n")
    (run.parent / "latest").symlink_to("first")
    return run


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (".", "model"),
        ("model", "model"),
        ("checkpoints/step-000010", "checkpoints/step-000010/model"),
        ("checkpoints/step-000010/model", "checkpoints/step-000010/model"),
        ("..", "../latest/model"),
        ("../latest", "../latest/model"),
    ],
)
def test_every_folder_of_a_run_is_a_model(run, path, found):
    assert resolve_model(run / path).resolve() == (run / found).resolve()
    assert load_model_folder(run / path).config == tiny().config


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("checkpoints", r"the newest one below it is model=.*step-000010"),
        ("checkpoints/step-000010/resume", r"beside it lies model=.*step-000010/model"),
        ("metrics.csv", r"is a file; give the folder that holds it"),
        ("model/model.safetensors", r"is a file; give the folder that holds it: model=.*first/model"),
        ("absent", "does not exist"),
    ],
)
def test_other_paths_of_a_run_name_what_to_give(run, path, message):
    """Each path works, or the message says what to type."""
    with pytest.raises(ModelFolderError, match=message):
        load_model_folder(run / path)


def test_pointers(run, tmp_path):
    latest = run.parent / "latest"
    latest.unlink()
    with pytest.raises(ModelFolderError, match="make pretrain"):
        resolve_model(latest)
    latest.write_text("first\n")  # where links do not exist
    assert resolve_model(latest) == run / "model"
    latest.unlink()
    latest.symlink_to("removed")
    (run / "model").rename(run / "elsewhere")
    with pytest.raises(ModelFolderError, match=r"not there any more; give another with model="):
        resolve_model(latest)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelFolderError, match="holds no model"):
        resolve_model(tmp_path / "empty")


@pytest.mark.parametrize("as_file", [False, True])
def test_a_latest_run_without_a_model_gives_way_to_the_newest_that_has_one(run, as_file, caplog):
    shutil.copytree(run, run.parent / "older")
    os.utime(run.parent / "older/model/config.json", (1, 1))
    latest = run.parent / "latest"
    latest.unlink()
    if as_file:
        latest.write_text("early\n")
    else:
        latest.symlink_to("early")
    for what in ("is not there any more", "has no model"):
        caplog.clear()
        assert resolve_model(latest) == run / "model" == resolve_model(run.parent)
        assert f"{latest} (early) {what}; model={run / 'model'} is used, the newest beside it" in caplog.text
        (run.parent / "early").mkdir(exist_ok=True)
    checkpoint = run.parent / "early/checkpoints/step-000100/model"
    shutil.copytree(run / "model", checkpoint)  # what it has is named, not passed over
    with pytest.raises(
        ModelFolderError, match=f"the newest one below it is model=.*{checkpoint.relative_to(run.parent / 'early')}"
    ):
        resolve_model(latest)


def test_incomplete_and_mixed_folders_are_refused(tmp_path):
    folder = tmp_path / "model"

    def broken(break_it, message: str) -> None:
        save(folder)
        break_it()
        with pytest.raises(ModelFolderError, match=message):
            load_model_folder(folder)
        with pytest.raises(ModelFolderError, match=f"{folder}.*(again|put the right|belong|supported|describe|rows)"):
            load_model_folder(folder)
        shutil.rmtree(folder)

    def rewrite(name: str, **changes) -> None:
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | changes))

    stored = folder / "model.safetensors"
    broken(stored.unlink, "half-written: it has a config.json and no model.safetensors")
    broken(lambda: os.truncate(stored, 5000), "model.safetensors is half-written or damaged")
    broken((folder / "config.json").unlink, "half-written: it has weights and no config.json")
    broken(lambda: os.truncate(folder / "config.json", 30), "config.json is half-written or damaged")
    broken(lambda: os.truncate(folder / "llmtrain.json", 30), "llmtrain.json is half-written or damaged")
    read = ("config.json", "generation_config.json", "llmtrain.json", "tokenizer_config.json")
    for name in (*read, "model.safetensors.index.json"):
        for content in (b"[]", b"\xff", b"{", b"7"):

            def spoil(file=folder / name, content=content) -> None:
                file.write_bytes(content)
                if file.name.endswith("index.json"):
                    stored.unlink()

            broken(spoil, name)
    broken((folder / "tokenizer.json").unlink, "has no usable tokenizer")
    broken(lambda: rewrite("config.json", num_hidden_layers=3), "9 of 29 tensors are missing, first 'model.layers.2")
    broken(lambda: rewrite("config.json", num_hidden_layers=1), "9 tensors that its config does not describe")
    broken(lambda: rewrite("config.json", intermediate_size=128), r"has shape \(.*\), but config.json asks for")
    broken(lambda: rewrite("config.json", vocab_size=128), "the model 128 rows|shape")
    broken(lambda: rewrite("config.json", model_type="bloom"), "model_type='bloom' is not supported")
    broken(lambda: rewrite("llmtrain.json", tokenizer_hash="f" * 64), r"hash \w{12}.*\(hash ffffffffffff\)")


def test_pickles_are_not_read(tmp_path):
    save(tmp_path / "model")
    (tmp_path / "model/model.safetensors").rename(tmp_path / "model/pytorch_model.bin")
    with pytest.raises(ModelFolderError, match="a pickle that can execute code"):
        load_model_folder(tmp_path / "model")


def test_saving_what_does_not_fit_is_refused(tmp_path):
    model = tiny()
    incomplete = {key: value for key, value in model.state_dict().items() if "norm" not in key}
    with pytest.raises(ModelFolderError, match="tensors are missing"):
        save(tmp_path / "model", model, state_dict=incomplete)
    small = tiny(vocab_size=100)
    with pytest.raises(ModelFolderError, match="the tokenizer has 262 ids and the model 100 rows"):
        save(tmp_path / "model", small)
    assert not (tmp_path / "model").exists()


def test_verify_notices_every_change(tmp_path):
    folder = tmp_path / "model"
    save(folder)
    verify(folder)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFolderError, match="hash differs"):
        verify(folder)
    save(folder)
    (folder / "generation_config.json").write_text("{}")
    with pytest.raises(ModelFolderError, match=r"generation_config.json is changed"):
        verify(folder)
    (folder / "generation_config.json").unlink()
    with pytest.raises(ModelFolderError, match=r"generation_config.json is missing"):
        verify(folder)
    (folder / "llmtrain.json").unlink()
    with pytest.raises(ModelFolderError, match="records no hashes"):
        verify(folder)


@pytest.mark.medium
def test_loading_imports_neither_peft_nor_transformers():
    code = (
        "import sys, llmtrain.checkpoint, llmtrain.adapters; "
        "assert not {'peft', 'transformers', 'lightning', 'hydra'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
