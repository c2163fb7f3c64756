"""Reads an adapter for a model that is loaded already, to be laid onto it unmerged.

The counterpart of `load_model_folder`, which merges. Knows folders and what an adapter was trained on; deliberately
knows nothing of who answers with it.
"""

from dataclasses import dataclass
from pathlib import Path

from llmtrain import adapters
from llmtrain.checkpoint import weights
from llmtrain.checkpoint.atomic import read_whole
from llmtrain.checkpoint.errors import ModelFolderError
from llmtrain.checkpoint.load import LoadedModel, check_base, read_own_tokenizer, resolve_model, taught_end
from llmtrain.model import ModelDelta


@dataclass(frozen=True)
class LaidAdapter:
    """An adapter laid onto a loaded model.

    Attributes:
        folder: Where it lies.
        delta: What `Engine.add_adapter` takes.
        eos_ids: The ids that end its answers besides those of the model.
    """

    folder: Path
    delta: ModelDelta
    eos_ids: list[int]


def lay_adapter(base: LoadedModel, path: str | Path) -> LaidAdapter:
    """Read the adapter that `path` means and lay it onto `base`.

    Args:
        base: The model as loaded; an adapter merged into it counts as part of it.
        path: An adapter folder, or a run or checkpoint that holds one (and its merged model, perhaps).

    Raises:
        ModelFolderError: There is no whole adapter, or it was trained on other weights or with another tokenizer.
    """
    folder = _resolve_adapter(path)
    try:
        deltas, tokenizer = read_whole(
            folder, lambda: (adapters.load_adapter_deltas(folder), read_own_tokenizer(folder))
        )
        if tokenizer is not None and tokenizer.hash != base.tokenizer.hash:
            raise ModelFolderError(
                f"The adapter {folder} has a tokenizer of its own, and one model has one: load it alone, as the model."
            )
        if deltas.base_state_hash is not None:
            check_base(deltas, _state_hash(base), folder=folder, base=base.adapter_folder or base.folder)
        delta = adapters.lay_onto(base.model, deltas)
    except adapters.AdapterError as error:
        raise ModelFolderError(str(error) if str(folder) in str(error) else f"{folder}: {error}") from error
    return LaidAdapter(folder, delta, taught_end(base.tokenizer))


def _resolve_adapter(path: str | Path) -> Path:
    found = resolve_model(path)
    if (found / adapters.ADAPTER_CONFIG_FILE).is_file():
        return found
    beside = found.parent / "adapter"  # a run holds the merged model, too
    if found != Path(path) and (beside / adapters.ADAPTER_CONFIG_FILE).is_file():
        return beside
    raise ModelFolderError(f"{path} holds whole weights and no adapter: load it alone, as the model.")


def _state_hash(base: LoadedModel) -> str:
    """Of the weights that stand in the folder; of those in memory where an adapter was merged into them."""
    if base.adapter_folder is None:
        return weights.folder_state_hash(base.folder)
    tied = base.config.tie_word_embeddings
    state = base.model.state_dict()
    return weights.state_hash({key: tensor for key, tensor in state.items() if weights.counts(key, tied=tied)})
