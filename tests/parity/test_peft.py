"""Adapters against peft itself: the same merged weights, and a folder that peft loads on the transformers twin."""

import json
import warnings

import pytest
import torch

from llmtrain import adapters
from llmtrain.checkpoint import folder_state_hash, load_model_folder, save_adapter_folder, save_model_folder
from llmtrain.model import ModelConfig, build_model
from llmtrain.tokenizer import byte_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # peft's and transformers' import-time notices
    import peft
    from peft.utils import get_peft_model_state_dict

pytestmark = [
    pytest.mark.medium,
    # peft 0.21 asks transformers 5 for a property that 6 will drop.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

TOKENS = [0, 1, 2, 3, 4, 5, 200, 261]
VARIANTS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "attention-only": {"target_modules": ["q_proj", "v_proj"]},
    "no-tokens": {"train_tokens": None},
}


def base_model(tied: bool, bias: bool = False):
    config = ModelConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        attention_bias=bias,
    )
    return build_model(config, seed=0).eval()


def trained(model, **settings):
    """An attached adapter whose tensors, B included, are random: as if it had been trained."""
    settings = {"r": 4, "lora_alpha": 8.0, "train_tokens": TOKENS} | settings
    adapted = adapters.attach(model, **settings)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapted


def ids() -> torch.Tensor:
    return torch.randint(0, 262, (2, 60), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_our_tensors_and_our_merge_are_pefts(variant, tied):
    model = base_model(tied)
    adapted = trained(model, **VARIANTS[variant])
    base, ours = adapters.split_state_dict(model.state_dict(), tied=tied)
    theirs = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)

    with torch.no_grad():
        before = model(ids())
        merged = adapters.merge_state_dict(base, adapters.deltas_from(ours, adapters.adapter_config(adapted)))
        assert torch.equal(model(ids()), before)  # merging into a copy changed nothing
        plain = base_model(tied)
        plain.load_state_dict(merged, strict=False)
        assert (plain(ids()) - before).abs().max().item() < 1e-4
        unloaded = adapted.merge_and_unload()
        assert (plain(ids()) - unloaded(ids())).abs().max().item() < 1e-5
    assert merged.keys() == {key for key in plain.state_dict() if not (tied and key == "lm_head.weight")}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_adapter_folder_loads_with_peft_and_without(variant, tied, tmp_path):
    model = base_model(tied, bias=variant == "lora")
    base, folder = tmp_path / "base", tmp_path / "adapter"
    save_model_folder(
        base, config=model.config, state_dict=model.state_dict(), tokenizer=byte_tokenizer(), info={"never_seen": [200]}
    )
    adapted = trained(model, base_folder=base, **VARIANTS[variant])
    save_adapter_folder(folder, adapted, info={"base_state_hash": folder_state_hash(base)})

    written = json.loads((folder / "adapter_config.json").read_text())
    assert (written["task_type"], written["base_model_name_or_path"]) == ("CAUSAL_LM", str(base))
    assert written.get("auto_mapping") is None
    assert "llmtrain" not in json.dumps({k: v for k, v in written.items() if k != "base_model_name_or_path"})
    assert sum(file.stat().st_size for file in folder.iterdir()) < 400_000

    with torch.no_grad():
        expected = model(ids())
        here = load_model_folder(folder)
        assert (here.model(ids()) - expected).abs().max().item() < 1e-4
        assert (here.folder, here.adapter_folder) == (base, folder)
        there = peft.AutoPeftModelForCausalLM.from_pretrained(folder)
        assert (there(input_ids=ids()).logits - expected).abs().max().item() < 1e-4


def test_a_peft_adapter_made_elsewhere_is_read(tmp_path):
    """With peft's own `save_pretrained`, `alpha_pattern` and `rank_pattern` on the transformers twin."""
    import transformers

    model = base_model(True)
    base = tmp_path / "base"
    save_model_folder(base, config=model.config, state_dict=model.state_dict(), tokenizer=byte_tokenizer(), info={})
    twin = transformers.AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "down_proj"],
        rank_pattern={"down_proj": 2},
        alpha_pattern={"layers.1.self_attn.q_proj": 16},
        init_lora_weights=False,
    )
    foreign = peft.get_peft_model(twin, config).eval()
    foreign.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        loaded = load_model_folder(tmp_path / "adapter")
        assert (loaded.model(ids()) - foreign(input_ids=ids()).logits).abs().max().item() < 1e-4
