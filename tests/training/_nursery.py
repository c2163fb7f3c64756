"""Imports everything once and then forks the processes of one toy run after another, so that a start costs nothing.

Reads one job per line on stdin and answers with one line: the exit codes by rank. A job is
`{"processes": 2, "fit": {…}, "folder": …, …}`: arguments of `toy_fit`, and what happens to the processes:

    "signal": {"rank": 1, "step": 6, "micro_batch": 1, "name": "SIGTERM"}   as that micro-batch begins (rank null: all)
    "kill_after": 0.3                                                       SIGKILL to all, in seconds from the start
    "kill_at_change": 7                                                     SIGKILL at the 7th change of the run folder
    "store_loaded": true         what a resumed run has loaded is saved again at once, to `loaded/`
    "no_space": {"rank": 1, "tensor": 70}     the disk is full when this process writes its 70th tensor
    "no_space": {"rank": 1, "folder": "resume"}     … when it makes a folder of that name
    "no_space": {"rank": 0, "file": "metrics.csv", "step": 4}     … when it writes that file after this step
    "disk": 2000000              the run folder is a file system of so many bytes; once it is full, see `fill_the_disk`

Each process appends what it trains on to `seen-<rank>.jsonl`: `[step, micro-batch, sample ids]`; rank 0 leaves the
result of `fit` in `result.json` (or the error's text), and all that is printed goes to `printed.txt`.
Must not run anything of torch itself: a process with threads cannot be forked.
"""

import ctypes
import dataclasses
import errno
import json
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from llmtrain import adapters, checkpoint  # noqa: F401
from llmtrain.bench.ranks import free_port
from llmtrain.training import checkpointing, state
from llmtrain.training import fit as fitting
from llmtrain.training.deepspeed import environment
from llmtrain.training.module import LanguageModule
from llmtrain.training.tensorfile import TensorWriter
from tests.training.toy import toy_fit


def import_the_rest() -> None:
    import lightning.pytorch.loggers
    import peft

    environment.prepare_import("cpu")
    import deepspeed.runtime.zero.muon.muon_optimizer  # which the engine imports late, and torch's compiler with it
    import torch.testing  # likewise

    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # surviving a power cut is another test's business
    assert lightning
    assert peft
    assert deepspeed


def record_and_signal(folder: Path, rank: int, wanted: dict[str, Any] | None) -> None:
    original = LanguageModule.on_train_batch_start
    seen = (folder / f"seen-{rank}.jsonl").open("a")

    def on_train_batch_start(self: Any, batch: dict, batch_idx: int) -> None:
        original(self, batch, batch_idx)
        place = [self.trainer.global_step, batch_idx % self.trainer.accumulate_grad_batches]
        seen.write(json.dumps([*place, batch["sample_ids"].tolist()]) + "\n")
        seen.flush()
        if wanted and wanted["rank"] in (None, rank) and place == [wanted["step"], wanted.get("micro_batch", 0)]:
            os.kill(os.getpid(), getattr(signal, wanted["name"]))

    LanguageModule.on_train_batch_start = on_train_batch_start


def store_loaded(folder: Path) -> None:
    original = checkpointing.load_training_state

    def load_training_state(trainer: Any, loaded_from: Any) -> None:
        original(trainer, loaded_from)
        shard = trainer.strategy.shard(trainer.lightning_module.model)
        state.save(shard, state.plan(shard), folder / "loaded")

    checkpointing.load_training_state = load_training_state


CHANGES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}


def kill_at_change(folder: Path, number: int) -> None:
    """Ends this process just before the given change of a file or folder in the run folder."""
    left = [number]

    def watch(event: str, arguments: tuple) -> None:
        if event not in CHANGES:
            return
        if event == "open" and not (isinstance(arguments[1], str) and set(arguments[1]) & set("wxa+")):
            return
        # What `rmtree` removes is named from a folder that it holds open.
        inside = event in ("os.remove", "os.rmdir") and arguments[1] != -1
        left[0] -= inside or str(arguments[0]).startswith(f"{folder}/")
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def no_space(folder: Path, wanted: dict[str, Any]) -> None:
    """Where the disk is full for this process."""
    if "folder" in wanted:
        fail_making(wanted["folder"])
    elif "file" in wanted:
        fill(folder / wanted["file"], wanted["step"])
    else:
        fail_writing(wanted["tensor"])


def fail_making(name: str) -> None:
    original = Path.mkdir

    def mkdir(self: Path, *arguments: Any, **options: Any) -> None:
        if self.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        original(self, *arguments, **options)

    Path.mkdir = mkdir


