"""Adapters: seeded, frozen base, exact merge, and refusal of a wrong base. What peft itself says is in tests/parity."""

import json
import subprocess
import sys

import pytest
import torch

from llmtrain import adapters
from llmtrain.checkpoint import (
    ModelFolderError,
    folder_state_hash,
    load_model_folder,
    save_adapter_folder,
    save_model_folder,
)
from llmtrain.model import ModelConfig, build_model, loss_sum
from llmtrain.tokenizer import byte_tokenizer

# The first `attach` of a process imports peft, which takes seconds.
pytestmark = pytest.mark.medium

TOKENS = [0, 3, 4, 5, 200]


def tiny(seed: int = 0, **changes):
    shape = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    return build_model(ModelConfig(**(shape | changes)), seed=seed).eval()


def train(model, steps: int = 5) -> list[float]:
    """A few steps of plain AdamW over whatever is trainable; returns the losses."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.02)
    ids = torch.tensor([[3, 40, 41, 4, 200, 42, 5]])
    losses = []
    for _ in range(steps):
        total, count = loss_sum(model, ids[:, :-1], ids[:, 1:])
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total / count).item())
    return losses


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[3, 40, 41, 4, 200, 42, 5]]))


def lora_a(model) -> list[torch.Tensor]:
    return [parameter.detach().clone() for name, parameter in model.named_parameters() if ".lora_A." in name]


def merged_state_dict(adapted) -> dict[str, torch.Tensor]:
    """The plain model's tensors with the attached adapter merged in."""
    tied = adapted.get_base_model().config.tie_word_embeddings
    base, tensors = adapters.split_state_dict(adapted.state_dict(), tied=tied)
    return adapters.merge_state_dict(base, adapters.deltas_from(tensors, adapters.adapter_config(adapted)))


def test_the_same_seed_gives_the_same_adapter_and_losses():
    """Whatever the global random state was."""
    runs = []
    for disturbance, seed in [(1, 7), (2, 7), (3, 8)]:
        torch.manual_seed(disturbance)
        model = tiny()
        before = torch.get_rng_state()
        adapters.attach(model, r=4, seed=seed, train_tokens=TOKENS)
        assert torch.equal(torch.get_rng_state(), before)
        runs.append((lora_a(model), train(model)))
    assert all(map(torch.equal, runs[0][0], runs[1][0]))
    assert runs[0][1] == runs[1][1]
    assert not any(map(torch.equal, runs[0][0], runs[2][0]))
    assert runs[0][1] != runs[2][1]


@pytest.mark.parametrize("tied", [True, False])
def test_only_the_adapter_is_trained(tied):
    model = tiny(tie_word_embeddings=tied)
    expected = logits(model)
    base = {key: value.clone() for key, value in model.state_dict().items() if not (tied and key == "lm_head.weight")}
    adapted = adapters.attach(model, r=4, lora_alpha=32.0, train_tokens=TOKENS)
    assert (logits(model) - expected).abs().max().item() < 1e-5  # a fresh adapter is the identity
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all(".lora_" in name or ".trainable_tokens_delta." in name for name in names)
    assert len(names) == 2 * 7 * 2 + (1 if tied else 2)

    losses = train(model, steps=20)
    assert losses[-1] < losses[0] / 4
    after, tensors = adapters.split_state_dict(adapted.state_dict(), tied=tied)
    assert after.keys() == base.keys()
    assert all(torch.equal(after[key], base[key]) for key in base)

    merged = merged_state_dict(adapted)
    table, old = merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"]
    changed = (table != old).any(dim=1).nonzero().flatten().tolist()
    assert changed == TOKENS  # their rows and no other; with a tied head they score too
    rows = tensors["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"]
    assert torch.equal(table[TOKENS], rows)


def test_a_tied_head_scores_with_the_trained_rows():
    model = tiny()
    adapters.attach(model, r=4, train_tokens=[200])
    before = logits(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.mul_(2)
    changed = (logits(model) - before)[0, :4].abs().amax(dim=0)  # positions before the token itself is read
    assert changed.nonzero().flatten().tolist() == [200]


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
def test_merged_and_adapted_models_agree(settings):
    """Random non-zero B, r 4, alpha 8, fp32."""
    model = tiny()
    adapted = adapters.attach(model, r=4, lora_alpha=8.0, train_tokens=TOKENS, **settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name or "magnitude" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    merged = tiny(seed=1)
    merged.load_state_dict(merged_state_dict(adapted), strict=False)
    assert (logits(merged) - logits(tiny())).abs().max().item() > 0.1
    assert (logits(merged) - logits(model)).abs().max().item() < 1e-4


def folders(tmp_path, stored="float32", **attach):
    """A base folder and a trained adapter's folder beside it."""
    model = tiny()
    model.to(getattr(torch, stored)).float()
    save_model_folder(
        tmp_path / "base",
        config=model.config,
        state_dict=model.state_dict(),
        tokenizer=byte_tokenizer(),
        info={"never_seen": [200]},
        dtype=stored,
    )
    adapted = adapters.attach(model, r=4, train_tokens=TOKENS, base_folder=tmp_path / "base", **attach)
    train(model)
    info = {"base_state_hash": folder_state_hash(tmp_path / "base"), "step": 5}
    save_adapter_folder(tmp_path / "adapter", adapted, info=info)
    return model


def test_an_adapter_folder_is_a_model(tmp_path):
    model = folders(tmp_path)
    loaded = load_model_folder(tmp_path / "adapter")
    assert (logits(loaded.model) - logits(model)).abs().max().item() < 1e-4
    assert (loaded.folder, loaded.adapter_folder) == (tmp_path / "base", tmp_path / "adapter")
    assert loaded.info["step"] == 5
    assert loaded.info["base"]["never_seen"] == [200]
    deltas = adapters.load_adapter_deltas(tmp_path / "adapter")
    assert deltas.token_ids == {"model.embed_tokens.weight": TOKENS}
    assert deltas.low_rank["model.layers.1.mlp.up_proj"].b.shape == (64, 4)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16, None])
