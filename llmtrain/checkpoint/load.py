"""Reads whatever path a user has at hand (run, checkpoint, model folder, adapter) as one model and tokenizer.

Knows how those folders are told apart and what makes one whole. Deliberately knows nothing of how they came to be, and
imports neither peft nor transformers: JSON, safetensors and `tokenizers` are all that a model folder needs.
"""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from llmtrain import adapters
from llmtrain.checkpoint import weights
from llmtrain.checkpoint.atomic import read_whole
from llmtrain.checkpoint.errors import ModelFolderError
from llmtrain.checkpoint.save import CONFIG_FILE, GENERATION_FILE, INFO_FILE, check_vocabulary, file_hashes
from llmtrain.model import ModelConfig, Transformer
from llmtrain.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LATEST = "latest"
_AGAIN = "copy the folder again, or train again"


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to use, in `eval` mode.

    Attributes:
        model: The transformer, an adapter already merged in.
        tokenizer: Its tokenizer.
        config: Its shape.
        info: `llmtrain.json` of the model folder; empty for a folder made elsewhere. With an adapter it is the
            adapter's, and that of its base stands under `base`: as in the merged folder.
        folder: The model folder that the weights came from.
        adapter_folder: The adapter that was merged in, or `None`.
        generation: `generation_config.json` of the model folder; empty if it has none.
    """

    model: Transformer
    tokenizer: Tokenizer
    config: ModelConfig
    info: dict[str, Any]
    folder: Path
    adapter_folder: Path | None = None
    generation: dict[str, Any] = field(default_factory=dict)

    @property
    def eos_ids(self) -> list[int] | None:
        """The end tokens that `generation_config.json` states; None leaves them to the tokenizer.

        Raises:
            ValueError: It states something else than ids.
        """
        stated = self.generation.get("eos_token_id")
        ids = [stated] if isinstance(stated, int) else stated
        if ids is not None and (not isinstance(ids, list) or any(type(each) is not int for each in ids)):
            raise ValueError(
                f"{self.folder}/generation_config.json: eos_token_id={ids!r} must be a token id or a list of them"
            )
        return [*ids, *(taught_end(self.tokenizer) if self.adapter_folder else [])] if ids else None


def taught_end(tokenizer: Tokenizer) -> list[int]:
    """What ends the answers of an adapter besides its base's end tokens: a base that knew no end of turn may have one
    that was taught it."""
    return [] if tokenizer.end_id is None else [tokenizer.end_id]


@dataclass(frozen=True)
class _Files:
    """What the files of one model folder hold, all of one and the same writing of it."""

    config: ModelConfig
    info: dict[str, Any]
    generation: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    tokenizer: Tokenizer


def resolve_model(path: str | Path) -> Path:
    """Find the model or adapter folder that `path` means.

    A run or checkpoint folder means the `model/` inside; `latest` (a link, or a file that holds a name) and a folder
    with a `latest` inside mean the run it points to, or, said in a warning, the newest beside it if that has no model.

    Raises:
        ModelFolderError: There is no model there; the message says what to give instead.
    """
    path = Path(path)
    if path.name == LATEST and (other := _newest_beside(path)):
        return other
    if not path.exists():
        if path.is_symlink():
            raise ModelFolderError(
                f"model={path} points to {path.resolve()}, which is not there any more; give another with model=…"
            )
        hint = "train one first (make pretrain)" if path.name == LATEST else "give a run, model or adapter folder"
        raise ModelFolderError(f"model={path} does not exist; {hint}.")
    if path.is_file():
        if path.name == LATEST:
            return resolve_model(path.parent / path.read_text(encoding="utf-8").strip())
        raise ModelFolderError(f"model={path} is a file; give the folder that holds it: model={path.parent}")
    if (path / CONFIG_FILE).is_file() or (path / adapters.ADAPTER_CONFIG_FILE).is_file():
        return path
    for inside in ("model", "adapter"):
        if (path / inside).is_dir():
            return resolve_model(path / inside)
    if (path / LATEST).exists() or (path / LATEST).is_symlink():
        return resolve_model(path / LATEST)
    raise ModelFolderError(_nothing_here(path))


def _newest_beside(latest: Path) -> Path | None:
    """The newest run that has a model, where the one that `latest` points to has none, not even in a checkpoint.

    So it is with a run that was interrupted early, or removed.
    """
    if latest.is_file():
        run = latest.parent / latest.read_text(encoding="utf-8").strip()
    elif latest.is_dir() or latest.is_symlink():
        run = latest.resolve()
    else:
        return None
    if run.is_dir() and any(run.rglob("*.safetensors")):
        return None
    others = [file.parent for file in latest.parent.glob(f"*/model/{CONFIG_FILE}")]
    newest = max(others, key=lambda model: (model / CONFIG_FILE).stat().st_mtime, default=None)
    if newest is not None:
        what = "has no model" if run.is_dir() else "is not there any more"
        logger.warning("%s (%s) %s; model=%s is used, the newest beside it", latest, run.name, what, newest)
    return newest


def _nothing_here(path: Path) -> str:
    if any(path.glob("*.safetensors")):
        return f"{path} is half-written: it has weights and no {CONFIG_FILE}; {_AGAIN}."
    checkpoints = [
        model.parent for pattern in ("*/model", "*/*/model") for model in path.glob(f"{pattern}/{CONFIG_FILE}")
    ]
    if checkpoints:
        newest = max(checkpoints, key=lambda folder: folder.stat().st_mtime)
        return f"{path} is no model folder itself; the newest one below it is model={newest}"
    if (path.parent / "model" / CONFIG_FILE).is_file():
        return f"{path} holds no model; beside it lies model={path.parent / 'model'}"
    return (
        f"{path} holds no model: neither {CONFIG_FILE}, nor {adapters.ADAPTER_CONFIG_FILE}, nor a folder model/; "
        "a run has one after its first validation: give another run with model=…"
    )


def load_model_folder(
    path: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> LoadedModel:
    """Load a model and its tokenizer from a run, checkpoint, model or adapter folder.

    Any Hugging Face folder of a supported family is read (safetensors and tokenizer.json; shards too). An adapter is
    merged into its base while loading, after its base's weights were recognised by their hash.

    Args:
        path: See `resolve_model`.
        device: Where the model is to be.
        dtype: What to convert the weights to; `None` keeps them as stored.

    Raises:
        ModelFolderError: Missing, half-written, of another tokenizer, of an unsupported family, or a wrong base.
    """
    folder = resolve_model(path)
    if (folder / adapters.ADAPTER_CONFIG_FILE).is_file() and not (folder / CONFIG_FILE).is_file():
        return _load_adapted(folder, device, dtype)
    files = _read_files(folder)
    model = _built(files.config, files.tensors, device, dtype)
    return LoadedModel(model, files.tokenizer, files.config, files.info, folder, generation=files.generation)


def _read_files(folder: Path, tokenizer: Tokenizer | None = None) -> _Files:
    """Everything in a model folder, checked, even while a run puts another in its place; a given tokenizer is taken."""

    def read() -> _Files:
        config, info = read_config(folder), read_info(folder)
        generation = _read_object(folder / GENERATION_FILE) if (folder / GENERATION_FILE).is_file() else {}
        fitting = tokenizer or _read_tokenizer(folder, info.get("tokenizer_hash"))
        check_vocabulary(config, fitting, where=str(folder))
        tensors = dict(weights.read_weights(folder))
        weights.check_tensors(tensors, config, where=str(folder))
        return _Files(config, info, generation, tensors, fitting)

    return read_whole(folder, read)


def _load_adapted(folder: Path, device: str | torch.device, dtype: torch.dtype | None) -> LoadedModel:
    def read() -> tuple[adapters.AdapterDeltas, Tokenizer | None]:
        return adapters.load_adapter_deltas(folder), read_own_tokenizer(folder)

    try:
        deltas, own_tokenizer = read_whole(folder, read)
    except adapters.AdapterError as error:
        raise ModelFolderError(str(error)) from error
    base = _base_of(folder, deltas)
    files = _read_files(base, own_tokenizer)
    check_base(deltas, weights.state_hash(files.tensors), folder=folder, base=base)
    try:
        merged = adapters.merge_state_dict(files.tensors, deltas, dtype=dtype)
    except adapters.AdapterError as error:
        raise ModelFolderError(f"{folder}: {error}") from error
    model = _built(files.config, merged, device, dtype)
    inherited = {key: files.info[key] for key in ("trained_length",) if key in files.info}
    info = inherited | {"base": files.info} | deltas.info
    return LoadedModel(model, files.tokenizer, files.config, info, base, folder, generation=files.generation)


def check_base(deltas: adapters.AdapterDeltas, found_hash: str, *, folder: Path, base: Path) -> None:
    """Refuse a base whose weights are not those that the adapter was trained on.

    Raises:
        ModelFolderError: The hashes differ: another model, one that was trained again, or one merged already.
    """
    expected = deltas.base_state_hash
    if expected is not None and found_hash != expected:
        raise ModelFolderError(
            f"The adapter {folder} was trained on other weights than {base} holds (hash {expected[:12]} against "
            f"{found_hash[:12]}): the base was trained again, or the adapter is merged into it already."
        )


def _base_of(folder: Path, deltas: adapters.AdapterDeltas) -> Path:
    """The base's folder: where the adapter was told it is, or the same way from where the adapter is now."""
    named, relative = deltas.base_folder, deltas.info.get("base_relative")
    candidates = [Path(named)] if named else []
    if relative:
        candidates.append((folder / relative).resolve())
    for candidate in candidates:
        if (candidate / CONFIG_FILE).is_file():
            return candidate
    raise ModelFolderError(
        f"The adapter {folder} needs its base model {named or '(no path given)'}, which is not there; put it back, or "
        "use the merged model folder beside the adapter."
    )


