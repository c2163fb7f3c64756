"""`llmtrain evaluate`: what is measured on, by default and on request, and what is refused."""

import json
import logging

import pytest

from llmtrain.checkpoint import save_model_folder
from llmtrain.data.corpora import open_corpus
from llmtrain.data.prepare import prepare
from llmtrain.evaluation import bits_per_byte
from llmtrain.launch import evaluate
from llmtrain.launch.composing import compose
from llmtrain.tokenizer import train_bpe


@pytest.fixture
def prepared(byte_tok, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"第{number}回 话说天下大势。" for number in range(60)), encoding="utf-8")
    corpus = open_corpus("files", data_dir=tmp_path / "data", paths=[str(text)])
    return prepare(corpus, byte_tok, data_dir=tmp_path / "data")


@pytest.fixture
def folder(tiny_model, byte_tok, tmp_path, prepared):
    save_model_folder(
        tmp_path / "run" / "model",
        config=tiny_model.config,
        state_dict=tiny_model.state_dict(),
        tokenizer=byte_tok,
        info={"trained_length": 32, "data_fingerprint": prepared.fingerprint},
    )
    return tmp_path / "run"


def run(folder, *overrides, few="tasks.settings.zh_number={train_examples: 20, test_examples: 10}"):
    run_dir = folder.parent / "evaluation"
    run_dir.mkdir(exist_ok=True)
    given = [f"model={folder}", f"paths.data_dir={folder.parent / 'data'}", "device=cpu", *([few] if few else [])]
    return evaluate.run(compose("evaluate", [*given, *overrides]).settings, run_dir)


def test_a_model_is_measured_on_its_own_validation_text_and_a_task(folder, tiny_model, byte_tok, prepared, caplog):
    with caplog.at_level(logging.INFO):
        results = run(folder)
    expected = bits_per_byte(tiny_model, prepared.val, sequence_length=32, eos_id=byte_tok.eos_id)
    assert results["val_bpb"] == pytest.approx(expected["bpb"], rel=1e-5)
    assert results["val_tokens"] == prepared.val.num_tokens
    task = results["tasks"]["zh_number"]
    assert (task["n"], task["metric"]) == (10, "exact_match")
    assert 0 <= task["score"] <= 1
    assert "bits per byte" in caplog.text
    assert "zh_number" in caplog.text
    items = (folder.parent / "evaluation" / "items-zh_number.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(items) == 10
    assert json.loads(items[0])["prompt"]
    json.dumps(results)


def test_other_shards_lengths_and_no_tasks(folder, prepared):
    train = prepared.train[0][0]
    results = run(folder, f"shards_dir={train.folder}", "tasks=none", "sequence_length=8", "batch_size=3", few=None)
    assert results["val_tokens"] == train.num_tokens
    assert results["tasks"] == {}


def test_a_corpus_named_on_the_command_line_is_prepared_with_the_models_tokenizer(folder, tmp_path):
    (tmp_path / "other.txt").write_text("Call me Ishmael. " * 100, encoding="utf-8")
    results = run(folder, "data=files", f"data.paths=[{tmp_path / 'other.txt'}]", "tasks=none", few=None)
    assert results["val_bpb"] > 0
    assert "files-" in results["shards"]


def test_without_a_text_only_tasks_are_scored_and_a_warning_says_so(tiny_model, byte_tok, tmp_path, caplog):
    save_model_folder(
        tmp_path / "bare", config=tiny_model.config, state_dict=tiny_model.state_dict(), tokenizer=byte_tok, info={}
    )
    with caplog.at_level(logging.WARNING):
        results = run(tmp_path / "bare")
    assert results["val_bpb"] is None
    assert "does not say what text it was trained on" in caplog.text
    assert results["tasks"]["zh_number"]["n"] == 10
    assert run(tmp_path / "bare", "shards_dir=null")["val_bpb"] is None


def test_a_fine_tuned_model_is_asked_what_its_own_run_held_out(folder, prepared):
    """As the folder itself says, wherever it lies; and bits per byte are taken on the text of its base's base."""
    file = folder / "model/llmtrain.json"
    info = json.loads(file.read_text(encoding="utf-8"))
    data = {"kind": "date_iso", "train_examples": 30, "test_examples": 7, "seed": 5, "max_length": 64}
    tuned = {**info, "config": {"data": data}, "data_fingerprint": "0" * 64, "base": {"base": info}}
    file.write_text(json.dumps(tuned), encoding="utf-8")
    (folder / "config.yaml").write_text("data: corpus.txt", encoding="utf-8")  # a stranger's, and none of our business
    results = run(folder, few=None)
    assert list(results["tasks"]) == ["date_iso"]
    assert results["tasks"]["date_iso"]["n"] == 7
    assert results["val_tokens"] == prepared.val.num_tokens


def test_another_metric_brings_its_own_chance(folder):
    task = run(folder, "shards_dir=null", "tasks.metric=character_error_rate", "tasks.examples=5")["tasks"]["zh_number"]
    assert (task["metric"], task["n"]) == ("character_error_rate", 5)
    assert task["chance"] > 0


def test_settings_of_a_task_that_is_not_scored_give_a_warning(folder, caplog):
    with caplog.at_level(logging.WARNING):
        run(folder, "tasks=none")
    assert "tasks.settings.zh_number is not used" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["shards_dir=/nowhere"], "no token shards at /nowhere"),
        (["shards_dir=/nowhere", "data=python_docs"], "both shards_dir and data say"),
        (["data=zh_number"], "data=zh_number is a task and has no text"),
        (["sequence_length=999"], r"sequence_length must lie in 1 … 256"),
        (["batch_size=0"], "batch_size=0 must be a whole number of at least 1"),
        (["tasks.names=[chess]"], "there is no task 'chess'"),
        (["tasks.metric=best"], "there is no metric 'best'"),
        (["tasks.examples=0"], "tasks.examples=0 must be a whole number of at least 1"),
        (["tasks.settings.zh_number.size=3"], "task zh_number has no setting size"),
    ],
)
def test_mistakes_are_refused_with_a_sentence(folder, overrides, message):
    with pytest.raises(ValueError, match=message):
        run(folder, *overrides, few=None)


def test_shards_of_another_tokenizer_are_refused_by_hash(folder, tmp_path):
    other = train_bpe(["话说天下大势，分久必合，合久必分。" * 20], vocab_size=300)
    (tmp_path / "text2.txt").write_text("话说天下大势。\n\n" * 50, encoding="utf-8")
    corpus = open_corpus("files", data_dir=tmp_path / "data", paths=[str(tmp_path / "text2.txt")])
    foreign = prepare(corpus, other, data_dir=tmp_path / "data")
    with pytest.raises(ValueError, match="were made with tokenizer"):
        run(folder, f"shards_dir={foreign.val.folder}", "tasks=none", few=None)
