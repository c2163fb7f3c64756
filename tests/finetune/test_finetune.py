"""`llmtrain finetune` from a model folder to adapter, merged folder and scores, on toy models."""

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Inner

from llmtrain import adapters, checkpoint
from llmtrain.checkpoint import load_model_folder, read_info, save_model_folder
from llmtrain.data.records import read_examples
from llmtrain.data.tasks import Task
from llmtrain.evaluation import score_task
from llmtrain.generation import Engine
from llmtrain.launch import evaluate, finetune, task_examples
from llmtrain.launch.base_model import base_model
from llmtrain.launch.composing import compose
from llmtrain.model import ModelConfig, build_model
from llmtrain.tokenizer import Tokenizer, byte_tokenizer

# Everything here trains through Lightning, whose import takes seconds.
pytestmark = [
    pytest.mark.medium,
    # Lightning 2.6 on torch 2.13, and its advice about loaders and data modules.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:You have overridden `transfer_batch_to_device`:UserWarning"),
]

DIGITS = byte_tokenizer().encode("0123456789")


def make_base(folder: Path, tokenizer: Tokenizer | None = None, **info) -> Path:
    tokenizer = tokenizer or byte_tokenizer()
    config = ModelConfig(
        vocab_size=-(-tokenizer.vocab_size // 64) * 64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
    )
    state = build_model(config, seed=0).state_dict()
    known = {"never_seen": [*DIGITS, 250], "trained_length": 64, "config": {"data": {"kind": "files"}}}
    info = known | info
    save_model_folder(folder, config=config, state_dict=state, tokenizer=tokenizer, info=info)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "model")


def tune(base: Path, run_dir: Path, *overrides: str) -> dict:
    run_dir.mkdir(parents=True, exist_ok=True)
    toy = ["trainer.max_steps=3", "trainer.batch_examples=8", "data.train_examples=40", "data.test_examples=6"]
    toy += ["trainer.val_examples=8", "trainer.accelerator=cpu", "trainer.precision=fp32", "strategy.name=single"]
    toy = [override for override in toy if "data=jsonl" not in overrides or not override.startswith("data.train")]
    settings = compose("finetune", [f"model={base}", "optim.warmup_steps=0", *toy, *overrides]).settings
    return finetune.run(settings, run_dir)


def content(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def logits(path: str | Path) -> torch.Tensor:
    with torch.no_grad():
        return load_model_folder(path).model(torch.tensor([[3, *DIGITS, 4, 5, 250]]))


def test_lora_leaves_an_adapter_a_merged_model_and_scores(base, tmp_path, caplog):
    before = content(base)
    with caplog.at_level(logging.INFO, "llmtrain"):
        results = tune(base, tmp_path)
    assert content(base) == before  # the pretrained folder is never touched

    assert results["command"] == "finetune"
    assert {"base", "finetuned", "chance"} <= results["scores"].keys()
    assert json.loads(json.dumps(results)) == results
    assert results["steps"] == 3
    assert {*results["held_out_loss"]} == {*results["stopped"]} == {"base", "finetuned"}
    assert results["held_out_loss"]["finetuned"] < results["held_out_loss"]["base"]
    assert f"fine-tuned {results['held_out_loss']['finetuned']:.3f}" in caplog.text
    assert "answers that ended by themselves: base" in caplog.text
    assert "exact match on 6 held-out items" in caplog.text
    assert "fine-tuned model" in caplog.text
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 6

    assert (logits(results["adapter"]) - logits(results["model"])).abs().max().item() < 1e-4
    assert (logits(results["adapter"]) - logits(base)).abs().max().item() > 1e-4
    deltas = adapters.load_adapter_deltas(results["adapter"])
    assert deltas.base_folder == str(base)
    assert deltas.base_state_hash == read_info(base)["state_hash"]
    # The digits were never seen and occur; 250 was never seen and does not occur; the special tokens always.
    assert deltas.token_ids["model.embed_tokens.weight"] == sorted({*range(6), *DIGITS})
    info = read_info(Path(results["model"]))
    assert (info["trained_length"], info["base_state_hash"]) == (64, deltas.base_state_hash)
    assert {"step", "tokens", "val_loss"} <= info.keys()


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_the_folders_know_what_they_were_tuned_on(adapter, base, tmp_path):
    """Settings, data, commit; what the base was trained on stands under `base`, and what was trained now was seen."""
    tuned = ["data=date_iso", "data.seed=7", f"adapter={adapter}"]
    results = tune(base, tmp_path / "run", *tuned)
    shutil.copytree(results["model"], tmp_path / "elsewhere/model")
    infos = [load_model_folder(results["model"]).info, load_model_folder(tmp_path / "elsewhere/model").info]
    if adapter == "lora":
        infos += [load_model_folder(results["adapter"]).info, read_info(Path(results["adapter"]))]
    for info in infos:
        assert (info["config"]["data"]["kind"], info["config"]["data"]["seed"]) == ("date_iso", 7)
        assert info["config"]["adapter"]["kind"] == adapter
        assert {"git_commit", "wandb_run_id", "data_fingerprint", "base_state_hash"} <= info.keys()
        assert (info["base_folder"], info["base"]["config"]) == (str(base), {"data": {"kind": "files"}})
        assert info["never_seen"] == [250]  # the digits occur in every date

    (tmp_path / "elsewhere/config.yaml").write_text("data: corpus.txt")
    overrides = [f"model={tmp_path / 'elsewhere'}", "shards_dir=null", "device=cpu", "tasks.examples=3"]
    evaluated = evaluate.run(compose("evaluate", overrides).settings, tmp_path / "no run folder")
    assert list(evaluated["tasks"]) == ["date_iso"]


def test_old_llama_folders_can_be_tuned(tmp_path):
    """Their weights hold a table that is no parameter; the merge comes after the training, and knows the base again."""
    base = make_base(tmp_path / "base")
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.arange(4.0)}
    save_file({**load_file(base / "model.safetensors"), **table}, base / "model.safetensors")
    results = tune(base, tmp_path / "run", "trainer.max_steps=1")
    assert (logits(results["adapter"]) - logits(results["model"])).abs().max().item() < 1e-4


