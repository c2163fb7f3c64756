"""`llmtrain pretrain` as a program on one and two processes, and the settings that it refuses before any work."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = "话说天下大势，分久必合，合久必分。周末七国分争，并入于秦。\n" * 60
TOY = [
    "model=tiny", "tokenizer=byte", "data=files", "data.validation_fraction=0.2", "data.sequence_length=32",
    "trainer.max_steps=20", "trainer.batch_tokens=256", "trainer.log_every=1", "trainer.val_every=10",
    "trainer.checkpoint_every=10", "trainer.sample_every=10", "optim.warmup_steps=2", "callbacks.prompts=[话说天下]",
    "callbacks.max_new_tokens=6", "sampling.max_new_tokens=12", "trainer.accelerator=cpu",
]  # fmt: skip


def settings(*overrides: str) -> Any:
    from llmtrain.launch.composing import compose

    return compose("pretrain", [*TOY, *overrides]).settings


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(12):
        (folder / f"{number}.txt").write_text(f"第{number}回\n{TEXT}", encoding="utf-8")
    return folder


@pytest.fixture
def program(tmp_path, corpus, fake_environment):
    """`program("name=a")` starts `llmtrain pretrain` at toy size in `tmp_path`."""

    started: list[subprocess.Popen] = []

    def start(*overrides: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-m", "llmtrain", "pretrain", *TOY, f"data.paths=[{corpus}]", *overrides],
            cwd=tmp_path,
            env=fake_environment | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen) -> int:
    """The exit code, once there is one; what it wrote is read, so that it never waits for a reader."""
    process.communicate(timeout=280)
    return process.returncode


def figures(run_dir: Path) -> list[dict[str, str]]:
    """The rows of `metrics.csv` without what depends on the clock."""
    with (run_dir / "metrics.csv").open(encoding="utf-8") as file:
        clocked = ("seconds", "train/tokens_per_second", "train/mfu", "train/memory_bytes")
        return [{k: v for k, v in row.items() if k not in clocked} for row in csv.DictReader(file)]


def wait_for_step(process: subprocess.Popen, run_dir: Path, step: int) -> None:
    """Until `metrics.csv` holds a step."""
    while process.poll() is None:
        if (run_dir / "metrics.csv").exists() and len(figures(run_dir)) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"the run ended before step {step}: {process.communicate()[1][-2000:]}")


@pytest.mark.medium
def test_one_process(program, tmp_path):
    process = program("name=toy", "report_every=0", "callbacks.recall=5")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert out.count("\n") == 1
    results = json.loads(out)
    run_dir = tmp_path / "runs" / "pretrain" / "toy"
    assert Path(results["run_dir"]) == run_dir
    assert results["model"] == str(run_dir / "model")
    assert results["steps"] == 20
    assert results["tokens"] == 20 * 256
    assert 0 < results["val_bpb"] < 8
    assert {"val_loss", "tokens_per_second", "train_seconds", "samples", "distinct_4"} <= results.keys()
    assert results["recall"].keys() == {"trained_on", "held_out"}
    assert results["recall"]["held_out"]["loss"] == pytest.approx(results["val_loss"], rel=1e-3)
    assert "is memory, not skill" in err
    assert [int(row["step"]) for row in figures(run_dir)] == list(range(1, 21))
    remembered = json.loads((run_dir / "model" / "llmtrain.json").read_text(encoding="utf-8"))
    assert remembered["trained_length"] == 32
    assert remembered["config"]["trainer"]["max_steps"] == 20
    assert 300 not in remembered["never_seen"]  # only ids that the tokenizer has
    assert set(b"Q") <= {token - 6 for token in remembered["never_seen"]}
    assert (run_dir / "samples.md").read_text(encoding="utf-8").startswith("## step 10")
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")
    for shown in ("finished", "name=toy report_every=0", "trainer.max_steps", "话说天下", "Memory, peak so far"):
        assert shown in page, shown
    facts = json.loads((run_dir / "facts.json").read_text(encoding="utf-8"))
    assert facts["differs"]["optim.warmup_steps"][1] == 2
    assert sum(source["share"] for source in facts["sources"]) == 1
    assert facts["tokenizer"]["ids"] == 262  # 256 bytes and the special tokens
    with (run_dir / "metrics.csv").open(encoding="utf-8") as file:
        memory = [float(row["train/memory_bytes"]) for row in csv.DictReader(file)]
    assert memory == sorted(memory)
    assert memory[0] > 10**7
    assert "next: make generate" in err
    assert "memory: about " in err  # the short form of the plan
    for chatter in ("deprecated", "litlogger", "GPU available", "untested optimizer"):
        assert chatter not in err


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_stop_on_a_signal_to_one_and_leave_one_folder(program, tmp_path):
    """With an exit code to queue again on; a step is finished and saved first."""
    run_dir = tmp_path / "runs" / "pretrain" / "two"
    process = program("name=two", "trainer.devices=2", "trainer.max_steps=5000", "trainer.val_every=null")
    wait_for_step(process, run_dir, 3)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 75, err
    assert "resume=auto goes on" in err
    steps = len(figures(run_dir))
    assert (run_dir / "checkpoints" / f"step-{steps:06d}" / "checkpoint.json").exists()
    assert sorted(path.name for path in run_dir.parent.iterdir()) == ["latest", "two"]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "options",
    [
        ("strategy=deepspeed_1", "optim=muon", "trainer.precision=fp32"),
        ("strategy=deepspeed_2", "optim=muon", "trainer.precision=bf16"),
        ("strategy=deepspeed_3", "optim=adamw", "trainer.precision=fp32"),
    ],
)
def test_two_processes_interrupted_equal_two_that_were_not(program, tmp_path, options):
    options = ("trainer.devices=2", "model.dropout=0.1", "trainer.max_steps=40", "trainer.micro_batch_size=2", *options)
    straight, interrupted = (tmp_path / "runs" / "pretrain" / name for name in ("straight", "interrupted"))
    assert ended(program("name=straight", *options)) == 0
    process = program("name=interrupted", *options)
    wait_for_step(process, interrupted, 5)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == 75
    assert 5 <= len(figures(interrupted)) < 40
    assert ended(program("name=interrupted", "resume=auto", *options)) == 0
    assert figures(interrupted) == figures(straight)
    ours, theirs = (folder / "model" / "model.safetensors" for folder in (interrupted, straight))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_checkpoint(program, tmp_path):
    run_dir = tmp_path / "runs" / "pretrain" / "killed"
    process = program("name=killed", "trainer.max_steps=2000", "trainer.checkpoint_every=5")
    wait_for_step(process, run_dir, 8)
    os.kill(process.pid, signal.SIGKILL)
    ended(process)
    steps = len(figures(run_dir)) + 10
    again = program("name=killed", f"trainer.max_steps={steps}", "trainer.checkpoint_every=5", "resume=auto")
    assert ended(again) == 0
    assert [int(row["step"]) for row in figures(run_dir)] == list(range(1, steps + 1))


@pytest.mark.medium
def test_init_goes_on_from_a_models_weights_with_its_shape_and_tokenizer(tmp_path, corpus, caplog):
    from llmtrain.checkpoint import load_model_folder
    from llmtrain.launch.pretrain import run

    def train(name: str, *overrides: str) -> dict[str, Any]:
        run_dir = tmp_path / name
        run_dir.mkdir()
        paths = (f"data.paths=[{corpus}]", f"paths.data_dir={tmp_path / 'data'}")
        return run(settings("strategy=single", "trainer.precision=fp32", "seed=1", *paths, *overrides), run_dir)

    first = train("first")
    caplog.set_level("INFO")
    second = train("second", f"init={first['model']}", "model.hidden_size=32", "tokenizer=bpe")
    assert second["val_bpb"] < first["val_bpb"]
    assert "model.* and tokenizer.* are not used" in caplog.text
    ours, theirs = load_model_folder(second["model"]), load_model_folder(first["model"])
    assert (ours.config, ours.tokenizer.hash) == (theirs.config, theirs.tokenizer.hash)
    assert ours.info["never_seen"] == theirs.info["never_seen"]


NEED_TEXT = ("lower data.sequence_length", "has no tokens", "model.vocab_size=100 is less than the tokenizer's 262 ids")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.batch_tokens=100"], "batch_tokens=100 is not a multiple of data.sequence_length=32"),
        (["trainer.micro_batch_size=3"], "micro_batch_size=3 does not divide the 8 rows"),
        (["trainer.devices=3"], "8 rows per step do not divide over 3 processes"),
        (["data.sequence_length=512", "trainer.batch_tokens=512"], "exceeds the model's context of 256 tokens"),
        (["model.hidden_size=65"], "model.hidden_size=65 is not divisible"),
        (["strategy=single", "trainer.devices=2"], "strategy=single runs one process"),
        (["strategy=deepspeed_3", "optim=muon"], "optim.name=muon cannot run under strategy=deepspeed_3"),
        (["trainer.precision=int8"], "trainer.precision=int8 must be auto, bf16 or fp32"),
        (["sampling.top_p=0"], "sampling.top_p=0 must be a number above 0 and at most 1"),
        (["sampling.temperature=-1"], "temperature=-1 must be a number of at least 0"),
        (["model.vocab_size=100"], "model.vocab_size=100 is less than the tokenizer's 262 ids"),
        (["optim.warmup_steps=30"], "optim.warmup_steps=30"),
        (["optim.schedule=linear"], "optim.schedule=linear"),
        (["trainer.max_steps=null"], "nothing says when to stop"),
        (
            ["data.sequence_length=256", "trainer.batch_tokens=256", "data.paths=[{short}]"],
            "lower data.sequence_length",
        ),
        (["callbacks.prompts=['']"], "has no tokens"),
        (["init=nowhere"], "init=nowhere does not exist"),
        (["resume=nowhere"], "resume=nowhere does not exist; give a run folder, a checkpoint, or auto"),
        (["data.paths=[nowhere.txt]"], "nowhere.txt"),
        (["tokenizer=bpe", "model.vocab_size=300"], "model.vocab_size=300 is less than the tokenizer's"),
        (["optim.lr=0"], "optim.lr=0 must be a number above 0"),
        (["optim.betas=[0.9]"], "optim.betas=[0.9] must be two numbers"),
        (["optim.grad_clip=-1"], "optim.grad_clip=-1 must be a number above 0, or null"),
        (["trainer.log_every=0"], "trainer.log_every=0 must be a whole number of at least 1 (log figures"),
        (["trainer.keep_last=0"], "trainer.keep_last=0 must be a whole number of at least 1, or null (checkpoints"),
        (["trainer.max_steps=1.5"], "trainer.max_steps=1.5 must be a whole number of at least 1"),
        (["seed=-1"], "seed=-1 must be a whole number from 0"),
        (["trainer.max_steps=null", "trainer.max_tokens=2560", "optim.warmup_steps=11"], "the run's 10 steps"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence(tmp_path, corpus, monkeypatch, overrides, message):
    from llmtrain.launch.pretrain import run

    short = tmp_path / "short.txt"
    short.write_text("one short text\n\nand another", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    overrides = [f"data.paths=[{corpus}]", *(each.format(short=short) for each in overrides)]
    with pytest.raises(ValueError, match=r".+") as error:
        run(settings(*overrides), tmp_path / "run")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    if message not in NEED_TEXT:
        assert not (tmp_path / "data").exists()  # refused before any work


REFUSED_LIGHTLY = """
import importlib, pathlib, sys
from llmtrain.launch.composing import compose
light = True
for command, *overrides in {cases}:
    light = light and command != "now torch"
    if command == "now torch":
        continue
    try:
        settings = compose(command, overrides).settings
        importlib.import_module(f"llmtrain.launch.{{command}}").run(settings, pathlib.Path("held"))
    except ValueError as error:
        print(error)
    found = {{"lightning", "deepspeed", "peft", "transformers", "datasets", *["torch"] * light}} & set(sys.modules)
    assert not found, (overrides, found)