def test_an_adapter_is_rounded_as_often_as_its_merged_folder(stored, asked, tmp_path):
    """Once: the base is merged into as it is stored, and converted after."""
    folders(tmp_path, stored=stored)
    wide = load_model_folder(tmp_path / "adapter", dtype=torch.float32).model
    model = load_model_folder(tmp_path / "adapter", dtype=asked).model
    dtype = asked or getattr(torch, stored)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    for (name, one), other in zip(wide.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(one.to(dtype), other), name
    assert not all(torch.equal(one, one.bfloat16().float()) for one in wide.state_dict().values())


def test_a_wrong_base_and_a_second_merge_are_refused(tmp_path):
    """By the hash of the weights, whatever the folders are called."""
    folders(tmp_path)
    merged = load_model_folder(tmp_path / "adapter")
    other = tiny(seed=9)
    for model in (merged.model, other):
        save_model_folder(
            tmp_path / "base",
            config=model.config,
            state_dict=model.state_dict(),
            tokenizer=byte_tokenizer(),
            info={},
        )
        with pytest.raises(ModelFolderError, match=r"trained on other weights .* or the adapter is merged"):
            load_model_folder(tmp_path / "adapter")
    adapted = adapters.attach(other, r=4)
    assert adapted is not None
    with pytest.raises(ValueError, match="already has an adapter"):
        adapters.attach(other, r=4)


def test_a_run_folder_can_be_moved_with_its_base(tmp_path):
    (tmp_path / "here").mkdir()
    model = folders(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    loaded = load_model_folder(tmp_path / "there/adapter")
    assert (logits(loaded.model) - logits(model)).abs().max().item() < 1e-4
    (tmp_path / "there/base").rename(tmp_path / "there/gone")
    with pytest.raises(ModelFolderError, match=r"needs its base model .*here/base, which is not there"):
        load_model_folder(tmp_path / "there/adapter")


def test_foreign_and_broken_adapters_are_refused(tmp_path):
    folders(tmp_path)
    folder = tmp_path / "adapter"
    config = json.loads((folder / "adapter_config.json").read_text())

    def refused(message: str, **changes) -> None:
        (folder / "adapter_config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ModelFolderError, match=message):
            load_model_folder(folder)

    refused("peft_type='IA3' is not supported", peft_type="IA3")
    refused("holds 5 rows of model.embed_tokens.weight and lists 1", trainable_token_indices=[3])
    refused("rows of model.embed_tokens.weight that are not there", trainable_token_indices=[0, 1, 2, 3, 999])
    (folder / "adapter_config.json").write_text(json.dumps(config)[:40])
    with pytest.raises(ModelFolderError, match="half-written or damaged"):
        load_model_folder(folder)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"adapter_model.safetensors is missing"):
        load_model_folder(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": 0}, "adapter.r=0 must be at least 1"),
        ({"lora_alpha": 0}, "adapter.lora_alpha=0 must be above 0"),
        ({"lora_dropout": 1.0}, r"adapter.lora_dropout=1.0 must lie in \[0, 1\)"),
        ({"target_modules": ["q_proj", "lm_head"]}, "'lm_head' is none of them"),
        ({"target_modules": []}, "must name one or more of q_proj"),
        ({"train_tokens": [0, 320]}, "the model has the rows 0 to 319"),
        ({"train_tokens": [-1]}, "ids from -1 to -1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        adapters.attach(tiny(), **settings)


def test_attaching_says_nothing_on_the_terminal():
    code = (
        "from llmtrain import adapters; from llmtrain.model import ModelConfig, build_model\n"
        "config = ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, "
        "num_attention_heads=2, num_key_value_heads=2)\n"
        "adapters.attach(build_model(config, seed=0), r=2, train_tokens=[1], use_rslora=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")
