"""Every key of the sections that training reads, with values that users write where they do not belong.

Each is refused in a sentence that names the key before anything is prepared, or is listed here with what it means.
"""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from llmtrain.launch import composing, finetune, starting
from llmtrain.launch.composing import compose, known_keys
from llmtrain.launch.keys import check_kinds
from llmtrain.training import hardware, wandb_server

ODD = ("null", "-1", "nan", "inf", "-inf", "words", "1e300", "auto", "1.5", "true")
SECTIONS = ("trainer", "optim", "strategy", "logger")
CHOICES = [
    ("pretrain", "optim=muon", "strategy=deepspeed_2", "logger=wandb"),
    ("pretrain", "optim=adamw", "strategy=deepspeed_3", "logger=csv"),
    ("finetune", "optim=adamw", "strategy=deepspeed_1", "logger=wandb"),
]
NULL, HALF, HALVES = {"null"}, {"1.5"}, {"1.5", "1e300"}
WORDS = {"words", "auto", "-1", "1.5", "1e300"}
MEANINGS = {
    "logger.project": WORDS, "logger.mode": {"auto"},
    "optim.eps": HALF, "optim.lr": HALF, "optim.muon_lr": HALF, "optim.weight_decay": HALF,
    "optim.warmup_steps": {"auto"},
    "optim.grad_clip": HALVES | NULL,
    "strategy.offload_optimizer": {"true"}, "strategy.offload_parameters": {"true"},
    "trainer.accelerator": {"auto"}, "trainer.devices": {"auto"}, "trainer.num_nodes": {"auto"},
    "trainer.precision": {"auto"}, "trainer.compile": {"true"}, "trainer.gradient_checkpointing": {"true"},
    "trainer.timeout": {"1.5"}, "trainer.spike_alarm": HALVES | NULL, "trainer.max_epochs": HALF | NULL,
    "trainer.max_steps": NULL, "trainer.max_tokens": NULL, "trainer.micro_batch_size": NULL,
    "trainer.packing_length": NULL, "trainer.val_examples": NULL, "trainer.val_every": NULL,
    "trainer.checkpoint_every": NULL, "trainer.sample_every": NULL, "trainer.keep_last": NULL,
    "trainer.max_skipped_steps": NULL,
}  # fmt: skip


def accepted() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for command, *choices in CHOICES:
        whole = compose(command, [*choices, "trainer.accelerator=cpu"])
        composed = whole.settings
        check = starting.check_settings if command == "pretrain" else finetune._check_settings
        for key in known_keys(composed):
            if key.partition(".")[0] not in SECTIONS or "." not in key:
                continue
            for value in ODD:
                settings = composed.copy()
                try:
                    composing._set(settings, key, value, (), command)
                    check_kinds(command, OmegaConf.to_container(settings, resolve=True), whole.choices)
                    check(settings)
                except ValueError as error:
                    sentence = str(error)
                else:
                    found.setdefault(key, set()).add(value)
                    continue
                # What is only too large may not fit to another setting, which is named then.
                assert key.removesuffix(".name") in sentence or value == "1e300", f"{key}={value}: {sentence}"
                assert "None" not in sentence
    return found


@pytest.mark.medium
def test_every_odd_value_is_refused_by_name_or_means_something(monkeypatch):
    monkeypatch.setattr(hardware, "check_compiler", lambda: None)
    assert accepted() == MEANINGS


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.timeout=null", "trainer.timeout=null must be a number of at least 1 and at most 1,000,000,000 (sec"),
        ("trainer.timeout=0", "trainer.timeout=0 must be a number of at least 1 and at most 1,000,000,000"),
        ("trainer.spike_alarm=-1", "trainer.spike_alarm=-1 must be a number above 0, or null (warn of a loss "),
        ("trainer.max_steps=1e300", "trainer.max_steps=1e+300 must be below 2^53, or null (optimiser steps; "),
        ("trainer.devices=1.5", "trainer.devices=1.5 must be a whole number of at least 1, or auto (processes "),
        ("optim.warmup_steps=1.5", "optim.warmup_steps=1.5 must be a whole number of at least 0, or auto (steps in "),
        ("optim.muon_steps=2.5", "optim.muon_steps=2.5 must be a whole number from 1 to 100 (Newton–Schulz "),
        ("optim.grad_clip=0", "optim.grad_clip=0 must be a number above 0, or null (largest "),
        ("optim.lr=1e300", "optim.lr=1e+300 must be a number above 0 and at most 1,000 (highest learning rate of "),
        ("optim.betas=[0.9,x]", "optim.betas=[0.9, x] must be a list in which each value is a number of at least 0 and "
         "below 1, and x is not"),
        ("optim.betas=[0.9]", "optim.betas=[0.9] must be two numbers"),
        ("strategy.offload_optimizer=null", "strategy.offload_optimizer=null must be true or false (keep the "),
        ("logger.project=a/b", "logger.project=a/b must be a name of at most 128 characters without any of / "),
        ("logger.project=", "logger.project= must be text, and not empty (project on the server)"),
        ("logger.mode=null", "logger.mode=null must be auto, online or offline (auto: online if logged in"),
    ],
)  # fmt: skip
def test_the_sentence(override, sentence):
    with pytest.raises(ValueError, match=r".+") as error:
        starting.check_settings(compose("pretrain", [*CHOICES[0][1:], "trainer.accelerator=cpu", override]).settings)
    assert str(error.value).startswith(sentence)


def test_online_is_insisted_on_in_the_first_second(monkeypatch):
    monkeypatch.setattr(wandb_server, "has_login", lambda: False)
    with pytest.raises(ValueError, match=r"logger\.mode=online: nobody is logged in here"):
        starting.check_settings(compose("pretrain", [*CHOICES[0][1:], "logger.mode=online"]).settings)
