"""DeepSpeed's checkpoint files: made free of foreign classes when written, checked before they are read.

DeepSpeed unpickles its files without restriction, and a pickle can run any code. So every file is first read
under an allow-list of exactly the two classes of DeepSpeed's that it needs. It knows files and pickles; what
is in them is DeepSpeed's business.
"""

import contextlib
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn


def client_state(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What goes into DeepSpeed's model file: ours, and the key that `ds_to_universal` asserts on."""
    from deepspeed.checkpoint.constants import (
        UNIVERSAL_CHECKPOINT_INFO,
        UNIVERSAL_CHECKPOINT_VERSION_KEY,
        UNIVERSAL_CHECKPOINT_VERSION_VALUE,
    )

    version = {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE}
    return {**checkpoint, UNIVERSAL_CHECKPOINT_INFO: version}


@contextlib.contextmanager
def plain_slice_mappings(optimizer: Any) -> Iterator[None]:
    """While inside, a ZeRO 1/2 optimiser saves where its slices lie without a class of DeepSpeed's.

    It keeps a dataclass `fragment_address(numel, start)` per parameter, a third class in the pickle.
    """
    mappings = getattr(optimizer, "_param_slice_mappings", None)
    if mappings is None:  # ZeRO 3
        yield
        return
    optimizer._param_slice_mappings = [
        OrderedDict((name, _plain(place)) for name, place in group.items()) for group in mappings
    ]
    try:
        yield
    finally:
        optimizer._param_slice_mappings = mappings


@contextlib.contextmanager
def without_frozen(engine: Any) -> Iterator[None]:
    """While inside, the engine saves no frozen weights, under none of their names.

    DeepSpeed's own `exclude_frozen_parameters` goes by `named_parameters`, which lists a tied weight once.
    """
    original = engine.module_state_dict
    values = engine.module.state_dict(keep_vars=True)
    frozen = {name for name, v in values.items() if isinstance(v, nn.Parameter) and not v.requires_grad}

    def trainable(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: value for name, value in original(*args, **kwargs).items() if name not in frozen}

    engine.module_state_dict = trainable
    try:
        yield
    finally:
        del engine.module_state_dict


def _plain(place: Any) -> OrderedDict:
    """An empty ordered dictionary with the attributes `numel` and `start`.

    Attributes of an OrderedDict (torch's state dicts have `_metadata`) are the one form that loads with
    `weights_only=True` and still answers `place.start`, as `ds_to_universal` asks.
    """
    plain: OrderedDict = OrderedDict()
    plain.numel, plain.start = place.numel, place.start  # type: ignore[attr-defined]
    return plain


def check_files(folder: Path, *, share: int = 0, shares: int = 1) -> str | None:
    """Reads DeepSpeed's files without running anything in them.

    Args:
        folder: holds DeepSpeed's `.pt` files, at any depth.
        share, shares: this process looks at every `shares`-th file from `share` on.

    Returns:
        What is wrong with the first bad file, or None.
    """
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    for path in sorted(folder.rglob("*.pt"))[share::shares]:
        try:
            with torch.serialization.safe_globals([LossScaler, ZeroStageEnum]):
                torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # tensors stay on disk
        except pickle.UnpicklingError as error:
            reason = str(error).splitlines()[0]
            return f"{path} holds objects that are no part of a checkpoint and is not opened ({reason})"
        except (OSError, RuntimeError, EOFError) as error:
            return f"{path} cannot be read ({error})"
    return None
