"""A model folder and adapter folders as fine-tuning writes them, served by name over HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import openai
import pytest
import torch

from llmtrain import adapters
from llmtrain.checkpoint import (
    ModelFolderError,
    folder_state_hash,
    lay_adapter,
    load_model_folder,
    save_adapter_folder,
    save_model_folder,
)
from llmtrain.generation import Engine, SamplingParams
from llmtrain.launch.inference import make_engine
from llmtrain.launch.serve import add_adapters
from llmtrain.model import build_model
from llmtrain.serve.app import create_app
from llmtrain.serve.runner import Runner
from llmtrain.serve.server import bind, served
from llmtrain.tokenizer import render_chat

pytestmark = pytest.mark.medium
HELLO = [{"role": "user", "content": "hello"}]


def new_model(tiny_config):
    return build_model(tiny_config(initializer_range=0.2), seed=0).eval()


def write_adapter(folder: Path, base: Path, model, tokenizer, *, taught: bool):
    """An adapter with noise in its low-rank pairs and, if taught, whose answer to HELLO is `<|end|>`."""
    adapted = adapters.attach(model, r=2, train_tokens=[tokenizer.end_id], base_folder=base)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.2)
        if taught:
            ids, _ = render_chat(HELLO, tokenizer, add_generation_prompt=True)
            last = model.hidden_states(torch.tensor([ids]))[0, -1]
            delta = next(p for name, p in model.named_parameters() if "trainable_tokens_delta" in name)
            delta[0] = 20 * last / last.norm()
    save_adapter_folder(folder, adapted, info={"base_state_hash": folder_state_hash(base)})


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_config, byte_tok):
    """`base`, whose generation_config.json knows no end of turn, `taught/adapter` with a merged model beside it, and
    `plain/adapter`."""
    run = tmp_path_factory.mktemp("run")
    model = new_model(tiny_config)
    save_model_folder(
        run / "base", config=model.config, state_dict=model.state_dict(), tokenizer=byte_tok, info={"trained_length": 9}
    )
    stated = json.loads((run / "base/generation_config.json").read_text())
    (run / "base/generation_config.json").write_text(json.dumps(stated | {"eos_token_id": byte_tok.eos_id}))
    for name in ("taught", "plain"):
        write_adapter(run / name / "adapter", run / "base", new_model(tiny_config), byte_tok, taught=name == "taught")
    merged = load_model_folder(run / "taught/adapter")
    save_model_folder(
        run / "taught/model", config=merged.config, state_dict=merged.model.state_dict(), tokenizer=byte_tok, info={}
    )
    return run


@pytest.fixture(scope="module")
def url(run):
    """Serves the three, a run folder standing for the adapter in it; `untold` is `taught`, of which nobody told."""
    loaded = load_model_folder(run / "base")
    engine = make_engine(loaded, max_rows=4)
    add_adapters(engine, loaded, {"taught": str(run / "taught"), "plain": str(run / "plain/adapter")})
    engine.add_adapter("untold", lay_adapter(loaded, run / "taught").delta)
    app = create_app(Runner(engine, max_waiting=8), models=["base", "taught", "plain", "untold"])
    with served(app, bind("127.0.0.1", 0)) as url:
        yield url


def test_each_name_answers_as_its_folder_does_alone(run, url):
    prompts = [[70, 80, 90], list(range(100, 140))]
    greedy = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    answers = {}
    for name, folder in (("base", "base"), ("taught", "taught/adapter"), ("plain", "plain/adapter")):
        body = {"model": name, "prompt": prompts, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        found = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert found["model"] == name
        alone = load_model_folder(run / folder)
        expected = Engine(alone.model, alone.tokenizer).generate(prompts, greedy)
        answers[name] = [choice["logprobs"]["token_ids"] for choice in found["choices"]]
        assert answers[name] == [each.token_ids for each in expected]
    assert len({str(ids) for ids in answers.values()}) == 3


def test_an_adapter_that_was_taught_the_end_of_a_turn_stops_there_though_its_base_does_not(run, url, byte_tok):
    """By any route: a chat knows the markers anyway, a completion only by the adapter that it names."""
    ids, _ = render_chat(HELLO, byte_tok, add_generation_prompt=True)
    end = {}
    for name in ("base", "taught", "untold"):
        body = {"model": name, "prompt": ids, "max_tokens": 5, "temperature": 0}
        choice = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]
        end[name] = choice["finish_reason"]
    assert end == {"base": "length", "taught": "stop", "untold": "length"}
    assert load_model_folder(run / "base").eos_ids == [byte_tok.eos_id]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    for name, settings, count in (("taught", {}, 1), ("untold", {}, 1), ("untold", {"ignore_eos": True}, 5)):
        answer = client.chat.completions.create(
            model=name, messages=HELLO, temperature=0, max_tokens=5, extra_body=settings
        )
        assert answer.usage.completion_tokens == count
        assert answer.choices[0].finish_reason == ("stop" if count == 1 else "length")


def test_what_is_no_adapter_of_this_model_is_refused_by_name(run, tmp_path, tiny_config, byte_tok):
    loaded = load_model_folder(run / "base")
    engine = make_engine(loaded, max_rows=1)
    with pytest.raises(ValueError, match=r"adapters=\{x: .*model\}: .* holds whole weights and no adapter"):
        add_adapters(engine, loaded, {"x": str(run / "taught/model")})
    with pytest.raises(ValueError, match=r"adapters=\{x: nowhere\}: .*does not exist"):
        add_adapters(engine, loaded, {"x": "nowhere"})
    other = build_model(tiny_config(), seed=9)
    save_model_folder(tmp_path, config=other.config, state_dict=other.state_dict(), tokenizer=byte_tok, info={})
    for wrong in (tmp_path, run / "taught/adapter"):  # of the same shape; the second is laid on already
        loaded = load_model_folder(wrong)
        with pytest.raises(ModelFolderError, match=r"was trained on other weights than .* or the adapter is merged"):
            lay_adapter(loaded, run / "taught/adapter")
    assert engine.adapters == ()


def test_a_damaged_adapter_or_one_with_its_own_tokenizer_is_refused(run, tmp_path, llama_tok):
    from shutil import copytree

    from safetensors.torch import load_file, save_file

    loaded = load_model_folder(run / "base")
    folder = copytree(run / "plain/adapter", tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    half = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up_proj.lora_B" not in name}
    save_file(half, folder / "adapter_model.safetensors")
    for read in (load_model_folder, lambda path: lay_adapter(loaded, path)):
        with pytest.raises(ModelFolderError, match=r"damaged: .*layers\.1\.mlp\.up_proj lacks its matrix B"):
            read(folder)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": None}))
    with pytest.raises(ModelFolderError, match=r"adapter: .* damaged: lora_alpha=None .* is no number"):
        lay_adapter(loaded, folder)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert lay_adapter(loaded, folder).folder == folder
    llama_tok.save(folder)
    with pytest.raises(ModelFolderError, match="has a tokenizer of its own, and one model has one"):
        lay_adapter(loaded, folder)
