"""The model folder in transformers and back: equal logits, ids and greedy tokens."""

import json

import pytest
import torch
import transformers

from llmtrain.checkpoint import ModelFolderError, load_model_folder, save_model_folder
from llmtrain.generation import Engine, SamplingParams
from llmtrain.model import ModelConfig, build_model
from llmtrain.tokenizer import byte_tokenizer

pytestmark = pytest.mark.medium

TINY = {
    "vocab_size": 320,  # the byte tokenizer's 262 ids, padded to a multiple of 64
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Ten times the usual spread: with 0.02 all logits are near zero and any two models look alike.
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPES = {
    "llama": {},
    "llama-untied": {"tie_word_embeddings": False, "head_dim": 32},
    "qwen2": {"attention_bias": True, "rope_theta": 1e6},
    "qwen3": {"qk_norm": True, "head_dim": 32, "rms_norm_eps": 1e-6},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama3": {"rope_scaling": LLAMA3},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
}
TEXTS = ["", "话说天下大势，分久必合。", "naïve 你好 🌍  x\n\tend", "\x00\u200d é e\u0301"]


def random_config(**changes) -> ModelConfig:
    return ModelConfig(**(TINY | changes))


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """Move every parameter away from its initial 0 or 1, biases and norms included, so that none can be ignored."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def ids(batch: int = 2, time: int = 100) -> torch.Tensor:
    return torch.randint(0, 262, (batch, time), generator=torch.Generator().manual_seed(2))


def saved(config: ModelConfig, folder):
    model = randomised(build_model(config, seed=0)).eval()
    save_model_folder(folder, config=config, state_dict=model.state_dict(), tokenizer=byte_tokenizer(), info={})
    return model


@pytest.mark.parametrize("shape", SHAPES)
def test_our_folder_gives_the_same_logits(shape, tmp_path):
    model = saved(random_config(**SHAPES[shape]), tmp_path / "model")
    twin = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert twin.dtype == torch.float32
    assert type(twin).__name__ == json.loads((tmp_path / "model/config.json").read_text())["architectures"][0]
    with torch.no_grad():
        difference = (twin(ids()).logits - model(ids())).abs().max().item()
    assert difference < 1e-4


@pytest.mark.parametrize("shape", ["llama", "qwen2", "qwen3"])
def test_our_folder_gives_the_same_50_greedy_tokens(shape, tmp_path):
    config = random_config(**SHAPES[shape])
    model, tokenizer = saved(config, tmp_path / "model"), byte_tokenizer()
    twin = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    prompt = tokenizer.encode("话说")
    greedy = SamplingParams(temperature=0.0, max_new_tokens=50, ignore_eos=True)
    ours = Engine(model, tokenizer).generate([prompt], greedy)[0]
    theirs = twin.generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=50,
        min_new_tokens=50,
        eos_token_id=None,
        suppress_tokens=list(range(tokenizer.vocab_size, config.vocab_size)),  # as our engine does: padding has no text
    )
    assert list(ours.token_ids) == theirs[0, len(prompt) :].tolist()


def test_our_tokenizer_in_transformers(tmp_path):
    saved(random_config(), tmp_path / "model")
    tokenizer = byte_tokenizer()
    twin = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    for text in TEXTS:
        assert twin.encode(text) == tokenizer.encode(text)
        assert twin.decode(tokenizer.encode(text)) == text
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "model")
    assert generation.eos_token_id == [tokenizer.eos_id, tokenizer.end_id]
    assert generation.pad_token_id == tokenizer.pad_id


FOREIGN = {
    "llama": (transformers.LlamaConfig, {}),
    "llama-tied-scaled": (transformers.LlamaConfig, {"tie_word_embeddings": True, "rope_scaling": LLAMA3}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None, "head_dim": 32}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
}


def foreign_model(family: str, **changes) -> transformers.PreTrainedModel:
    config_class, settings = FOREIGN[family]
    torch.manual_seed(0)
    return randomised(transformers.AutoModelForCausalLM.from_config(config_class(**(TINY | settings | changes)))).eval()


@pytest.mark.parametrize("shard_size", ["5GB", "100KB"])
@pytest.mark.parametrize("family", FOREIGN)
def test_transformers_folder_here(family, shard_size, tmp_path):
    twin = foreign_model(family)
    twin.save_pretrained(tmp_path, max_shard_size=shard_size)
    byte_tokenizer().save(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").is_file() == (shard_size == "100KB")

    loaded = load_model_folder(tmp_path)
    with torch.no_grad():
        difference = (twin(ids()).logits - loaded.model(ids())).abs().max().item()
    assert difference < 1e-4
    assert loaded.info == {}

    # And out again: what we write of it is read by transformers as the same model.
    save_model_folder(
        tmp_path / "again",
        config=loaded.config,
        state_dict=loaded.model.state_dict(),
        tokenizer=loaded.tokenizer,
        info={},
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert (twin(ids()).logits - again(ids()).logits).abs().max().item() < 1e-4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.MistralConfig(**TINY, sliding_window=64), "sliding_window=64"),
        (transformers.MistralConfig(**TINY), "sliding_window=4096"),
        (transformers.Qwen2Config(**TINY, use_sliding_window=True), "use_sliding_window=true"),
        (transformers.LlamaConfig(**TINY, attention_bias=True), "attention_bias=true"),
        (transformers.LlamaConfig(**(TINY | {"hidden_act": "gelu"})), "hidden_act='gelu'"),
        (transformers.GPTNeoXConfig(**{k: v for k, v in TINY.items() if "key" not in k}), "model_type='gpt_neox'"),
    ],
)
def test_unsupported_folders_are_refused(config, message, tmp_path):
    config.save_pretrained(tmp_path)
    byte_tokenizer().save(tmp_path)
    with pytest.raises(ModelFolderError, match=message):
        load_model_folder(tmp_path)
