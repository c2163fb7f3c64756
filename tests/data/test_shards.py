"""Shard folders: written in runs, read in windows, and never half."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.data.corpora import open_corpus
from llmtrain.data.prepare import prepare
from llmtrain.data.shards import ShardSet, token_dtype
from llmtrain.data.writer import ShardWriter
from llmtrain.tokenizer import byte_tokenizer

EXTRA = {"tokenizer_hash": "a" * 64, "fingerprint": "f" * 64, "name": "test", "split": "train", "sources": []}


def make(folder: Path, runs: list[list[int]], *, shard_tokens: int = 7, vocab_size: int = 100) -> ShardSet:
    """A folder of one document per run."""
    writer = ShardWriter(folder, vocab_size=vocab_size, shard_tokens=shard_tokens)
    for run in runs:
        ids = np.array(run, dtype=writer.dtype)
        writer.append(ids, np.array([len(run)]), utf8_bytes=3 * len(run), characters=len(run))
    writer.finish(EXTRA)
    return ShardSet.open(folder)


def test_the_type_is_the_smallest_that_holds_all_ids() -> None:
    assert token_dtype(65_536) == np.uint16
    assert token_dtype(65_537) == np.uint32


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    shard_tokens=st.integers(1, 30),
    start=st.integers(0, 60),
    count=st.integers(0, 60),
)
def test_any_range_reads_across_files(
    lengths: list[int], shard_tokens: int, start: int, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    tokens = np.arange(sum(lengths)) % 90
    runs = [run.tolist() for run in np.split(tokens, np.cumsum(lengths)[:-1])]
    shards = make(folder, runs, shard_tokens=shard_tokens)
    assert shards.num_tokens == len(tokens)
    assert len(list(folder.glob("tokens-*.bin"))) == -(-len(tokens) // shard_tokens)
    start, count = min(start, len(tokens)), min(count, max(len(tokens) - start, 0))
    read = shards.read(start, count)
    assert read.dtype == np.int64
    assert read.tolist() == tokens[start : start + count].tolist()
    assert shards.document_ends().tolist() == np.cumsum(lengths).tolist()
    assert [shards.document(index).tolist() for index in range(len(runs))] == runs


def test_the_manifest_counts(tmp_path: Path) -> None:
    shards = make(tmp_path, [[5, 6, 5], [7, 0]], vocab_size=9)
    assert (shards.num_tokens, shards.num_documents, shards.utf8_bytes, shards.characters) == (5, 2, 15, 5)
    assert shards.never_seen == [1, 2, 3, 4, 8]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["dtype"] == "uint16"
    assert manifest["vocab_size"] == 9
    assert manifest["tokenizer_hash"] == "a" * 64


def test_wide_vocabularies(tmp_path: Path) -> None:
    assert make(tmp_path, [[70_000, 1]], vocab_size=70_001).read(0, 2).tolist() == [70_000, 1]


def test_outside_is_refused(tmp_path: Path) -> None:
    shards = make(tmp_path, [[1, 2, 3]])
    for start, count in ((-1, 1), (0, 4), (3, 1), (1, -1)):
        with pytest.raises(ValueError, match="which holds 3"):
            shards.read(start, count)
    with pytest.raises(ValueError, match="document 1 is outside"):
        shards.document(1)


def test_a_pickled_shard_set_reads_elsewhere(tmp_path: Path) -> None:
    shards = make(tmp_path, [[1, 2, 3]] * 4)
    shards.read(0, 12)
    data = pickle.dumps(shards)
    assert len(data) < 5_000
    assert pickle.loads(data).read(2, 2).tolist() == [3, 1]


def test_a_tokenizer_that_does_not_belong_is_refused_by_hash(tmp_path: Path) -> None:
    shards = make(tmp_path, [[1]])
    shards.check_tokenizer(SimpleNamespace(hash="a" * 64))
    with pytest.raises(ValueError, match=r"made with tokenizer aaaaaaaaaaaa, not with bbbbbbbbbbbb"):
        shards.check_tokenizer(SimpleNamespace(hash="b" * 64))


def test_half_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no token shards at .* run `llmtrain prepare`"):
        ShardSet.open(tmp_path)
    make(tmp_path, [[1, 2, 3]] * 4)
    file = tmp_path / "tokens-00000.bin"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"tokens-00000\.bin has 12 bytes, its manifest says 14: delete .* prepare"):
        ShardSet.open(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=r"tokens-00000\.bin is missing"):
        ShardSet.open(tmp_path)


def test_a_damaged_or_newer_manifest_is_refused(tmp_path: Path) -> None:
    make(tmp_path, [[1]])
    file = tmp_path / "manifest.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps(manifest | {"version": 99}))
    with pytest.raises(ValueError, match=r"of format 99, this program reads 1"):
        ShardSet.open(tmp_path)
    file.write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        ShardSet.open(tmp_path)
    file.write_text("{}")
    with pytest.raises(ValueError, match="is damaged"):
        ShardSet.open(tmp_path)


@pytest.mark.parametrize("saved_after", range(7))
def test_an_interrupted_folder_is_cut_back_and_continued(saved_after: int, tmp_path: Path) -> None:
    """What was written behind the saved state, whole files included, goes; the result is that of one go."""
    runs = [[number, number + 1, number + 2, 0] for number in range(6)]

    def append(writer: ShardWriter, run: list[int]) -> None:
        writer.append(np.array(run, dtype=writer.dtype), np.array([4]), utf8_bytes=4, characters=4)

    whole = make(tmp_path / "whole", runs, shard_tokens=5)
    writer = ShardWriter(tmp_path / "cut", vocab_size=100, shard_tokens=5)
    state = None
    for number, run in enumerate(runs, start=1):
        if number - 1 == saved_after:
            state = json.loads(json.dumps(writer.save_state()))
        append(writer, run)
    if saved_after == len(runs):
        state = writer.save_state()
    writer.close()
    writer = ShardWriter(tmp_path / "cut", vocab_size=100, shard_tokens=5, state=state)
    for run in runs[saved_after:]:
        append(writer, run)
    writer.finish(EXTRA)
    cut = ShardSet.open(tmp_path / "cut")
    assert cut.read(0, 24).tolist() == whole.read(0, 24).tolist()
    assert cut.document_ends().tolist() == whole.document_ends().tolist()
    assert cut.never_seen == whole.never_seen
    assert cut.characters == 24
    assert sorted(p.name for p in (tmp_path / "cut").iterdir()) == sorted(
        p.name for p in (tmp_path / "whole").iterdir()
    )


@pytest.mark.parametrize("weights", [None, [3, 1]])
def test_a_corpus_folder_is_not_mistaken_for_damaged_shards(weights: list[int] | None, tmp_path: Path) -> None:
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in paths:
        path.write_text("line\n" * 50)
    corpus = open_corpus("files", data_dir=tmp_path, paths=[str(path) for path in paths], weights=weights)
    folder = prepare(corpus, byte_tokenizer(), data_dir=tmp_path).folder
    names = "train-00, train-01, val" if weights else "train, val"
    with pytest.raises(ValueError, match=rf"holds a whole corpus: give one of the shard folders in it, {names}$"):
        ShardSet.open(folder)
    for name in names.split(", "):
        ShardSet.open(folder / name)
