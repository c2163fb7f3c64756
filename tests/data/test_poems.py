"""The Tang poems: cleaned from both sources, and which source is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.data import poems
from llmtrain.data.corpora import open_corpus
from llmtrain.data.npm import TANG_POEMS
from llmtrain.data.poems import choose_source, clean_fortunes, clean_npm, lines_of, read_poems

THOUGHT = "床前明月光，疑是地上霜。\n举头望明月，低头思故乡。"
FORTUNES = (
    "\x1b[32m《夜思》\x1b[m\n\x1b[33m作者：李白\x1b[m\n" + THOUGHT + "\n%\n"
    "\x1b[32m《鹿柴》\x1b[m\n\x1b[33m作者：王维\x1b[m\n空山不见人，但闻人语响。\n%\n"
)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("床前明月光，疑是地上霜，\n举头望明月，低头思故乡。", THOUGHT),
        ("斜阳照墟落，穷巷牛羊归。(斜阳 一作：斜光)\n野老念牧童。", "斜阳照墟落，穷巷牛羊归。\n野老念牧童。"),
        ("如霜。(回乐\n一作：回乐\n）\n不知何处。", "如霜。\n不知何处。"),
        ("初为《霓裳》后《六幺》（六幺 一作：绿腰）。", "初为霓裳后六幺。"),
        ("甲,乙?丙！丁", "甲，乙？\n丙！\n丁。"),
        ("不可留；\n乱我心。", "不可留。\n乱我心。"),
        (" \n", ""),
    ],
)
def test_a_line_is_a_sentence_with_a_stop(text: str, lines: str) -> None:
    assert lines_of(text) == lines


def test_both_sources_give_poems_without_titles_and_each_once() -> None:
    assert clean_fortunes(FORTUNES + FORTUNES) == [THOUGHT, "空山不见人，但闻人语响。"]
    poem = {"chapter": "靜夜思", "author": "李白", "paragraphs": ["床前明月光，", "疑是地上霜。"]}
    content = {"title": "唐詩三百首", "content": [{"type": "五言絕句", "content": [poem]}, {"content": [poem]}]}
    assert clean_npm(content, lambda text: text.replace("霜", "雪")) == ["床前明月光。\n疑是地上雪。"]


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`there(npm=…, opencc=…, fortunes=…)`: what this machine seems to have."""

    def set_up(*, npm: bool, opencc: bool, fortunes: bool) -> None:
        monkeypatch.setattr(poems.shutil, "which", lambda name: "/bin/npm" if npm else None)
        monkeypatch.setattr(poems.importlib.util, "find_spec", lambda name: object() if opencc else None)
        file = tmp_path / "tang300"
        if fortunes:
            file.write_text(FORTUNES, encoding="utf-8")
        monkeypatch.setattr(poems, "FORTUNES", file)

    return set_up


@pytest.mark.parametrize(
    ("npm", "opencc", "fortunes", "source"),
    [
        (True, True, True, "npm"),
        (True, True, False, "npm"),
        (False, True, True, "fortunes"),
        (True, False, True, "fortunes"),
        (False, False, False, "npm"),
    ],
)
def test_auto_takes_what_is_there(there, npm, opencc, fortunes, source, tmp_path) -> None:
    there(npm=npm, opencc=opencc, fortunes=fortunes)
    assert choose_source("auto", tmp_path) == source
    assert choose_source("fortunes", tmp_path) == "fortunes"


def test_neither_source_is_one_sentence(there, tmp_path, monkeypatch) -> None:
    there(npm=False, opencc=False, fortunes=False)
    with pytest.raises(ValueError, match=r"needs opencc: install it .*llmtrain\[tang\].* fortunes-zh"):
        read_poems("npm", tmp_path)
    with pytest.raises(ValueError, match=r"data\.source=fortunes needs .*tang300, which is not there: .* fortunes-zh"):
        read_poems("fortunes", tmp_path)
    with pytest.raises(ValueError, match=r"data\.source=web is unknown: use auto, npm, fortunes"):
        choose_source("web", tmp_path)
    monkeypatch.setattr(poems, "_converter", lambda: str)
    monkeypatch.setattr("llmtrain.data.npm.shutil.which", lambda name: None)
    with pytest.raises(ValueError, match=r"there is no npm here\): .*Debian's package fortunes-zh"):
        read_poems("npm", tmp_path)


def test_the_corpus_knows_its_source(there, tmp_path) -> None:
    there(npm=False, opencc=False, fortunes=True)
    corpus = open_corpus("tang", data_dir=tmp_path)
    assert next(iter(corpus.sources[0].source.pieces())).text == THOUGHT
    assert corpus.fingerprint() != open_corpus("tang", data_dir=tmp_path, source="npm").fingerprint()


FETCHED = Path(__file__).parents[2] / "data"


@pytest.mark.skipif(not (FETCHED / "downloads" / TANG_POEMS.file).is_file(), reason="the poems were not fetched")
def test_the_real_poems_are_whole_and_the_famous_one_is_trained_on() -> None:
    pytest.importorskip("opencc")
    corpus = open_corpus("tang", data_dir=FETCHED, source="npm")
    texts = [piece.text for piece in corpus.sources[0].source.pieces()]
    assert len(texts) == 320
    assert THOUGHT in texts
    assert not {*"".join(texts)} & {*"()（）《》;；, "}
    routed = list(corpus.splits[0](corpus.sources[0].source.pieces()))
    assert sum(piece.held_out for piece in routed) == 10
    assert not next(piece.held_out for piece in routed if piece.text == THOUGHT)


@pytest.mark.skipif(not poems.FORTUNES.is_file(), reason="Debian's fortunes-zh is not installed")
def test_debians_poems() -> None:
    texts = read_poems("fortunes", Path())
    assert len(texts) > 300
    assert THOUGHT in texts
    assert json.dumps("\x1b")[1:-1] not in json.dumps(texts)
