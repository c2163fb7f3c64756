"""What an adapter changes, as plain tensors: read from a peft folder, take out of a model, merge.

Knows the model's parameter names and peft's file format. Deliberately knows nothing of peft itself, so that generation
needs neither it nor the seconds of its import.

Besides the low-rank pair of each linear layer an adapter holds whole embedding *rows*: pretraining leaves the rows of
tokens that it never saw collapsed, and no change of the linear layers can tell those tokens apart. peft calls the ids
`trainable_token_indices`; a tied head uses the same rows.

Shapes: I in features, O out features, R rank, N trained rows, C hidden.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_INFO_FILE = "llmtrain.json"
PEFT_NAME = "default"  # peft's name of the first adapter; it stands inside parameter names and not in files
_PEFT_PREFIX = "base_model.model."


class AdapterError(ValueError):
    """An adapter that cannot be read, or that does not belong to the weights it is to be merged into."""


@dataclass(frozen=True)
class LowRank:
    """What one linear layer gains: W + scale · B A, or with DoRA magnitude · that / its row norms."""

    a: Tensor  # (R, I)
    b: Tensor  # (O, R)
    scale: float
    magnitude: Tensor | None = None  # (O,), DoRA only

    def merged_into(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """(O, I) base weight → (O, I) merged weight, computed in fp32 and rounded once."""
        merged = weight.float() + self.scale * (self.b.float() @ self.a.float())
        if self.magnitude is not None:
            merged *= (self.magnitude.float() / torch.linalg.norm(merged, dim=1))[:, None]
        return merged.to(dtype)


@dataclass(frozen=True)
class AdapterDeltas:
    """An adapter as plain tensors.

    Attributes:
        low_rank: Module name (`model.layers.0.self_attn.q_proj`) to its low-rank change.
        token_ids: Parameter name (`model.embed_tokens.weight`, `lm_head.weight`) to the N ids whose rows are trained.
        token_rows: The same names to the (N, C) rows that replace the base's.
        config: peft's `adapter_config.json`.
        info: Our `llmtrain.json`; empty in an adapter that was made elsewhere.
    """

    low_rank: dict[str, LowRank]
    token_ids: dict[str, list[int]] = field(default_factory=dict)
    token_rows: dict[str, Tensor] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def base_folder(self) -> str | None:
        """The model folder that the adapter was trained on, as it was written down."""
        return self.config.get("base_model_name_or_path")

    @property
    def base_state_hash(self) -> str | None:
        """`state_hash` of the weights that the adapter was trained on; `None` if it was made elsewhere."""
        return self.info.get("base_state_hash")


def has_adapter(state_dict: Mapping[str, Tensor]) -> bool:
    """Whether a state dict comes from a model with an adapter injected."""
    return any(".lora_A." in key or ".token_adapter." in key for key in state_dict)


def split_state_dict(state_dict: Mapping[str, Tensor], *, tied: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Take the state dict of an injected `Transformer` apart.

    Args:
        state_dict: Tensors under the injected model's names, with or without peft's own prefix.
        tied: Whether the head shares the embedding table; then neither its table nor its rows are listed twice.

    Returns:
        The base's tensors under the plain model's names, and the adapter's under those of peft's file.
    """
    base, adapter = {}, {}
    for key, tensor in state_dict.items():
        key = key.removeprefix(_PEFT_PREFIX)
        if tied and key.startswith("lm_head."):
            continue
        if ".lora_" in key or ".trainable_tokens_delta." in key:
            name = key.replace(f".{PEFT_NAME}.weight", ".weight").removesuffix(f".{PEFT_NAME}")
            if name.endswith("lora_magnitude_vector.weight"):
                name = name.removesuffix(".weight")
            adapter[_PEFT_PREFIX + name] = tensor
        else:
            base[key.replace(".token_adapter.base_layer.", ".").replace(".base_layer.", ".")] = tensor
    return base, adapter


