"""`llmtrain generate`: where prompts come from, what is printed, what is returned."""

import io
import json
import logging
import sys
from types import SimpleNamespace

import pytest

from llmtrain.checkpoint import save_model_folder
from llmtrain.generation import Engine, SamplingParams
from llmtrain.launch import generate
from llmtrain.launch.composing import compose
from llmtrain.tokenizer import render_chat


@pytest.fixture
def folder(model, tok, tmp_path):
    save_model_folder(
        tmp_path / "模型, a=b",  # a name that Hydra's grammar cannot read
        config=model.config,
        state_dict=model.state_dict(),
        tokenizer=tok,
        info={"trained_length": 256},
    )
    return tmp_path / "模型, a=b"


def run(folder, *overrides):
    settings = compose("generate", [f"model={folder}", "device=cpu", *overrides]).settings
    return generate.run(settings, folder / "no run folder")


def test_text_is_streamed_to_stdout_and_returned(folder, model, tok, capsys):
    prompt = '你好，a=b "x" ${y}\n🌍'
    results = run(folder, f"prompt={prompt}", "sampling=greedy", "sampling.max_new_tokens=12")
    expected = Engine(model, tok).generate([prompt], SamplingParams(temperature=0.0, max_new_tokens=12))[0]
    assert capsys.readouterr().out == prompt + expected.text + "\n"
    (completion,) = results["completions"]
    assert completion["text"] == expected.text
    assert completion["tokens"] == 12
    assert completion["token_ids"] == expected.token_ids
    assert completion["finish_reason"] == "length"
    assert results["ttft_seconds"] > 0
    assert results["decode_tokens_per_second"] > 0
    json.dumps(results)


def test_samples_have_seeds_of_their_own_that_give_them_again(folder, capsys):
    short = "sampling.max_new_tokens=6"
    both = run(folder, "prompt=ab", "num_samples=2", "sampling.seed=7", short)["completions"]
    assert [completion["seed"] for completion in both] == [7, 8]
    assert both[0]["text"] != both[1]["text"]
    assert "── sample 2 ──" in capsys.readouterr().out
    again = run(folder, "prompt=ab", "sampling.seed=8", short)["completions"]
    assert again[0]["text"] == both[1]["text"]


def test_candidates_are_printed_for_each_step(folder, capsys):
    two = ("sampling.max_new_tokens=2", "sampling.ignore_eos=true")  # no end token may be drawn first
    results = run(folder, "prompt=ab", "show_candidates=true", "candidates=3", *two)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("   1  ")
    assert lines[1].startswith("   2  ")
    candidates = results["completions"][0]["candidates"]
    assert [len(step) for step in candidates] == [3, 3]
    assert f"{candidates[0][0]['probability']:.3f}" in lines[0]


def test_a_chat_prompt_is_rendered_by_the_template_and_not_echoed(folder, model, tok, capsys):
    results = run(folder, "prompt=<|user|>", "chat=true", "sampling=greedy", "sampling.max_new_tokens=5")
    ids, _ = render_chat([{"role": "user", "content": "<|user|>"}], tok, add_generation_prompt=True)
    expected = Engine(model, tok).generate([ids], SamplingParams(temperature=0.0, max_new_tokens=5))[0]
    assert results["completions"][0]["text"] == expected.text
    assert capsys.readouterr().out == expected.text + "\n"


def test_the_folders_own_end_tokens_are_used(folder, tok):
    first = run(folder, "prompt=ab", "sampling=greedy")["completions"][0]["token_ids"][0]
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": first}), encoding="utf-8")
    completion = run(folder, "prompt=ab", "sampling=greedy")["completions"][0]
    assert (completion["token_ids"], completion["finish_reason"]) == ([first], "stop")