def read_config(folder: Path) -> ModelConfig:
    """Return the shape of a model folder.

    Raises:
        ModelFolderError: config.json cannot be read or describes a model that is not supported.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ModelFolderError(f"{folder} is half-written: it has no {CONFIG_FILE}; {_AGAIN}.")
    values = _read_object(file)
    try:
        return ModelConfig.from_hf(values)
    except KeyError as error:
        raise ModelFolderError(f"{file} lacks {error} and describes no whole model; {_AGAIN}.") from error
    except (TypeError, ValueError) as error:
        raise ModelFolderError(f"{file}: {error}") from error


def read_info(folder: Path) -> dict[str, Any]:
    """Return `llmtrain.json` of a model folder, or an empty dict for a folder made elsewhere."""
    file = folder / INFO_FILE
    return _read_object(file) if file.is_file() else {}


def _read_object(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{file} is half-written or damaged ({error}); {_AGAIN}.") from error
    if not isinstance(values, dict):
        raise ModelFolderError(f"{file} is damaged (it holds no object); {_AGAIN}.")
    return values


def read_own_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer that lies in an adapter's folder, if one does: then it is not its base's.

    Raises:
        ModelFolderError: It cannot be read, or is not the one that the adapter was trained with.
    """
    if not (folder / "tokenizer.json").is_file():
        return None
    return _read_tokenizer(folder, read_info(folder).get("tokenizer_hash"))


