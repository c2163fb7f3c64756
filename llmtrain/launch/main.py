"""The console entry: `llmtrain <command> [key=value …]`; the scripts and the Makefile come through here too.

Reads the command line and answers `--help` from the YAML files. Imports nothing heavy: the command's own module is
imported when it runs.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import llmtrain
from llmtrain.launch import catalogue
from llmtrain.launch.edge import Command, launch
from llmtrain.launch.terminal import OutputError, discard, whole_output

COMMANDS = {
    command.name: command
    for command in (
        Command("prepare", "turn text into token shards"),
        Command("tokenizer", "train a tokenizer on a corpus"),
        Command("tokenize", "show the tokens of a text", "text", text_on_stdout=True, keeps_folder=False),
        Command("plan", "say what a pretraining run will take: memory, time, cost", keeps_folder=False),
        Command("pretrain", "train a model from random weights on token shards", trains=True),
        Command("finetune", "fine-tune a model folder on a task, by LoRA or whole", trains=True),
        Command("evaluate", "measure a model folder or adapter: bits per byte and task scores"),
        Command("compare", "compare two evaluations item by item", positionals=("a", "b"), keeps_folder=False),
        Command("report", "make a page of one training run or several", list_key="runs", keeps_folder=False),
        Command("generate", "continue a prompt", "prompt", text_on_stdout=True, keeps_folder=False),
        Command("inspect", "show all that happens between a prompt and its answer", "prompt", text_on_stdout=True),
        Command("chat", "talk with a fine-tuned model", text_on_stdout=True, keeps_folder=False),
        Command("serve", "answer requests over HTTP, and show a page to chat on", keeps_folder=False),
        Command("show-batch", "print the texts of one step of a run", text_on_stdout=True, keeps_folder=False),
        Command("bench", "measure speed side by side with plain PyTorch and transformers"),
        Command(
            "verify-resume", "check that an interrupted pretraining run equals one that was not", takes_overrides=True
        ),
        Command("smoke", "run the whole line once at toy size"),
    )
}
ARGS_VARIABLE = "LLMTRAIN_ARGS"  # the Makefile's ARGS="…", split as a shell would
PROMPT_VARIABLE = "LLMTRAIN_PROMPT"  # the Makefile's PROMPT="…", which no shell has touched


def _open_missing_streams() -> None:
    """A closed standard stream is an empty one: else the next file that is opened would take its descriptor."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def main(command: str | None = None) -> int:
    """Runs the command line of this process.

    Args:
        command: The command, when the program's name says it already (`scripts/pretrain.py`); else the first argument.

    Returns:
        The exit code.
    """
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):  # whatever the locale says
        stream.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    try:
        # Into sys.argv itself: the other ranks are started with it, as they are with the first rank's environment.
        sys.argv += shlex.split(os.environ.pop(ARGS_VARIABLE, ""))
    except ValueError as error:
        return _refuse(f"ARGS cannot be split into arguments ({error}); check its quotes")
    arguments = sys.argv[1:]
    if command is None:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            return _show(_overview())
        if arguments[0] == "--version":
            return _show(f"llmtrain {llmtrain.__version__}")
        command, *arguments = arguments
    if command not in COMMANDS:
        return _refuse(f"there is no command {command!r}; the commands are {', '.join(COMMANDS)}")
    return run_command(COMMANDS[command], arguments)


def run_command(command: Command, arguments: Sequence[str], configs: Path | None = None) -> int:
    """Reads the arguments of one command and launches it, or prints its help."""
    overrides: list[str] = []
    texts: list[str] = []
    given_ids = several = False
    arguments = _tokenizer_files(command, arguments, configs or catalogue.config_dir())
    for index, argument in enumerate(arguments):
        if argument == "--":
            texts += arguments[index + 1 :]
            break
        if argument in ("-h", "--help"):
            return _show(describe_settings(command, configs or catalogue.config_dir(), arguments))
        if argument in ("-m", "--multirun"):
            several = True
        elif argument == "--ids" and command.name == "tokenize":
            given_ids = True
        elif argument == "--text" and command.name == "inspect":
            overrides.append("as_text=true")
        elif argument.startswith("-") and argument != "-" and not argument[1:].isdigit():
            return _refuse(f"there is no flag {argument}; settings are written key=value (see --help)")
        elif _is_override(argument):
            overrides.append(argument)
        else:
            texts.append(argument)
    if len(texts) <= len(command.positionals):
        overrides += [f"{key}={text}" for key, text in zip(command.positionals, texts, strict=False)]
        texts = []
    if texts and command.list_key is not None:
        overrides.append(f"{command.list_key}={json.dumps(texts, ensure_ascii=False)}")
        texts = []
    if texts and command.positional is None:
        return _refuse(f"{texts[0]!r} is not of the form key=value, and {command.name} takes nothing else")
    if given_ids:
        overrides.append(f"ids=[{','.join(texts)}]")
    elif texts:
        overrides.append(f"{command.positional}={' '.join(texts)}")
    prompt = os.environ.pop(PROMPT_VARIABLE, "")
    if prompt and command.positional and not any(o.startswith(f"{command.positional}=") for o in overrides):
        overrides.append(f"{command.positional}={prompt}")
    if several:
        return _launch_several(command, overrides, configs or catalogue.config_dir())
    hydras = next((each for each in overrides if each.startswith(("hydra.", "hydra/"))), None)
    if hydras:
        return _refuse(f"{hydras}: Hydra's own settings are for several runs in one command; add -m")
    return launch(command, overrides, configs=configs)


