"""The shape of a model: `ModelConfig`, and its two-way translation to a Hugging Face `config.json`.

Knows field names and their limits. Knows nothing about files, tokenizers or training.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

ROPE_SCALING_TYPES = ("linear", "llama3", "yarn")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "llmtrain")
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llmtrain": "LlmtrainForCausalLM",
}
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_NUMBERS = (("rms_norm_eps", 0, 1), ("rope_theta", 1, 1e12), ("initializer_range", 0, 100))  # with their limits
_SCALING_NUMBERS = frozenset(
    {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    | {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
)
_SWITCHES = ("attention_bias", "qk_norm", "tie_word_embeddings")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that decides the shape and the arithmetic of a `Transformer`.

    Field names are those of Hugging Face's `LlamaConfig`. The flags `attention_bias` (Qwen2) and `qk_norm` (Qwen3)
    choose the family; without them the model is a Llama (a Mistral without sliding window is the same model).

    Attributes:
        vocab_size: Rows of the embedding table. May exceed the tokenizer's vocabulary (padding to a multiple of 64).
        hidden_size: C, the width of the residual stream.
        intermediate_size: Width of the SwiGLU MLP.
        num_hidden_layers: Number of transformer layers.
        num_attention_heads: H, query heads.
        num_key_value_heads: K, key/value heads; H must be a multiple of it (grouped-query attention).
        head_dim: D; `None` means hidden_size / num_attention_heads.
        max_position_embeddings: The context limit in tokens.
        rms_norm_eps: Added to the mean square in RMSNorm.
        rope_theta: Base of the rotary frequencies (Su et al., 2021, arXiv:2104.09864).
        rope_scaling: `None` or a dict with `rope_type` of `linear`, `llama3` or `yarn` and its fields.
        position: `rope`, or `sinusoidal` (Vaswani et al., 2017), which has no Hugging Face twin.
        attention_bias: Bias on the q, k and v projections (not on o), as in Qwen2.
        qk_norm: RMSNorm over each head of q and k before the rotation, as in Qwen3.
        tie_word_embeddings: The output layer shares the embedding table.
        dropout: Probability on the embeddings and on each residual branch; active in training only.
        initializer_range: Standard deviation of the normal initialisation.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = None  # type: ignore[assignment]  # given or derived below, never None afterwards
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    position: Literal["rope", "sinusoidal"] = "rope"
    attention_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = True
    dropout: float = 0.0
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        self._check_kinds()
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"model.hidden_size={self.hidden_size} is not divisible by model.num_attention_heads="
                    f"{self.num_attention_heads}; change one of them or set model.head_dim."
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim={self.head_dim} must be even: the rotation acts on pairs.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"model.num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"model.num_key_value_heads={self.num_key_value_heads}; each key/value head serves whole query heads."
            )
        if self.attention_bias and self.qk_norm:
            raise ValueError("model.attention_bias and model.qk_norm exclude each other: no public family has both.")
        if self.rope_scaling is not None:
            object.__setattr__(self, "rope_scaling", _checked_rope_scaling(self.rope_scaling))

    def _check_kinds(self) -> None:
        """Each field by itself: a config.json may hold null or "4" where a number belongs."""
        for name in _COUNTS:
            value = getattr(self, name)
            if name == "head_dim" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**53:
                raise ValueError(f"model.{name}={_shown(value)} must be at least 1, a whole number below 2^53.")
        for name, least, most in _NUMBERS:
            value = getattr(self, name)
            if not _is_number(value) or not least <= value <= most:
                raise ValueError(f"model.{name}={_shown(value)} must be a number from {least:g} to {most:g}.")
        if not _is_number(self.dropout) or not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout={_shown(self.dropout)} must lie in [0, 1).")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"model.{name}={_shown(getattr(self, name))} must be true or false.")
        if self.position not in ("rope", "sinusoidal"):
            raise ValueError(f"model.position={_shown(self.position)} must be 'rope' or 'sinusoidal'.")

    @property
    def family(self) -> str:
        """The Hugging Face `model_type` that this shape is written as."""
        if self.position == "sinusoidal":
            return "llmtrain"
        if self.qk_norm:
            return "qwen3"
        return "qwen2" if self.attention_bias else "llama"

    def to_hf(
        self,
        *,
        dtype: str = "float32",
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
    ) -> dict[str, Any]:
        """The `config.json` that transformers 4 and 5 both read (the legacy rope and dtype keys; 5 converts them)."""
        written: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "torch_dtype": dtype,
            "use_cache": True,
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
        }
        same_name = (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
            "head_dim max_position_embeddings rms_norm_eps rope_theta rope_scaling "
            "tie_word_embeddings initializer_range"
        )
        written.update({name: getattr(self, name) for name in same_name.split()})
        if self.family == "llama":
            written.update(attention_bias=False, mlp_bias=False, pretraining_tp=1)
        if self.family == "qwen3":
            written.update(attention_bias=False)
        if self.family in ("qwen2", "qwen3"):
            written.update(use_sliding_window=False, sliding_window=None)
        if self.family == "llmtrain":
            written.update(attention_bias=self.attention_bias, qk_norm=self.qk_norm, position=self.position)
        written["dropout"] = self.dropout  # ours; Hugging Face keeps and ignores it
        return written

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelConfig:
        """Reads a Hugging Face `config.json` of a supported family.

        Raises:
            ValueError: for a family or a feature whose arithmetic this model does not have; the message names it.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ValueError(f"model_type={family!r} is not supported; supported are {', '.join(FAMILIES)}.")
        _refuse_unsupported(family, config)
        theta, scaling = _rope_from_hf(config)
        heads = config["num_attention_heads"]
        dropout = config.get("dropout", 0.0)
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim"),  # type: ignore[arg-type]
            max_position_embeddings=config.get("max_position_embeddings", 2048),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            position=config.get("position", "rope"),
            attention_bias=family == "qwen2" or (family == "llmtrain" and config.get("attention_bias", False)),
            qk_norm=family == "qwen3" or (family == "llmtrain" and config.get("qk_norm", False)),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            dropout=dropout,
            initializer_range=config.get("initializer_range", 0.02),
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values; `ModelConfig(**d)` gives the same config back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """Like the constructor, with one sentence for an unknown or missing field.

        Raises:
            ValueError: names the field.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"model.{unknown[0]} is not a field of the model; fields are {', '.join(sorted(known))}.")
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"the model's settings are incomplete: {error}.") from error


def _refuse_unsupported(family: str, config: dict[str, Any]) -> None:
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act={config['hidden_act']!r} is not supported; this model has SwiGLU (silu) only.")
    if family == "mistral" and config.get("sliding_window") is not None:
        limit = config["sliding_window"]
        raise ValueError(
            f"sliding_window={limit} is not supported; set it to null for full attention (equal up to {limit} tokens)."
        )
    if config.get("use_sliding_window"):
        raise ValueError("use_sliding_window=true is not supported; this model has full attention only.")
    if family in ("llama", "qwen3") and config.get("attention_bias"):
        raise ValueError(f"attention_bias=true in a {family} config puts a bias on o_proj, which is not supported.")
    if config.get("mlp_bias"):
        raise ValueError("mlp_bias=true is not supported.")


def _rope_from_hf(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Rotary base and scaling from the legacy keys (transformers 4) or from `rope_parameters` (5)."""
    parameters = _mapping("rope_parameters", config.get("rope_parameters") or {})
    theta = parameters.get("rope_theta", config.get("rope_theta", 10_000.0))
    theta = float(theta) if _is_number(theta) else theta  # what is no number is refused by the constructor
    scaling = config.get("rope_scaling") or {k: v for k, v in parameters.items() if k != "rope_theta"}
    scaling = _mapping("rope_scaling", scaling)
    if not scaling or scaling.get("rope_type", scaling.get("type")) in (None, "default"):
        return theta, None
    return theta, dict(scaling)


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"model.{name}={_shown(value)} must be null or a mapping with rope_type, factor, …")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _shown(value: Any) -> str:
    """A value as it stands in a config.json, or its beginning."""
    return json.dumps(value, ensure_ascii=False, default=str)[:60]