def _read_tokenizer(folder: Path, expected_hash: str | None) -> Tokenizer:
    try:
        tokenizer = Tokenizer.load(folder)
    except ValueError as error:
        raise ModelFolderError(f"{folder} has no usable tokenizer ({error}); {_AGAIN}.") from error
    if expected_hash is not None and tokenizer.hash != expected_hash:
        raise ModelFolderError(
            f"{folder} holds a tokenizer (hash {tokenizer.hash[:12]}) that is not the one the model was trained with "
            f"(hash {expected_hash[:12]}); put the right tokenizer.json back."
        )
    return tokenizer


def _built(
    config: ModelConfig,
    tensors: dict[str, torch.Tensor],
    device: str | torch.device,
    dtype: torch.dtype | None,
) -> Transformer:
    """A transformer that owns its tensors: those just read may be views of a memory-mapped file."""
    with torch.device("meta"):
        model = Transformer(config)
    owned = {key: tensor.to(device=device, dtype=dtype or tensor.dtype, copy=True) for key, tensor in tensors.items()}
    model.load_state_dict(owned, strict=False, assign=True)  # strict in `check_tensors`, which knows the tied head
    model.tie_weights()
    return model.eval()


def verify(folder: str | Path) -> None:
    """Check every file of a model folder against the hashes in its `llmtrain.json`.

    Raises:
        ModelFolderError: A file was changed, lost or damaged since it was written, or the folder records no hashes.
    """
    folder = resolve_model(folder)
    read_whole(folder, lambda: _verify(folder))


def _verify(folder: Path) -> None:
    info = read_info(folder)
    if "files" not in info or "state_hash" not in info:
        raise ModelFolderError(f"{folder} records no hashes: it was not written by save_model_folder.")
    found = file_hashes(folder)
    for name, expected in info["files"].items():
        if found.get(name) != expected:
            raise ModelFolderError(
                f"{folder / name} is {'missing' if name not in found else 'changed'} since it was written."
            )
    if weights.folder_state_hash(folder) != info["state_hash"]:
        raise ModelFolderError(f"The weights in {folder} are not those that were written (hash differs).")
