"""Every command that the README shows is run, in its order, at smoke size; at full size in the slow tests.

The commands run in a folder that looks like the checkout (links to what they use) and keeps their runs and data away
from the user's own. `SMALL` makes each of them small; `UNTOUCHED` names those that other tests run, and which.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
LINKED = ("Makefile", "scripts", "llmtrain", "configs", "pyproject.toml", "setup.py", "constraints.txt")

CORPUS = ["data=python_docs", "tokenizer.vocab_size=512"]
SMALL = {
    "prepare": CORPUS,
    "tokenizer": CORPUS,
    "tokenize": CORPUS,
    "pretrain": [
        *CORPUS,
        "model=tiny",
        "data.sequence_length=64",
        "trainer.max_steps=20",
        "trainer.val_every=10",
        "optim.warmup_steps=5",
    ],
    "finetune": [
        "data.train_examples=64",
        "data.test_examples=16",
        "trainer.max_steps=10",
        "trainer.val_examples=16",
        "optim.warmup_steps=2",
    ],
    "plan": CORPUS,
    "evaluate": ["tasks=none"],
    "generate": ["sampling.max_new_tokens=8"],
    "chat": ["sampling.max_new_tokens=8"],
    "serve": ["port=0"],
}
UNTOUCHED = {
    "test": "this very run",
    "test-fast": "a part of this run",
    "test-slow": "runs beside this one",
    "test-gpu": "needs a GPU",
    "checks": ".ci/run runs it",
    "smoke": "tests/launch/test_smoke.py runs it",
    "bench": "tests/bench run its parts",
    "bench-memory": "tests/bench run its parts",
    "bench-generate": "tests/bench run its parts",
    "bench-peers": "tests/bench/test_foreign.py runs its parts",
    "bench-memory-training": "tests/bench run its parts",
    "verify-resume": "tests/launch/test_verify_resume.py runs it",
    "setup": "tests/launch/test_makefile.py runs it",
    "help": "tests/launch/test_makefile.py runs it",
    "clean": "removes caches",
    "clean-all": "removes the environment that this runs in",
}
# A text of the reader's own, under each name that the README gives to it.
OWN_TEXT = "\n".join(f"Line {number} of a text of one's own, 第 {number} 行。" for number in range(2000))
OWN_EXAMPLES = "".join(json.dumps({"prompt": f"{n}+1=", "completion": str(n + 1)}) + "\n" for n in range(400))


def commands(text: str) -> list[str]:
    """The commands in the shell blocks of a README: lines that call make, llmtrain or a script."""
    found = []
    for block in re.findall(r"^```(?:bash|sh|shell|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"\s+#\s.*$", "", line.removeprefix("$ ")).strip()
            if re.match(r"(make|llmtrain|\.venv/bin/llmtrain|python (-m llmtrain|scripts/))(\s|$|\w)", line):
                found.append(line)
    return found


def command_of(line: str) -> str:
    """The command or target that a line runs."""
    words = [word for word in shlex.split(line) if "=" not in word]
    if words[0] == "python":
        return words[2] if words[1] == "-m" and words[2] != "llmtrain" else Path(words[-1]).stem
    return words[1] if len(words) > 1 else "help"


def prepared(line: str, *, small: bool, stamp: Path) -> list[str]:
    """The words to run for a line: the same program, out of this checkout, at smoke size."""
    words = shlex.split(line)
    overrides = SMALL.get(command_of(line), []) if small else []
    given = " ".join(words)
    overrides = [override for override in overrides if f"{override.partition('=')[0]}=" not in given]
    if "data=jsonl" in given:  # the reader's own examples are as many as they are
        overrides = [override for override in overrides if not override.startswith("data.train_examples=")]
    if words[0] != "make":
        program = (
            [sys.executable, *words[1:]] if words[0] == "python" else [sys.executable, "-m", "llmtrain", *words[1:]]
        )
        return [*program, *overrides]
    arguments = "".join(word.removeprefix("ARGS=") for word in words if word.startswith("ARGS="))
    rest = [word for word in words if not word.startswith("ARGS=")]
    together = " ".join([arguments, *map(shlex.quote, overrides)]).strip()
    return [*rest, f"RUN={shlex.quote(sys.executable)}", f"STAMP={stamp}", f"ARGS={together}"]


def run_all(readme: Path, workspace: Path, *, small: bool) -> None:
    for name in LINKED:
        (workspace / name).symlink_to(ROOT / name)
    text = readme.read_text(encoding="utf-8")
    for name in set(re.findall(r"[\w/-]+\.(?:txt|md|jsonl)\b", " ".join(commands(text)))):
        (workspace / name).parent.mkdir(parents=True, exist_ok=True)
        (workspace / name).write_text(OWN_EXAMPLES if name.endswith("jsonl") else OWN_TEXT, encoding="utf-8")
    stamp = workspace / ".stamp"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("LLMTRAIN_", "MAKE"))}
    for line in commands(text):
        if command_of(line) in UNTOUCHED:
            continue
        stamp.touch()
        words = prepared(line, small=small, stamp=stamp)
        variables = environment | {"PYTHONPATH": str(ROOT)} | ({"OMP_NUM_THREADS": "1"} if small else {})
        if command_of(line) == "serve":
            ask_and_end(words, workspace, variables)
            continue
        done = subprocess.run(
            words,
            cwd=workspace,
            env=variables,
            capture_output=True,
            encoding="utf-8",
            input="你好\n" if command_of(line) == "chat" else "",
            timeout=300 if small else 1200,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        if command_of(line) == "chat":
            assert json.loads(done.stdout.splitlines()[-1])["turns"] == 1


def ask_and_end(words: list[str], workspace: Path, variables: dict[str, str]) -> None:
    """A server, as its reader would use it: looks at the page, then presses Ctrl-C, which make hears as well."""
    process = subprocess.Popen(
        words, cwd=workspace, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if "serving on " in line:
                break
        else:
            raise AssertionError("".join(said))
        with urllib.request.urlopen(line.partition("serving on ")[2].strip()) as page:
            assert page.status == 200
    finally:
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert json.loads(out.splitlines()[-1])["command"] == "serve"


def existing(readme: Path) -> Path:
    if not readme.exists():
        pytest.skip(f"there is no {readme.name} yet")
    return readme


@pytest.mark.medium
@pytest.mark.timeout(400)
def test_every_command_of_the_readme_runs(tmp_path):
    run_all(existing(READMES[0]), tmp_path, small=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_command_of_the_readme_runs_at_full_size(tmp_path):
    run_all(existing(READMES[0]), tmp_path, small=False)


def test_every_target_and_command_of_the_readmes_exists():
    from llmtrain.launch.main import COMMANDS

    targets = set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)) | set(COMMANDS)
    for readme in READMES:
        for line in commands(existing(readme).read_text(encoding="utf-8")):
            assert command_of(line) in targets | {"--help"}, line


def test_both_readmes_show_the_same_commands():
    """The translation may differ in its prompts, not in what it runs."""
    english, chinese = ([command_of(line) for line in commands(existing(r).read_text("utf-8"))] for r in READMES)
    assert english == chinese


def test_commands_are_found_and_made_small(tmp_path):
    text = (
        '```bash\ngit clone x\nmake pretrain   # five minutes\n$ make generate PROMPT="a b" \\\n  ARGS="seed=1"\n```\n'
    )
    text += "```python\nmake up\n```\n"
    text += "```sh\nllmtrain pretrain data=files 'data.paths=[a b.txt]'\npython scripts/bench.py\n```"
    lines = commands(text)
    assert [command_of(line) for line in lines] == ["pretrain", "generate", "pretrain", "bench"]
    words = prepared(lines[1], small=True, stamp=tmp_path)
    assert words[:3] == ["make", "generate", "PROMPT=a b"]
    assert words[-1] == "ARGS=seed=1 sampling.max_new_tokens=8"
    own = prepared(lines[2], small=True, stamp=tmp_path)
    assert own[2:6] == ["llmtrain", "pretrain", "data=files", "data.paths=[a b.txt]"]
    assert "data=python_docs" not in own
    assert "model=tiny" in own
