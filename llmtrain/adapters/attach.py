"""Attach an adapter to a model through peft, and write it down.

The only module that imports peft, and only when an adapter is attached: the import takes seconds and pulls transformers
in. Deliberately knows nothing of tokenizers, run folders, training loops or where a base model's weights lie.
"""

import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from llmtrain.adapters.deltas import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    ADAPTER_INFO_FILE,
    PEFT_NAME,
    has_adapter,
    split_state_dict,
)
from llmtrain.model import Transformer

if TYPE_CHECKING:
    from peft import PeftModel

Adapted: TypeAlias = "PeftModel"
"""An injected model as peft sees it: what `attach` returns."""

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def attach(
    model: Transformer,
    *,
    r: int = 8,
    lora_alpha: float = 16.0,
    lora_dropout: float = 0.0,
    target_modules: Sequence[str] = LINEAR_LAYERS,
    use_rslora: bool = False,
    use_dora: bool = False,
    train_tokens: Sequence[int] | None = None,
    seed: int = 0,
    base_folder: str | Path | None = None,
) -> Adapted:
    """Inject a fresh adapter into `model` in place and freeze everything else.

    `model` itself goes on working, adapter included: training and generation keep using it, and the returned
    `PeftModel` is needed only for what peft alone offers. The adapter starts as the identity (B = 0, rows copied).

    Args:
        model: The base model; it must have no adapter yet.
        r: Rank.
        lora_alpha: The change is scaled by lora_alpha / r (rsLoRA: / √r).
        lora_dropout: Probability of dropping an input of A, in training.
        target_modules: Which linear layers, by their last name.
        use_rslora: Scale by √r (Kalajdzievski 2023, arXiv:2312.03732).
        use_dora: Learn magnitude and direction apart (Liu et al. 2024, arXiv:2402.09353).
        train_tokens: Ids whose embedding rows are trained too; `None` or empty for none.
        seed: Decides `lora_A`; the global random state is neither read nor changed.
        base_folder: Written into `adapter_config.json` as the base model's path.

    Raises:
        ValueError: A setting is out of range, a target is unknown, or `model` already has an adapter.
    """
    ids = sorted(set(train_tokens or ()))
    check_adapter(r, lora_alpha, lora_dropout, target_modules)
    _check_model(model, ids)
    with _quiet_peft():
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=r,
            lora_alpha=lora_alpha,  # type: ignore[arg-type]
            lora_dropout=lora_dropout,
            target_modules=sorted(target_modules),
            use_rslora=use_rslora,
            use_dora=use_dora,
            trainable_token_indices=_token_indices(model, ids),
        )
        devices = [model.lm_head.weight.device] if model.lm_head.weight.is_cuda else []
        # peft hooks the embeddings of any model that does not deny checkpointing the old, reentrant way; ours is not.
        model.is_gradient_checkpointing = False  # type: ignore[assignment]
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            adapted = get_peft_model(model, config)
        del model.is_gradient_checkpointing
    config.base_model_name_or_path = None if base_folder is None else str(Path(base_folder).absolute())
    return adapted


def _token_indices(model: Transformer, ids: list[int]) -> list[int] | dict[str, list[int]] | None:
    if not ids:
        return None
    if model.config.tie_word_embeddings:
        return ids
    return {"embed_tokens": ids, "lm_head": ids}


def check_adapter(r: int, lora_alpha: float, lora_dropout: float, targets: Sequence[str]) -> None:
    """Refuses what `attach` would, before there is a model.

    Raises:
        ValueError: A setting is out of range, or a target is unknown.
    """
    if r < 1:
        raise ValueError(f"adapter.r={r} must be at least 1.")
    if lora_alpha <= 0:
        raise ValueError(f"adapter.lora_alpha={lora_alpha} must be above 0.")
    if not 0.0 <= lora_dropout < 1.0:
        raise ValueError(f"adapter.lora_dropout={lora_dropout} must lie in [0, 1).")
    unknown = sorted(set(targets) - set(LINEAR_LAYERS))
    if unknown or not targets:
        raise ValueError(
            f"adapter.target_modules={list(targets)} must name one or more of {', '.join(LINEAR_LAYERS)}"
            + (f"; {unknown[0]!r} is none of them." if unknown else ".")
        )


def _check_model(model: Transformer, ids: list[int]) -> None:
    if ids and (min(ids) < 0 or max(ids) >= model.config.vocab_size):
        raise ValueError(
            f"adapter.train_tokens holds ids from {ids[0]} to {ids[-1]}, but the model has the rows 0 to "
            f"{model.config.vocab_size - 1}."
        )
    if has_adapter(model.state_dict()):
        raise ValueError("The model already has an adapter; merge it first, or load the base model again.")


@contextmanager
def _quiet_peft() -> Iterator[None]:
    """peft and transformers warn about versions and optional packages that are no business of a user of ours."""
    loggers = [logging.getLogger(name) for name in ("transformers", "peft")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def save_adapter(
    folder: Path,
    adapted: Adapted,
    *,
    info: Mapping[str, Any],
    state_dict: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a peft folder into an existing, empty `folder` (`checkpoint.save_adapter_folder` makes that atomic).

    Args:
        folder: Where to.
        adapted: What `attach` returned.
        info: Goes into `llmtrain.json`; `base_state_hash` is what later refuses a wrong base.
        state_dict: The injected model's tensors, if they were gathered elsewhere (ZeRO 3); default the model's own.
    """
    from safetensors.torch import save_file

    assert "base_state_hash" in info, "an adapter must know which weights it belongs to"
    model: Any = adapted.get_base_model()
    tied = model.config.tie_word_embeddings
    _, tensors = split_state_dict(adapted.state_dict() if state_dict is None else state_dict, tied=tied)
    stored = {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in tensors.items()}
    save_file(stored, folder / ADAPTER_FILE, metadata={"format": "pt"})
    (folder / ADAPTER_FILE).chmod(0o644)
    _write_json(folder / ADAPTER_CONFIG_FILE, adapter_config(adapted))
    _write_json(folder / ADAPTER_INFO_FILE, dict(info))


def adapter_config(adapted: Adapted) -> dict[str, Any]:
    """Return `adapter_config.json` of an attached adapter as plain values."""
    values = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in adapted.peft_config[PEFT_NAME].to_dict().items()
    }
    return {**json.loads(json.dumps(values, default=str)), "inference_mode": True}


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
