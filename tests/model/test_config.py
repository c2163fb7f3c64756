"""ModelConfig: limits, families, and the way to config.json and back."""

import pytest

from llmtrain.model import ModelConfig, padded_vocab_size

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"attention_bias": True},
        {"qk_norm": True, "head_dim": 32},
        {"position": "sinusoidal"},
        {"tie_word_embeddings": False, "dropout": 0.1},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
    ],
)
def test_config_survives_the_way_to_hugging_face_and_back(extra):
    config = ModelConfig(**SHAPE, **extra)
    assert ModelConfig.from_hf(config.to_hf()) == config
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_config_json_carries_the_keys_that_transformers_4_reads():
    written = ModelConfig(**SHAPE).to_hf(dtype="bfloat16", eos_token_id=[0, 5])
    assert written["rope_theta"] == 10_000.0
    assert written["rope_scaling"] is None
    assert written["torch_dtype"] == "bfloat16"
    assert written["eos_token_id"] == [0, 5]


def test_rope_parameters_of_transformers_5_are_read():
    hf = ModelConfig(**SHAPE).to_hf()
    del hf["rope_theta"], hf["rope_scaling"]
    hf["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500_000.0}
    config = ModelConfig.from_hf(hf)
    assert config.rope_theta == 500_000.0
    assert config.rope_scaling == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 66}, "hidden_size=66 is not divisible"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be at least 1"),
        ({"head_dim": 15}, "head_dim=15 must be even"),
        ({"dropout": 1.0}, r"dropout=1\.0 must lie in \[0, 1\)"),
        ({"position": "alibi"}, 'position="alibi" must be'),
        ({"attention_bias": True, "qk_norm": True}, "exclude each other"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2}}, 'rope_type="ntk" must be one of'),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "needs the field 'low_freq_factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, r"factor=0\.5 must be at least 1"),
    ],
)
def test_impossible_shapes_are_refused_with_the_field_and_the_limit(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**SHAPE, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' is not supported"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window=4096 is not supported"),
        ({"use_sliding_window": True, "model_type": "qwen2"}, "use_sliding_window=true"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "bias on o_proj"),
        ({"mlp_bias": True}, "mlp_bias=true"),
    ],
)
def test_foreign_arithmetic_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**ModelConfig(**SHAPE).to_hf(), **change})


def test_unknown_and_missing_fields_are_named():
    with pytest.raises(ValueError, match=r"model\.hiden_size is not a field"):
        ModelConfig.from_dict({**SHAPE, "hiden_size": 1})
    with pytest.raises(ValueError, match=r"incomplete: .*vocab_size"):
        ModelConfig.from_dict({k: v for k, v in SHAPE.items() if k != "vocab_size"})


def test_vocabulary_is_padded_up():
    assert [padded_vocab_size(n) for n in (1, 64, 65, 4096)] == [64, 64, 128, 4096]


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("hidden_size", None, r"model\.hidden_size=null must be at least 1, a whole number below 2\^53\."),
        ("num_hidden_layers", "4", r'model\.num_hidden_layers="4" must be at least 1'),
        ("head_dim", 8.0, r"model\.head_dim=8\.0 must be at least 1, a whole number"),
        ("max_position_embeddings", True, r"model\.max_position_embeddings=true must be at least 1"),
        ("rope_theta", 0, r"model\.rope_theta=0\.0 must be a number from 1 to 1e\+12"),
        ("rope_theta", None, r"model\.rope_theta=null must be a number"),
        ("rms_norm_eps", -1, r"model\.rms_norm_eps=-1 must be a number from 0 to 1"),
        ("rms_norm_eps", 10**400, r"model\.rms_norm_eps=1000.* must be a number from 0 to 1"),
        ("initializer_range", [], r"model\.initializer_range=\[\] must be a number"),
        ("tie_word_embeddings", None, r"model\.tie_word_embeddings=null must be true or false"),
        ("dropout", "x", r'model\.dropout="x" must lie in \[0, 1\)'),
        ("rope_scaling", 3, r"model\.rope_scaling=3 must be null or a mapping"),
        (
            "rope_scaling",
            {"rope_type": "linear", "factor": "4"},
            r'model\.rope_scaling: factor="4" must be a number above 0',
        ),
        ("rope_scaling", {"rope_type": ["x"], "factor": 4}, r"rope_type=\[\"x\"\] must be one of"),
    ],
)
def test_a_config_json_with_a_value_of_another_kind_is_refused_by_field(field, value, sentence):
    config = ModelConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    ).to_hf()  # fmt: skip
    with pytest.raises(ValueError, match=sentence):
        ModelConfig.from_hf({**config, field: value})
