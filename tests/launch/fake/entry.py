"""Stands in for the real commands behind the real edge: `entry.py <script or -m llmtrain> …` runs that program.

Only two things are replaced: the folder of the YAML files, and the modules of three commands, whose `run` returns what
it was given. `mode` says what else it does, so that a test can look at each way a command can end.
"""

import logging
import os
import runpy
import subprocess
import sys
import types
import warnings
from pathlib import Path

from llmtrain.launch import catalogue, runs

HERE = Path(__file__).resolve()
catalogue.config_dir = lambda: HERE.parent / "configs"


def run(settings, run_dir, accept=None):
    mode = settings.mode
    if mode.startswith("accepted "):
        mode = mode.removeprefix("accepted ")
        accept()
    if mode == "chatter":
        chatter()
    elif mode == "text":
        print("the text", end="")
    elif mode == "fault":
        int("not ours")
    elif mode == "mistake":
        runs.choose_run_dir(run_dir, "x", name="a/b")
    elif mode == "interrupt":
        raise KeyboardInterrupt
    elif mode == "interrupt late":
        (run_dir / "metrics.csv").write_text("step\n1\n", encoding="utf-8")
        raise KeyboardInterrupt
    elif mode == "requeue":
        raise SystemExit(75)
    elif mode == "full":
        raise OSError(28, "No space left on device", str(run_dir / "model"))
    elif mode == "read":
        Path(settings.missing_file).read_text()
    elif mode == "ranks" and not os.environ.get("LOCAL_RANK"):
        from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd

        # Lightning starts `python <program> <arguments>`; here the program has to be this double again.
        command = list(_basic_subprocess_cmd())
        command[1:1] = [str(HERE)]
        subprocess.run(command, env=os.environ | {"LOCAL_RANK": "1"}, check=True)
    elif mode == "ranks":
        (Path(os.environ["PROOF"])).write_text(f"{run_dir}\n{settings.get('prompt')}", encoding="utf-8")
    values = {key: settings.get(key) for key in ("prompt", "text", "model", "seed", "temperature")}
    for key in ("files", "ids"):
        values[key] = list(settings[key]) if settings.get(key) is not None else None
    return {"command": "fake", "run_dir": run_dir, "nothing": float("nan")} | values


def chatter():
    """What libraries do: print, write to descriptor 1, log, warn, hang handlers on their own loggers."""
    print("print of ours")
    library["print_of_a_library"]()
    os.write(1, b"descriptor 1\n")
    subprocess.run(["echo", "a child process"], check=True)
    theirs = logging.getLogger("DeepSpeed")
    theirs.propagate = False
    theirs.addHandler(logging.StreamHandler(sys.stdout))
    theirs.setLevel(logging.INFO)
    theirs.info("library info")
    theirs.warning("library warning")
    logging.getLogger("llmtrain.training").info("our sentence")
    warnings.warn("old way", FutureWarning, stacklevel=1)
    warnings.warn("look out", UserWarning, stacklevel=1)


# What a library prints: a function whose module is not ours.
exec("def print_of_a_library(): print('print of a library')", library := {"__name__": "deepspeed.runtime.utils"})

for name in ("generate", "tokenize", "pretrain"):
    sys.modules[f"llmtrain.launch.{name}"] = types.ModuleType(name)
    sys.modules[f"llmtrain.launch.{name}"].run = run

if __name__ == "__main__":
    program = sys.argv.pop(1)
    if program == "-m":
        runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
    else:
        sys.argv[0] = program
        runpy.run_path(program, run_name="__main__")
