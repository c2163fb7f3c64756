"""`llmtrain chat`: through a pipe, in a real pseudo-terminal, its commands, and which model it takes."""

import json
import logging
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llmtrain.checkpoint import save_model_folder
from llmtrain.data.tasks import build_task
from llmtrain.generation import SamplingParams
from llmtrain.launch import chat
from llmtrain.launch.composing import compose
from llmtrain.launch.transcript import save_transcript
from llmtrain.model import ModelConfig, build_model
from llmtrain.tokenizer import byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]
BYTES = byte_tokenizer()


def make_model(folder: Path, *, kind: str = "chatterbot", context: int = 20_000, **info) -> Path:
    """Random weights that greedily go on for ever: the rows of the special tokens say nothing."""
    config = ModelConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=context, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    state = build_model(config, seed=0).state_dict()
    state["lm_head.weight"][sorted(BYTES.special_ids.values())] = 0
    state["lm_head.weight"][97:] = 0  # ids 6 to 96 are control characters, marks, digits and capitals
    info = {"config": {"data": {"kind": kind}}} | info
    save_model_folder(folder, config=config, state_dict=state, tokenizer=BYTES, info=info)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    make_model(runs / "finetune/talk/model")
    return runs


class Lines:
    """A console that is no terminal: what a pipe would give."""

    interactive = False

    def __init__(self, *lines: str) -> None:
        self._lines = list(lines)

    def read(self) -> str | None:
        return self._lines.pop(0) if self._lines else None

    stoppable = chat.Console.stoppable


def talk(runs: Path, monkeypatch, *lines: str, overrides: tuple[str, ...] = ()) -> dict:
    settings = ["sampling=greedy", "sampling.max_new_tokens=4", "device=cpu", f"paths.runs_dir={runs}", *overrides]
    monkeypatch.setattr(chat, "Console", lambda: Lines(*lines))
    return chat.run(compose("chat", settings).settings, runs / "no run folder")


def test_every_line_is_answered_and_the_figures_are_reported(runs, monkeypatch, capsys):
    results = talk(runs, monkeypatch, "你好" * 8, "", "  ", "how are you?", "//help", "/quit", "never read")
    assert len(capsys.readouterr().out.splitlines()) >= 3
    assert (results["command"], results["turns"], results["tokens"], results["stopped"]) == ("chat", 3, 12, 0)
    assert results["model"].endswith("finetune/talk/model")
    assert results["ttft_seconds"] > 0
    assert len(results["seeds"]) == 3
    first, second = BYTES.encode("你好" * 8), BYTES.encode("how are you?")
    # Each turn is the question between its markers, four tokens of answer, and the end.
    grown = [len(first) + 2, len(first) + 7 + len(second) + 2, len(first) + len(second) + 14 + len("/help") + 2]
    assert results["prompt_tokens"] == sum(grown)
    assert results["cached_tokens"] == grown[0] + 3 + grown[1] + 3  # prompt and answer, its last token never read
    assert json.loads(json.dumps(results)) == results


def test_a_full_context_forgets_the_oldest_turns_and_says_so(runs, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "llmtrain")
    results = talk(runs, monkeypatch, "a" * 10, "b" * 10, "c" * 200, "d", overrides=("max_length=36",))
    assert "the context is full: the oldest turn is forgotten" in caplog.text
    assert "the message has 202 tokens with its markers, and the prompt may have 32, 4 being kept" in caplog.text
    assert (results["turns"], results["dropped_turns"]) == (3, 1)
    assert "cut off at sampling.max_new_tokens=4" in caplog.text


