"""Every key of every command with values that do not belong there: each is refused by name, or it means something.

Nothing is trained: a configuration is composed and, where that accepts it, what a command looks at in its first second
is looked at, down to corpora, tasks and a model folder that is not there. None may end in anything but a `ValueError`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from llmtrain.checkpoint import LoadedModel
from llmtrain.data import prepare as preparing
from llmtrain.launch import (
    bench,
    catalogue,
    chat,
    compare,
    composing,
    edge,
    evaluate,
    finetune,
    generate,
    inspect,
    plan,
    prepare,
    report,
    serve,
    show_batch,
    starting,
    task_examples,
    tokenize,
    verify_resume,
)
from llmtrain.launch.composing import compose, known_keys
from llmtrain.launch.keys import KINDS, LARGEST_VOCABULARY, KindError, check_kinds
from llmtrain.launch.main import COMMANDS
from llmtrain.tokenizer import train
from llmtrain.training import hardware

ODD = ("null", "-1", "nan", "inf", "1e30", "words", "auto", "1.5", "true", "[]", "[null,x]", "{a: 1}", "9" * 400)


@pytest.fixture(autouse=True)
def _no_measuring(monkeypatch, tmp_path):
    """No bench, no training, no download, and a folder without a model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "check_compiler", lambda: None)
    monkeypatch.setattr(preparing, "find_prepared", lambda *_, **__: None)
    monkeypatch.setattr(hardware, "measure_peak", lambda *_, **__: hardware.Peak(1e12, "a test's"), raising=False)
    (tmp_path / "text.txt").write_text("some text of our own\n" * 40, encoding="utf-8")
    (tmp_path / "examples.jsonl").write_text(
        "".join(json.dumps({"prompt": f"p{number}", "completion": "c"}) + "\n" for number in range(20)), "utf-8"
    )


def corpus(settings: DictConfig) -> None:
    opened = prepare.corpus_from(settings)
    if settings.data.kind == "files":  # the others are downloads
        opened.fingerprint()
        assert opened.splits


def pretraining(settings: DictConfig) -> None:
    starting.check_settings(settings)
    corpus(settings)


def tuning(settings: DictConfig) -> None:
    finetune._check_settings(settings)
    if settings.data.kind not in ("hsk_pinyin", "chatterbot"):
        task_examples.task_from(settings)


def planning(settings: DictConfig) -> None:
    plan._check(settings)
    plan.plan_from(settings)


def to_the_model(run: Callable[..., Any]) -> Callable[[DictConfig], None]:
    """Runs a command up to its model folder, which is not there."""

    def up_to(settings: DictConfig) -> None:
        try:
            run(settings, None)
        except ValueError as error:
            if "nowhere" not in str(error):
                raise

    return up_to


def complaint(attempt: Callable[[], None], what: str) -> str:
    """The sentence that the user would see, or nothing if there is none."""
    try:
        attempt()
    except Exception as error:
        sentence = edge._sentence(error)
        if sentence is None:
            raise AssertionError(f"{what} would end in a traceback") from error
        return sentence
    return ""