def test_a_base_that_is_exchanged_before_its_hash_is_taken_is_read_again(tmp_path, monkeypatch):
    """Or the adapter would name weights that it was not trained on, and be merged into those."""
    base = make_base(tmp_path / "base")
    other = {key: value + 1 for key, value in load_model_folder(base).model.state_dict().items()}
    take, left = checkpoint.folder_state_hash, [other]

    def exchange_first(folder):
        if left:
            config = load_model_folder(base).config
            save_model_folder(base, config=config, state_dict=left.pop(), tokenizer=byte_tokenizer(), info={})
        return take(folder)

    monkeypatch.setattr(checkpoint, "folder_state_hash", exchange_first)
    settings = compose("finetune", [f"model={base}"]).settings
    loaded, state_hash = base_model(settings, base, tmp_path)
    assert state_hash == take(base)
    assert torch.equal(loaded.model.model.norm.weight, other["model.norm.weight"])


def test_a_family_with_a_begin_of_text_is_tuned_with_it(tmp_path, llama_tok):
    base = make_base(tmp_path / "base", llama_tok, never_seen=[])
    settings = compose("finetune", [f"model={base}", "data.train_examples=5", "data.test_examples=2"]).settings
    task = task_examples.task_from(settings)
    train, _ = task_examples.examples_from(settings, load_model_folder(base), task)
    assert {(example.input_ids[0], example.labels[0], example.prompt_ids[0]) for example in train} == {(0, -100, 0)}
    results = tune(base, tmp_path / "run", "trainer.max_steps=1")
    assert load_model_folder(results["model"]).tokenizer.begin([]) == [0]


def test_without_token_rows_it_says_how_many_targets_stay_untrained(base, tmp_path, caplog):
    results = tune(base, tmp_path, "adapter.train_tokens=none")
    assert adapters.load_adapter_deltas(results["adapter"]).token_rows == {}
    assert results["trained_token_rows"] == 0
    assert results["untrained_target_tokens"] > 100
    assert f"{results['untrained_target_tokens']} of" in caplog.text
    assert "(10 different ones) were never seen in pretraining" in caplog.text


def test_full_fine_tuning_changes_every_matrix_of_a_copy(base, tmp_path):
    before = content(base)
    results = tune(base, tmp_path, "adapter=none")
    assert results["adapter"] is None
    assert not (tmp_path / "adapter").exists()
    assert content(base) == before
    old, new = (load_file(Path(folder) / "model.safetensors") for folder in (base, results["model"]))
    assert old.keys() == new.keys()
    assert not any(torch.equal(old[key], new[key]) for key in old)


