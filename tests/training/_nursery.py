"""Imports everything once and then forks the processes of one toy run after another, so that a start costs nothing.

Reads one job per line on stdin and answers with one line: the exit codes by rank. A job is
`{"processes": 2, "fit": {…}, "folder": …, …}`: arguments of `toy_fit`, and what happens to the processes:

    "signal": {"rank": 1, "step": 6, "micro_batch": 1, "name": "SIGTERM"}   as that micro-batch begins (rank null: all)
    "kill_after": 0.3                                                       SIGKILL to all, in seconds from the start
    "kill_at_change": 7                                                     SIGKILL at the 7th change of the run folder
    "store_loaded": true                      what a resumed run has loaded is saved again at once, to `loaded/`

Each process appends what it trains on to `seen-<rank>.jsonl`: `[step, micro-batch, sample ids]`; rank 0 leaves the
result of `fit` in `result.json` (or the error's text), and all that is printed goes to `printed.txt`.
Must not run anything of torch itself: a process with threads cannot be forked.
"""

import dataclasses
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from llmtrain import adapters, checkpoint  # noqa: F401
from llmtrain.training import checkpointing, state
from llmtrain.training import fit as fitting
from llmtrain.training.deepspeed import environment
from llmtrain.training.module import LanguageModule
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


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


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


def train(job: dict[str, Any], rank: int, port: int) -> None:
    folder = Path(job["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    printed = os.open(folder / "printed.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    record_and_signal(folder, rank, job.get("signal"))
    if "store_loaded" in job:
        store_loaded(folder)
    if "kill_at_change" in job:
        kill_at_change(folder, job["kill_at_change"])
    try:
        result = dataclasses.asdict(toy_fit(folder, devices=job["processes"], **job["fit"]))
    except ValueError as error:
        result = {"error": str(error)}
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result, default=str))


def born(job: dict[str, Any], rank: int, port: int) -> int:
    """Forks one process; returns its id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        train(job, rank, port)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run(job: dict[str, Any]) -> list[int]:
    """Runs a job; when one of its processes is killed, or fails, the others are ended too."""
    port = free_port()
    processes = [born(job, rank, port) for rank in range(job["processes"])]
    codes: dict[int, int] = {}
    deadline = time.monotonic() + job.get("kill_after", 240.0)
    while len(codes) < len(processes):
        for process in set(processes) - set(codes):
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                codes[process] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) or time.monotonic() > deadline:
            for process in set(processes) - set(codes):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.002)
    return [codes[process] for process in processes]


if __name__ == "__main__":
    import_the_rest()
    assert fitting
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
