"""What the machine at hand can do: which accelerator, how many devices, which precision, how many FLOP/s at most.

Knows torch and the processor. It does not know models, batches or DeepSpeed.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass

import torch

from llmtrain.training import placement, resident
from llmtrain.training.ranges import shown

PRECISIONS = ("auto", "bf16", "fp32")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet.

    Attributes:
        label: words that `torch.cuda.get_device_name` has for it and for no other.
        bf16: dense FLOP/s in bf16 with fp32 accumulation ("with sparsity" halved).
        fp32: FLOP/s in fp32 outside the tensor cores, which is what torch takes for fp32 products.
        memory_gb: as the sheet writes it, which means 2³⁰ bytes.
        inline_ecc: GDDR6 whose error correction, on by default, takes a sixteenth of it; HBM has room of its own.
    """

    label: str
    bf16: float
    fp32: float
    memory_gb: float
    inline_ecc: bool = False

    def peak(self, precision: str) -> float:
        """FLOP/s at most in `bf16` or `fp32`."""
        return self.bf16 if precision == "bf16" else self.fp32

    @property
    def memory(self) -> int:
        """Bytes that CUDA says the device has (`total_memory`).

        The driver keeps 0.7 to 1.6 % to itself: an H100 with "80 GB" has 79.1 to 79.6 GiB, an H200 with "141 GB" 139.8,
        an RTX 4090 23.6, an L40S 44.4 after error correction. So this is within 2 % of what the card at hand says.
        """
        return int(0.988 * self.memory_gb * (15 / 16 if self.inline_ecc else 1) * 2**30)


# From NVIDIA's data sheets and architecture papers; SXM modules unless the name says otherwise (A10G: AWS's instance
# pages). A device is the first whose label is among the words of its name, so the narrower label stands first.
GPUS = {
    "b200": Gpu("B200", 2250e12, 75e12, 180),
    "h200-nvl": Gpu("H200 NVL", 835e12, 60e12, 141),
    "h200": Gpu("H200", 989e12, 67e12, 141),
    "h100-nvl": Gpu("H100 NVL", 835e12, 60e12, 94),
    "h100-pcie": Gpu("H100 PCIe", 756e12, 51e12, 80),
    "h100": Gpu("H100", 989e12, 67e12, 80),
    "h800-pcie": Gpu("H800 PCIe", 756e12, 51e12, 80),
    "h800": Gpu("H800", 989e12, 67e12, 80),
    "h20": Gpu("H20", 148e12, 44e12, 96),
    "a100-40gb": Gpu("A100-(SXM4|PCIE)-40GB", 312e12, 19.5e12, 40),
    "a100": Gpu("A100", 312e12, 19.5e12, 80),
    "a800": Gpu("A800", 312e12, 19.5e12, 80),
    "l40s": Gpu("L40S", 362e12, 91.6e12, 48, inline_ecc=True),
    "l40": Gpu("L40", 181e12, 90.5e12, 48, inline_ecc=True),
    "l20": Gpu("L20", 119.5e12, 59.8e12, 48, inline_ecc=True),
    "l4": Gpu("L4", 121e12, 30.3e12, 24, inline_ecc=True),
    "a10g": Gpu("A10G", 70e12, 35e12, 24, inline_ecc=True),
    "a10": Gpu("A10", 125e12, 31.2e12, 24, inline_ecc=True),
    "rtx4090": Gpu("RTX 4090", 165e12, 82.6e12, 24),
    "rtx3090": Gpu("RTX 3090", 71e12, 35.6e12, 24),
}
_OTHER_CHIPS = r"\b(Laptop|Max-Q|Ti|SUPER|D|MIG)\b"  # a name that goes on like this is another, or a part of one
_VIRTUAL = r"\bGRID\b|-\d+[ABCQ](ME)?\b"  # a hypervisor's share of a card: GRID A100-10C, NVIDIA A10-4Q


def known_gpu(name: str) -> Gpu | None:
    """The data sheet of the device that calls itself so, if it is in the table.

    ```
    >>> known_gpu("NVIDIA L40").label, known_gpu("NVIDIA GeForce RTX 4090 Laptop GPU")
    ('L40', None)
    ```
    """
    if re.search(f"{_OTHER_CHIPS}|{_VIRTUAL}", name):
        return None
    return next((gpu for gpu in GPUS.values() if re.search(rf"\b{gpu.label}\b", name)), None)


