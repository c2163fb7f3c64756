"""A GPU is known by the name it gives itself, and no other is taken for it; the peak that MFU is a share of."""

import time

import pytest
import torch

from llmtrain.training import hardware
from llmtrain.training.hardware import GPUS, known_gpu


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA B200", "b200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA H800 PCIe", "h800-pcie"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA A800-SXM4-80GB", "a800"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L20", "l20"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
    ],
)
def test_a_gpu_is_known_by_its_name(name, key):
    assert known_gpu(name) is GPUS[key]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A1000 Laptop GPU",
        "NVIDIA RTX A1000",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA GH200 480GB",
        "NVIDIA T4",
        "GRID A100-10C",
        "GRID A100D-80C",
        "NVIDIA A100-40C",
        "NVIDIA A100-1-5CME",
        "NVIDIA A10-4Q",
        "NVIDIA L40S-48Q",
    ],
)
def test_another_gpu_with_a_like_name_is_measured_instead(name):
    assert known_gpu(name) is None


@pytest.mark.parametrize(
    ("key", "reported"),
    [
        ("h100", 79.1),
        ("h100", 79.6),
        ("h200", 139.8),
        ("h100-nvl", 93.1),
        ("a100-40gb", 39.4),
        ("a100", 79.2),
        ("h20", 95.1),
        ("rtx4090", 23.52),
        ("rtx3090", 23.68),
        ("l40s", 44.39),
        ("l40", 44.4),
        ("l4", 22.03),
    ],
)
def test_a_cards_memory_is_what_cuda_says(key, reported):
    """In GiB, as torch prints it where memory runs out ("GPU 0 has a total capacity of …")."""
    assert GPUS[key].memory == pytest.approx(reported * 2**30, rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_data_sheet_says_the_peak_of_a_known_gpu_and_nothing_is_measured(monkeypatch, precision):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200 NVL")
    peak = hardware.peak_of(precision, torch.device("cuda", 0))
    assert peak.flops == {"fp32": 60e12, "bf16": 835e12}[precision]
    assert "H200 NVL" in peak.source


def test_a_measured_peak_is_the_best_of_several_products_after_the_first(monkeypatch):
    """The first one takes as long as the whole measurement may, as on a GPU that loads its library; others are slow."""
    now, calls, product = [0.0], [], torch.Tensor.__matmul__
    seconds = [10.0, 0.3, 0.2, 0.25, 0.4, 0.5]

    def slow(left, right):
        calls.append(len(calls))
        now[0] += seconds[min(len(calls), len(seconds)) - 1]
        return product(left[:8, :8], right[:8, :8])

    monkeypatch.setattr(torch.Tensor, "__matmul__", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    peak = hardware.measure_peak("fp32", torch.device("cpu"), seconds=0.3)
    assert len(calls) == 6
    assert peak.flops == pytest.approx(2 * 1024**3 / 0.2)