def test_open_answers_are_shown_as_they_are(base, tmp_path, caplog, monkeypatch):
    """Twenty of them, unmarked; those that did not end by themselves say so."""
    items = [{"prompt": f"{number}", "completion": "c" * 9} for number in range(40)]
    task = Task("talk", items[:15], items[15:], "exact_match", open_ended=True)
    monkeypatch.setattr(finetune, "task_from", lambda settings: task)
    with caplog.at_level(logging.INFO, "llmtrain"):
        tune(base, tmp_path, "trainer.val_examples=0")
    shown = caplog.text.partition("prompt → fine-tuned answer\n")[2].splitlines()
    assert [line.split(" → ")[0].strip() for line in shown[:20]] == [str(number) for number in range(15, 35)]
    assert all(line.endswith("   (length)") for line in shown[:20])
    assert "✗" not in caplog.text


def test_a_second_run_into_the_same_folder_is_refused(base, tmp_path):
    """Old merged weights never pass for new ones."""
    tune(base, tmp_path)
    merged = content(tmp_path / "model")
    (tmp_path / "results.json").write_text("{}")  # as the command leaves it at its end
    for override in ("seed=1", "resume=auto"):  # by default it saves no checkpoint
        with pytest.raises(
            ValueError, match=r"holds another run \(model and adapter and results.json and .*no checkpoint"
        ):
            tune(base, tmp_path, override)
    assert content(tmp_path / "model") == merged
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) > 1


def test_a_resumed_run_gives_the_same_adapter_bit_for_bit(base, tmp_path):
    """With dropout; the resume files hold adapter tensors only."""
    overrides = ["trainer.max_steps=8", "trainer.checkpoint_every=4", "trainer.keep_last=null"]
    overrides += ["trainer.val_examples=0", "adapter.lora_dropout=0.1"]
    tune(base, tmp_path / "straight", *overrides)
    checkpoint = tmp_path / "straight/checkpoints/step-000004"
    saved = json.loads((checkpoint / "resume/state.json").read_text())["parameters"]
    assert all(".lora_" in name or ".trainable_tokens_delta." in name for name in saved)
    assert all("exp_avg" in parameter["tensors"] for parameter in saved.values())

    shutil.copytree(checkpoint, tmp_path / "resumed/checkpoints/step-000004")
    tune(base, tmp_path / "resumed", *overrides, "resume=auto")
    one, other = adapter_of(tmp_path / "straight"), adapter_of(tmp_path / "resumed")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)

    other_base = make_base(tmp_path / "other", never_seen=[])
    state = load_model_folder(other_base).model.state_dict()
    state["model.norm.weight"] += 1
    config = load_model_folder(other_base).config
    save_model_folder(other_base, config=config, state_dict=state, tokenizer=byte_tokenizer(), info={})
    shutil.copytree(checkpoint, tmp_path / "wrong/checkpoints/step-000004")
    with pytest.raises(ValueError, match=r"the base model's weights was .* and is"):
        tune(other_base, tmp_path / "wrong", *overrides, "resume=auto")


def adapter_of(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "adapter/adapter_model.safetensors")


def test_the_seed_decides_the_whole_run(base, tmp_path):
    """The first weights of the adapter, the order of the examples and dropout."""
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        torch.manual_seed(hash(name) % 1000)
        tune(base, tmp_path / name, f"seed={seed}", "adapter.lora_dropout=0.1")
    one, two, other = (adapter_of(tmp_path / name) for name in ("one", "two", "other"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_train_the_same_adapter_as_one(base, tmp_path):
    """Through the real command, with DeepSpeed; the token rows are shared by embedding and tied head."""
    common = [f"model={base}", "trainer.max_steps=4", "optim.warmup_steps=0", "trainer.batch_examples=8"]
    common += ["data.train_examples=40", "data.test_examples=4", "trainer.val_examples=8", "trainer.accelerator=cpu"]
    common += ["trainer.precision=fp32"]
    for devices in (1, 2):
        command = [sys.executable, "-m", "llmtrain", "finetune", *common, f"trainer.devices={devices}"]
        command.append(f"paths.run_dir={tmp_path / str(devices)}")
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        assert "rank 1" not in done.stderr
        results = json.loads(done.stdout)  # the one line, from the one rank that reports
        assert results["steps"] == 4
    one, two = adapter_of(tmp_path / "1"), adapter_of(tmp_path / "2")
    assert one.keys() == two.keys()
    # Sums over two ranks round differently, and Adam's first steps divide by gradients as small as the rounding.
    worst = max((one[key] - two[key]).norm().item() / one[key].norm().item() for key in one)
    assert worst < 1e-3


def test_it_learns(base, tmp_path):
    """Eight examples by heart, digits that pretraining never saw among them; the base knows none of them."""
    file = tmp_path / "mine.jsonl"
    pairs = zip("abcdefgh", "31415926", strict=True)
    file.write_text("\n".join(json.dumps({"prompt": name, "completion": digit * 2}) for name, digit in pairs))
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "z", "completion": "0"}))
    overrides = ["data=jsonl", f"data.paths=[{file}]", f"data.test_paths=[{other}]", "data.test_examples=null"]
    overrides += ["trainer.val_examples=0", "trainer.max_steps=120", "trainer.max_epochs=null", "optim.lr=0.02"]
    results = tune(base, tmp_path / "run", *overrides)
    trained = read_examples(file)[0]
    scores = []
    for folder in (base, results["model"]):
        loaded = load_model_folder(folder)
        scores.append(score_task(Engine(loaded.model, loaded.tokenizer, max_rows=8), trained)["score"])
    assert scores == [0.0, 1.0]


