"""One safetensors file, written tensor by tensor and read stretch by stretch.

The library's `save_file` wants every tensor of a file in memory at once, and gives back whole tensors or rows. A
training state is several times the model, and no process should ever hold it. The format is simple: the length of a
JSON header (8 bytes, little-endian), the header (dtype, shape and place of each tensor), then the bytes.

It knows fp32 tensors and files, and nothing of what the tensors mean.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_ALIGNMENT = 8  # of the first byte behind the header, as safetensors itself writes it


class TensorWriter:
    """Writes fp32 tensors into a new file, one after another, in the order in which they are announced.

    Args:
        path: the file; its folder exists.
        shapes: name and shape of every tensor.
    """

    def __init__(self, path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, shape in shapes.items():
            size = 4 * math.prod(shape)
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._due = list(shapes.items())
        self._due.reverse()
        self._file: IO[bytes] = path.open("xb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, values: Tensor) -> None:
        """Writes the next tensor.

        Args:
            name: as announced.
            values: its elements, fp32, on any device and in any shape.

        Raises:
            OSError: the disk is full.
        """
        expected, shape = self._due.pop()
        assert (name, values.numel(), values.dtype) == (expected, math.prod(shape), torch.float32)
        flat = values.detach().to("cpu").contiguous().reshape(-1)
        self._file.write(flat.view(torch.uint8).numpy().data)

    def close(self, *, whole: bool = True) -> None:
        """Ends the file.

        Args:
            whole: everything announced was written; it is forced to the disk.

        Raises:
            OSError: the disk is full.
        """
        try:
            if whole:
                assert not self._due, f"{self._due[-1][0]} was announced and not written"
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            with contextlib.suppress(OSError):  # of bytes that were buffered when writing failed
                self._file.close()


class TensorReader:
    """Reads stretches of tensors from the files of one folder; only the pages that hold them are touched.

    Args:
        folder: where the files are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: dict[str, Any] = {}

    def read(self, file: str, name: str, *, start: int, count: int) -> Tensor:
        """A stretch of a tensor laid out flat.

        Args:
            file: name of the file.
            name: name of the tensor.
            start: first element.
            count: number of elements.

        Returns:
            (count,) on the CPU.

        Raises:
            ValueError: the file is missing or damaged, or has no such tensor.
        """
        try:
            if file not in self._opened:
                self._opened[file] = safe_open(self._folder / file, framework="pt")
            rows = self._opened[file].get_slice(name)
            width = math.prod(rows.get_shape()[1:])
            first, last = start // width, -(-(start + count) // width)
            return rows[first:last].reshape(-1).narrow(0, start - first * width, count)
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{self._folder / file} cannot be read ({error}); resume from another checkpoint."
            ) from error