def _checked_rope_scaling(scaling: dict[str, Any]) -> dict[str, Any]:
    scaling = dict(_mapping("rope_scaling", scaling))
    kind = scaling.pop("type", None) or scaling.get("rope_type")
    scaling["rope_type"] = kind
    needed = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("factor",),
    }
    if not isinstance(kind, str) or kind not in needed:
        raise ValueError(
            f"model.rope_scaling: rope_type={_shown(kind)} must be one of {', '.join(ROPE_SCALING_TYPES)}."
        )
    for name in needed[kind]:
        if name not in scaling:
            raise ValueError(f"model.rope_scaling of type {kind!r} needs the field {name!r}.")
    for name, value in scaling.items():
        if name in _SCALING_NUMBERS and value is not None and (not _is_number(value) or value <= 0):
            raise ValueError(f"model.rope_scaling: {name}={_shown(value)} must be a number above 0.")
    if scaling["factor"] is None or scaling["factor"] < 1.0:
        raise ValueError(f"model.rope_scaling: factor={_shown(scaling['factor'])} must be at least 1.")
    return scaling


def padded_vocab_size(vocab_size: int, multiple: int = 64) -> int:
    """The next multiple of `multiple`: matrix products over the vocabulary are faster at round sizes."""
    return -(-vocab_size // multiple) * multiple
