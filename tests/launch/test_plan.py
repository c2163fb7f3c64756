"""`llmtrain plan`: its figures against counted ones, what it refuses, and that it builds and fetches nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from llmtrain.launch import forecast
from llmtrain.launch.composing import compose
from llmtrain.launch.plan import plan_from, run
from llmtrain.launch.plan_text import describe, short_form, shortage
from llmtrain.model import ModelConfig, flops_per_token, parameter_count
from llmtrain.training import hardware
from llmtrain.training.hardware import GPUS

H100 = [
    "model=350m", "tokenizer.vocab_size=32768", "optim=adamw", "data.sequence_length=2048", "plan.device=h100",
    "trainer.batch_tokens=524288", "trainer.devices=8", "trainer.num_nodes=2", "strategy=deepspeed_2",
]  # fmt: skip
HERE = ["model=tiny", "tokenizer=byte", "data=python_docs", "data.sequence_length=32", "trainer.batch_tokens=256",
        "trainer.accelerator=cpu", "trainer.precision=fp32"]  # fmt: skip


def settings(tmp_path, *overrides: str):
    return compose("plan", [*overrides, f"paths.data_dir={tmp_path / 'data'}", f"paths.runs_dir={tmp_path}"]).settings


def test_a_run_on_machines_that_are_not_here(tmp_path, caplog):
    caplog.set_level("INFO")
    results = run(settings(tmp_path, *H100, "plan.price_per_hour=3"), tmp_path / "run")
    values = compose("pretrain", ["model=350m"]).settings.model
    config = ModelConfig.from_dict({**values, "vocab_size": 32768})
    assert results["parameters"] == parameter_count(config)
    assert results["tokens"] == 1500 * 524288
    assert results["flops"] == results["tokens"] * flops_per_token(config, 2048)
    assert results["seconds"] == pytest.approx(results["flops"] / (0.4 * 989e12 * 16))
    assert results["cost"] == pytest.approx(3 * 16 * results["seconds"] / 3600)
    assert list(results["memory"]) == [1, 2, 3]
    assert results["memory"][2]["gradients"] == 4 * parameter_count(config) // 16
    assert results["epochs"] is None
    assert json.loads(json.dumps(results))
    assert "16 × h100 (2 machines × 8), bf16" in caplog.text
    assert "* ZeRO 2" in caplog.text
    assert "the corpus is not prepared yet" in caplog.text
    assert not (tmp_path / "data").exists()
    assert not (tmp_path / "run").exists()


def test_the_largest_micro_batch_fits_and_one_more_does_not(tmp_path):
    plan = plan_from(settings(tmp_path, *H100))
    for stage in plan.stages:
        rows = plan.largest_micro_batch(stage)
        room = GPUS["h100"].memory - forecast.RESERVED
        fits, does_not = (replace(plan.workload, micro_batch_size=number) for number in (rows, rows + 1))
        assert forecast.memory(fits, plan.target, stage).total <= room
        assert forecast.memory(does_not, plan.target, stage).total > room


def test_too_little_memory_is_said(tmp_path):
    plan = plan_from(settings(tmp_path, *H100, "plan.memory_gb=1"))
    assert plan.largest_micro_batch(2) == 0
    assert "a device has 1.00 GB" in (shortage(plan) or "")
    assert shortage(plan) in describe(plan)
    assert shortage(plan_from(settings(tmp_path, *H100, "trainer.gradient_checkpointing=true"))) is None


def test_what_only_the_corpus_can_say_is_unknown_until_it_is_prepared(tmp_path):
    from llmtrain.launch.prepare import prepare_from

    given = settings(tmp_path, *HERE, "trainer.max_steps=null", "trainer.max_epochs=2", "optim.warmup_steps=2")
    plan = plan_from(given)
    assert (plan.length, plan.flops, plan.seconds) == (None, None, None)
    assert "unknown, as the corpus is not prepared yet" in "\n".join(describe(plan))
    _, _, prepared = prepare_from(given)
    plan = plan_from(given)
    rows = sum(shards.num_tokens // 32 for shards, _ in prepared.train)
    assert plan.length is not None
    assert plan.length.steps == -(-2 * rows // 8)
    assert plan.epoch_tokens == rows * 32


def test_an_unprepared_corpus_leaves_its_epochs_out_of_other_limits(tmp_path, caplog):
    plan = plan_from(settings(tmp_path, *HERE, "trainer.max_epochs=2", "trainer.max_steps=60"))
    assert plan.length is not None
    assert plan.length.steps == 60
    assert "trainer.max_epochs=2 is left out" in caplog.text


def test_this_machine_is_measured_and_shared(tmp_path):
    one = plan_from(settings(tmp_path, *HERE))
    two = plan_from(settings(tmp_path, *HERE, "trainer.devices=2", "strategy=deepspeed_1"))
    assert one.target.on_cpu
    assert one.target.memory is not None
    assert two.target.memory == one.target.memory // 2
    assert one.target.peak_flops is not None
    assert one.target.peak_flops > 1e9
    assert one.stages == [0, 1, 2]
    assert two.stages == [1, 2]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_named_card_is_planned_for_as_the_card_itself(tmp_path, monkeypatch, precision):
    """An H200 by its data sheet, and one that is here: it says its name and 139.8 GiB."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    found = SimpleNamespace(total_memory=int(139.8 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    one = [*H100, "trainer.devices=1", "trainer.num_nodes=1", f"trainer.precision={precision}"]
    named = plan_from(settings(tmp_path, *one, "plan.device=h200"))
    here = plan_from(settings(tmp_path, *one, "plan.device=auto"))
    trained = hardware.peak_of(precision, torch.device("cuda", 0)).flops  # what MFU is a share of
    assert named.target.peak_flops == here.target.peak_flops == trained
    assert named.target.memory == pytest.approx(here.target.memory, rel=0.02)
    assert named.largest_micro_batch(2) == pytest.approx(here.largest_micro_batch(2), rel=0.03)
    assert named.seconds == here.seconds