def test_commands(runs, monkeypatch, capsys, caplog, tmp_path):
    file = tmp_path / "a b.jsonl"
    lines = ["/help", "/save x.jsonl", "/seed 5", "one", "/seed", f"/save {file}", "/reset", "two", "three"]
    lines += [f"/save {file}", "/candidates 3", "four", "/candidates", "/system Be brief.", "five", f"/save {file}"]
    lines += [
        "/nothing",
        "/seed x",
        "/candidates -1",
        "/save plain.txt",
        "/seed off",
        "/system",
        "six",
        f"/save {file}",
    ]
    results = talk(runs, monkeypatch, *lines, overrides=("sampling.temperature=1", "sampling.top_k=3"))
    out = capsys.readouterr().out
    assert all(f"  {name}" in out for name in ("/reset", "/system", "/save", "/seed", "/candidates", "/help", "/quit"))
    assert "(the last answer had the seed 5)" in out
    assert len(re.findall(r"^ +\d  .* of  ", out, re.MULTILINE)) == 4
    assert results["seeds"][:5] == [5, 5, 6, 7, 5]  # counted from the beginning of each conversation
    records = [json.loads(line)["messages"] for line in file.read_text(encoding="utf-8").splitlines()]
    asked = [[message["content"] for message in record if message["role"] != "assistant"] for record in records]
    assert asked == [["one"], ["two", "three"], ["Be brief.", "five"], ["six"]]
    assert f"(saved to {file})" in out
    assert f"(added to {file}, which now holds 2 lines)" in out
    for complaint in (
        "there is no answer to save yet",
        "there is no command /nothing; /help lists them",
        "/seed x: give a whole number from 0 to",
        f"/candidates -1: give a whole number from 0 to {BYTES.vocab_size}",
        "/save plain.txt: give a name that ends with .jsonl",
    ):
        assert complaint in caplog.text
    task = build_task("jsonl", paths=[file], test_examples=1)
    assert len(task.train) + len(task.test) == 4


def test_a_seed_gives_the_same_conversation_again(runs, monkeypatch, capsys):
    free = ("sampling.temperature=2", "sampling.top_k=0", "sampling.seed=3")
    talk(runs, monkeypatch, "a", "b", "/reset", "a", "b", overrides=free)
    first, second = capsys.readouterr().out.split("(a new conversation)\n")
    assert first == second


def test_saving_never_writes_over_anything(tmp_path):
    messages = [{"role": "user", "content": "你"}, {"role": "assistant", "content": "好"}]
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match="is there and holds no conversations: give another file, nothing was written"):
        save_transcript(str(other), messages)
    assert other.read_text() == '{"text": "a"}\n'
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"messages": []}')  # without the end of its line
    save_transcript(str(mine), [*messages, {"role": "user", "content": "x"}, {"role": "assistant", "content": " "}])
    assert [json.loads(line)["messages"] for line in mine.read_text().splitlines()] == [[], messages]
    with pytest.raises(ValueError, match="cannot be written"):
        save_transcript(str(tmp_path / "none/there.jsonl"), messages)


def test_the_model_is_the_newest_that_was_trained_on_conversations(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "llmtrain")
    runs = tmp_path / "runs"
    with pytest.raises(ValueError, match=r"there is no fine-tuned model in .*: make one .*experiment=chat"):
        talk(runs, monkeypatch)
    latest = make_model(runs / "finetune/numbers/model", kind="zh_number")
    (runs / "finetune/latest").symlink_to("numbers")
    assert talk(runs, monkeypatch)["model"].endswith("latest/model")
    assert "no run in" in caplog.text
    make_model(runs / "finetune/old/model", kind="jsonl")
    make_model(runs / "finetune/new/model")
    for age, name in ((300, "old"), (200, "new"), (0, "numbers")):
        os.utime(runs / f"finetune/{name}/model/llmtrain.json", (time.time() - age,) * 2)
    assert talk(runs, monkeypatch)["model"].endswith("new/model")
    assert talk(runs, monkeypatch, overrides=(f"model={latest}",))["model"] == str(latest)


