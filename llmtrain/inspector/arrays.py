"""Numbers in JSON: exact, small, and readable from any language."""

from __future__ import annotations

import base64
import sys
from typing import Any

import torch
from torch import Tensor

_NAMES = {torch.float32: "float32", torch.int32: "int32"}


def packed(tensor: Tensor) -> dict[str, Any]:
    """A tensor as {"dtype", "shape", "base64"}: row by row, little-endian, float32 or int32."""
    tensor = tensor.detach().cpu()
    tensor = (tensor.float() if tensor.is_floating_point() else tensor.to(torch.int32)).contiguous()
    array = tensor.numpy()
    if sys.byteorder == "big":
        array = array.byteswap()
    return {
        "dtype": _NAMES[tensor.dtype],
        "shape": list(tensor.shape),
        "base64": base64.b64encode(array.tobytes()).decode("ascii"),
    }


def unpacked(value: dict[str, Any]) -> Tensor:
    """The tensor that `packed` was given, in float32 or int32."""
    dtype = {name: dtype for dtype, name in _NAMES.items()}[value["dtype"]]
    data = bytearray(base64.b64decode(value["base64"]))
    if sys.byteorder == "big":
        data = bytearray(b"".join(bytes(reversed(data[i : i + 4])) for i in range(0, len(data), 4)))
    if not data:
        return torch.zeros(value["shape"], dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(value["shape"])


def rounded(value: float, digits: int = 6) -> float:
    """A number to `digits` significant digits: what a page shows needs no more, and it must be finite."""
    return float(f"{value:.{digits}g}")