def fill(file: Path, step: int) -> None:
    """From this step on a file takes no more."""
    original = LanguageModule.on_train_batch_start

    def on_train_batch_start(self: Any, batch: dict, batch_idx: int) -> None:
        original(self, batch, batch_idx)
        if self.trainer.global_step == step:
            full = file.with_name("full")
            full.unlink(missing_ok=True)
            full.symlink_to("/dev/full")
            full.replace(file)

    LanguageModule.on_train_batch_start = on_train_batch_start


def fail_writing(tensor: int) -> None:
    original, left = TensorWriter.write, [tensor]

    def write(self: Any, name: str, values: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a disk")
        original(self, name, values)

    TensorWriter.write = write


def fill_the_disk(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Runs on a small disk until it is full; then looks at what is there, and goes on with room enough.

    The disk is this process's alone and goes with it, so that the run folder is copied to `copied/` beside it.
    """
    from llmtrain.checkpoint import atomic, verify
    from llmtrain.launch.edge import _sentence

    atomic.check_free_space = lambda *arguments: None  # else it would say so before the disk is full
    mount(folder, f"size={job['disk']}")
    answer: dict[str, Any] = {}
    try:
        toy_fit(folder, resume="auto", **job["fit"])
        answer["full"] = False
    except Exception as error:
        answer |= {"full": True, "sentence": _sentence(error), "error": repr(error)}
    for found in checkpointing.list_checkpoints(folder):
        verify(found.path / "model")
        answer["newest"] = found.step
    answer["left"] = [path.name for place in (folder, folder / "checkpoints") for path in place.glob(".*")]
    mount(folder, "remount,size=1000000000")
    result = toy_fit(folder, resume="auto", **job["fit"])
    shutil.copytree(folder, folder.with_name("copied"))
    return answer | {"steps": result.steps, "resumed_from": result.resumed_from}


def mount(folder: Path, options: str) -> None:
    """A file system in memory at `folder`, seen by this process alone."""
    c = ctypes.CDLL(None, use_errno=True)
    remount = options.startswith("remount")
    if not remount:
        user = f"0 {os.getuid()} 1"
        if os.getuid():  # whoever is not root becomes it, in a world of their own
            assert c.unshare(0x10000000 | 0x00020000) == 0, os.strerror(ctypes.get_errno())  # new user and mount names
            Path("/proc/self/uid_map").write_text(user)
        else:
            assert c.unshare(0x00020000) == 0, os.strerror(ctypes.get_errno())
        c.mount(None, b"/", None, 0x4000 | 0x40000, None)  # what is mounted here is not seen elsewhere
    flags, text = (0x20, options.removeprefix("remount,")) if remount else (0, options)
    if c.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, text.encode()):
        raise OSError(ctypes.get_errno(), "mount")


def train(job: dict[str, Any], rank: int, port: int) -> int:
    """What one process does; returns its exit code."""
    folder = Path(job["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    printed = os.open(folder / "printed.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if "disk" in job:
        result = fill_the_disk(folder, job)
        folder.with_name("result.json").write_text(json.dumps(result))
        return 0
    record_and_signal(folder, rank, job.get("signal"))
    if "no_space" in job and job["no_space"]["rank"] == rank:
        no_space(folder, job["no_space"])
    if "store_loaded" in job:
        store_loaded(folder)
    if "kill_at_change" in job:
        kill_at_change(folder, job["kill_at_change"])
    code = 0
    try:
        result = dataclasses.asdict(toy_fit(folder, devices=job["processes"], **job["fit"]))
    except (ValueError, OSError) as error:
        result, code = {"error": str(error)}, 2
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result, default=str))
    return code


def born(job: dict[str, Any], rank: int, port: int) -> int:
    """Forks one process; returns its id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        code = train(job, rank, port)
    except SystemExit as asked:
        code = asked.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run(job: dict[str, Any]) -> list[int]:
    """Runs a job. When one of its processes is killed the others are ended too; when one fails, a little later."""
    port = free_port()
    processes = [born(job, rank, port) for rank in range(job["processes"])]
    codes: dict[int, int] = {}
    deadline = time.monotonic() + job.get("kill_after", 240.0)
    while len(codes) < len(processes):
        for process in set(processes) - set(codes):
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                codes[process] = os.waitstatus_to_exitcode(status)
                if codes[process]:
                    deadline = min(deadline, time.monotonic() + (30.0 if codes[process] > 0 else 0.0))
        if time.monotonic() > deadline:
            for process in set(processes) - set(codes):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.002)
    return [codes[process] for process in processes]


if __name__ == "__main__":
    import_the_rest()
    assert fitting
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