@dataclass(frozen=True)
class Machine:
    """What a run trains on, every `auto` resolved.

    Attributes:
        accelerator: `cpu` or `gpu`, as Lightning calls them.
        devices: processes on each machine.
        num_nodes: machines.
        precision: `bf16` or `fp32`.
    """

    accelerator: str
    devices: int
    num_nodes: int
    precision: str

    @property
    def world_size(self) -> int:
        """All processes."""
        return self.devices * self.num_nodes

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`, as torch calls them."""
        return "cuda" if self.accelerator == "gpu" else "cpu"


def resolve_machine(accelerator: str, devices: int | str, num_nodes: int | str, precision: str) -> Machine:
    """Resolves every `auto`, from what the launcher says where it started the processes.

    Raises:
        ValueError: as `resolve_accelerator`, `resolve_devices`, `Placement.agree` and `resolve_precision`.
    """
    accelerator = resolve_accelerator(accelerator)
    place = placement.here()
    asked = 0 if devices == "auto" and place.starts_all else resolve_devices(devices, accelerator)
    size, nodes = place.agree(asked, num_nodes)
    return Machine(accelerator, resolve_devices(size, accelerator), nodes, resolve_precision(precision, accelerator))


def resolve_accelerator(accelerator: str) -> str:
    """`auto` → `gpu` where CUDA is usable, else `cpu`.

    Raises:
        ValueError: for an unknown name, or a GPU that is asked for and not there.
    """
    if accelerator not in ("auto", "cpu", "gpu", "cuda"):
        raise ValueError(f"trainer.accelerator={shown(accelerator)!r} must be auto, cpu or gpu.")
    available = torch.cuda.is_available()
    if accelerator == "auto":
        return "gpu" if available else "cpu"
    if accelerator != "cpu" and not available:
        raise ValueError(
            f"trainer.accelerator={accelerator} was asked for and torch {torch.__version__} sees no CUDA device; "
            "take trainer.accelerator=cpu or install a CUDA build of torch (make TORCH_INDEX=…)."
        )
    return "cpu" if accelerator == "cpu" else "gpu"


def resolve_devices(devices: int | str, accelerator: str) -> int:
    """Processes on this machine: `auto` means every GPU, or one process on a CPU.

    Raises:
        ValueError: for a number that is not positive or exceeds the GPUs there are.
    """
    count = torch.cuda.device_count() if accelerator == "gpu" else 1
    if devices == "auto":
        return count
    try:
        number = int(devices)
    except ValueError:
        raise ValueError(f"trainer.devices={devices!r} must be a number or auto.") from None
    if number < 1:
        raise ValueError(f"trainer.devices={number} must be at least 1.")
    if accelerator == "gpu" and number > count:
        raise ValueError(f"trainer.devices={number} exceeds the {count} GPUs of this machine.")
    return number


def resolve_precision(precision: str, accelerator: str) -> str:
    """`auto` → `bf16` where the processor multiplies bf16 natively, else `fp32`.

    Raises:
        ValueError: for an unknown name.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"trainer.precision={shown(precision)!r} must be one of {', '.join(PRECISIONS)}.")
    if precision == "auto":
        return "bf16" if has_native_bf16(accelerator) else "fp32"
    return precision


def has_native_bf16(accelerator: str) -> bool:
    """AVX512-BF16, AMX or Arm's BF16 on a CPU; compute capability 8.0 (Ampere) or above on a GPU."""
    if accelerator == "gpu":
        return torch.cuda.get_device_capability()[0] >= 8
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


@dataclass(frozen=True)
class Peak:
    """The most FLOP/s that a device can do, the denominator of MFU, and where the figure is from."""

    flops: float
    source: str


def peak_of(precision: str, device: torch.device) -> Peak:
    """The peak of a device in `bf16` or `fp32`: a known GPU's by its data sheet, another's as measured now."""
    return known_peak(precision, device) or measure_peak(precision, device)


def known_peak(precision: str, device: torch.device) -> Peak | None:
    """The peak by the data sheet; `None` for a CPU and a GPU that is not in the table."""
    if device.type != "cuda":
        return None
    gpu = known_gpu(torch.cuda.get_device_name(device))
    return None if gpu is None else Peak(gpu.peak(precision), f"the data sheet's {gpu.label}")


def measure_peak(precision: str, device: torch.device, *, seconds: float = 0.3, products: int = 5) -> Peak:
    """The fastest of repeated square matrix products.

    The best of several, because whatever else the machine does can only make one slower.

    Args:
        precision: `bf16` or `fp32`.
        device: where they are taken.
        seconds: how long to go on.
        products: how many at least.
    """
    size = 4096 if device.type == "cuda" else 1024
    times: list[float] = []
    with torch.no_grad():
        left = torch.full((size, size), 0.5, dtype=DTYPES[precision], device=device)
        left @ left  # the first product pays for thread pools and kernels
        synchronize(device)
        end = time.perf_counter() + seconds
        while len(times) < products or time.perf_counter() < end:
            start = time.perf_counter()
            left @ left
            synchronize(device)
            times.append(time.perf_counter() - start)
    return Peak(2 * size**3 / min(times), f"the fastest of {len(times)} matrix products, measured now")


def share_threads(processes: int) -> None:
    """Divides this machine's threads among its processes, unless the user did with `OMP_NUM_THREADS`.

    Torch with MKL takes one thread per physical core. Lightning would take one per logical core, which is slower in
    matrix products; it leaves alone what the variable says, and processes that it starts inherit that.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, torch.get_num_threads() // processes)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)


def check_compiler() -> None:
    """Refuses `torch.compile` where it has no compiler to hand its code to.

    Raises:
        ValueError: there is none.
    """
    names = [os.environ.get("CXX", "").split(" ")[0], "c++", "g++", "clang++"]
    if not any(name and shutil.which(name) for name in names):
        raise ValueError(
            "trainer.compile=true needs a C++ compiler, and there is none on PATH; install one (Debian: apt install "
            "g++) or leave trainer.compile=false."
        )


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held so far: on its GPU, or resident where it computes on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident.peak_bytes()