"""


@pytest.mark.medium
def test_settings_are_refused_before_anything_heavy_is_imported(tmp_path, fake_environment):
    """Lightning takes seconds to import, torch one. What is imported stays, so one process does for all cases."""
    cases = [
        ("pretrain", "trainer.batch_tokens=1000"),
        ("pretrain", "init=nowhere"),
        ("pretrain", "resume=nowhere"),
        ("pretrain", "trainer.val_every=0"),
        ("pretrain", "sampling.top_p=2"),
        ("pretrain", "data=zh_number"),
        ("finetune", "data=sanguo"),
        ("finetune", "trainer.log_every=0"),
        ("generate", "prompt=a", "sampling.temperature=-1"),
        ("generate", "prompt=a", "precision=int8"),
        ("generate", "prompt_file=nowhere"),
        ("evaluate", "tasks.names=chess"),
        ("evaluate", "shards_dir=nowhere"),
        ("tokenize", "ids=[x]"),
        ("prepare", "tokenizer.vocab_size=1"),
        ("now torch",),
        ("pretrain", "trainer.precision=int8"),
        ("pretrain", "optim.warmup_steps=2000"),
        ("pretrain", "optim.weight_decay=-1"),
        ("finetune", "trainer.max_steps=3"),
        ("finetune", "adapter.r=0"),
        ("finetune", "trainer.precision=int8"),
        ("finetune", "model=nowhere"),
        ("generate", "prompt=a", "model=nowhere"),
    ]
    program = REFUSED_LIGHTLY.format(cases=cases)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=fake_environment, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    sentences = done.stdout.splitlines()
    assert len(sentences) == len(cases) - 1, done.stdout
    assert sentences[18].startswith(
        "optim.warmup_steps=10 must be between 0 and the run's 3 steps; for so short a run give"
    )
    assert list(tmp_path.iterdir()) == []
