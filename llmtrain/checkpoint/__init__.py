"""The model folder: save, load, verify; and the adapter folder beside it.

A model folder is a Hugging Face checkpoint folder plus `llmtrain.json`. Nothing in it is a pickle. Knows nothing of how
a model is trained or what it is used for.
"""

from llmtrain.checkpoint.adapter import LaidAdapter, lay_adapter
from llmtrain.checkpoint.atomic import check_free_space, read_whole, whole_folder
from llmtrain.checkpoint.errors import ModelFolderError
from llmtrain.checkpoint.extend import with_role_markers
from llmtrain.checkpoint.load import LoadedModel, load_model_folder, read_config, read_info, resolve_model, verify
from llmtrain.checkpoint.save import save_adapter_folder, save_model_folder
from llmtrain.checkpoint.weights import folder_state_hash, plain_keys, state_hash

__all__ = [
    "LaidAdapter",
    "LoadedModel",
    "ModelFolderError",
    "check_free_space",
    "folder_state_hash",
    "lay_adapter",
    "load_model_folder",
    "plain_keys",
    "read_config",
    "read_info",
    "read_whole",
    "resolve_model",
    "save_adapter_folder",
    "save_model_folder",
    "state_hash",
    "verify",
    "whole_folder",
    "with_role_markers",
]
