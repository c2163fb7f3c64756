"""`llmtrain show-batch`: the texts that a step was really trained on, of pretraining and fine-tuning runs."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmtrain.launch import show_batch
from llmtrain.launch.composing import compose

pytestmark = [
    pytest.mark.medium,
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["trainer.accelerator=cpu", "trainer.precision=fp32", "strategy.name=single", "trainer.max_steps=3"]
PRETRAIN = [
    "model=tiny", "tokenizer=byte", "data=files", "data.validation_fraction=0.2", "data.sequence_length=32",
    "trainer.batch_tokens=128", "trainer.micro_batch_size=2", "optim.warmup_steps=0", "callbacks=none", "seed=3",
]  # fmt: skip


def write_texts(folder: Path) -> list[Path]:
    """Two sources of several documents, whose every line says where it stands."""
    folder.mkdir(exist_ok=True)
    for name in ("one", "two"):
        for number in range(6):
            lines = "".join(f"{name}，文{number}，行{line}\n" for line in range(40))
            (folder / f"{name}-{number}.txt").write_text(lines, encoding="utf-8")
    return sorted(folder.iterdir())


@pytest.fixture
def trained_on(monkeypatch) -> list[tuple[list[int], list[list[int]]]]:
    """Sample ids and input ids of every micro-batch that is trained on."""
    from llmtrain.training.module import LanguageModule

    seen: list[tuple[list[int], list[list[int]]]] = []
    original = LanguageModule.training_step

    def training_step(module: Any, batch: dict, batch_idx: int) -> Any:
        seen.append((batch["sample_ids"].tolist(), batch["input_ids"].tolist()))
        return original(module, batch, batch_idx)

    monkeypatch.setattr(LanguageModule, "training_step", training_step)
    return seen


def trained(command: str, run_dir: Path, *overrides: str) -> None:
    """A run as the edge starts it: its settings are in config.yaml once it is accepted."""
    import importlib

    from omegaconf import OmegaConf

    settings = compose(command, [*SMALL, *overrides]).settings
    run_dir.mkdir(parents=True)

    def accept() -> None:
        OmegaConf.save(OmegaConf.create(OmegaConf.to_container(settings, resolve=True)), run_dir / "config.yaml")

    importlib.import_module(f"llmtrain.launch.{command}").run(settings, run_dir, accept)


def shown(tmp_path: Path, *overrides: str) -> dict[str, Any]:
    settings = compose("show-batch", [f"paths.runs_dir={tmp_path / 'runs'}", *overrides]).settings
    results = show_batch.run(settings, tmp_path)
    assert json.loads(json.dumps(results)) == results
    return results


def test_the_windows_of_a_pretraining_step(tmp_path, trained_on, capsys):
    from llmtrain.tokenizer import byte_tokenizer

    write_texts(tmp_path / "one")
    write_texts(tmp_path / "two")
    mixture = [f"data.paths=[{tmp_path / 'one'}, {tmp_path / 'two'}]", "data.weights=[3, 1]"]
    run = tmp_path / "runs" / "pretrain" / "mine"
    trained("pretrain", run, *PRETRAIN, *mixture, f"paths.data_dir={tmp_path / 'data'}")
    sources = set()
    for step in (1, 2, 3):
        results = shown(tmp_path, f"run={run}", f"step={step}")
        printed = capsys.readouterr().out
        micro_batches = trained_on[2 * (step - 1) : 2 * step]
        assert results["ids"] == [number for ids, _ in micro_batches for number in ids]
        windows = [window for _, inputs in micro_batches for window in inputs]
        for sample, window in zip(results["samples"], windows, strict=True):
            assert sample["tokens"] == 33
            text = byte_tokenizer().decode(window, skip_special=False)
            assert sample["text"].startswith(text.rstrip("\ufffd"))
            assert f"── sample {sample['id']} · {sample['source']} · {sample['where']} · 33 tokens ──" in printed
            assert sample["text"] in printed
            sources.add(sample["source"])
    assert sources == {"one", "two"}


def test_a_place_is_the_document_and_the_token_in_it(tmp_path):
    from llmtrain.data.shards import ShardSet

    write_texts(tmp_path / "texts")
    run = tmp_path / "runs" / "pretrain" / "mine"
    trained("pretrain", run, *PRETRAIN, f"data.paths=[{tmp_path / 'texts'}]", f"paths.data_dir={tmp_path / 'data'}")
    (folder,) = (path.parent for path in (tmp_path / "data" / "shards").glob("*/train/manifest.json"))
    ends = ShardSet.open(folder).document_ends().tolist()
    places = {sample["id"]: sample["where"] for sample in shown(
        tmp_path, f"run={run}", f"samples=[0, {ends[0] - 1}, {ends[0]}, {ends[1] + 6}]"
    )["samples"]}  # fmt: skip
    assert list(places.values()) == [
        f"document 1 of {len(ends)}, token 1",
        f"document 1 of {len(ends)}, token {ends[0]}",
        f"document 2 of {len(ends)}, token 1",
        f"document 3 of {len(ends)}, token 7",
    ]


def test_the_examples_of_a_fine_tuning_step(tmp_path, trained_on, tiny_config, byte_tok):
    from llmtrain.checkpoint import save_model_folder
    from llmtrain.model import build_model

    config = tiny_config()
    base = tmp_path / "base"
    save_model_folder(
        base, config=config, state_dict=build_model(config, seed=0).state_dict(), tokenizer=byte_tok, info={}
    )
    link = tmp_path / "latest"
    link.symlink_to(base, target_is_directory=True)
    run = tmp_path / "runs" / "finetune" / "mine"
    sizes = ["data.train_examples=30", "data.test_examples=4", "trainer.val_examples=4", "trainer.batch_examples=6"]
    trained("finetune", run, f"model={link}", "trainer.micro_batch_size=3", "optim.warmup_steps=0", *sizes)
    link.unlink()  # `latest` has moved on; the run knows what it was
    (tmp_path / "runs" / "finetune" / "latest").symlink_to("mine")
    results = shown(tmp_path, "step=2")
    micro_batches = trained_on[2:4]
    assert results["ids"] == [number for ids, _ in micro_batches for number in ids]
    rows = [row for _, inputs in micro_batches for row in inputs]
    for sample, row in zip(results["samples"], rows, strict=True):
        text = byte_tok.decode([token for token in row if token != byte_tok.pad_id], skip_special=False)
        assert sample["text"] == f"{text}<|end|>"
        assert sample["source"] == "zh_number"
    assert len(shown(tmp_path, "step=2", "limit=2")["samples"]) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "show-batch takes step=… or samples=[…] (neither is given)"),
        (["step=1", "samples=[1]"], "(both are given)"),
        (["step=0"], "step=0 must be a whole number of at least 1"),
        (["step=1"], "there is no run in"),
        (["step=1", "run=nowhere"], "run=nowhere is no run folder"),
        (["step=nan"], "step=nan must be a whole number of at least 1"),
        (["step=1.5"], "step=1.5 must be a whole number"),
        (
            ["samples=[a]"],
            "samples=[a] must be a list in which each value is a whole number of at least 0, and a is not",
        ),
        (["samples=[99999999999999999999999]"], "samples=[1e+23] must be a list in which each value is below 2^53"),
        (["samples=3"], "samples=3 must be a list, in brackets"),
        (["step=1", "limit=0"], "limit=0 must be a whole number of at least 1, or null ("),
        (["step=1", "run={prepared}"], "was not trained, so it has no steps; give runs/pretrain/<name>."),
    ],
)
def test_what_cannot_be_shown_is_refused(tmp_path, overrides, message):
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    (prepared / "config.yaml").write_text("data: {kind: files}\n")
    with pytest.raises(ValueError) as error:  # noqa: PT011 (compared as text: the sentences hold brackets)
        shown(tmp_path, *(each.format(prepared=prepared) for each in overrides))
    assert message in str(error.value)


def test_samples_and_texts_that_are_not_there_are_refused(tmp_path):
    texts = write_texts(tmp_path / "texts")
    run = tmp_path / "runs" / "pretrain" / "mine"
    data = [f"data.paths=[{tmp_path / 'texts'}]", f"paths.data_dir={tmp_path / 'data'}"]
    trained("pretrain", run, *PRETRAIN, *data, "trainer.checkpoint_every=3")
    with pytest.raises(ValueError, match=r"there is no sample 1000000: the run has the ids 0 … \d+"):
        shown(tmp_path, f"run={run}", "samples=[1000000]")
    with pytest.raises(ValueError, match=r"step=4 is beyond the end of the run, which has 3 steps."):
        shown(tmp_path, f"run={run}", "step=4")
    texts[0].write_text("something else\n" * 100)
    with pytest.raises(ValueError, match="the data's fingerprint differs from that of"):
        shown(tmp_path, f"run={run}", "step=1")


@pytest.mark.slow
def test_a_run_that_overflows_ends_in_a_sentence_whose_command_works(tmp_path, fake_environment):
    """As a program: the learning rate blows the weights up, the run ends, its folder stays, and the batch is shown."""
    write_texts(tmp_path / "texts")

    def program(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "llmtrain", *arguments],
            cwd=tmp_path,
            env=fake_environment | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            encoding="utf-8",
            timeout=240,
            check=False,
        )

    former = tmp_path / "runs" / "pretrain" / "former"
    former.mkdir(parents=True)
    (former.parent / "latest").symlink_to("former")
    huge = ["optim=adamw", "optim.lr=1000", "optim.weight_decay=1000", "optim.schedule=constant"]
    huge += ["trainer.max_skipped_steps=2"]
    sizes = ["trainer.max_steps=50", "trainer.checkpoint_every=1", "trainer.val_every=1", "data.paths=[texts]"]
    done = program("pretrain", *PRETRAIN, *sizes, *huge, "trainer.accelerator=cpu", "name=huge")
    assert done.returncode == 2, done.stderr
    sentence = done.stderr.splitlines()[-1]
    assert sentence.startswith("error: step 5 was the 2nd in a row to be skipped (trainer.max_skipped_steps=2)")
    assert done.stdout == ""
    run = tmp_path / "runs" / "pretrain" / "huge"
    assert (run.parent / "latest").resolve() == run
    for file in run.rglob("*.safetensors"):
        from safetensors.torch import load_file

        assert all(value.isfinite().all() for value in load_file(file).values()), file
    command = shlex.split(sentence.split("`")[1])
    assert command[:2] == ["llmtrain", "show-batch"]
    batch = program(*command[1:])
    assert batch.returncode == 0, batch.stderr
    results = json.loads(batch.stdout.splitlines()[-1])
    assert [str(number) for number in results["ids"][:4]] == sentence.split("the samples ")[1].split(", which")[
        0
    ].split(", ")
    assert Path(results["run"]) == run
