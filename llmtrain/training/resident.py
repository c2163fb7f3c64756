"""How much memory this process has, now and at most: resident bytes on a CPU, allocated bytes on a GPU.

Knows the operating system and torch's allocator; not what the memory is for.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """The bytes that this process has resident now; where the system does not say (not Linux), its peak."""
    return _from_status("VmRSS") if _STATUS.exists() else peak_bytes()


def peak_bytes() -> int:
    """The most bytes that this process had resident since it started, or since `reset_peak`."""
    # Linux's ru_maxrss survives exec: a child would begin with its parent's peak. VmHWM belongs to this program alone.
    if _STATUS.exists():
        return _from_status("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak() -> None:
    """Lets the peak begin again at what is resident now, where the system can (Linux); elsewhere it stays."""
    if _CLEAR.exists():
        _CLEAR.write_text("5")  # proc(5): resets the peak resident set size


class Growth:
    """How far a process's memory grows above what it has when this is built: the figure that a plan predicts.

    Garbage is collected first, and what the C library keeps of freed memory goes back to the system.

    Args:
        device: `cpu` or `cuda`, where the model will be; on `cuda` only the device's memory counts.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._cuda: Any = None
        gc.collect()
        if device == "cuda":
            import torch

            self._cuda = torch.cuda
            self._cuda.empty_cache()
            self._cuda.reset_peak_memory_stats()
            self._idle = self._cuda.memory_allocated()
            return
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
        reset_peak()
        self._idle = resident_bytes()

    def peak(self) -> int:
        """Bytes at the peak so far, above the idle process."""
        return (self._cuda.max_memory_allocated() if self._cuda else peak_bytes()) - self._idle


def _from_status(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
