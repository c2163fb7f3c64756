"""Writes a model folder (and an adapter folder) so that it is whole or not there.

Knows which files a model folder holds and what stands in them. Deliberately knows nothing of training: whoever calls it
hands over tensors, a tokenizer and what is to be remembered.
"""

import hashlib
import json
import os.path
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import llmtrain
from llmtrain import adapters
from llmtrain.checkpoint import weights
from llmtrain.checkpoint.atomic import whole_folder
from llmtrain.checkpoint.errors import ModelFolderError
from llmtrain.model import ModelConfig
from llmtrain.tokenizer import Tokenizer

INFO_FILE = "llmtrain.json"
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
FORMAT = 1
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def save_model_folder(
    folder: str | Path,
    *,
    config: ModelConfig,
    state_dict: Mapping[str, torch.Tensor],
    tokenizer: Tokenizer,
    info: Mapping[str, Any],
    dtype: str = "float32",
) -> None:
    """Write a Hugging Face model folder with our `llmtrain.json`, replacing an older one in one step.

    Args:
        folder: Where to; a folder that llmtrain did not write is refused unless it is empty.
        config: The model's shape.
        state_dict: The model's tensors, on any device; names of wrapped models are accepted. A tied head is left out.
        tokenizer: The tokenizer the model was trained with; its vocabulary may be smaller than the model's.
        info: What `llmtrain.json` remembers (step, tokens, val_bpb, never_seen, …); the tokenizer's hash, the hash of
            the weights and those of the small files are added.
        dtype: `float32`, `bfloat16` or `float16`: how the weights are stored.

    Raises:
        ModelFolderError: No disk space, a foreign folder in the way, or tensors or tokenizer do not fit.
    """
    if dtype not in _DTYPES:
        raise ModelFolderError(f"dtype={dtype!r} must be one of {', '.join(_DTYPES)}.")
    tied = config.tie_word_embeddings
    plain = weights.plain_keys(state_dict)
    tensors = {key: tensor for key, tensor in plain.items() if weights.counts(key, tied=tied)}
    weights.check_tensors(tensors, config, where="The state dict to be saved")
    check_vocabulary(config, tokenizer, where=str(folder))
    needed = sum(tensor.numel() for tensor in tensors.values()) * _DTYPES[dtype].itemsize
    with whole_folder(folder, marker=INFO_FILE, needed_bytes=needed) as new:
        weights.write_weights(new, tensors, dtype=_DTYPES[dtype])
        tokenizer.save(new)
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
        _write_json(new / CONFIG_FILE, config.to_hf(dtype=dtype, **ids))
        _write_json(new / GENERATION_FILE, ids | {"eos_token_id": _stop_ids(tokenizer)})
        _write_json(new / INFO_FILE, _remembered(new, config, tokenizer, info, weights.folder_state_hash(new)))


def _remembered(
    folder: Path, config: ModelConfig, tokenizer: Tokenizer, info: Mapping[str, Any], state_hash: str
) -> dict[str, Any]:
    remembered: dict[str, Any] = {"format": FORMAT, "llmtrain_version": llmtrain.__version__, **info}
    if config.position == "sinusoidal":
        remembered["loadable_by"] = "llmtrain only: sinusoidal positions have no Hugging Face twin"
    remembered["tokenizer_hash"] = tokenizer.hash
    remembered["state_hash"] = state_hash
    remembered["files"] = file_hashes(folder)
    return remembered


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of the folder's small files; the weights have `state_hash`, which does not depend on the file layout."""
    small = [file for file in folder.iterdir() if file.suffix in (".json", ".jinja") and file.name != INFO_FILE]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(small)}


def check_vocabulary(config: ModelConfig, tokenizer: Tokenizer, *, where: str) -> None:
    """Raise `ModelFolderError` if the tokenizer has ids for which the model has no row."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelFolderError(
            f"{where}: the tokenizer has {tokenizer.vocab_size} ids and the model {config.vocab_size} rows; "
            "they do not belong together: set model.vocab_size=null to take the tokenizer's."
        )


def _stop_ids(tokenizer: Tokenizer) -> list[int]:
    return [tokenizer.eos_id] if tokenizer.end_id is None else [tokenizer.eos_id, tokenizer.end_id]


def save_adapter_folder(
    folder: str | Path,
    adapted: adapters.Adapted,
    *,
    info: Mapping[str, Any],
    state_dict: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a peft adapter folder, replacing an older one in one step.

    Args:
        folder: Where to.
        adapted: What `adapters.attach` returned.
        info: What `llmtrain.json` remembers; must hold `base_state_hash`.
        state_dict: The injected model's tensors, if they were gathered elsewhere (ZeRO 3).

    Raises:
        ModelFolderError: No disk space, or a foreign folder in the way.
    """
    needed = sum(p.numel() * p.element_size() for p in adapted.parameters() if p.requires_grad)
    # The base's path as seen from here too, so that a run folder can be moved together with its base.
    base = adapted.peft_config["default"].base_model_name_or_path
    info = {"format": FORMAT, "llmtrain_version": llmtrain.__version__, **info}
    if base is not None:
        info["base_relative"] = _relative(Path(base), Path(folder))
    with whole_folder(folder, marker=INFO_FILE, needed_bytes=needed) as new:
        adapters.save_adapter(new, adapted, info=info, state_dict=state_dict)


def _relative(target: Path, start: Path) -> str | None:
    try:
        return os.path.relpath(target.resolve(), start.resolve())
    except ValueError:  # another drive
        return None


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