def test_an_offloaded_run_is_planned_with_its_optimiser_in_the_hosts_memory(tmp_path):
    one = [*H100, "trainer.devices=1", "trainer.num_nodes=1"]
    plain = plan_from(settings(tmp_path, *one))
    offloaded = plan_from(settings(tmp_path, *one, "strategy.offload_optimizer=true"))
    assert plain.memory.optimizer > 0
    assert (offloaded.memory.optimizer, offloaded.memory.gradients) == (0, 0)
    assert offloaded.largest_micro_batch(2) > plain.largest_micro_batch(2)
    host = forecast.size(offloaded.memory.host - plain.memory.host)
    assert f"offloaded, beside the above: {host} in the host's memory" in "\n".join(describe(offloaded))
    would = "\n".join(describe(plain))
    assert f"strategy.offload_optimizer=true: {forecast.size(offloaded.memory.total)} on the device, {host}" in would
    assert f"; {offloaded.largest_micro_batch(2)} rows fit" in would
    third = [*H100, "strategy=deepspeed_3", "strategy.offload_optimizer=true", "strategy.offload_parameters=true"]
    assert plan_from(settings(tmp_path, *third)).memory.state == 0


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("plan.device=h900", "plan.device=h900 is unknown; use auto (this machine) or one of b200, h200"),
        ("plan.mfu=1.5", "plan.mfu=1.5 must be a number above 0 and at most 1"),
        ("plan.memory_gb=0", "plan.memory_gb=0 must be a number above 0 and at most 1,000,000, or null"),
        ("plan.price_per_hour=-1", "plan.price_per_hour=-1 must be a number above 0"),
        ("plan.probe=true", "plan.probe=true measures this machine, not plan.device=h100; leave one out"),
        ("trainer.batch_tokens=100", "trainer.batch_tokens=100 is not a multiple"),
        ("trainer.micro_batch_size=5", "trainer.micro_batch_size=5 does not divide"),
        ("trainer.precision=int8", "trainer.precision=int8 must be auto, bf16 or fp32"),
        ("trainer.num_nodes=0", "trainer.num_nodes=0 must be a whole number of at least 1"),
        ("strategy=single", "strategy=single runs one process, not 16"),
        ("data.sequence_length=4096", "exceeds the model's context of 2048"),
        ("init=nowhere", "init=nowhere does not exist"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(tmp_path, override, sentence):
    with pytest.raises(ValueError, match=r".+") as error:
        run(settings(tmp_path, *H100, override), tmp_path / "run")
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["optim=muon", "strategy.offload_optimizer=true"],
        ["optim=muon", "strategy=deepspeed_3"],
        ["strategy.grad_accum_dtype=int8"],
        ["strategy.grad_accum_dtype=bf16", "trainer.precision=fp32"],
        ["optim.lr=-1"],
        ["optim=muon", "optim.muon_steps=0"],
        ["optim.grad_clip=-1"],
        ["optim.warmup_steps=2000"],
        ["trainer.log_every=0"],
        ["trainer.keep_last=0"],
        ["trainer.timeout=0"],
        ["seed=-1"],
        ["model.hidden_size=100"],
        ["sampling.top_p=0"],
    ],
    ids=lambda overrides: overrides[-1],
)
def test_plan_refuses_what_pretrain_refuses_in_the_same_words(tmp_path, overrides):
    """With a device that is not here, so nothing of this machine is asked."""
    from llmtrain.launch import pretrain

    one = [each for each in H100 if not each.startswith(("trainer.devices", "trainer.num_nodes", "plan."))]
    one += ["trainer.precision=bf16", *overrides]
    said = []
    for command, more in ((plan_from, "plan.device=h100"), (lambda given: pretrain.run(given, tmp_path), None)):
        with pytest.raises(ValueError, match=r".+") as error:
            command(compose("plan" if more else "pretrain", [*one, *([more] if more else [])]).settings)
        said.append(str(error.value).partition(" (")[0])  # in brackets is what the key means to the command
    assert said[0] == said[1]