def test_markers_that_were_never_trained_are_said(tmp_path, monkeypatch, caplog):
    special = BYTES.special_ids
    model = make_model(tmp_path / "a", never_seen=[special["<|user|>"]])
    talk(tmp_path, monkeypatch, overrides=(f"model={model}",))
    assert f"{model} was never trained on the role markers of a chat, so expect no answer" in caplog.text
    caplog.clear()
    model = make_model(tmp_path / "b", never_seen=[special["<|system|>"]])
    talk(tmp_path, monkeypatch, overrides=(f"model={model}",))
    assert "never trained" not in caplog.text
    talk(tmp_path, monkeypatch, "/system x", overrides=(f"model={model}",))
    assert f"{model} was never trained on a system message" in caplog.text


def test_the_length_is_the_one_it_was_trained_on(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "llmtrain")
    model = make_model(tmp_path / "a", trained_length=64)
    results = talk(tmp_path, monkeypatch, "a" * 40, "b" * 40, overrides=(f"model={model}",))
    assert results["dropped_turns"] == 1


def test_an_answer_that_fails_is_said_and_not_remembered(runs, monkeypatch, caplog):
    folder = make_model(runs / "broken")
    loaded = chat.load_model(SimpleNamespace(model=str(folder), device="cpu", precision="auto"))
    with torch.no_grad():
        loaded.model.lm_head.weight.fill_(torch.nan)
    settings = compose("chat", [f"model={folder}"]).settings
    session = chat.Session(loaded, settings, SamplingParams(), Lines("a", "b"))
    assert session.run()["turns"] == 2
    assert "this answer broke off and is not remembered: the model's scores for token 1" in caplog.text
    assert session._conversation.turns == []


def test_an_answer_without_end_is_refused(runs, monkeypatch):
    with pytest.raises(ValueError, match=r"sampling\.ignore_eos=true would let no answer end"):
        talk(runs, monkeypatch, overrides=("sampling.ignore_eos=true",))


# --- processes


def command(runs: Path, *overrides: str) -> list[str]:
    return [
        sys.executable, "-m", "llmtrain", "chat", f"paths.runs_dir={runs}", "sampling=greedy", "device=cpu",
        "sampling.max_new_tokens=20000", *overrides,
    ]  # fmt: skip


def environment(**changes: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "LLMTRAIN"))}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm"} | changes


@pytest.mark.medium
@pytest.mark.distributed
def test_a_pipe_gets_answers_and_one_line_of_json(runs, tmp_path):
    done = subprocess.run(
        command(runs, "sampling.max_new_tokens=5"),
        input="\ufeff你好\r\n/seed\n".encode() + b"\xff\n" + f"/save {tmp_path}/a.jsonl\nlast".encode(),
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        timeout=120,
    )
    out, said = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == 0, said
    assert "line 3 is not UTF-8 at byte 0 and is left out" in said
    assert "›" not in out
    assert "\x1b" not in out
    results = json.loads(out.splitlines()[-1])
    assert (results["turns"], results["tokens"]) == (2, 10)
    saved = json.loads((tmp_path / "a.jsonl").read_text(encoding="utf-8"))
    assert saved["messages"][0]["content"] == "你好"


class Person:
    """Types at a pseudo-terminal that controls the process, so that Ctrl-C there is a signal."""

    def __init__(self, arguments: list[str], cwd: Path, **variables: str) -> None:
        takes = "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR)); os.execvp(sys.argv[1], sys.argv[1:])"
        self.screen, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", takes, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd,
            env=environment(**variables), start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.seen = b""

    def type(self, text: str) -> None:
        time.sleep(0.5)  # Python does not notice a Ctrl-C between the end of a prompt and the wait for a key
        os.write(self.screen, text.encode())

    def wait_for(self, pattern: str, seconds: float = 90) -> str:
        """What the screen shows up to a pattern, from where the last wait ended."""
        until = time.monotonic() + seconds
        while not (found := re.search(pattern.encode(), self.seen)):
            assert time.monotonic() < until, f"{pattern!r} never came: {self.seen!r}"
            if select.select([self.screen], [], [], 1)[0]:
                try:
                    self.seen += os.read(self.screen, 65536)
                except OSError:  # the process is gone
                    raise AssertionError(f"ended before {pattern!r}: {self.seen!r}") from None
        shown, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return shown.decode(errors="replace")

    def leave(self) -> int:
        code = self.process.wait(timeout=30)
        os.close(self.screen)
        return code


