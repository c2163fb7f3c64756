"""Two machines, as near as one comes to them: two network namespaces with a cable between them.

Each "host" has its own loopback and one interface; the disk is shared. DeepSpeed over gloo trains on both, one host is
lost, and the run goes on to the same weights.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from tests.launch.test_pretrain import TOY, figures

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(600)]

ADDRESSES = ("10.77.0.1", "10.77.0.2")  # of no network but the cable's
OPTIONS = (
    "data=python_docs",
    "trainer.checkpoint_every=4",
    "trainer.num_nodes=2",
    "trainer.timeout=60",
    "model.dropout=0.1",
    "strategy=deepspeed_2",
    "trainer.precision=fp32",
)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """The names of two network namespaces that reach each other under `ADDRESSES`."""
    if not shutil.which("ip"):
        pytest.skip("there is no `ip` to make network namespaces with")
    names = [f"llmtrain-{os.getpid()}-{side}" for side in "ab"]
    cable = [f"llm{os.getpid() % 10**6}{side}" for side in "ab"]
    commands = [f"netns add {name}" for name in names]
    commands.append(f"link add {cable[0]} netns {names[0]} type veth peer name {cable[1]} netns {names[1]}")
    for name, end, address in zip(names, cable, ADDRESSES, strict=True):
        commands += [f"-n {name} addr add {address}/24 dev {end}", f"-n {name} link set {end} up"]
        commands.append(f"-n {name} link set lo up")
    try:
        for command in commands:
            done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"this machine allows no network namespaces: ip {command}: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@pytest.fixture
def start(hosts, tmp_path, fake_environment) -> Iterator[Callable[..., list[subprocess.Popen]]]:
    """`start("name=a", env=[…, …])` starts `llmtrain pretrain` on both hosts, with each host's variables."""
    started: list[subprocess.Popen] = []

    def run(*overrides: str, program: tuple[str, ...] = ("-m", "llmtrain", "pretrain"), env: list[dict[str, str]]):
        processes = [
            subprocess.Popen(
                [*words(host), *(word.format(node=node) for word in program), *TOY, *OPTIONS, *overrides],
                cwd=tmp_path,
                env=fake_environment | {"OMP_NUM_THREADS": "1"} | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
            )
            for node, (host, variables) in enumerate(zip(hosts, env, strict=True))
        ]
        started.extend(processes)
        return processes

    yield run
    for process in started:
        process.kill()
        process.communicate()


def words(host: str) -> list[str]:
    """Runs this interpreter on that host."""
    return ["ip", "netns", "exec", host, sys.executable]


def by_hand(port: int) -> list[dict[str, str]]:
    meeting = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(port)}
    return [meeting | {"NODE_RANK": node} for node in "01"]


def test_a_run_on_two_hosts_loses_one_and_goes_on_to_the_same_weights(start, tmp_path):
    straight, lossy = (tmp_path / "runs" / "pretrain" / name for name in ("straight", "lossy"))
    torchrun = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--node_rank={node}")
    torchrun += (f"--master_addr={ADDRESSES[0]}", "--master_port=29601", "-m", "llmtrain", "pretrain")
    for process in start("name=straight", program=torchrun, env=[{}, {}]):
        _, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
    assert [int(row["step"]) for row in figures(straight)] == list(range(1, 21))

    lost = [each | {"LLMTRAIN_SIGNAL_AT": "SIGKILL@7:1"} for each in by_hand(29602)]
    first, second = start("name=lossy", env=lost)
    second.wait(200)
    began = time.monotonic()
    _, err = first.communicate(timeout=120)
    assert (second.returncode, first.returncode) == (-9, 1), err
    assert "error: rank 1 is gone, and the others cannot go on without it" in err
    assert time.monotonic() - began < 60

    for process in start("name=lossy", "resume=auto", env=by_hand(29603)):
        _, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
    assert figures(lossy) == figures(straight)
    ours, theirs = (folder / "model" / "model.safetensors" for folder in (lossy, straight))
    assert ours.read_bytes() == theirs.read_bytes()
    assert {path.name for path in lossy.iterdir()} == {path.name for path in straight.iterdir()}