def _tokenizer_files(command: Command, arguments: Sequence[str], configs: Path) -> list[str]:
    """`--tokenizer FILE` and `tokenizer=FILE` of `tokenize` are tokenizer=file tokenizer.path=FILE, typed shorter."""
    if command.name != "tokenize":
        return list(arguments)
    kinds = catalogue.group_options(configs, "tokenizer")
    read: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            return [*read, argument, *rest]
        key, _, value = argument.partition("=")
        if argument == "--tokenizer":
            value = next(rest, "")
        is_path = key == "--tokenizer" or any(mark in value for mark in "./~")
        if key.removeprefix("--") == "tokenizer" and value not in kinds and is_path:
            read += ["tokenizer=file", f"tokenizer.path={value}"]
        else:
            read.append(f"tokenizer={value}" if key == "--tokenizer" else argument)
    return read


def _launch_several(command: Command, overrides: Sequence[str], configs: Path) -> int:
    from llmtrain.launch.multirun import Multirun

    multirun = Multirun(command, overrides, configs)
    return launch(command, overrides, configs=configs, run=multirun.run, prepare=multirun.prepare)


def _is_override(argument: str) -> bool:
    from llmtrain.launch.composing import is_override

    return is_override(argument)


def _overview() -> str:
    lines = ["llmtrain — from text to a small language model, on your own machine", "", "usage:"]
    lines += [
        "  llmtrain <command> [group=option …] [key=value …]",
        "  llmtrain <command> -m key=1,2,3  (several runs)",
    ]
    lines += ["  llmtrain <command> --help", "", "commands:"]
    return "\n".join([*lines, *(f"  {command.name:<13} {command.summary}" for command in COMMANDS.values())])


def describe_settings(command: Command, configs: Path, arguments: Sequence[str] = ()) -> str:
    """The help of one command: its groups with their options, and every key with its default and comment.

    Groups chosen in `arguments` show the keys of that option (`llmtrain prepare data=files --help`).
    """
    text = f' ["{command.positional}"]' if command.positional else "".join(f" {key}" for key in command.positionals)
    text += f" {command.list_key}…" if command.list_key else ""
    lines = [
        f"llmtrain {command.name} — {command.summary}",
        "",
        f"usage: llmtrain {command.name}{text} [group=option …] [key=value …]",
    ]
    lines.append(f"       llmtrain {command.name} -m key=1,2,3   one run for each value")
    if command.positional:
        lines.append("  text that looks like key=value goes after --")
    groups = catalogue.read_groups(configs, command.name)
    pairs = (argument.partition("=") for argument in arguments)
    chosen: dict[str, str | None] = {
        name: option for name, _, option in pairs if name in groups and option in groups[name].options
    }
    if groups:
        lines += ["", "groups (the one in use has a star):"]
        for group in groups.values():
            used = chosen.get(group.name, group.default)
            options = (f"{option}*" if option == used else option for option in group.options)
            lines.append(f"  {group.name:<12} {'  '.join(options)}")
    settings = catalogue.read_settings(configs, command.name, chosen)
    shown = {f"{key}={setting.default}": setting.comment for key, setting in settings.items()}
    width = min(max(map(len, shown), default=0), 48)
    lines += ["", "keys and their defaults:"]
    lines += [f"  {pair:<{width}}  {comment}".rstrip() for pair, comment in shown.items()]
    return "\n".join(lines)


def _show(text: str) -> int:
    """Prints what was asked for; returns the exit code."""
    try:
        with whole_output(1):
            print(text, flush=True)
    except BrokenPipeError:  # the reader went away, as with `| head`
        discard(1)
        return 141
    except OutputError as error:
        return _refuse(str(error))
    return 0


def _refuse(sentence: str) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
