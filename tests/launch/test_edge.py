"""Each way a command can end, seen from outside: exit code, stdout, stderr and what is left on the disk."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from llmtrain.launch import terminal
from llmtrain.launch.terminal import visible

ROOT = Path(__file__).resolve().parents[2]
FAKE = Path(__file__).resolve().parent / "fake"
FULL = "error: no space left on the disk: {cwd}/r/model; free some, or choose another folder with paths.*"
NASTY = [
    "你好，a=b",
    "a,b",
    "it's",
    'say "hi"',
    "$HOME ${x} $(y)",
    " two  spaces ",
    "line\nline",
    "🌍",
    "[a]",
    "#1",
    "-5",
    "--x",
]


def test_stdout_holds_one_line_of_json_and_the_rest_goes_where_it_belongs(fake, tmp_path):
    done = fake("pretrain", "mode=chatter", "name=one")
    assert done.code == 0
    assert done.stdout.count("\n") == 1
    assert done.results["nothing"] is None
    for line in ("print of ours", "our sentence", "warning: library warning", "warning: look out"):
        assert line in done.stderr.splitlines()
    log = (tmp_path / "runs/pretrain/one/log.txt").read_text()
    for line in (
        "library info",
        "library warning",
        "print of a library",
        "old way",
        "look out",
        "descriptor 1",
        "a child process",
        "our sentence",
    ):
        assert line in log
    for line in ("library info", "old way", "descriptor 1", "a child process", "print of a library"):
        assert line not in done.stderr


def test_the_run_folder_holds_settings_log_and_results(fake, tmp_path):
    done = fake("pretrain", "prompt=${x}，", "seed=3")
    folder = tmp_path / "runs/pretrain/latest"
    assert done.results["run_dir"] == str(folder.resolve())
    assert sorted(entry.name for entry in folder.iterdir()) == ["config.yaml", "log.txt", "results.json"]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["seed"], config["prompt"], config["paths"]["run_dir"]) == (3, "${x}，", str(folder.resolve()))
    assert json.loads((folder / "results.json").read_text()) == done.results
    assert done.stderr.startswith(f"llmtrain pretrain → runs/pretrain/{folder.resolve().name}\n")
    assert "seed=3" in done.stderr
    assert "one: kind=one length=128" in done.stderr


def test_text_is_the_product_of_some_commands_and_json_still_has_its_line(fake, tmp_path):
    done = fake("generate", "mode=text")
    assert done.stdout.splitlines()[0] == "the text"
    assert done.results["command"] == "fake"
    assert not (tmp_path / "runs").exists()
    assert fake("generate", "name=kept").code == 0
    assert (tmp_path / "runs/generate/kept/results.json").exists()


@pytest.mark.parametrize("script", [False, True])
def test_free_text_arrives_whole(fake, script):
    text = "\n".join(NASTY)
    done = fake(
        "generate", f"prompt={text}", f"model=/路径 {NASTY[4]}/=,，'\"", f"files=['{NASTY[0]}', b c]", script=script
    )
    assert done.results["prompt"] == text
    assert done.results["model"] == f"/路径 {NASTY[4]}/=,，'\""
    assert done.results["files"] == [NASTY[0], "b c"]


@pytest.mark.medium
def test_text_without_a_key(fake):
    assert fake("tokenize", "unhappiness 你好，大模型").results["text"] == "unhappiness 你好，大模型"
    assert fake("tokenize", "--", "a=b").results["text"] == "a=b"
    assert fake("tokenize", "--", *NASTY).results["text"] == " ".join(NASTY)
    assert fake("tokenize", "--ids", "1", "2", "3").results["ids"] == [1, 2, 3]
    refused = fake("pretrain", "text")
    assert (refused.code, refused.stdout) == (2, "")
    assert refused.stderr == "error: 'text' is not of the form key=value, and pretrain takes nothing else\n"


@pytest.mark.medium
def test_prompt_and_arguments_by_environment(fake):
    given = {"LLMTRAIN_PROMPT": "$HOME，'a' = \"b\"", "LLMTRAIN_ARGS": "seed=4 'files=[x y, 语]' model=\"a b\""}
    done = fake("generate", env=given)
    assert done.results["prompt"] == given["LLMTRAIN_PROMPT"]
    assert (done.results["seed"], done.results["files"], done.results["model"]) == (4, ["x y", "语"], "a b")
    assert fake("generate", "prompt=mine", env=given).results["prompt"] == "mine"
    broken = fake("generate", env={"LLMTRAIN_ARGS": "prompt='a"})
    assert broken.code == 2
    assert broken.stderr.startswith("error: ARGS cannot be split")


@pytest.mark.medium
def test_bytes_that_are_not_utf8_survive(fake_environment, tmp_path):
    done = subprocess.run(
        [sys.executable, str(FAKE / "entry.py"), "-m", "llmtrain", "generate", b"prompt=\xff\xfe a"],
        cwd=tmp_path,
        env=fake_environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert os.fsencode(json.loads(done.stdout)["prompt"]) == b"\xff\xfe a"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["sed=1"], "error: unknown key 'sed' (did you mean seed?); `llmtrain pretrain --help` lists all keys"),
        (
            ["hydra.sweep.dir=x"],
            "error: hydra.sweep.dir=x: Hydra's own settings are for several runs in one command; add -m",
        ),
        (["--tepm"], "error: there is no flag --tepm; settings are written key=value (see --help)"),
        (["mode=mistake"], "error: name='a/b' cannot name a folder; give a word without slashes, not 'latest'"),
        (["mode=read", "missing_file=/不 在"], "error: No such file or directory: /不 在"),
        (["mode=full", "paths.run_dir=r"], FULL),
        (["name=" + "x" * 300], "error: File name too long: {cwd}/runs/pretrain/" + "x" * 300 + "; give another path"),
        (["paths.run_dir=taken"], "error: paths.run_dir=taken is a file: give a folder"),
        (
            ["paths.runs_dir=taken/er"],
            "error: paths.runs_dir=taken/er lies below taken, which is a file: give a folder",
        ),
    ],
)
def test_a_mistake_ends_with_one_sentence_code_2_and_no_litter(fake, tmp_path, arguments, sentence):
    (tmp_path / "taken").touch()
    done = fake("pretrain", *arguments)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == sentence.format(cwd=tmp_path)
    assert "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} <= {"taken", "failed.log"}


@pytest.mark.medium
def test_a_mistake_leaves_latest_as_it_was(fake, tmp_path):
    fake("pretrain", "name=good")
    assert fake("pretrain", "mode=mistake").code == 2
    assert (tmp_path / "runs/pretrain/latest").resolve().name == "good"
    assert "Traceback" in (tmp_path / "runs/pretrain/failed.log").read_text()


def test_a_fault_ends_with_a_traceback_code_1_and_the_place_of_the_log(fake, tmp_path):
    done = fake("pretrain", "mode=fault", "name=one")
    assert (done.code, done.stdout) == (1, "")
    assert "ValueError: invalid literal" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("the log is runs/pretrain/one/log.txt")
    assert "ValueError: invalid literal" in (tmp_path / "runs/pretrain/one/log.txt").read_text()


@pytest.mark.medium
def test_interrupts_and_requests_to_be_queued_again_keep_their_codes(fake, tmp_path):
    fake("pretrain", "mode=chatter", "name=good")
    early = fake("pretrain", "mode=interrupt", "name=early")
    assert (early.code, early.stderr.splitlines()[-1]) == (130, "interrupted")
    assert not (tmp_path / "runs/pretrain/early").exists()
    assert (tmp_path / "runs/pretrain/latest").resolve().name == "good"  # what the other commands start from
    late = fake("pretrain", "mode=interrupt late", "name=one")
    assert (late.code, late.stderr.splitlines()[-1]) == (130, "interrupted; what was done is in runs/pretrain/one")
    assert fake("pretrain", "mode=requeue").code == 75


@pytest.mark.medium
def test_ranks_above_zero_write_nothing_but_a_log_of_their_own(fake, tmp_path):
    (tmp_path / "r").mkdir()
    done = fake("pretrain", "mode=chatter", "paths.run_dir=r", env={"RANK": "1"})
    assert (done.code, done.stdout) == (0, "")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["r", "r/log-rank1.txt"]
    assert "our sentence" in (tmp_path / "r/log-rank1.txt").read_text()
    assert "our sentence" not in done.stderr
    assert "[rank 1] warning: look out" in done.stderr
    lost = fake("pretrain", env={"RANK": "1"})
    assert lost.code == 2
    assert "give all ranks the same one with paths.run_dir=… or name=…" in lost.stderr


@pytest.mark.medium
@pytest.mark.distributed
@pytest.mark.parametrize("script", [False, True])
def test_lightning_starts_the_other_ranks_with_the_same_command_and_folder(fake, tmp_path, script):
    proof = tmp_path / "proof"
    given = {"PROOF": str(proof), "LLMTRAIN_ARGS": "'prompt=你好， $x' seed=2"}
    done = fake("pretrain", "mode=ranks", env=given, script=script)
    assert done.code == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert proof.read_text(encoding="utf-8") == f"{done.results['run_dir']}\n你好， $x"
    assert len(list((tmp_path / "runs/pretrain").iterdir())) == 2  # the run and latest


def test_help_is_quick_and_lists_groups_keys_and_comments(fake):
    shown = fake("generate", "--help")
    assert shown.code == 0
    for line in (
        "data         one*  two",
        "temperature=0.8",
        "a number",
        "data.length=128",
        "in tokens",
        "nested.depth=1",
    ):
        assert line in shown.stdout
    assert "data.path=???" in fake("generate", "data=two", "--help").stdout
    heavy = f"import sys; sys.path.insert(0, {str(FAKE)!r}); import entry; from llmtrain.launch.main import main\n"
    heavy += "sys.argv[1:] = ['generate', '--help']; main()\n"
    heavy += "assert not {'torch', 'lightning', 'hydra', 'omegaconf', 'numpy'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", heavy], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.medium
def test_a_reader_that_goes_away_is_no_fault(fake_environment, tmp_path):
    command = f"{sys.executable} {FAKE}/entry.py -m llmtrain generate mode=text | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=fake_environment, capture_output=True, timeout=60, check=False
    )
    assert done.returncode in (0, 141)
    assert b"Traceback" not in done.stderr


@pytest.mark.medium
@pytest.mark.parametrize(
    "arguments", ["generate mode=text", "generate prompt=a", "pretrain name=one", "generate --help", "--version"]
)
def test_a_full_disk_under_stdout_is_a_sentence(fake_environment, tmp_path, arguments):
    """The text of a command, its line of JSON, and the help, which no command prints."""
    command = f"{sys.executable} {FAKE}/entry.py -m llmtrain {arguments} > /dev/full"
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env=fake_environment, capture_output=True, timeout=60, encoding="utf-8"
    )
    assert done.returncode == 2
    sentence = "error: standard output cannot be written (No space left on device): free space where it goes, or "
    assert done.stderr.splitlines()[-1] == sentence + "send it elsewhere"
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_text_that_looks_like_a_setting_is_told_where_to_go(fake):
    done = fake("generate", "he=llo you")
    assert done.code == 2
    hint = "`llmtrain generate --help` lists all keys; if it is the prompt: llmtrain generate -- 'he=llo you'"
    assert done.stderr.endswith(hint + "\n")
    assert fake("generate", "--", "he=llo you").results["prompt"] == "he=llo you"
    assert "if it is" not in fake("pretrain", "he=llo").stderr


def test_a_terminal_gets_no_control_characters():
    text = "a\x1b[2Jb\n你\t\x07\u3000👨\u200d👩\u202e\udcff\r"
    terminal, file = SimpleNamespace(isatty=lambda: True), SimpleNamespace(isatty=lambda: False)
    assert visible(text, file) == text
    assert visible(text, terminal) == "a\\x1b[2Jb\n你\t\\x07\u3000👨\u200d👩\\u202e\\udcff\\r"


@pytest.mark.medium
def test_what_is_said_on_a_terminal_is_made_visible(fake_environment, tmp_path):
    """A refusal repeats what the user gave, here to a pseudo-terminal."""
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, str(FAKE / "entry.py"), "-m", "llmtrain", "pretrain", "mode=read", "missing_file=/\x1b[2J"],
        cwd=tmp_path,
        env=fake_environment,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        timeout=60,
    )
    os.close(theirs)
    said = os.read(ours, 65536)
    os.close(ours)
    assert done.returncode == 2
    assert b"\x1b" not in said
    assert said.endswith(b"error: No such file or directory: /\\x1b[2J\r\n")


@pytest.mark.medium
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_empty_ones(closed):
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m llmtrain --version {closed}', sys.executable], cwd=ROOT, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.medium
def test_what_all_ranks_find_rank_0_says(fake_environment):
    """The others show errors, and warnings of what is theirs alone."""
    program = (
        "import logging\n"
        "from llmtrain.launch.terminal import Terminal\n"
        "terminal = Terminal(rank={rank})\n"
        "log = logging.getLogger('llmtrain.training')\n"
        "log.warning('of all')\n"
        "log.warning('of one', extra={{'of_this_rank': True}})\n"
        "log.error('an error')\n"
    )
    said = {}
    for rank in (0, 1):
        done = subprocess.run(
            [sys.executable, "-c", program.format(rank=rank)], env=fake_environment, capture_output=True,
            encoding="utf-8", timeout=60, check=True,
        )  # fmt: skip
        said[rank] = done.stderr.splitlines()
    assert said[0] == ["warning: of all", "warning: of one", "error: an error"]
    assert said[1] == ["[rank 1] warning: of one", "[rank 1] error: an error"]


def test_a_warning_is_said_once_however_often_the_machine_is_looked_at(monkeypatch, caplog):
    from llmtrain.launch.composing import compose
    from llmtrain.launch.fitting import check_machine
    from llmtrain.training import hardware

    monkeypatch.setattr(hardware, "has_native_bf16", lambda accelerator: False)
    settings = compose("pretrain", ["trainer.precision=bf16", "trainer.accelerator=cpu"]).settings
    check_machine(settings)
    assert hardware.resolve_machine("cpu", 1, 1, "bf16").precision == "bf16"
    said = [record.message for record in caplog.records if "no bf16 arithmetic" in record.message]
    assert len(said) == 1


def test_a_library_inside_a_checkout_named_llmtrain_is_not_ours(caplog):
    for file, quiet in (("/home/you/llmtrain/.venv/lib/other.py", True), (terminal.__file__, False)):
        caplog.clear()
        terminal._show_warning("old way", FutureWarning, file, 1)
        assert [record.quiet for record in caplog.records] == [quiet]