TOY = ["data.train_examples=20", "data.test_examples=5"]
# Group choices by command, what then looks at the settings, and the sections to try (of what no other case has tried).
CASES: list[tuple[str, list[str], Callable[[DictConfig], None], tuple[str, ...]]] = [
    ("pretrain", ["optim=muon", "strategy=deepspeed_2", "logger=wandb"], pretraining, ()),
    ("pretrain", ["strategy=deepspeed_3", "optim=adamw", "data=huggingface", "data.path=x"], pretraining,
     ("strategy", "data")),
    ("prepare", ["data=files", "data.paths=[text.txt]"], corpus, ("data", "paths", "name")),
    ("prepare", ["data=kjv", "tokenizer=byte"], corpus, ("data", "tokenizer")),
    ("tokenizer", ["data=python_docs", "tokenizer=file", "tokenizer.path=nowhere"], corpus, ("data", "tokenizer")),
    ("plan", ["data=files", "data.paths=[text.txt]", "plan.device=h100"], planning, ("plan", "init", "trainer")),
    ("finetune", ["data=zh_number", "optim=muon", *TOY], tuning, ()),
    ("finetune", ["data=date_iso", "adapter=none", *TOY], tuning, ("data", "adapter")),
    ("finetune", ["data=hsk_pinyin", "strategy=single"], tuning, ("data", "strategy")),
    ("finetune", ["data=chatterbot", "strategy=single"], tuning, ("data",)),
    ("finetune", ["data=jsonl", "data.paths=[examples.jsonl]"], tuning, ("data",)),
    ("generate", ["prompt=x", "model=nowhere"], to_the_model(generate.run), ()),
    ("inspect", ["prompt=x", "model=nowhere"], to_the_model(inspect.run), ()),
    ("chat", ["model=nowhere"], to_the_model(chat.run), ("candidates", "system", "model", "max_length")),
    ("evaluate", ["model=nowhere"], to_the_model(evaluate.run), ()),
    ("serve", ["model=nowhere", "port=0"], to_the_model(serve.run), ()),
    ("compare", ["a=nowhere", "b=nowhere"], to_the_model(compare.run), ()),
    ("report", ["runs=[nowhere]"], to_the_model(report.run), ()),
    ("tokenize", ["text=x", "model=nowhere"], to_the_model(tokenize.run), ("text", "ids", "model", "name")),
    ("show-batch", ["step=1", "run=nowhere"], to_the_model(show_batch.run), ()),
    ("bench", ["model=nowhere"], bench._checked_parts, ()),
    ("verify-resume", [], verify_resume._check, ("verify",)),
    ("smoke", [], lambda settings: None, ("stages",)),
]  # fmt: skip
# Where the path itself says enough.
PATHS = {f"data.{name}" for name in ("path", "paths", "data_files", "test_paths", "validation_paths")}
PATHS |= {"a", "b", "paths.data_dir", "model", "run", "init", "resume", "shards_dir"}
# Where the fault is that two settings do not fit together, the other one may be named.
TOGETHER = {
    "trainer.micro_batch_size": "trainer", "trainer.num_nodes": "processes", "trainer.devices": "processes",
    "data.train_examples": "examples", "data.test_examples": "examples", "data.max_number": "max_number",
    "data.first_year": "first_year", "data.last_year": "last_year", "data.metric": "metric",
    "model.hidden_size": "head_dim", "model.num_attention_heads": "heads", "model.num_key_value_heads": "heads",
    "optim.betas": "betas", "verify.steps": "verify", "tasks.metric": "metric", "tasks.also": "metric",
    "data.kind": "data.",
}  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize(
    ("command", "choices", "look", "only"), CASES, ids=lambda each: each if isinstance(each, str) else ""
)
def test_an_odd_value_is_accepted_or_refused_in_a_sentence_that_names_the_key(command, choices, look, only):
    cpu = ["trainer.accelerator=cpu"] if command in ("pretrain", "finetune", "plan", "verify-resume") else []
    composed = compose(command, [*choices, *cpu])
    groups = catalogue.read_groups(catalogue.config_dir(), command)
    look(composed.settings.copy())
    tried = 0
    keys = [key for key in known_keys(composed.settings) if not only or key.partition(".")[0] in only]
    for key in keys:
        for value in ODD:
            tried += 1
            settings = composed.settings.copy()

            def try_it(settings: DictConfig = settings, key: str = key, value: str = value) -> None:
                composing._set(settings, key, value, groups, command)
                check_kinds(command, OmegaConf.to_container(settings, resolve=True), composed.choices)
                look(settings)

            sentence = complaint(try_it, f"{key}={value[:20]}")
            paths = value.strip("[]").split(",") if key in PATHS else []
            named = (key, key.rpartition(".")[2] + " must", TOGETHER.get(key, key), *paths)
            assert any(name in sentence for name in named) or not sentence, f"{key}={value[:20]}: {sentence}"
            assert "None" not in sentence, sentence
    assert tried > len(ODD)


def test_every_command_and_every_key_is_here():
    assert {command for command, *_ in CASES} == set(COMMANDS)
    written = set()
    for path in catalogue.config_dir().rglob("*.yaml"):
        folder = path.relative_to(catalogue.config_dir()).parent.as_posix()
        if not folder.startswith("hydra"):
            written |= {setting.key for setting in catalogue.read_file(path, "" if folder == "." else folder)}
    assert {key for key in written if not key.startswith("hydra.")} == set(KINDS)


def test_a_null_that_the_table_allows_is_explained():
    """Where null is allowed the comment says what it means, unless null is what stands there."""
    silent = set()
    for path in catalogue.config_dir().rglob("*.yaml"):
        folder = path.relative_to(catalogue.config_dir()).parent.as_posix()
        if folder == "experiment":  # which changes what is explained elsewhere
            continue
        for setting in catalogue.read_file(path, "" if folder == "." else folder):
            kind = KINDS.get(setting.key)
            if kind and kind.null and setting.default != "null" and "null" not in setting.comment:
                silent.add(f"{path.name}: {setting.key}")
    assert not silent


