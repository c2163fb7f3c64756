"""`-m`: which runs a command line asks for, and several real runs from one command."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmtrain.launch import children, main, multirun
from llmtrain.launch.composing import SettingsError
from llmtrain.launch.sweeps import read_sweep
from llmtrain.training import placement
from tests.launch.test_pretrain import ROOT, TOY, figures

CONFIGS = Path(__file__).parent / "fake" / "configs"
TOKENIZE = [sys.executable, "-m", "llmtrain", "tokenize", "-m"]


def sweep(*overrides):
    return read_sweep("generate", overrides, CONFIGS)


def swept(*overrides):
    return [job.swept for job in sweep(*overrides).jobs]


def test_every_combination_in_the_order_of_the_values():
    jobs = sweep("seed=1,2", "data=one", "switch=true,false", "temperature=0.5").jobs
    assert [job.name for job in jobs] == [
        "seed=1,switch=true", "seed=1,switch=false", "seed=2,switch=true", "seed=2,switch=false",
    ]  # fmt: skip
    assert jobs[0].overrides == ["seed=1", "data=one", "switch=true", "temperature=0.5"]


def test_hydras_grammar_groups_and_lists():
    assert swept("seed=range(1,4)") == [{"seed": "1"}, {"seed": "2"}, {"seed": "3"}]
    groups = read_sweep("tokenize", ["tokenizer=byte,bpe", "text=x"]).jobs
    assert [job.swept for job in groups] == [{"tokenizer": "byte"}, {"tokenizer": "bpe"}]
    assert swept("numbers=[1,2],[3]") == [{"numbers": "[1,2]"}, {"numbers": "[3]"}]
    assert swept("temperature=null,7") == [{"temperature": "null"}, {"temperature": "7"}]
    assert swept("seed=7") == [{}]
    assert sweep("seed=7").jobs[0].name == "one"
    assert swept("seed=1,2", "seed=3") == [{}]  # the last one for a key wins
    assert swept("hydra.sweeper.params.seed=1,2") == [{"seed": "1"}, {"seed": "2"}]


def test_a_comma_belongs_to_text_and_choice_makes_several_of_a_path():
    for text in ("prompt=a,b，c", "prompt=choice(a,b)", "model=/x,y", "files=[a,b]", "prompt=it's $x, 你好"):
        (job,) = sweep(text).jobs
        assert job.overrides == [text]
    jobs = sweep("model=choice('/路径 x/a,b',runs/c)", "prompt=a,b").jobs
    assert [job.overrides[0] for job in jobs] == ["model=/路径 x/a,b", "model=runs/c"]
    assert [job.name for job in jobs] == ["model=-路径-x-a,b", "model=runs-c"]


@pytest.mark.parametrize("name", [name for name, command in main.COMMANDS.items() if command.takes_overrides])
def test_a_command_that_is_given_its_arguments_runs_several_times(name, monkeypatch, tmp_path):
    seen = []

    def run(self, settings, run_dir):
        seen.extend(settings.runs)
        return {"command": name}

    monkeypatch.setattr(multirun.Multirun, "run", run)
    assert main.run_command(main.COMMANDS[name], ["-m", "seed=1,2", f"paths.runs_dir={tmp_path}"]) == 0
    assert seen == ["seed=1", "seed=2"]


def test_long_or_equal_names_are_numbered():
    jobs = sweep("model=choice(a/b,a-b)").jobs
    assert [job.name for job in jobs] == ["1-model=a-b", "2-model=a-b"]
    assert len(sweep(f"model=choice({'x' * 300},y)").jobs[0].name) < 200


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["seed=1,x"], "run seed=x: seed=x: expected a number"),
        (["data=one,tow"], r"run data=tow: data=tow: there is no such option \(did you mean two\?\)"),
        (["sed=1,2"], "run sed=1: unknown key 'sed'"),
        (["data=glob(*)"], r"data=glob\(\*\): there is no such option; data is one of one, two"),
        (["temperature=interval(0,1)"], "temperature=interval.0,1. is a stretch of numbers; write out values"),
        (["hydra/sweeper=optuna", "seed=1,2"], "the only sweeper is Hydra's basic one"),
    ],
)
def test_every_run_is_checked_before_the_first_starts(overrides, sentence):
    with pytest.raises(SettingsError, match=sentence):
        sweep(*overrides)


def test_an_experiment_brings_its_own_values():
    jobs = read_sweep("pretrain", ["experiment=muon_or_adamw", "seed=5"]).jobs
    assert [job.swept for job in jobs] == [{"optim": "muon"}, {"optim": "adamw"}]
    assert len(read_sweep("pretrain", ["experiment=muon_or_adamw"]).jobs) == 4


@pytest.mark.medium
def test_one_folder_for_each_run_and_one_failure_loses_nothing(tmp_path, fake_environment):
    """The first run has no tokenizer to read."""
    done = subprocess.run(
        [*TOKENIZE, "text=你好, a=b", "tokenizer=file,byte", "name=two"],
        cwd=tmp_path, env=fake_environment, capture_output=True, encoding="utf-8", timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    first, second = results["jobs"]
    assert (results["command"], results["failed"], first["exit_code"], second["exit_code"]) == ("tokenize", 1, 2, 0)
    assert second["results"]["text"] == "你好, a=b"
    assert first["results"] is None
    assert done.stdout.startswith("piece")  # the text of a run comes before the line
    folder = tmp_path / "runs" / "tokenize" / "two"
    assert json.loads((folder / "results.json").read_text()) == results
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"tokenizer=file", "tokenizer=byte"}
    assert (folder.parent / "latest").resolve().name == "tokenizer=byte"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ids=1,2", "hydra/launcher=nowhere"], "error: Hydra cannot start the runs: "),
        (["text=a", "resume.x=1,2"], "error: run resume.x=1: unknown key 'resume.x'"),
    ],
)
def test_what_cannot_start_is_refused_in_a_sentence(tmp_path, fake_environment, arguments, sentence):
    done = subprocess.run(
        [*TOKENIZE, "tokenizer=byte", *arguments],
        cwd=tmp_path, env=fake_environment, capture_output=True, encoding="utf-8", timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(sentence)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "failed.log"]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["seed=1,nan"], "run seed=nan: seed=nan must be a whole number"),
        (["seed=1,2", "hydra/launcher=submitit_local", "optim.warmup_steps=500"], "run seed=1: optim.warmup_steps=500"),
        (["seed=1,2"], "run seed=2: {folder}/seed=2 holds another run (model) and no checkpoint"),
        (["seed=1,3", "name=single"], "runs/pretrain/single holds a run (metrics.csv), not several"),
    ],
)
def test_every_run_is_refused_before_the_first_starts(tmp_path, monkeypatch, overrides, sentence):
    from llmtrain.launch.main import COMMANDS
    from llmtrain.launch.multirun import Multirun

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "pretrain" / "several"
    (folder / "seed=2" / "model").mkdir(parents=True)
    (folder.parent / "single").mkdir()
    (folder.parent / "single" / "metrics.csv").touch()
    arguments = [*TOY, "data=python_docs", "name=several", *overrides]
    with pytest.raises(ValueError) as error:  # noqa: PT011 (compared as text: the sentences hold brackets)
        Multirun(COMMANDS["pretrain"], arguments, ROOT / "configs").prepare()
    assert sentence.format(folder=folder) in str(error.value)
    assert not (folder / "seed=1").exists()


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_for_each_run_and_a_signal_that_stops_them_all(tmp_path, fake_environment):
    """The first run goes to its end; the second gets the signal, saves, and the third is not started."""
    words = [sys.executable, str(ROOT / "scripts" / "pretrain.py"), "-m", *TOY, "data=python_docs"]
    options = ["trainer.max_steps=6,100000,7", "trainer.devices=2", "trainer.val_every=null", "name=several"]
    process = subprocess.Popen(
        [*words, *options], cwd=tmp_path, env=fake_environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
    )  # fmt: skip
    folder = tmp_path / "runs" / "pretrain" / "several"
    long = folder / "trainer.max_steps=100000"
    while process.poll() is None and not ((long / "metrics.csv").exists() and len(figures(long)) > 3):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, err
    results = json.loads(out)
    codes = [job["exit_code"] for job in results["jobs"]]
    assert (codes, results["failed"]) == ([0, 75, None], 2)
    assert results["jobs"][0]["results"]["steps"] == 6
    assert results["jobs"][1]["results"]["stopped_by"] == "SIGTERM"
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"trainer.max_steps=6", long.name}
    assert not list(folder.rglob("log-rank*"))
    assert (folder.parent / "latest").resolve() == long


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_of_the_scheduler_reaches_the_run_at_work(monkeypatch, number):
    """SIGUSR2 is submitit's: its handler ends the job where the run would save; what Slurm sends it is for the run."""

    def of_submitit(number, frame):
        raise RuntimeError("timed-out and not checkpointable")

    program = (
        "import signal, sys\n"
        f"signal.signal({int(number)}, lambda number, frame: sys.exit(75))\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    monkeypatch.setattr(children, "command_line", lambda command, overrides: [sys.executable, "-c", program])
    former = signal.signal(number, of_submitit)
    try:
        task = multirun.Task("pretrain", {"one": []})
        with task._process([]) as process:
            assert process.stdout.readline() == "ready\n"
            signal.raise_signal(number)
            process.communicate(timeout=20)
        assert process.returncode == 75
        assert task._stopped == number
        assert signal.getsignal(number) is of_submitit
    finally:
        signal.signal(number, former)


def test_a_training_handles_what_is_passed_on_to_it():
    from llmtrain.training.callbacks import StopOnSignal

    assert set(multirun._SIGNALS) == set(StopOnSignal.SIGNALS)


def test_a_run_takes_the_place_of_the_task_and_other_children_take_none(monkeypatch):
    """Slurm starts each task of a run, and each starts its process of the run."""
    for name, value in {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    assert placement.read_placement(children.environment(same_place=True)).rank == 1
    assert placement.read_placement(children.environment()) == placement.Placement()


def test_the_slurm_launcher_composes():
    """With the plug-in, which refuses keys that it does not know."""
    missing = "hydra-submitit-launcher is not installed (pip install 'llmtrain[slurm]')"
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher.config", reason=missing)
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(config_dir=str(ROOT / "configs"), version_base="1.3"):
        settings = hydra.compose(
            "pretrain", ["hydra/launcher=slurm", "hydra.launcher.partition=gpu"], return_hydra_config=True
        )
    launcher = settings.hydra.launcher
    assert launcher._target_.endswith("SlurmLauncher")
    assert (launcher.partition, launcher.signal_delay_s, launcher.tasks_per_node) == ("gpu", 120, 1)