def test_prompts_of_a_file_are_all_continued_and_a_bad_one_does_not_stop_the_others(folder, tmp_path, caplog):
    file = tmp_path / "prompts.txt"
    file.write_text(f"one\n\n{'x' * 300}\n三\n", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        results = run(folder, f"prompt_file={file}", "sampling.max_new_tokens=3", "sampling.ignore_eos=true")
    assert [completion["prompt"] for completion in results["completions"]] == ["one", "x" * 300, "三"]
    assert [completion["finish_reason"] for completion in results["completions"]] == ["length", "error", "length"]
    assert "this prompt is left out: the prompt has 300 tokens" in caplog.text


def test_prompts_from_jsonl_may_hold_newlines(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\\nb"}\n\n{"prompt": "\u2028"}\n', encoding="utf-8")
    assert generate.read_prompts(None, str(file)) == ["a\nb", "\u2028"]


def test_a_base_model_that_never_saw_a_chat_says_so(folder, tok, caplog):
    short = ("sampling.max_new_tokens=1", "prompt=a")
    run(folder, *short, "chat=true")
    assert "never trained on the role markers" not in caplog.text  # the folder does not say what it never saw
    file = folder / "llmtrain.json"
    info = json.loads(file.read_text(encoding="utf-8")) | {"never_seen": [tok.special_ids["<|user|>"], 200]}
    file.write_text(json.dumps(info), encoding="utf-8")
    run(folder, *short)
    assert "role markers" not in caplog.text
    run(folder, *short, "chat=true")
    assert f"chat=true: {folder} was never trained on the role markers of a chat" in caplog.text
    caplog.clear()
    # As fine-tuning on chats without a system message leaves it.
    file.write_text(json.dumps(info | {"never_seen": [tok.special_ids["<|system|>"], 200]}), encoding="utf-8")
    run(folder, *short, "chat=true")
    assert "role markers" not in caplog.text


def test_equal_samples_are_announced(folder, caplog):
    run(folder, "prompt=a", "sampling.max_new_tokens=1", "num_samples=3")
    assert "will be equal" not in caplog.text
    run(folder, "prompt=a", "sampling.max_new_tokens=1", "num_samples=3", "sampling=greedy")
    assert (
        "sampling.temperature=0 always takes the likeliest token: the 3 samples of a prompt will be equal"
        in caplog.text
    )


def test_standard_input_is_one_prompt(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("第一行\n第二行\n".encode())))
    assert generate.read_prompts("-", None) == ["第一行\n第二行"]


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"", "a.txt", "holds no prompt"),
        (b"ok\n\xff", "a.txt", "not UTF-8 at byte 3"),
        (b'{"prompt": "a"}\n{"text": "b"}', "a.jsonl", "a.jsonl, line 2: each line must be"),
        (b'{"prompt": "a"}\nnonsense', "a.jsonl", "a.jsonl, line 2: each line must be"),
        (b'{"prompt": "\\ud83d"}', "a.jsonl", "a.jsonl, line 1: the prompt is not UTF-8 from character 1"),
        (b'{"prompt": ""}', "a.jsonl", '"prompt" must be text that is not empty'),
    ],
)
def test_files_that_are_no_prompts_are_refused_by_place(tmp_path, content, name, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        generate.read_prompts(None, str(tmp_path / name))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "there is no prompt; give one of"),
        (["prompt="], "the prompt is empty"),
        (["prompt=a", "prompt_file=b"], "both prompt and prompt_file are given"),
        (["prompt=a", "sampling.temperature=-1"], "temperature=-1 must be a number of at least 0"),
        (["prompt=a", "sampling.top_p=0"], "top_p=0 must be a number above 0 and at most 1"),
        (["prompt=a", "num_samples=0"], "num_samples=0 must be a whole number from 1 to 100,000"),
        (["prompt=a", "candidates=0"], "candidates=0 must be a whole number of at least 1"),
        (["prompt=a", "precision=int3"], "precision=int3: give one of auto, fp32"),
        (["prompt=a", "device=tpu"], "device=tpu: give auto, cpu or cuda"),
        (["prompt_file=/no/where"], "prompt_file=/no/where cannot be read .No such file or directory.: give a file"),
        (["prompt_file=/"], "prompt_file=/ cannot be read .Is a directory.: give a file with one prompt per line"),
        (["prompt=a", "max_length=0"], "max_length=0 must be a whole number of at least 1, or null"),
        (["prompt=ab\udcff", "model=/nowhere"], r"the prompt is not UTF-8 from character 3 on \('\\udcff'\)"),
        (["prompt=a", "sampling.stop=[\udcff]", "model=/nowhere"], "sampling.stop=.* is not UTF-8 from character 1"),
        (["prompt=" + "x" * 300], "leaves no room for an answer"),
        (["prompt=a", "model=/nowhere"], "/nowhere does not exist"),
    ],
)
def test_mistakes_are_refused_with_a_sentence(folder, overrides, message):
    with pytest.raises(ValueError, match=message):
        run(folder, *overrides)


def test_a_terminal_gets_no_control_characters(folder, monkeypatch, capsys):
    prompt = "a\x1b[2Jb\n你\t\x07"
    run(folder, f"prompt={prompt}", "sampling.max_new_tokens=1")
    assert capsys.readouterr().out.startswith(prompt)  # a pipe gets the text as it is
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    run(folder, f"prompt={prompt}", "sampling.max_new_tokens=1")
    assert capsys.readouterr().out.startswith("a\\x1b[2Jb\n你\t\\x07")
