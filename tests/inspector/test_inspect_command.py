"""`llmtrain inspect`: the two files, what is printed, chats and adapters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.checkpoint import save_model_folder
from llmtrain.launch import inspect, main
from llmtrain.launch.composing import compose
from llmtrain.model import build_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tiny_config, byte_tok, tmp_path):
    model = build_model(tiny_config(initializer_range=0.2), seed=0)
    save_model_folder(
        tmp_path / "first" / "model",
        config=model.config,
        state_dict=model.state_dict(),
        tokenizer=byte_tok,
        info={"trained_length": 64},
    )
    return tmp_path / "first"


def run(folder, *overrides):
    settings = compose(
        "inspect", [f"model={folder}", "device=cpu", "measure=false", "sampling.max_new_tokens=5", *overrides]
    ).settings
    results = inspect.run(settings, folder)
    return results, json.loads(Path(results["json"]).read_text("utf-8"))


def test_a_chat_is_asked_in_its_markers(folder, byte_tok):
    results, found = run(folder, "prompt=hi", "chat=true", "sampling=greedy")
    assert results["prompt"] == "hi"
    special = [token["text"] for token in found["tokens"] if token["special"] and token["source"] == "prompt"]
    assert special == ["<|user|>", "<|assistant|>"]
    assert found["prompt"].startswith("<|user|>hi")


def test_nothing_is_printed_unless_asked_for(folder, capsys):
    run(folder, "prompt=你好")
    assert capsys.readouterr().out == ""
    results, _ = run(folder, "prompt=你好", "as_text=true", "sampling.seed=3")
    printed = capsys.readouterr().out
    assert "5 of the answer" in printed
    assert "seed 3" in printed
    assert "ended by the length: 5 new tokens" in printed
    assert results["seed"] == 3


def test_the_flag_is_the_key(monkeypatch):
    given = []
    monkeypatch.setattr(main, "launch", lambda command, overrides, **_: given.append((command.name, overrides)) or 0)
    assert main.run_command(main.COMMANDS["inspect"], ["床前 明月光", "--text"]) == 0
    assert given == [("inspect", ["as_text=true", "prompt=床前 明月光"])]
    assert main.run_command(main.COMMANDS["generate"], ["x", "--text"]) == 2


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([], "there is no prompt"),
        (["prompt="], "the prompt is empty"),
        ([f"prompt={'a' * 300}"], "the prompt has 300 tokens and leaves no room"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_a_sentence(folder, overrides, sentence):
    with pytest.raises(ValueError, match=sentence):
        run(folder, *overrides)


@pytest.mark.medium
def test_an_adapter_folder_is_inspected_merged(folder, tmp_path):
    import torch

    from llmtrain import adapters
    from llmtrain.checkpoint import folder_state_hash, load_model_folder, save_adapter_folder

    base = load_model_folder(folder)
    adapted = adapters.attach(base.model, r=4, train_tokens=[70], use_dora=True, base_folder=base.folder)
    with torch.no_grad():
        for name, parameter in base.model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.2)
    save_adapter_folder(tmp_path / "adapter", adapted, info={"base_state_hash": folder_state_hash(base.folder)})
    _, plain = run(folder, "prompt=hello", "sampling=greedy")
    results, found = run(tmp_path / "adapter", "prompt=hello", "sampling=greedy")
    assert found["model"]["adapter"] == str(tmp_path / "adapter") == results["model"]
    assert found["steps"][0]["scores"] != plain["steps"][0]["scores"]
    assert all(error < 1e-5 for error in found["checks"].values())


@pytest.mark.medium
def test_the_script_writes_both_files_into_the_run_folder(folder, tmp_path):
    """The whole way, as make goes it: free text by the environment, two files, one line of results."""
    text = '</script>"床前" ${x} $(id)'
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "inspect_prompt.py"), f"model={folder}", "sampling.max_new_tokens=6"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "LLMTRAIN_PROMPT": text},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "longer than" not in done.stderr  # measuring at all lengths is no text of the user's
    results = json.loads(done.stdout.splitlines()[-1])
    json_file, page = Path(results["json"]), Path(results["page"])
    assert json_file.parent == page.parent
    assert json_file.parent.parent == tmp_path / "runs" / "inspect"
    found = json.loads(json_file.read_text("utf-8"))
    assert found["prompt"] == text == results["prompt"]
    assert found["model"]["name"] == "first"
    assert found["measured"]["lengths"]
    html = page.read_text("utf-8")
    assert html.lower().startswith("<!doctype html>")
    assert text not in html  # a prompt cannot end the page's script
    assert found["schema"] in html