def load_adapter_deltas(folder: str | Path) -> AdapterDeltas:
    """Read a peft LoRA folder without peft.

    Raises:
        AdapterError: It is missing, half-written, or uses a method whose arithmetic is not known here.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    for name in (ADAPTER_CONFIG_FILE, ADAPTER_FILE):
        if not (folder / name).is_file():
            raise AdapterError(f"{folder} is no whole adapter folder: {name} is missing.")
    try:
        config = json.loads((folder / ADAPTER_CONFIG_FILE).read_text(encoding="utf-8"))
        tensors = load_file(folder / ADAPTER_FILE)
        info_file = folder / ADAPTER_INFO_FILE
        info = json.loads(info_file.read_text(encoding="utf-8")) if info_file.is_file() else {}
        if not isinstance(config, dict) or not isinstance(info, dict):
            raise ValueError("a JSON file of it holds no object")
    except (SafetensorError, ValueError) as error:
        raise AdapterError(
            f"{folder} is half-written or damaged ({error}); copy the folder again, or fine-tune again."
        ) from error
    return deltas_from(tensors, config, info)


def deltas_from(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], info: Mapping[str, Any] | None = None
) -> AdapterDeltas:
    """Arrange an adapter's tensors (peft's file names) by what they change.

    Raises:
        AdapterError: The adapter uses a method whose arithmetic is not known here.
    """
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"peft_type={config.get('peft_type')!r} is not supported; LORA is.")
    parts: dict[str, dict[str, Tensor]] = {}
    rows: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(_PEFT_PREFIX)
        if match := re.fullmatch(r"(.+)\.token_adapter\.trainable_tokens_delta", name):
            rows[f"{match[1]}.weight"] = tensor
        elif match := re.fullmatch(r"(.+)\.lora_(A|B|magnitude_vector)(\.weight)?", name):
            parts.setdefault(match[1], {})[match[2]] = tensor
        else:
            raise AdapterError(f"The adapter holds {key!r}, which is neither LoRA, DoRA nor a trained token row.")
    for name, part in parts.items():
        if absent := {"A", "B"} - part.keys():
            raise AdapterError(f"The adapter is damaged: the change of {name} lacks its matrix {min(absent)}.")
    low_rank = {
        name: LowRank(part["A"], part["B"], _scale(name, part["A"], config), part.get("magnitude_vector"))
        for name, part in parts.items()
    }
    return AdapterDeltas(
        low_rank=low_rank,
        token_ids={name: _ids_of(name, config, len(tensor)) for name, tensor in rows.items()},
        token_rows=rows,
        config=dict(config),
        info=dict(info or {}),
    )


def _scale(name: str, a: Tensor, config: Mapping[str, Any]) -> float:
    """lora_alpha / r or, with rsLoRA, lora_alpha / √r; peft's per-module `alpha_pattern` comes first."""
    alpha = config.get("lora_alpha")
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            alpha = value
            break
    if not isinstance(alpha, int | float):
        raise AdapterError(f"The adapter is damaged: lora_alpha={alpha!r} in its {ADAPTER_CONFIG_FILE} is no number.")
    rank = a.shape[0]
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _ids_of(parameter: str, config: Mapping[str, Any], count: int) -> list[int]:
    indices = config.get("trainable_token_indices") or []
    if isinstance(indices, dict):
        module = parameter.removesuffix(".weight")
        indices = next((ids for name, ids in indices.items() if module.endswith(name)), [])
    if len(indices) != count or any(type(each) is not int or each < 0 for each in indices):
        raise AdapterError(
            f"The adapter holds {count} rows of {parameter} and lists {len(indices)} trainable_token_indices, "
            "which must be their ids."
        )
    return list(indices)


def merge_state_dict(
    base: Mapping[str, Tensor], deltas: AdapterDeltas, *, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return the base's tensors with the adapter's change added; the base is not modified.

    Args:
        base: Plain names (`model.layers.0.self_attn.q_proj.weight`) to tensors; without a tied head's, as in the file.
        deltas: What `load_adapter_deltas` or `deltas_from` gave.
        dtype: Of the tensors that the adapter changes, which are rounded to it once, from fp32; `None` takes the
            base's. A base that was converted before would be rounded twice.

    Raises:
        AdapterError: The adapter changes a layer that the base does not have, or not in this shape.
    """
    merged = dict(base)
    for name, change in deltas.low_rank.items():
        weight = base.get(f"{name}.weight")
        if weight is None or weight.shape != (change.b.shape[0], change.a.shape[1]):
            raise AdapterError(
                f"The adapter does not fit the model: it changes {name} by a "
                f"({change.b.shape[0]}, {change.a.shape[1]}) matrix, and the model has "
                + ("no such layer." if weight is None else f"{tuple(weight.shape)} there.")
            )
        merged[f"{name}.weight"] = change.merged_into(weight, dtype or weight.dtype)
    for name, rows in deltas.token_rows.items():
        ids = deltas.token_ids[name]
        if name not in base or base[name].shape[1] != rows.shape[1] or max(ids) >= base[name].shape[0]:
            raise AdapterError(f"The adapter does not fit the model: it replaces rows of {name} that are not there.")
        table = base[name].to(dtype or base[name].dtype, copy=True)
        table[torch.tensor(ids, device=table.device)] = rows.to(table)
        merged[name] = table
    return merged
