"""The model that fine-tuning starts from: read whole, in fp32, its tokenizer with the chat template's role markers.

Its folder is only read; where the tokenizer lacks the markers, the run keeps a copy that has them. Knows folders; not
what is trained.
"""

from __future__ import annotations

import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from llmtrain.training import placement

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.checkpoint import LoadedModel

logger = logging.getLogger(__name__)


def base_model(settings: DictConfig, folder: Path, run_dir: Path) -> tuple[LoadedModel, str]:
    """The model to start from, in fp32, its tokenizer with the role markers of the chat template; and its state hash.

    The hash is the first process's to know; to the others it is empty.

    Raises:
        ValueError: There is none, or it is an adapter.
    """
    import torch

    from llmtrain.checkpoint import folder_state_hash, load_model_folder, read_whole, with_role_markers

    is_first = placement.here().is_first

    def read() -> tuple[LoadedModel, str]:
        loaded = load_model_folder(folder, dtype=torch.float32)
        return loaded, folder_state_hash(loaded.folder) if is_first else ""

    base, state_hash = read_whole(folder, read)
    if base.adapter_folder is not None:
        raise ValueError(
            f"model={settings.model} is an adapter, and an adapter is trained on whole weights; give its merged model "
            "folder, which lies beside it as model/."
        )
    if base.tokenizer.end_id is None:
        logger.info("The tokenizer of %s lacks the role markers of chats; they are added in a copy.", base.folder)
        if is_first:
            _check_same_base(settings, base, run_dir)
        base = with_role_markers(base, run_dir / "base", write=is_first)
        state_hash = folder_state_hash(base.folder) if is_first else ""
    return base, state_hash


def _check_same_base(settings: DictConfig, base: LoadedModel, run_dir: Path) -> None:
    """Before the copy of the base model is written anew: a run that goes on must be of the same one.

    Raises:
        ValueError: It is of another, whose copy stays.
    """
    from llmtrain.checkpoint import folder_state_hash, with_role_markers
    from llmtrain.launch.fitting import check_folder

    if (run_dir / "base").is_dir():
        with TemporaryDirectory() as beside:
            copy = with_role_markers(base, Path(beside) / "base", write=True)
            check_folder(settings, run_dir, {"the base model's weights": folder_state_hash(copy.folder)})
