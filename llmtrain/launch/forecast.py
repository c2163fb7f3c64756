"""What a training run will take, from its shape and its machine: memory by ZeRO stage, files, time. Pure arithmetic.

`plan` prints all of it and `pretrain` a few lines. Knows numbers only; settings are read by the commands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmtrain.model import ModelConfig
    from llmtrain.training.hardware import Machine
    from llmtrain.training.memory import TrainingMemory, Workload

RESERVED = 500_000_000
"""Bytes of a process before there is a model: Python and the libraries, or CUDA's context and kernels."""

_SEARCHED = 1 << 20  # no micro-batch is looked for beyond this


@dataclass(frozen=True)
class Target:
    """Where the run is to be.

    Attributes:
        name: of one device, for the reader.
        on_cpu: whether the devices are processes on a CPU.
        devices: processes on each machine.
        num_nodes: machines.
        precision: `fp32` or `bf16`.
        memory: bytes of one device; `None` if unknown.
        peak_flops: FLOP/s of one device at most; `None` if unknown.
    """

    name: str
    on_cpu: bool
    devices: int
    num_nodes: int
    precision: str
    memory: int | None
    peak_flops: float | None

    @property
    def world_size(self) -> int:
        """All devices."""
        return self.devices * self.num_nodes


def memory(work: Workload, target: Target, stage: int) -> TrainingMemory:
    """Of one process at a ZeRO stage, 0 for one process without DeepSpeed."""
    from llmtrain.training.memory import training_memory

    return training_memory(
        work, precision=target.precision, zero_stage=stage, world_size=target.world_size, on_cpu=target.on_cpu
    )


def largest_micro_batch(work: Workload, target: Target, stage: int) -> int | None:
    """The most rows at a time that fit a device; 0 if not even one does, `None` if its memory is unknown."""
    if target.memory is None:
        return None
    room = target.memory - RESERVED

    def fits(rows: int) -> bool:
        return memory(replace(work, micro_batch_size=rows), target, stage).total <= room

    if not fits(1):
        return 0
    low, high = 1, 2
    while high < _SEARCHED and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def stage_of(strategy: str) -> int:
    """The ZeRO stage of a strategy; 0 for `single`."""
    return 0 if strategy == "single" else int(strategy.removeprefix("deepspeed_"))


def checkpoint_bytes(config: ModelConfig, *, optimizer: str) -> dict[str, int]:
    """Bytes on disk of a checkpoint, over all processes: `model`, `resume` and their sum `total`.

    The model folder holds fp32 weights; to resume, there are the fp32 weights once more and what the optimiser keeps,
    by parameter and whole, whatever the strategy, the number of processes and the precision (`training/state.py`).
    """
    from llmtrain.model import moment_count, parameter_count

    model = 4 * parameter_count(config)
    resume = model + 4 * moment_count(config, optimizer)
    return {"model": model, "resume": resume, "total": model + resume}


def training_seconds(flops: float, target: Target, mfu: float) -> float | None:
    """Time of the steps alone, if the devices reach this share of their peak; `None` if that is unknown."""
    return None if target.peak_flops is None else flops / (mfu * target.peak_flops * target.world_size)


def present_target(machine: Machine, *, measure: bool) -> Target:
    """The machine at hand as a target.

    Args:
        machine: every `auto` resolved.
        measure: also measure a peak that no data sheet says (0.3 s).
    """
    import torch

    from llmtrain.model.memory import machine_memory
    from llmtrain.training import hardware

    if machine.accelerator == "gpu":
        device = torch.device("cuda", 0)
        found = (hardware.peak_of if measure else hardware.known_peak)(machine.precision, device)
        return Target(
            torch.cuda.get_device_name(device),
            False,
            machine.devices,
            machine.num_nodes,
            machine.precision,
            torch.cuda.get_device_properties(device).total_memory,
            None if found is None else found.flops,
        )
    peak = None
    if measure:
        # All threads at once: what the machine's processes have together.
        peak = hardware.peak_of(machine.precision, torch.device("cpu")).flops / machine.devices
    shared = machine_memory()
    return Target(
        "CPU process",
        True,
        machine.devices,
        machine.num_nodes,
        machine.precision,
        None if shared is None else shared // machine.devices,
        peak,
    )


def size(count: float) -> str:
    """Bytes with three digits: `950 B`, `11.3 MB`, `1.54 GB` (powers of ten)."""
    from llmtrain.training.progress import compact

    text = compact(count)
    return f"{text[:-1]} {text[-1].upper() if text[-1] != 'k' else 'k'}B" if text[-1].isalpha() else f"{text} B"
