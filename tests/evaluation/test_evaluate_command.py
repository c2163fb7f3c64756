"""`llmtrain evaluate`: what is measured on, by default and on request, and what is refused."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtrain.checkpoint import save_model_folder
from llmtrain.data.corpora import open_corpus
from llmtrain.data.prepare import prepare
from llmtrain.evaluation import bits_per_byte
from llmtrain.launch import compare, evaluate, teaming
from llmtrain.launch.composing import compose
from llmtrain.launch.terminal import to_json
from llmtrain.tokenizer import train_bpe
from llmtrain.training import placement

ROOT = Path(__file__).resolve().parents[2]


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


def questions(path, count=12):
    rows = [
        {"prompt": f"{number}?", "choices": ["yes", "no", "perhaps"], "answer": number % 3} for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_own_files_are_asked_whole_each_by_what_it_holds(folder, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "a", "completion": "b"}\n' * 3, encoding="utf-8")
    files = f"tasks.files=[{questions(tmp_path / 'mine.jsonl')},{pairs}]"
    results = run(folder, "shards_dir=null", "tasks=none", files, "tasks.also=[token_f1]", few=None)
    mine = results["tasks"]["mine"]
    assert (mine["metric"], mine["n"], mine["chance"]) == ("accuracy", 12, pytest.approx(1 / 3))
    assert set(mine["metrics"]) == {"accuracy", "accuracy_norm"}
    assert results["tasks"]["pairs"]["n"] == 3
    assert set(results["tasks"]["pairs"]["metrics"]) == {"exact_match", "token_f1"}
    assert results["tasks"]["pairs"]["chance"] == 1.0
    kept = (folder.parent / "evaluation" / "items-mine.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(json.loads(kept[0])["details"]["logprobs"]) == 3
    (tmp_path / "other").mkdir()
    same_name = questions(tmp_path / "other" / "mine.jsonl")
    with pytest.raises(ValueError, match="two of the tasks are called mine"):
        run(folder, f"tasks.files=[{tmp_path / 'mine.jsonl'},{same_name}]")
    with pairs.open("a", encoding="utf-8") as file:
        file.write((tmp_path / "mine.jsonl").read_text(encoding="utf-8"))
    with pytest.raises(ValueError, match="holds 12 items with choices and 3 without"):
        run(folder, f"tasks.files=[{pairs}]")


def test_bits_per_byte_come_with_an_interval(folder, prepared):
    results = run(folder, f"shards_dir={prepared.train[0][0].folder}", "tasks=none", few=None)
    low, high = results["val_bpb_interval"]
    assert low < results["val_bpb"] < high


HARNESS = f"harness.include_path={Path(__file__).parent / 'harness_tasks'}"


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore")
def test_tasks_of_lm_eval_are_scored_and_their_items_kept(folder, caplog):
    names = "harness.tasks=[local_choices,local_text]"
    results = run(folder, "tasks=none", "shards_dir=null", HARNESS, names, "harness.limit=3", few=None)
    assert set(results["harness"]) == {"local_choices", "local_text"}
    assert {"acc", "acc_stderr", "acc_norm"} <= set(results["harness"]["local_choices"])
    items = (folder.parent / "evaluation" / "items-local_choices.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(items) == 3
    assert json.loads(items[0])["metric"] == "acc"
    json.dumps(results)
    with pytest.raises(ValueError, match=r"there is no task 'chess' in .* among lm-eval's own"):
        run(folder, "tasks=none", HARNESS, "harness.tasks=[chess]", few=None)


def test_without_lm_eval_a_sentence_says_how_to_get_it(folder, monkeypatch):
    monkeypatch.setattr("llmtrain.launch.harness.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs lm-eval, which is not installed: pip install 'llmtrain\[harness\]'"):
        run(folder, "harness.tasks=[x]", few=None)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"harness\.include_path=/nowhere is no folder"):
        run(folder, "harness.tasks=[x]", "harness.include_path=/nowhere", few=None)


def lines_of(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.medium
@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore")  # lm-eval's own, of the run in this process
def test_two_processes_give_the_result_of_one_and_compare_says_so(folder, tmp_path, prepared):
    """One launch for all: bits per byte, a task, choices and lm-eval's; then the two runs are compared."""
    given = [
        f"shards_dir={prepared.train[0][0].folder}",
        "batch_size=2",
        "tasks.settings={zh_number: {train_examples: 20, test_examples: 11}}",
        f"tasks.files=[{questions(tmp_path / 'mine.jsonl', count=13)}]",
        "harness.tasks=[local_choices,local_answers]",
        HARNESS,
    ]
    one = json.loads(to_json(run(folder, *given, few=None)))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "llmtrain",
            "evaluate",
            f"model={folder}",
            "device=cpu",
            *given,
            "devices=2",
            "name=two",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    two = json.loads(done.stdout.splitlines()[-1])
    assert (one.pop("processes"), two.pop("processes")) == (1, 2)
    assert one.pop("seconds") > 0
    assert two.pop("seconds") > 0
    for task, figures in one.pop("harness").items():
        assert two["harness"][task] == pytest.approx(figures)  # whose deviations are sums in another order
    del two["harness"]
    assert one == two
    runs = folder.parent / "evaluation", tmp_path / "runs/evaluate/two"
    files = [sorted(path.name for path in each.glob("items-*")) for each in runs]
    assert files[0] == files[1]
    assert len(files[0]) == 4
    for name in ("items-zh_number.jsonl", "items-mine.jsonl"):
        items = [lines_of(each / name) for each in runs]
        for key in ("prompt", "prediction", "points"):
            assert [each[key] for each in items[0]] == [each[key] for each in items[1]]
    found = compared(f"a={runs[0]}", f"b={runs[1]}")["tasks"]
    assert set(found) == {"zh_number", "mine", "local_choices", "local_answers"}
    assert all(each["difference"] == 0 and each["p_value"] == 1 for each in found.values())
    assert found["mine"]["n"] == 13


