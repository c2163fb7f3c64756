"""Files, folders, fingerprints, and data sets of `datasets`."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from llmtrain.data import files as files_module
from llmtrain.data.files import find_files, hash_files
from llmtrain.data.readers import SUFFIXES
from llmtrain.data.sources import FileSource, HuggingFaceSource


def old(path: Path, text: str) -> Path:
    """A file that was last changed an hour ago, so that its hash is remembered."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (time.time() - 3600,) * 2)
    return path


def test_folders_are_recursive_and_in_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("b.txt", "a/z.md", "a/c.jsonl.gz", "picture.png", ".hidden/x.txt", "a/.cache.txt"):
        old(tmp_path / name, "x")
    with caplog.at_level(logging.WARNING):
        found = find_files([tmp_path], SUFFIXES)
    assert [str(file.relative_to(tmp_path)) for file in found] == ["a/c.jsonl.gz", "a/z.md", "b.txt"]
    assert "1 files of other kinds" in caplog.text


def test_files_patterns_and_repeats(tmp_path: Path) -> None:
    for name in ("2.txt", "1.txt", "语料, x=1.txt"):
        old(tmp_path / name, "x")
    assert [f.name for f in find_files([tmp_path / "2.txt", tmp_path / "1.txt"], SUFFIXES)] == ["2.txt", "1.txt"]
    assert [f.name for f in find_files([f"{tmp_path}/[12].txt"], SUFFIXES)] == ["1.txt", "2.txt"]
    assert [f.name for f in find_files([tmp_path / "2.txt", tmp_path], SUFFIXES)] == ["2.txt", "1.txt", "语料, x=1.txt"]
    assert [f.name for f in find_files([tmp_path / "语料, x=1.txt"], SUFFIXES)] == ["语料, x=1.txt"]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is nothing at .*gone\.txt: correct the path"):
        find_files([tmp_path / "gone.txt"], SUFFIXES)
    with pytest.raises(ValueError, match=r"there is nothing at .*\*\.txt"):
        find_files([f"{tmp_path}/*.txt"], SUFFIXES)
    with pytest.raises(ValueError, match=r"no file of the kinds \.txt .* in "):
        find_files([tmp_path], SUFFIXES)
    old(tmp_path / "a.docx", "x")
    with pytest.raises(ValueError, match=r"a\.docx has an unknown extension: use \.txt"):
        find_files([tmp_path / "a.docx"], SUFFIXES)


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    file = old(tmp_path / "a.txt", "one")

    def fingerprint(path: Path = file, **options: str) -> str:
        return FileSource([path], data_dir=tmp_path / "data", **options).fingerprint()

    first = fingerprint()
    os.utime(file)
    assert fingerprint() == first
    moved = old(tmp_path / "elsewhere" / "a.txt", "one")
    assert fingerprint(moved) == first
    assert fingerprint(encoding="gb18030") != first
    old(file, "two")  # the same size
    assert fingerprint() != first


