"""Several runs in one command (`-m seed=1,2,3`): each one a fresh process, started by a launcher of Hydra's.

The runs are known before Hydra sees them (`sweeps`), so no free text passes through its grammar: what it sweeps over is
the number of the run. Its launcher decides where they go: one after the other on this machine (`basic`), or to a
cluster through a plug-in (`hydra/launcher=slurm`). Knows folders and exit codes; nothing of what a run does.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from llmtrain.launch import children, runs
from llmtrain.launch.composing import Composed, SettingsError
from llmtrain.launch.ending import Ended
from llmtrain.launch.folders import RunFolder
from llmtrain.launch.reading import literal
from llmtrain.launch.sweeps import Sweep, read_sweep
from llmtrain.training import early, placement
from llmtrain.training.former import check_no_run

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.launch.edge import Command

logger = logging.getLogger(__name__)

_ROOT = "llmtrain_multirun"
# Those that a training handles. Submitit has Slurm send SIGUSR2, and its own handler would end the job unsaved.
_SIGNALS = (signal.SIGINT, *early.SIGNALS)
# Given once for all runs: the folder that theirs are in.
_FOLDERS = ("name=", "paths.run_dir=")


class Multirun:
    """The runs of one command line, for `edge.launch`.

    Args:
        command: The command that they all run.
        overrides: Its arguments, `-m` left out.
        configs: The folder of the YAML files; the package's own unless given.
    """

    def __init__(self, command: Command, overrides: Sequence[str], configs: Path) -> None:
        self._command, self._overrides, self._configs = command, list(overrides), configs

    def prepare(self) -> tuple[Composed, RunFolder]:
        """The runs, composed and checked, and the folder for theirs."""
        from omegaconf import OmegaConf

        if placement.here() != placement.Placement():
            raise ValueError(
                f"several runs (-m) are started once, and {placement.here().launcher} starts this command on every "
                "rank; leave the launcher out (each run starts its own processes), or take hydra/launcher=slurm"
            )
        sweep = read_sweep(self._command.name, self._overrides, self._configs)
        path = self._folder(sweep)
        self._check(sweep, path)
        jobs = {
            job.name: [literal(each) for each in job.overrides if not each.startswith(_FOLDERS)] for job in sweep.jobs
        }
        settings = OmegaConf.create(
            {"paths": {"run_dir": None}, "runs": jobs, "hydra": [literal(each) for each in sweep.hydra]}
        )
        runs_dir = Path(sweep.first.settings.paths.runs_dir).absolute()
        folder = RunFolder(path, kept=True, runs_dir=runs_dir, command=self._command.name, listed=False)
        return Composed(settings, {}), folder

    def _folder(self, sweep: Sweep) -> Path:
        given = [each.partition("=")[2] for each in sweep.hydra if each.startswith("hydra.sweep.dir=")]
        settings = sweep.first.settings
        name, run_dir = settings.get("name"), given[-1] if given else settings.paths.run_dir
        if settings.get("resume") == "auto" and name is None and run_dir is None:
            raise SettingsError(
                "resume=auto among several runs needs the name=… that they were started with, the folder of theirs"
            )
        runs_dir = Path(settings.paths.runs_dir)
        name = name or f"multirun-{time.strftime('%Y-%m-%d_%H-%M-%S')}"
        return runs.choose_run_dir(runs_dir, self._command.name, name=name, run_dir=run_dir).absolute()

    def _check(self, sweep: Sweep, path: Path) -> None:
        """Everything that each run would refuse in its first second, where its command says what that is.

        Raises:
            SettingsError: A run that would not start.
        """
        check = getattr(importlib.import_module(self._command.module), "check", None)
        if check is None:
            return
        check_no_run(path)
        here = all(each.endswith("=basic") for each in sweep.hydra if each.startswith("hydra/launcher="))
        for job, composed in zip(sweep.jobs, sweep.composed, strict=True):
            try:
                check(composed.settings, path / job.name, here=here)
            except ValueError as error:
                raise SettingsError(f"run {job.name}: {error}") from error

    def run(self, settings: DictConfig, run_dir: Path) -> dict[str, Any]:
        """Starts every run and gathers what they left.

        Returns:
            `jobs`: for each its `name`, `run_dir`, `exit_code` and `results`.

        Raises:
            Ended: A run did not end well, with its exit code.
        """
        task = Task(self._command.name, {str(name): list(each) for name, each in settings.runs.items()})
        logger.info("llmtrain %s, %d runs → %s", self._command.name, len(task.jobs), run_dir)
        outcomes = _launch(task, list(settings.hydra), run_dir, self._configs)
        failed = [each for each in outcomes if each["exit_code"] != 0]
        for each in outcomes:
            bits = (each["results"] or {}).get("val_bpb")
            figure = f", {bits:.4f} bits per byte" if isinstance(bits, float) else ""
            how = "not started" if each["exit_code"] is None else f"exit code {each['exit_code']}{figure}"
            logger.info("%s: %s", each["name"], how)
        results = {"command": self._command.name, "run_dir": run_dir, "jobs": outcomes, "failed": len(failed)}
        if failed:
            code = next((each["exit_code"] for each in failed if each["exit_code"]), 130)
            raise Ended(results, code if code > 0 else 128 - code)  # ended by a signal: as a shell says it
        return results


class Task:
    """Runs one job in a process of its own; Hydra's launcher calls it, here or on another machine.

    Args:
        command: The command.
        jobs: The overrides of each, by name.
    """

    def __init__(self, command: str, jobs: dict[str, list[str]]) -> None:
        self.command, self.jobs = command, jobs
        self._stopped: int | None = None

    def __call__(self, cfg: DictConfig) -> dict[str, Any]:
        """Runs the job that `cfg.job` numbers; whatever becomes of it, the others go on."""
        from hydra.core.hydra_config import HydraConfig

        number = int(cfg.job.removeprefix("run"))
        name = list(self.jobs)[number]
        folder = Path(HydraConfig.get().runtime.output_dir)
        outcome = {"name": name, "run_dir": str(folder), "exit_code": None, "results": None}
        if self._stopped is not None:
            with contextlib.suppress(OSError):
                folder.rmdir()
            return outcome
        logger.info("\nrun %d of %d: %s", number + 1, len(self.jobs), name)
        with self._process([*self.jobs[name], f"paths.run_dir={folder}"]) as process:
            stdout, _ = process.communicate()
        text, results = children.split_output(stdout)
        if text:
            print(text, end="")
        return outcome | {"exit_code": process.returncode, "results": results}

    @contextlib.contextmanager
    def _process(self, overrides: list[str]) -> Iterator[subprocess.Popen[str]]:
        """The process of a job, to which signals are passed on: it saves, and no further job is started."""
        process = subprocess.Popen(
            children.command_line(self.command, overrides),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=children.environment(same_place=True),  # Slurm may have started this one as one of several
            encoding="utf-8",
            errors="surrogateescape",
            process_group=0,  # else the terminal would send it a second Ctrl-C, which ends it at once
        )

        def forward(number: int, frame: FrameType | None) -> None:
            self._stopped = number
            process.send_signal(number)

        main = threading.current_thread() is threading.main_thread()
        former = {number: signal.signal(number, forward) for number in _SIGNALS} if main else {}
        try:
            yield process
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


def _launch(task: Task, hydra_overrides: list[str], run_dir: Path, configs: Path) -> list[dict[str, Any]]:
    from hydra import version
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    node: dict[str, Any] = {
        "job": "run0",
        "names": {f"run{number}": name for number, name in enumerate(task.jobs)},
        "hydra": {
            "sweep": {"dir": literal(str(run_dir)), "subdir": "${names.${job}}"},
            "output_subdir": None,  # a run keeps its settings itself
        },
    }
    ConfigStore.instance().store(name=_ROOT, node=node)
    quiet = ["hydra/hydra_logging=none", "hydra/job_logging=none"]  # Hydra would take over logging and stdout
    own = [each for each in hydra_overrides if not each.startswith("hydra.sweep.dir=")]
    version.setbase("1.3")
    GlobalHydra.instance().clear()
    try:
        app = Hydra.create_main_hydra2("llmtrain", create_config_search_path(str(configs.resolve())))
        batches = app.multirun(
            _ROOT, task, [*quiet, *own, f"job={','.join(node['names'])}"], with_log_configuration=False
        )
    except (HydraException, OmegaConfBaseException) as error:
        sentence = " ".join(str(error).partition("\n\n")[0].split())
        raise SettingsError(f"Hydra cannot start the runs: {sentence}{_hint(hydra_overrides)}") from error
    finally:
        GlobalHydra.instance().clear()
    return [each.return_value for batch in batches for each in batch]


def _hint(hydra_overrides: Sequence[str]) -> str:
    slurm = any("submitit" in each or each == "hydra/launcher=slurm" for each in hydra_overrides)
    return "; Slurm needs the plug-in: pip install 'llmtrain[slurm]'" if slurm else ""
