"""Tensors to and from safetensors files: one key set, one content hash, shards above a size.

Knows file layout and key names; deliberately knows nothing of tokenizers, run folders or adapters.

Above `SHARD_BYTES` the weights are split as Hugging Face does it (`model-00001-of-00002.safetensors` and an index), so
that writing never holds a second copy of a large model and every reader of such folders can open them.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from llmtrain.checkpoint.atomic import read_whole
from llmtrain.checkpoint.errors import ModelFolderError
from llmtrain.model import ModelConfig, Transformer

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# transformers' own limit up to version 4; small enough to copy and resume, large enough to be rare.
SHARD_BYTES = 5 * 10**9
# What wrappers put in front of, or into, a module's parameter names: compile, DDP, Lightning, DeepSpeed.
_WRAPPERS = ("_orig_mod.", "_forward_module.", "_fsdp_wrapped_module.")

StateDict = Mapping[str, torch.Tensor]


def plain_keys(state_dict: StateDict) -> dict[str, torch.Tensor]:
    """Return the tensors under the names of the bare `Transformer`, whatever wrapped it when they were taken.

    `torch.compile` adds `_orig_mod.`, data parallelism `module.`, a LightningModule the attribute's name; a folder
    written with any of them must read with none of them.
    """
    plain = {}
    for key, tensor in state_dict.items():
        for wrapper in _WRAPPERS:
            key = key.replace(wrapper, "")
        plain[key] = tensor
    for outer in ("module.", "model."):
        inner = f"{outer}model.embed_tokens."
        if any(key.startswith(inner) for key in plain):
            plain = {key.removeprefix(outer): tensor for key, tensor in plain.items()}
    return plain


def counts(name: str, *, tied: bool) -> bool:
    """Whether a tensor of this name is stored, read, checked and hashed.

    Not a tied head's, which is the embedding table, and not `inv_freq`, which follows from the config: folders made
    elsewhere may hold either.
    """
    return not (tied and name == "lm_head.weight") and not name.endswith("rotary_emb.inv_freq")


def expected_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Name and shape of every tensor that counts in a model of this config."""
    with torch.device("meta"):
        state = Transformer(config).state_dict()
    return {key: tensor.shape for key, tensor in state.items() if counts(key, tied=config.tie_word_embeddings)}


def check_tensors(state_dict: StateDict, config: ModelConfig, *, where: str) -> None:
    """Raise `ModelFolderError`, naming the first tensor, unless exactly the tensors of `config` are there.

    Args:
        state_dict: Plain names to tensors.
        config: What the tensors must fit.
        where: The folder, for the message.
    """
    expected = expected_shapes(config)
    missing = sorted(set(expected) - set(state_dict))
    if missing:
        raise ModelFolderError(
            f"{where} is incomplete: {len(missing)} of {len(expected)} tensors are missing, first {missing[0]!r}; copy "
            "it again, or train again."
        )
    extra = sorted(set(state_dict) - set(expected))
    if extra:
        raise ModelFolderError(
            f"{where} holds {len(extra)} tensors that its config does not describe, first {extra[0]!r}; "
            "the model is of another family or has parts that are not supported."
        )
    for key, shape in expected.items():
        if state_dict[key].shape != shape:
            raise ModelFolderError(
                f"{where}: tensor {key!r} has shape {tuple(state_dict[key].shape)}, but config.json asks for "
                f"{tuple(shape)}; the two files do not belong together."
            )


def state_hash(state_dict: StateDict) -> str:
    """Return the SHA-256 (hex) of names, dtypes, shapes and values, independent of order, files and sharding."""
    return _hash((key, state_dict[key]) for key in sorted(state_dict))


def folder_state_hash(folder: Path) -> str:
    """Return `state_hash` of the weights stored in a model folder, one tensor in memory at a time."""
    return read_whole(folder, lambda: _hash(read_weights(folder)))


def _hash(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The hash of tensors that come in the order of their names."""
    digest = hashlib.sha256()
    for key, tensor in tensors:
        digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_weights(folder: Path, state_dict: StateDict, *, dtype: torch.dtype, shard_bytes: int = SHARD_BYTES) -> None:
    """Write `model.safetensors`, or numbered shards and their index, into an existing folder."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for key, tensor in state_dict.items():
        tensor_bytes = tensor.numel() * dtype.itemsize
        if shards[-1] and size + tensor_bytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][key] = tensor
        size += tensor_bytes
    if len(shards) == 1:
        _save(folder / WEIGHTS_FILE, shards[0], dtype)
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _save(folder / name, shard, dtype)
        weight_map.update(dict.fromkeys(shard, name))
    total = sum(tensor.numel() for tensor in state_dict.values()) * dtype.itemsize
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _save(file: Path, tensors: StateDict, dtype: torch.dtype) -> None:
    """Copies nothing that is on the CPU in this dtype already, except what shares memory: safetensors refuses that."""
    stored: dict[str, torch.Tensor] = {}
    taken = set()
    for key, tensor in tensors.items():
        tensor = tensor.detach().to("cpu", dtype).contiguous()
        memory = tensor.untyped_storage().data_ptr()
        stored[key] = tensor.clone() if memory in taken else tensor
        taken.add(memory)
    save_file(stored, file, metadata={"format": "pt"})
    file.chmod(0o644)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder.

    Raises:
        ModelFolderError: There are none, or the index names files that are not there.
    """
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = [folder / name for name in sorted(set(weight_map.values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelFolderError(
                f"{index} is half-written or damaged ({error}); copy the folder again, or train again."
            ) from error
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise ModelFolderError(
                f"{folder} is incomplete: {len(absent)} of {len(files)} weight files are missing, first {absent[0]}; "
                "copy or download it again."
            )
        return files
    others = [name for name in ("pytorch_model.bin", "pytorch_model.bin.index.json") if (folder / name).is_file()]
    if others:
        raise ModelFolderError(
            f"{folder} holds its weights as {others[0]}, a pickle that can execute code; only safetensors are read: "
            "convert it once with transformers' save_pretrained."
        )
    raise ModelFolderError(
        f"{folder} is half-written: it has a config.json and no {WEIGHTS_FILE}; copy it again, or train again."
    )


def read_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of everything that counts in a model folder, by name, on the CPU, as stored."""
    tied = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings", False)
    handles = [_opened(file) for file in weight_files(folder)]
    places = {key: handle for handle in handles for key in handle.keys()}  # noqa: SIM118 (a handle is not iterable)
    for key in sorted(places):
        if counts(key, tied=tied):
            yield key, places[key].get_tensor(key)


def _opened(file: Path):
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelFolderError(
            f"{file} is half-written or damaged ({error}); copy it again or train the model again."
        ) from error
