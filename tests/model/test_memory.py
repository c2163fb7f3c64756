"""The memory that is there, as Linux and control groups tell it."""

import pytest
import torch

from llmtrain.model import memory

CPU = torch.device("cpu")


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Writes what the system would say."""
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CONTROL_GROUP", tmp_path)

    def write(**files: str) -> None:
        for name, text in files.items():
            (tmp_path / name.replace("__", ".")).write_text(text)

    return write


def test_what_only_caches_files_can_be_had(system):
    system(meminfo="MemTotal: 4000 kB\nMemFree: 1000 kB\nMemAvailable: 3000 kB\n")
    assert memory.available_memory(CPU) == 3000 * 1024


def test_a_control_group_counts_as_the_machine(system):
    system(meminfo="MemAvailable: 3000 kB\n", memory__max="2000000\n", memory__current="900000\n")
    system(memory__stat="anon 500000\ninactive_file 300000\n")
    assert memory.available_memory(CPU) == 2_000_000 - 900_000 + 300_000
    assert memory.machine_memory() == 2_000_000


def test_a_group_without_a_limit_changes_nothing(system):
    system(meminfo="MemAvailable: 3000 kB\n", memory__max="max\n", memory__current="900000\n")
    assert memory.available_memory(CPU) == 3000 * 1024
    assert memory.machine_memory() > 2**28


def test_a_system_that_does_not_say_counts_all_there_is(system):
    assert memory.available_memory(CPU) == memory.machine_memory()
