"""The two sides of preparation get the same text, and peak memory is that of the process that prepared."""

import json

import pytest

from llmtrain.bench.preparing import (
    BARE,
    FAST,
    FRAMEWORK,
    batched,
    check_space,
    documents_of,
    measure_memory,
    measure_preparing,
    repeated,
    write_jsonl,
)
from llmtrain.bench.rounds import Rounds
from llmtrain.data.corpora import open_corpus
from llmtrain.data.prepare import prepare
from llmtrain.tokenizer import byte_tokenizer
from llmtrain.training.resident import peak_bytes

DOCUMENTS = ["话说天下大势，\n分久必合。", "In the beginning\tGod created", "naïve 🌍 " * 50]


def test_documents_come_back_from_shards(tmp_path) -> None:
    """As far as the limit, whole, and long ones cut."""
    file = tmp_path / "corpus.jsonl"
    write_jsonl(iter([*DOCUMENTS, "last"]), file)
    corpus = open_corpus("files", data_dir=tmp_path, paths=[str(file)], validation_last=1, validation_fraction=0.0)
    shards, _ = prepare(corpus, byte_tokenizer(), data_dir=tmp_path).train[0]
    assert documents_of(shards, byte_tokenizer(), limit_bytes=10**6) == DOCUMENTS
    assert documents_of(shards, byte_tokenizer(), limit_bytes=1) == DOCUMENTS[:1]


def test_text_is_repeated_to_size_by_whole_documents() -> None:
    texts = list(repeated(DOCUMENTS, 5000))
    size = sum(len(text.encode()) for text in texts)
    assert 5000 <= size < 5000 + max(len(document.encode()) for document in DOCUMENTS)
    assert texts[:6] == DOCUMENTS * 2


def test_a_corpus_without_text_is_refused() -> None:
    with pytest.raises(ValueError, match="no text to measure"):
        next(repeated([""], 10))


def test_lines_hold_the_documents(tmp_path) -> None:
    file = tmp_path / "corpus.jsonl"
    write_jsonl(iter(DOCUMENTS), file)
    lines = file.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == DOCUMENTS


def test_batches_hold_every_text_once() -> None:
    batches = list(batched(["a" * 3, "b" * 3, "c" * 10, "d"], 5))
    assert batches == [["aaa", "bbb"], ["c" * 10], ["d"]]


def test_sides_take_turns_on_the_same_text(tmp_path) -> None:
    rounds = Rounds(3, warmup_rounds=0)
    measure_preparing(DOCUMENTS, byte_tokenizer(), rounds, size=100_000, folder=tmp_path)
    for theirs in (BARE, FAST):
        assert len(rounds.compare(FRAMEWORK, theirs).per_round) == 3
    assert not (tmp_path / "data").exists()


def test_no_disk_space_is_said_before_anything_is_written(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"the bench needs about .* MB on the disk of .*paths.run_dir"):
        measure_preparing(DOCUMENTS, byte_tokenizer(), Rounds(3), size=10**18, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
    check_space(tmp_path, 1)


@pytest.mark.medium
def test_memory_is_that_of_a_process_of_its_own(tmp_path) -> None:
    """This process holds 200 MB more than it needs; the child's peak does not contain them."""
    ballast = b"x" * 200_000_000
    ratio = measure_memory(DOCUMENTS, byte_tokenizer(), small=100_000, large=110_000, folder=tmp_path)
    assert peak_bytes() > len(ballast)
    assert 10 < ratio.theirs[0] < 180
    assert 0.8 < ratio.median < 1.2