def tokenizer_without_roles() -> Tokenizer:
    """Bytes and an end of text, as a published base model has them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Inner(models.BPE(vocab={character: number for number, character in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(inner.to_str())


def test_a_base_without_role_markers_gets_them_in_a_copy(tmp_path):
    tokenizer = tokenizer_without_roles()
    assert tokenizer.end_id is None
    base = make_base(tmp_path / "foreign", tokenizer)
    before = content(base)
    results = tune(base, tmp_path / "run")
    assert content(base) == before
    extended = load_model_folder(tmp_path / "run/base")
    assert extended.tokenizer.special_ids.keys() >= {"<|user|>", "<|assistant|>", "<|end|>"}
    assert adapters.load_adapter_deltas(results["adapter"]).base_folder == str(tmp_path / "run/base")
    kept = load_model_folder(base).model.model.embed_tokens.weight[: tokenizer.vocab_size]
    assert torch.equal(extended.model.model.embed_tokens.weight[: tokenizer.vocab_size], kept)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=/nowhere"], "model=/nowhere does not exist"),
        (["trainer.val_examples=40"], "trainer.val_examples=40 must lie between 0 and 39: of the 40 usable"),
        (["trainer.micro_batch_size=3"], "trainer.micro_batch_size=3 does not divide the 8 rows"),
        (["adapter.train_tokens=some"], "adapter.train_tokens=some must be auto or none"),
        (["adapter.r=0"], "adapter.r=0 must be a whole number of at least 1"),
        (["data.max_length=3"], "data.max_length=3 must be at least 4"),
        (["trainer.max_epochs=null", "trainer.max_steps=null"], "nothing says when to stop"),
    ],
)
def test_wrong_settings_are_refused_before_any_work(base, overrides, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tune(base, tmp_path, *overrides)
    assert not list(tmp_path.iterdir())


def test_an_adapter_is_no_base(base, tmp_path):
    results = tune(base, tmp_path / "first")
    with pytest.raises(ValueError, match="give its merged model folder"):
        tune(Path(results["adapter"]), tmp_path / "second")
    tune(Path(results["run_dir"]), tmp_path / "third")  # the run means its merged model


def test_a_refused_base_model_does_not_replace_the_copy_of_the_runs_own(tmp_path):
    """Of a base whose tokenizer lacks the role markers the run keeps a copy with them, which its adapter needs."""
    one = make_base(tmp_path / "one", tokenizer_without_roles(), never_seen=[])
    other = make_base(tmp_path / "other", tokenizer_without_roles(), never_seen=[])
    state = load_file(other / "model.safetensors")
    state["model.norm.weight"] += 1
    config, tokenizer = load_model_folder(one).config, load_model_folder(one).tokenizer
    save_model_folder(other, config=config, state_dict=state, tokenizer=tokenizer, info={})
    overrides = ["trainer.max_steps=2", "trainer.checkpoint_every=2", "optim.warmup_steps=0"]
    tune(one, tmp_path / "run", *overrides)
    before = content(tmp_path / "run" / "base")
    with pytest.raises(ValueError, match=r"the base model's weights was .* and is"):
        tune(other, tmp_path / "run", *overrides, "resume=auto")
    assert content(tmp_path / "run" / "base") == before
