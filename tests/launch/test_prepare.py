"""The commands prepare, tokenizer and tokenize, called as the edge calls them."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from llmtrain.data.shards import ShardSet
from llmtrain.launch import prepare, tokenize, tokenizer
from llmtrain.launch.composing import compose
from llmtrain.tokenizer import Tokenizer, byte_tokenizer

TEXT = "unhappiness 你好，大模型\n"


def run(module: Any, command: str, tmp_path: Path, *overrides: str) -> dict[str, Any]:
    return module.run(compose(command, [f"paths.data_dir={tmp_path / 'data'}", *overrides]).settings, tmp_path)


@pytest.fixture
def novel(tmp_path: Path) -> str:
    """A file whose name Hydra's grammar cannot read."""
    file = tmp_path / "语料, a=1 'x'.txt"
    file.write_text("".join(f"第{number}行 {TEXT}" for number in range(200)))
    return f"data.paths={file}"


def test_prepare_reports_what_it_made(tmp_path: Path, novel: str, caplog: pytest.LogCaptureFixture) -> None:
    arguments = ("data=files", novel, "tokenizer.vocab_size=280")
    with caplog.at_level(logging.INFO):
        results = run(prepare, "prepare", tmp_path, *arguments)
    assert results["command"] == "prepare"
    assert results["vocab_size"] == 280
    assert not results["cached"]
    assert results["characters"] == len(Path(novel.removeprefix("data.paths=")).read_text())
    assert "characters per token (" in caplog.text
    assert "tokens/s" in caplog.text
    train = ShardSet.open(Path(results["shards"]) / "train")
    assert train.num_tokens == results["train_tokens"]
    train.check_tokenizer(Tokenizer.load(results["tokenizer"]))
    again = run(prepare, "prepare", tmp_path, *arguments)
    assert again["cached"]
    assert {**again, "cached": False} == results


def test_tokenizer_measures_what_it_has_not_seen(tmp_path: Path, novel: str) -> None:
    results = run(tokenizer, "tokenizer", tmp_path, "data=files", novel, "tokenizer.vocab_size=280")
    assert Tokenizer.load(results["tokenizer"]).hash == results["hash"]
    assert results["bytes_per_token"] > results["characters_per_token"] > 1
    plain = run(tokenizer, "tokenizer", tmp_path, "data=files", novel, "tokenizer=byte")
    assert (plain["kind"], plain["vocab_size"], plain["bytes_per_token"]) == ("byte", 262, 1.0)


def test_tokenize_goes_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run(tokenize, "tokenize", tmp_path, f"text={TEXT}", "tokenizer=byte")
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + len(TEXT.encode()) == 1 + results["tokens"]
    assert results["ids"] == byte_tokenizer().encode(TEXT)
    back = run(tokenize, "tokenize", tmp_path, f"ids={results['ids']}", "tokenizer=byte")
    assert back["text"] == TEXT
    assert capsys.readouterr().out == TEXT + "\n"


def test_tokenize_reads_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("好".encode())))
    assert run(tokenize, "tokenize", tmp_path, "text=-", "tokenizer=byte")["text"] == "好"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff")))
    with pytest.raises(ValueError, match=r"standard input is not UTF-8 \(byte 1\)"):
        run(tokenize, "tokenize", tmp_path, "text=-", "tokenizer=byte")


def test_tokenize_takes_the_tokenizer_of_a_file(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path / "mine, x=1")
    results = run(tokenize, "tokenize", tmp_path, "text=x", "tokenizer=file", f"tokenizer.path={tmp_path}/mine, x=1")
    assert results["ids"] == byte_tokenizer().encode("x")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([], r"takes a text or ids \(neither is given\)"),
        (["text=a", "ids=[1]"], r"takes a text or ids \(both are given\)"),
        (["text=a\udcff", "data=files"], "the text is not UTF-8 from character 2"),
        (["ids=[1,x]"], "'x' is not an id"),
        (["ids=[-1]"], "'-1' is not an id"),
        (["ids=[7,262]"], "id 262 is outside the vocabulary"),
    ],
)
def test_tokenize_refuses(overrides: list[str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        run(tokenize, "tokenize", tmp_path, "tokenizer=byte", *overrides)


@pytest.mark.parametrize("given", [[12, 345], ["12", "345"], ["12 345"], "12, 345", "12 345"])
def test_ids_in_any_form(given: Any) -> None:
    assert tokenize.read_ids(given) == [12, 345]
    assert tokenize.read_ids(7) == [7]


def test_a_task_is_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.kind=zh_number is no corpus to prepare"):
        run(prepare, "prepare", tmp_path, "data=zh_number")


def test_a_vocabulary_that_is_too_small_is_refused_without_fetching(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.vocab_size=100 is too small"):
        run(prepare, "prepare", tmp_path, "tokenizer.vocab_size=100")
    assert not (tmp_path / "data").exists()