PROMPT = r"› \x1b\[0m"


@pytest.mark.medium
@pytest.mark.distributed
@pytest.mark.parametrize("variables", [{"LANG": "C.UTF-8"}, {"LC_ALL": "C"}], ids=str)
def test_a_terminal(variables, runs, tmp_path):
    person = Person(command(runs), tmp_path, **variables)
    try:
        shown = person.wait_for(PROMPT)
        assert "/help lists the commands" in shown
        # Ctrl-C stops an answer that would go on for minutes, and not the program.
        person.type("你好吗\r")
        person.wait_for("[!-~]{40}")
        person.type("\x03")
        person.wait_for("stopped; what was said so far is remembered")
        person.wait_for(PROMPT)
        # Left over a character, and the one before it is rubbed out: editing goes by characters, and the cursor by
        # columns, of which each of them has two.
        person.type("甲乙丙\x1b[D\x7f")
        person.wait_for("丙\x08{4}.{0,6}丙\x08{2}", 20)
        person.type("\r")
        person.wait_for("[!-~]{40}")
        person.type("\x03")
        person.wait_for("stopped;")
        person.wait_for(PROMPT)
        # A paste of two lines is one message, and the arrow fetches a former one.
        person.type("\x1b[200~one\ntwo\x1b[201~\r")
        person.wait_for("[!-~]{40}")
        person.type("\x03")
        person.wait_for("stopped;")
        person.wait_for(PROMPT)
        person.type("\x1b[A\x1b[A\x1b[A丁\r")
        person.wait_for("[!-~]{40}")
        person.type("\x03")
        person.wait_for("stopped;")
        person.wait_for(PROMPT)
        # Ctrl-C drops what is typed; at an empty prompt the second one ends.
        person.type("dropped\x03")
        person.wait_for(PROMPT)
        person.type("/save talk.jsonl\r")
        person.wait_for("saved to talk.jsonl")
        person.wait_for(PROMPT)
        person.type("\x03")
        person.wait_for("Ctrl-C again")
        person.wait_for(PROMPT)
        person.type("\x03")
        results = json.loads(re.search("{.*}", person.wait_for("}\r\n"))[0])  # type: ignore[index]
        assert person.leave() == 0
    finally:
        person.process.kill()
    assert results["turns"] == 4
    (record,) = (json.loads(line) for line in (tmp_path / "talk.jsonl").read_text(encoding="utf-8").splitlines())
    asked = [message["content"] for message in record["messages"] if message["role"] == "user"]
    assert asked == ["你好吗", "甲丙", "one\ntwo", "你好吗丁"]


@pytest.mark.medium
@pytest.mark.distributed
def test_make_hears_nothing_of_a_ctrl_c_that_stops_an_answer(runs, tmp_path):
    """It would end by it after the chat, with code 130 instead of 0; after the chat it has its terminal again."""
    (tmp_path / "stamp").touch()
    settings = shlex.join(command(runs)[4:])
    making = ["make", "chat", f"STAMP={tmp_path}/stamp", f"RUN={sys.executable}", f"ARGS={settings}"]
    person = Person(["sh", "-c", f"cd {ROOT} && {shlex.join(making)}; echo code $?; read line; echo $line"], tmp_path)
    try:
        person.wait_for(PROMPT)
        person.type("\x1a")  # Ctrl-Z
        person.type("hello\r")
        person.wait_for("[!-~]{40}")
        person.type("\x03")
        person.wait_for("stopped; what was said so far is remembered")
        person.wait_for(PROMPT)
        person.type("\x04")
        shown = person.wait_for(r"code \d+\r\n")
        assert shown.endswith("code 0\r\n")
        assert "***" not in shown
        person.type("still a terminal\r")
        person.wait_for("still a terminal\r\nstill a terminal\r\n")
        assert person.leave() == 0
    finally:
        person.process.kill()
