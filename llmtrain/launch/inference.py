"""What `generate` and `evaluate` share: from settings to a loaded model, an engine and sampling parameters.

Knows the names of settings and what a model folder says about itself (`llmtrain.json`, `generation_config.json`).
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

from llmtrain.launch.reading import check_text

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig

    from llmtrain.checkpoint import LoadedModel
    from llmtrain.generation import Engine, SamplingParams

logger = logging.getLogger(__name__)

PRECISIONS = ("auto", "fp32", "bf16", "fp16")


def load_model(settings: DictConfig, *, local_rank: int = 0) -> LoadedModel:
    """The model that `model`, `device` and `precision` name.

    Args:
        settings: Those of the command.
        local_rank: Of several processes on this machine, which one this is: each takes a GPU of its own if there are
            enough.

    Raises:
        ValueError: No model there, or no such device or precision.
    """
    if settings.precision not in PRECISIONS:
        raise ValueError(f"precision={settings.precision}: give one of {', '.join(PRECISIONS)}")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(settings.device)):
        raise ValueError(f"device={settings.device}: give auto, cpu or cuda")
    device, dtype = _device(settings.device, local_rank), _dtype(settings.precision)
    from llmtrain.checkpoint import load_model_folder

    loaded = load_model_folder(settings.model, device=device, dtype=dtype)
    what = f"{loaded.folder} with the adapter {loaded.adapter_folder}" if loaded.adapter_folder else loaded.folder
    count = sum(parameter.numel() for parameter in loaded.model.parameters())
    logger.info("model %s: %.2f M parameters, %s", what, count / 1e6, device)
    return loaded


def make_engine(loaded: LoadedModel, *, max_rows: int, max_length: int | None = None, compile: bool = False) -> Engine:
    """An engine that ends where the model's folder says, and warns beyond the length it was trained on."""
    from llmtrain.generation import Engine

    if compile:
        logger.info("compiling the decode step: some ten seconds, less when torch has it on disk")
    return Engine(
        loaded.model,
        loaded.tokenizer,
        max_rows=max_rows,
        max_length=max_length,
        eos_ids=loaded.eos_ids,
        trained_length=loaded.info.get("trained_length"),
        compile=compile,
    )


def roles_trained(loaded: LoadedModel, *roles: str) -> bool:
    """Whether training touched the markers of a turn, or of `roles`; true where the folder does not say.

    Raises:
        ValueError: The tokenizer has no role markers.
    """
    from llmtrain.tokenizer import render_chat

    turn = [{"role": role, "content": ""} for role in roles or ("user", "assistant")]
    markers, _ = render_chat(turn, loaded.tokenizer)
    return not set(markers) & set(loaded.info.get("never_seen", []))


def sampling_params(section: DictConfig, **changes: Any) -> SamplingParams:
    """The settings of the section `sampling`, checked."""
    from omegaconf import OmegaConf

    from llmtrain.generation import SamplingParams

    values: dict[str, Any] = OmegaConf.to_container(section, resolve=True)  # type: ignore[assignment]
    params = SamplingParams(**{**values, **changes})
    for text in params.stop:
        check_text(text, "sampling.stop")
    return params


def _device(name: str, local_rank: int = 0) -> torch.device:
    import torch

    if name in ("auto", "cuda") and local_rank and torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"device={name}: this machine has no GPU that torch can use; take device=cpu")
    device = torch.device(name)
    if (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name}: this machine has {torch.cuda.device_count()} GPUs, counted from cuda:0")
    return device


def _dtype(precision: str) -> torch.dtype | None:
    import torch

    return {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
