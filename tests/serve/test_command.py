"""`llmtrain serve` as a process: what it refuses in the first second, its signals, its end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from llmtrain.checkpoint import save_model_folder
from llmtrain.launch.composing import compose
from llmtrain.launch.serve import api_key, model_names, run
from llmtrain.model import build_model

pytestmark = pytest.mark.medium
NEW_TOKENS = 1500


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_config, byte_tok):
    """Model T with room for a long answer."""
    path = tmp_path_factory.mktemp("model") / "model"
    config = tiny_config(max_position_embeddings=2048)
    save_model_folder(
        path, config=config, state_dict=build_model(config, seed=0).state_dict(), tokenizer=byte_tok, info={}
    )
    return path


class Serve:
    """A process that serves."""

    def __init__(self, folder, cwd, *settings, **environment):
        command = [sys.executable, "-m", "llmtrain", "serve", f"model={folder}", "port=0", *settings]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        )  # fmt: skip
        self.said = ""
        for line in self.process.stderr:
            self.said += line
            if "serving on " in line:
                break
        else:
            raise AssertionError(self.said)
        self.url = line.partition("serving on ")[2].strip()

    def end(self):
        """What it printed, once it has ended by itself."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, self.said + err


def test_sigterm_finishes_what_runs_and_refuses_what_comes(folder, tmp_path):
    keys = {"LLMTRAIN_API_KEY": "s3cret"}
    gentle = Serve(folder, tmp_path, "max_tokens=2000", **keys)
    hasty = Serve(folder, tmp_path, "max_tokens=2000", "shutdown_grace=0.2")
    assert "s3cret" not in gentle.said
    assert httpx.get(gentle.url + "/v1/models").status_code == 401
    client = openai.OpenAI(base_url=gentle.url + "/v1", api_key="s3cret", max_retries=0)
    settings = {"model": "llmtrain", "prompt": "a", "max_tokens": NEW_TOKENS, "extra_body": {"ignore_eos": True}}
    stream = iter(client.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    first = next(stream)
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(client.completions.create, **settings)
        while (
            "llmtrain_requests_running 2"
            not in httpx.get(gentle.url + "/metrics", headers={"authorization": "Bearer s3cret"}).text
        ):
            pass
        gentle.process.send_signal(signal.SIGTERM)
        while httpx.get(gentle.url + "/health").status_code == 200:
            pass
        assert httpx.get(gentle.url + "/health").json() == {"status": "draining"}
        with pytest.raises(openai.InternalServerError, match="shutting down") as refused:
            client.completions.create(**settings)
        assert refused.value.status_code == 503
        chunks = [first, *stream]
        assert chunks[-1].usage.completion_tokens == NEW_TOKENS
        assert whole.result().usage.completion_tokens == NEW_TOKENS
    code, out, err = gentle.end()
    assert code == 0, err
    results = json.loads(out)
    assert (results["command"], results["requests"]) == ("serve", {"completions ok": 2})
    assert results["generated_tokens"] == 2 * NEW_TOKENS
    # Ctrl-C, and more to do than the grace allows: the client is told, and the end is still an orderly one.
    client = openai.OpenAI(base_url=hasty.url + "/v1", api_key="-", max_retries=0)
    stream = client.completions.create(**settings, stream=True)
    next(iter(stream))
    hasty.process.send_signal(signal.SIGINT)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    code, out, err = hasty.end()
    assert code == 0, err
    assert json.loads(out)["requests"] == {"completions error": 1}
    assert "Traceback" not in err
    assert "1 completions were broken off" in err


def settings_of(*overrides):
    return compose("serve", ["model=nowhere", "port=0", *overrides]).settings


def test_a_port_that_is_taken_is_a_sentence(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"host=127\.0\.0\.1 port={port} cannot be listened on \(Address already"):
            run(settings_of(f"port={port}"), tmp_path)
    with pytest.raises(ValueError, match=r"host=no\.such\.host\.invalid port=0 cannot be listened on"):
        run(settings_of("host=no.such.host.invalid"), tmp_path)


def test_without_the_extra_there_is_a_sentence_and_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(ValueError, match=re.escape('serve needs uvicorn: pip install "llmtrain[serve]"')):
        run(settings_of(), tmp_path)


def test_the_key_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("LLMTRAIN_API_KEY", raising=False)
    assert api_key(None) is None
    monkeypatch.setenv("LLMTRAIN_API_KEY", "from-outside")
    assert api_key(None) == "from-outside"
    file = tmp_path / "key"
    file.write_text(" s3cret\n")
    assert api_key(str(file)) == "s3cret"
    for text in ("", "two words", "schlüssel", "a\x00b"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"api_key_file=.*key: a key is printable ASCII without blanks"):
            api_key(str(file))


def test_names_of_models_are_checked(tmp_path):
    (tmp_path / "a").mkdir()
    assert model_names(settings_of("adapters={pinyin: runs/a, 日期: runs/b}")) == ["llmtrain", "pinyin", "日期"]
    with pytest.raises(ValueError, match=r"adapters=\{x: …\} has the name of the model itself"):
        model_names(settings_of("served_name=x", "adapters={x: runs/a}"))
    with pytest.raises(ValueError, match=r"adapters=\{x: 5\} must name a folder"):
        model_names(settings_of("adapters={x: 5}"))
    with pytest.raises(ValueError, match="is no name for a model"):
        model_names(settings_of("served_name='a\tb'"))