@pytest.mark.medium
@pytest.mark.distributed
def test_torchrun_may_start_the_processes(folder, tmp_path):
    """And one of them says and writes what one process alone does."""
    given = ["shards_dir=null", "tasks=zh_number", "tasks.settings={zh_number: {train_examples: 20, test_examples: 7}}"]
    given += [f"tasks.files=[{questions(tmp_path / 'mine.jsonl', count=5)}]"]
    one = json.loads(to_json(run(folder, *given, few=None)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*torchrun, "-m", "llmtrain", "evaluate", f"model={folder}", "device=cpu", *given, "name=two"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    two = json.loads(line)
    assert (one.pop("processes"), two.pop("processes")) == (1, 2)
    del one["seconds"], two["seconds"]
    assert one == two
    for name in ("items-zh_number.jsonl", "items-mine.jsonl"):
        items = [lines_of(each / name) for each in (folder.parent / "evaluation", tmp_path / "runs/evaluate/two")]
        for key in ("prompt", "prediction", "points"):
            assert [each[key] for each in items[0]] == [each[key] for each in items[1]]


def test_a_process_that_is_lost_is_named(monkeypatch):
    process = SimpleNamespace(poll=lambda: -9)
    error = teaming._named([process], RuntimeError("Connection closed by peer"))
    assert "process 1 of the evaluation was ended by signal 9" in str(error)
    monkeypatch.setattr(teaming, "_LAST_WORDS", 0.0)
    assert str(teaming._named([SimpleNamespace(poll=lambda: None)], RuntimeError("else"))) == "else"


def test_a_launcher_that_starts_another_number_is_refused(monkeypatch):
    settings = compose("evaluate", ["devices=3"]).settings
    place = placement.Placement(placement.TORCHRUN, True, rank=0, local_rank=0, world_size=2, local_size=2)
    monkeypatch.setattr(placement, "here", lambda: place)
    with pytest.raises(ValueError, match="devices=3 does not fit what torchrun says: 2 processes"):
        teaming.check_team(settings)
    settings.devices = "auto"
    assert teaming.check_team(settings).world_size == 2
    monkeypatch.setattr(placement, "here", lambda: placement.Placement(placement.BY_HAND, node_rank=1))
    with pytest.raises(ValueError, match="has not started all processes"):
        teaming.check_team(settings)


def compared(*overrides):
    return compare.run(compose("compare", list(overrides)).settings, Path("none"))


def test_compare_reads_runs_and_files_and_says_what_is_wrong(folder, tmp_path, caplog):
    run(folder, "shards_dir=null", "tasks.examples=6")
    evaluation = folder.parent / "evaluation"
    items = evaluation / "items-zh_number.jsonl"
    rows = [json.loads(line) for line in items.read_text(encoding="utf-8").splitlines()]
    better = tmp_path / "better.jsonl"
    for row in rows:
        row["points"] = 1
    better.write_text("".join(json.dumps(row) + "\n" for row in rows[:5]), encoding="utf-8")
    with caplog.at_level(logging.INFO):
        found = compared(f"a={items}", f"b={better}")["tasks"]["items"]
    assert (found["n"], found["only_b"], found["unmatched_a"]) == (5, 5, 1)
    assert found["p_value"] == 0.0625
    assert "not compared: 1 items of A alone, 0 of B alone" in caplog.text
    assert "only B 5" in caplog.text
    for arguments, message in (
        ([f"a={items}"], "b=null, and compare takes two evaluations"),
        ([f"a={items}", "b=nowhere"], "b=nowhere does not exist"),
        ([f"a={tmp_path / 'data'}", f"b={items}"], "holds no items-<task>.jsonl"),
        ([f"a={evaluation}", f"b={better}"], "has the tasks zh_number and b=.* has better: compare two"),
        ([f"a={items}", f"b={tmp_path / 'text.txt'}"], "line 1 is no item of an evaluation"),
    ):
        with pytest.raises(ValueError, match=message):
            compared(*arguments)