def test_hashes_are_remembered_but_not_of_fresh_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of change of the inode is always new here, so the clock is set forward instead."""
    files = [old(tmp_path / name, name) for name in ("a.txt", "b.txt")]
    hash_files(files, tmp_path / "data")
    assert not (tmp_path / "data").exists()
    ahead = time.time_ns() + 10**10
    monkeypatch.setattr(files_module.time, "time_ns", lambda: ahead)
    expected = hash_files(files, tmp_path / "data")
    monkeypatch.setattr(files_module.hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    assert hash_files(files, tmp_path / "data") == expected
    (tmp_path / "data" / "file_hashes.json").write_text("{damaged")
    monkeypatch.undo()
    assert hash_files(files, tmp_path / "data") == expected


def test_documents_of_several_kinds_come_in_order(tmp_path: Path) -> None:
    old(tmp_path / "a.txt", "first")
    old(tmp_path / "b.jsonl", '{"text": "second"}\n{"text": "third"}')
    source = FileSource([tmp_path], data_dir=tmp_path / "data")
    for _ in range(2):
        assert [piece.text for piece in source.pieces()] == ["first", "second", "third"]
    assert source.size_bytes() == 5 + 36


@pytest.fixture
def local_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"id": n, "text": f"document {n}" if n != 2 else None} for n in range(5)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "set").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "set" / "train.parquet")
    return tmp_path


@pytest.mark.medium
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("kind", ["json", "parquet", "folder"])
def test_data_sets_from_local_files(kind: str, streaming: bool, local_sets: Path) -> None:
    where = {
        "json": {"path": "json", "data_files": [str(local_sets / "a.jsonl")]},
        "parquet": {"path": "parquet", "data_files": [f"{local_sets}/set/*.parquet"]},
        "folder": {"path": str(local_sets / "set")},
    }[kind]
    source = HuggingFaceSource(**where, data_dir=local_sets / "data", streaming=streaming)  # type: ignore[arg-type]
    assert [piece.text for piece in source.pieces()] == ["document 0", "document 1", "document 3", "document 4"]
    assert source.fingerprint() == source.fingerprint()
    fewer = HuggingFaceSource(**where, data_dir=local_sets / "data", streaming=streaming, max_documents=2)  # type: ignore[arg-type]
    assert [piece.text for piece in fewer.pieces()] == ["document 0", "document 1"]
    assert fewer.fingerprint() != source.fingerprint()
    wrong = HuggingFaceSource(**where, data_dir=local_sets / "data", streaming=streaming, text_field="body")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"has no column 'body' \(there is: id, text\): set data\.text_field"):
        list(wrong.pieces())
    number = HuggingFaceSource(**where, data_dir=local_sets / "data", streaming=streaming, text_field="id")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'id' holds int, not text"):
        list(number.pieces())


@pytest.mark.medium
def test_a_data_set_that_is_not_there(local_sets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = HuggingFaceSource("json", data_files=[str(local_sets / "gone.jsonl")], data_dir=local_sets / "data")
    with pytest.raises(ValueError, match=r"data set 'json' cannot be loaded: .*gone\.jsonl"):
        list(source.pieces())


@pytest.mark.medium
def test_no_file_is_left_out_because_others_are_there(local_sets: Path) -> None:
    """A name that is no local file may be remote: `datasets` is asked, and says what it does not find."""
    data_files = [str(local_sets / "a.jsonl"), str(local_sets / "gone.jsonl")]
    source = HuggingFaceSource("json", data_files=data_files, data_dir=local_sets / "data")
    with pytest.raises(ValueError, match=r"data set 'json' cannot be loaded: .*gone\.jsonl"):
        list(source.pieces())
    one = HuggingFaceSource("json", data_files=data_files[0], data_dir=local_sets / "data")
    assert len(list(one.pieces())) == 4
    assert source.fingerprint() != one.fingerprint()
    assert source.size_bytes() is None
    assert source.downloads
    assert not one.downloads


def test_a_changed_local_data_set_is_noticed(local_sets: Path) -> None:
    def fingerprint() -> str:
        return HuggingFaceSource(
            "json", data_files=[str(local_sets / "a.jsonl")], data_dir=local_sets / "d"
        ).fingerprint()

    first = fingerprint()
    (local_sets / "a.jsonl").write_text('{"text": "other"}\n')
    assert fingerprint() != first


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_pipe_is_refused_before_anybody_waits_for_it(tmp_path, suffix):
    pipe = tmp_path / f"pipe{suffix}"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match=r"is a pipe or a device, and text is read more than once: write it to a file"):
        find_files([pipe], [".txt", ".jsonl"])
    with pytest.raises(ValueError, match=r"is a pipe or a device"):
        find_files(["/dev/null"], [".txt"])


@pytest.mark.parametrize("name", ['["x/dq"uote.txt"]', "[br[ack]et.txt]"])
def test_a_path_that_looks_like_a_list_is_told_how_it_is_quoted(name):
    with pytest.raises(
        ValueError, match=r'put in quotation marks inside the list, .*: data\.paths=\["a\[1\]\.txt", "b'
    ):
        find_files([name], [".txt"])
    with pytest.raises(ValueError, match=r"there is nothing at plain\.txt: correct the path$"):
        find_files(["plain.txt"], [".txt"])
