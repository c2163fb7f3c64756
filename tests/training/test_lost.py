"""Which process is named when a collective fails: from what those that are left tell each other."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtrain.training import lost, placement
from llmtrain.training.cluster import describe_exit
from llmtrain.training.lost import LostProcessError
from llmtrain.training.placement import BY_HAND, Placement

BROKEN = "[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4711"
LATE = "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 10000ms for recv operation to complete"


class Store:
    """The store that the ranks share, in memory."""

    def __init__(self) -> None:
        self.words: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.words[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.words for key in keys)

    def get(self, key: str) -> bytes:
        return self.words[key].encode()


@pytest.fixture
def ends(monkeypatch):
    """`ends({0: error, 2: error}, world_size=3)`: what each of these ranks raises when its collective has failed so."""
    import torch.distributed as dist

    store = Store()
    monkeypatch.setattr(lost, "_store", lambda: store)
    monkeypatch.setattr(lost, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(lost, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(lost, "LINGER_SECONDS", 0.5)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)

    def run(errors: dict[int, Exception], *, world_size: int, news: str | None = None) -> dict[int, Exception]:
        raised: dict[int, Exception] = {}

        def rank(number: int, error: Exception) -> None:
            launcher = SimpleNamespace(find_lost=lambda seconds: news, kill=lambda number: None)
            strategy = SimpleNamespace(launcher=launcher)
            trainer = SimpleNamespace(world_size=world_size, global_rank=number, strategy=strategy)
            try:
                with lost.naming_the_lost(trainer, timeout=10):
                    raise error
            except Exception as other:
                raised[number] = other

        threads = [threading.Thread(target=rank, args=each) for each in errors.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return raised

    return run


def test_the_rank_that_says_nothing_is_the_lost_one_and_one_of_the_others_says_so(ends):
    raised = ends({0: RuntimeError(BROKEN), 2: RuntimeError(BROKEN)}, world_size=3)
    assert str(raised[0]).startswith("rank 1 is gone, and the others cannot go on without it; resume=auto")
    assert (raised[0].speaks, raised[2].speaks) == (True, False)


def test_a_rank_that_hangs_is_named_with_the_timeout(ends):
    raised = ends({1: RuntimeError(LATE)}, world_size=2)
    assert str(raised[1]).startswith("rank 0 has not answered for 10 s (trainer.timeout)")
    assert raised[1].speaks


def test_a_rank_that_failed_by_itself_is_named_with_its_reason_and_keeps_its_error(ends):
    full = OSError(28, "No space left on device")
    raised = ends({0: RuntimeError(BROKEN), 1: full}, world_size=2)
    assert raised[1] is full
    assert str(raised[0]).startswith("rank 1 failed ([Errno 28] No space left on device), and the others")


def test_our_own_launcher_knows_how_a_process_ended(ends):
    raised = ends({0: RuntimeError(BROKEN)}, world_size=2, news="rank 1 was ended by SIGSEGV")
    assert str(raised[0]).startswith("rank 1 was ended by SIGSEGV, and the others")


def test_without_its_store_rank_0_is_the_lost_one(ends, monkeypatch):
    def gone():
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(lost, "_store", gone)
    assert str(ends({1: RuntimeError(BROKEN)}, world_size=2)[1]).startswith("rank 0 is gone")


def test_processes_that_never_met_are_told_where(ends, monkeypatch):
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    raised = ends({1: dist.DistNetworkError("the client socket has timed out")}, world_size=2)
    assert "rank 1 did not meet all 2 processes at 10.0.0.1:29500 within 10 s (trainer.timeout)" in str(raised[1])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    raised = ends({1: RuntimeError("Gloo connectFullMesh failed with … Connection refused")}, world_size=2)
    assert "cannot connect to them over the network interface lo; set GLOO_SOCKET_IFNAME" in str(raised[1])


def test_an_error_of_one_process_alone_is_its_own(ends):
    error = RuntimeError(BROKEN)
    assert ends({0: error}, world_size=1)[0] is error
    assert not isinstance(error, LostProcessError)


def test_how_a_process_ended():
    assert describe_exit(2) == "ended with code 2"
    assert describe_exit(-9) == "was ended by SIGKILL, as the system does when memory runs out"
    assert describe_exit(-11) == "was ended by SIGSEGV"


def test_the_reason_of_a_process_of_our_own_says_more_than_its_code(ends):
    full = OSError(28, "No space left on device")
    raised = ends({1: full, 0: RuntimeError(BROKEN)}, world_size=2, news="rank 1 ended with code 2")
    assert str(raised[0]).startswith("rank 1 failed ([Errno 28] No space left on device), and the others")


def test_the_word_of_rank_0_is_heard_before_its_store_goes(ends, monkeypatch):
    """Rank 1 is still in a collective when rank 0 fails, and the store ends with rank 0."""
    store, raised, entered = lost._store(), {}, threading.Event()
    monkeypatch.setattr(placement, "here", lambda: Placement(BY_HAND, local_rank=1))
    trainer = SimpleNamespace(world_size=2, global_rank=1, strategy=SimpleNamespace(launcher=SimpleNamespace()))
    trainer.strategy.launcher = SimpleNamespace(find_lost=lambda seconds: None, kill=lambda number: None)
    broken = threading.Event()

    def rank_1():
        try:
            with lost.naming_the_lost(trainer, timeout=10):
                entered.set()
                broken.wait(20)
                raise RuntimeError(BROKEN)
        except Exception as other:
            raised[1] = other

    thread = threading.Thread(target=rank_1)
    thread.start()
    entered.wait(20)
    raised |= ends({0: OSError(28, "No space left on device")}, world_size=2)
    store.words.clear()
    broken.set()
    thread.join(20)
    assert isinstance(raised[0], OSError)
    assert str(raised[1]).startswith("rank 0 failed ([Errno 28] No space left on device), and the others")


@pytest.mark.medium
@pytest.mark.parametrize(("fails", "code"), [(True, 2), (False, 0)])
def test_a_process_that_has_left_the_training_keeps_its_own_exit_code(fails, code):
    """The other rank ends with code 2, as with a mistake that all find; this one takes longer to end than is waited."""
    end = 'raise ValueError("a mistake")' if fails else "pass"
    program = (
        "import subprocess, sys, time\n"
        "from llmtrain.training import cluster\n"
        "from llmtrain.training.placement import Placement\n"
        "cluster.GRACE_SECONDS = 0.5\n"
        "launcher = cluster.Launcher(cluster.Cluster(Placement(), 2), 2, 1)\n"
        "other = [sys.executable, '-c', 'exit(2)']\n"
        "launcher._call_children_scripts = lambda: launcher.procs.append(subprocess.Popen(other))\n"
        "def function():\n"
        f"    {end}\n"
        "code = 0\n"
        "try:\n"
        "    launcher.launch(function)\n"
        "except ValueError:\n"
        "    code = 2\n"
        "time.sleep(3)\n"
        "assert launcher.find_lost(1) == 'rank 1 ended with code 2'\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.medium
def test_a_process_that_waits_for_a_dead_one_ends_all_the_same():
    """The main thread sleeps, as inside a collective; the other rank ends with code 3."""
    code = (
        "import subprocess, sys, threading, time\n"
        "from llmtrain.training import cluster\n"
        "from llmtrain.training.placement import Placement\n"
        "cluster.GRACE_SECONDS = 0.5\n"
        "launcher = cluster.Launcher(cluster.Cluster(Placement(), 3), 3, 1)\n"
        "sleeping = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "launcher.procs = [subprocess.Popen(sleeping), subprocess.Popen([sys.executable, '-c', 'exit(3)'])]\n"
        "threading.Thread(target=launcher._watch, daemon=True).start()\n"
        "print(launcher.procs[0].pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "rank 2 ended with code 3, and the others cannot go on without it"
    state = Path(f"/proc/{done.stdout.strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"
