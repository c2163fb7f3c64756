"""How much memory this machine has, and how much of it can be had: what sizes of caches and plans are measured against.

Pages that only cache files count as available, since the system gives them up when asked; so the answer does not depend
on what was read before. A control group (a container, a batch system's job) counts as the machine. Knows no model.
"""

import os
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CONTROL_GROUP = Path("/sys/fs/cgroup")


def machine_memory() -> int | None:
    """Bytes of memory that this machine has, or that its control group allows; `None` where the system does not say."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    limit = _group_limit()
    return memory if limit is None else min(memory, limit)


def available_memory(device: torch.device) -> int | None:
    """Bytes that can be allocated on a device now without swapping; `None` where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _field(MEMINFO, "MemAvailable:")
    if free is None:
        return machine_memory()
    limit = _group_limit()
    used = _number(CONTROL_GROUP / "memory.current")
    if limit is None or used is None:
        return free * 1024
    cached = _field(CONTROL_GROUP / "memory.stat", "inactive_file") or 0
    return max(0, min(free * 1024, limit - used + cached))


def _group_limit() -> int | None:
    return _number(CONTROL_GROUP / "memory.max")  # "max" where there is none


def _number(file: Path) -> int | None:
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None


def _field(file: Path, name: str) -> int | None:
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), None)