@pytest.mark.parametrize(
    ("command", "override", "sentence"),
    [
        ("pretrain", "model.hidden_size=null", "model.hidden_size=null must be a whole number of at least 1 (width of"),
        ("pretrain", "trainer.max_steps=" + "9" * 23, "trainer.max_steps=1e+23 must be below 2^53, or null (optimiser"),
        (
            "prepare",
            "tokenizer.vocab_size=1e9",
            "tokenizer.vocab_size=1000000000 must be a whole number from 1 to 1,048",
        ),
        ("finetune", "adapter.target_modules=q_proj", "adapter.target_modules=q_proj must be a list of at least one"),
        ("finetune", "trainer.batch_examples=0", "trainer.batch_examples=0 must be a whole number of at least 1 (exam"),
        ("generate", "sampling.stop=null", "sampling.stop=null must be a list, in brackets (strings that end the"),
        ("generate", "num_samples=1000000000", "num_samples=1000000000 must be a whole number from 1 to 100,000 (com"),
        ("plan", "plan.memory_gb=inf", "plan.memory_gb=inf must be a number above 0 and at most 1,000,000, or null ("),
        ("evaluate", "tasks.settings.zh_number.seed=x", "tasks.settings.zh_number.seed=x must be a whole number of at"),
        ("prepare", "paths.data_dir=bad\udcff", "paths.data_dir='bad\\udcff' is not UTF-8 from character 4 on: write"),
        ("pretrain", "optim=null", "optim=null: there is no such option; optim is one of adamw, muon"),
    ],
)
def test_the_sentence(command, override, sentence):
    with pytest.raises(ValueError, match=r".+") as error:
        compose(command, [override])
    assert str(error.value).startswith(sentence)


def test_more_completions_than_anybody_waits_for_are_refused(tmp_path):
    (tmp_path / "prompts.txt").write_text("a\n" * 1001)
    settings = compose("generate", ["prompt_file=prompts.txt", "num_samples=100", "model=nowhere"]).settings
    with pytest.raises(ValueError, match=r"num_samples=100 of 1,001 prompts are more than 100,000 completions; lower"):
        generate.run(settings, tmp_path)


def test_a_text_without_one_window_is_refused_by_prepare_as_by_pretrain():
    with pytest.raises(ValueError, match=r"data\.sequence_length=4000 needs a training text of at least 4001 tokens"):
        prepare.run(
            compose("prepare", ["data=files", "data.paths=[text.txt]", "data.sequence_length=4000"]).settings, None
        )


@pytest.mark.parametrize("folder", ["nowhere", "."])
def test_a_wrong_init_is_called_init(folder):
    settings = compose("plan", [f"init={folder}", "plan.device=h100"]).settings
    with pytest.raises(ValueError, match="init=") as error:
        planning(settings)
    assert "model=" not in str(error.value)


def test_tokenize_without_ids_is_refused():
    with pytest.raises(ValueError, match="there are no ids: give whole numbers"):
        tokenize.run(compose("tokenize", ["ids=[]"]).settings, None)


def test_a_command_of_another_one_s_section_takes_no_mapping():
    with pytest.raises(KindError, match=r"model=\{a: 1\} must be text"):
        check_kinds("generate", {"model": {"a": 1}}, ["sampling"])
    check_kinds("pretrain", {"model": {"hidden_size": 1}}, ["model"])


def test_the_largest_vocabulary_is_the_trainer_s():
    assert LARGEST_VOCABULARY == train.MAX_VOCAB_SIZE


@pytest.mark.parametrize("stated", ["4", ["4"], {"a": 1}, True])
def test_end_tokens_of_another_kind_are_refused(stated):
    loaded = LoadedModel(None, None, None, {}, Path("m"), generation={"eos_token_id": stated})
    with pytest.raises(ValueError, match=r"m/generation_config\.json: eos_token_id=.* must be a token id or a list"):
        _ = loaded.eos_ids


def test_limits_that_stand_in_a_library_of_ours_too_are_the_same():
    """The table is read before torch and `tokenizers` are imported, so it cannot take them from there."""
    from llmtrain.generation import params
    from llmtrain.model import config

    largest = {
        "sampling.temperature": params.MAX_TEMPERATURE,
        "sampling.repetition_penalty": params.MAX_PENALTY,
    }
    least = {"sampling.repetition_penalty": 1 / params.MAX_PENALTY}
    for name, low, high in config._NUMBERS:
        least[f"model.{name}"], largest[f"model.{name}"] = low, high
    for key, limit in largest.items():
        assert KINDS[key].wants(limit) is None, key
        assert KINDS[key].wants(2 * limit), key
    for key, limit in least.items():
        assert KINDS[key].wants(limit) is None, key
        assert KINDS[key].wants(limit / 2 if limit else -1), key