def test_a_probe_is_of_one_machine(tmp_path):
    with pytest.raises(ValueError, match=r"plan.probe=true runs on this machine alone, and trainer.num_nodes=2"):
        run(settings(tmp_path, *HERE, "plan.probe=true", "trainer.num_nodes=2"), tmp_path / "run")


def test_no_model_is_built(tmp_path):
    """A billion parameters are planned for in a process that may not have a quarter of their bytes."""
    code = (
        "import resource, sys\n"
        "from llmtrain.launch.plan import run\nfrom llmtrain.launch.composing import compose\nimport torch\n"
        "from llmtrain.training.resident import peak_bytes, resident_bytes\nfrom pathlib import Path\n"
        "before = resident_bytes()\n"
        f"run(compose('plan', ['model=1b', 'plan.device=h100', 'optim=adamw', 'paths.data_dir={tmp_path}/d']).settings,"
        " Path('x'))\nprint(peak_bytes() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1e9


def test_the_short_form_has_at_most_four_lines(tmp_path):
    assert len(short_form(plan_from(settings(tmp_path, *H100)))) == 4
    lines = short_form(plan_from(settings(tmp_path, *HERE)))
    assert "M parameters" in lines[0]
    assert lines[2].startswith("memory: about ")


@pytest.mark.medium
def test_a_checkpoint_takes_what_the_plan_says(tmp_path, monkeypatch):
    """Of a model whose weights are most of it."""
    from llmtrain.launch import pretrain

    text = tmp_path / "text.txt"
    text.write_text("话说天下大势，分久必合，合久必分。\n\n" * 300, encoding="utf-8")
    common = [
        "model=tiny", "model.hidden_size=256", "model.intermediate_size=512", "tokenizer=byte", "data=files",
        f"data.paths=[{text}]", "data.sequence_length=32", "trainer.batch_tokens=64", "trainer.max_steps=2",
        "trainer.accelerator=cpu", "trainer.precision=fp32", "strategy=single", "optim.warmup_steps=1",
        "callbacks.prompts=[话]", "sampling.max_new_tokens=2", "trainer.checkpoint_every=2",
    ]  # fmt: skip
    said = plan_from(settings(tmp_path, *common)).files()
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    pretrain.run(compose("pretrain", [*common, f"paths.data_dir={tmp_path / 'data'}"]).settings, run_dir)
    folder = run_dir / "checkpoints" / "step-000002"
    for part in ("model", "resume"):
        found = sum(file.stat().st_size for file in (folder / part).rglob("*") if file.is_file())
        assert found == pytest.approx(said[part], rel=0.05)


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_a_probe_predicts_time_and_memory(tmp_path, monkeypatch):
    """The time of a longer run within 15 % of the probe's estimate; up to three tries, as machines are shared."""
    from llmtrain.bench.trials import Trial, run_trial
    from llmtrain.launch.probing import _fit_options, probe

    monkeypatch.setenv("CXX", "none")
    given = settings(
        tmp_path, "model=30m", "tokenizer.vocab_size=8192", "optim=adamw", "trainer.batch_tokens=512",
        "trainer.devices=2", "strategy=deepspeed_2", "trainer.accelerator=cpu", "trainer.max_steps=20",
    )  # fmt: skip
    plan = plan_from(given)
    ratios = []
    for _ in range(3):
        found = probe(given, plan)
        assert found["memory_ratio"] == pytest.approx(1, abs=0.15)
        assert found["seconds"] == pytest.approx(20 * found["step_seconds"])
        longer = Trial(
            plan.config.to_dict(), _fit_options(given, plan), processes=2, micro_batch_size=1, sequence_length=256,
            steps=20,
        )  # fmt: skip
        ratios.append(20 / 19 * sum(run_trial(longer).step_seconds) / found["seconds"])
        if abs(ratios[-1] - 1) <= 0.15:
            return
    raise AssertionError(f"measured over estimated time: {ratios}")
