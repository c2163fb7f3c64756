"""`llmtrain tokenize --tokenizer FILE`: what is typed becomes settings, and a rank file is shown."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from llmtrain.launch import main
from llmtrain.launch.composing import compose
from llmtrain.launch.tokenize import run

FILE = ["tokenizer=file", "tokenizer.path=x/o200k_base.tiktoken"]


@pytest.mark.parametrize(
    ("typed", "overrides"),
    [
        (["--tokenizer", "x/o200k_base.tiktoken", "你好"], [*FILE, "text=你好"]),
        (["你好", "--tokenizer=x/o200k_base.tiktoken"], [*FILE, "text=你好"]),
        (["tokenizer=x/o200k_base.tiktoken", "--ids", "1", "2"], [*FILE, "ids=[1,2]"]),
        (["--tokenizer", "byte", "a"], ["tokenizer=byte", "text=a"]),
        (["--tokenizer", "folder", "a"], ["tokenizer=file", "tokenizer.path=folder", "text=a"]),
        (["tokenizer=folder", "a"], ["tokenizer=folder", "text=a"]),  # no option; Hydra lists those there are
        (["--", "--tokenizer", "x.json"], ["text=--tokenizer x.json"]),
    ],
)
def test_a_file_is_named_in_short(typed, overrides, monkeypatch):
    launched = []
    monkeypatch.setattr(main, "launch", lambda command, given, **_: launched.append(given) or 0)
    monkeypatch.delenv(main.PROMPT_VARIABLE, raising=False)
    assert main.run_command(main.COMMANDS["tokenize"], typed) == 0
    assert launched == [overrides]


def test_other_commands_take_no_such_flag(monkeypatch, capsys):
    monkeypatch.delenv(main.PROMPT_VARIABLE, raising=False)
    assert main.run_command(main.COMMANDS["prepare"], ["--tokenizer", "x.json"]) == 2
    assert "there is no flag --tokenizer" in capsys.readouterr().err


def test_a_rank_file_is_shown(tmp_path: Path, capsys):
    tokens = [*(bytes([byte]) for byte in range(256)), b"un", b"ha", b"hap"]
    file = tmp_path / "mine.tiktoken"
    file.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)))
    overrides = ["tokenizer=file", f"tokenizer.path={file}", "text=unhap", f"paths.data_dir={tmp_path / 'data'}"]
    with pytest.raises(ValueError, match=r"name the encoding with tokenizer\.pattern="):
        run(compose("tokenize", overrides).settings, tmp_path)
    found = run(compose("tokenize", [*overrides, "tokenizer.pattern=o200k_base"]).settings, tmp_path)
    assert found["ids"] == [256, 258]
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["piece", "id", "bytes"], ["un", "256", "75", "6e"], ["hap", "258", "68", "61", "70"],
    ]  # fmt: skip
    assert not (tmp_path / "data" / "downloads").exists()  # no corpus was fetched for it
