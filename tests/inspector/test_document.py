"""The document as a whole: what it says of awkward prompts, of ends, of long texts, and how large it is."""

import json

import pytest
import torch

from llmtrain.generation import Engine, SamplingParams
from llmtrain.inspector import as_text, document, record, timing, unpacked
from llmtrain.model import KVCache, ModelConfig, build_model
from tests.inspector.conftest import SHAPES

PROMPTS = {
    "one token": [70],
    "a part of a character": [6 + 0xE5],
    "emoji": "👩‍👩‍👧 🌍!",
    "right to left": "שלום עולם، مرحبا",
    "special tokens' names": "<|user|><|endoftext|>",
    "special tokens": [0, 2, 70, 71, 5],
    "page": "</script><script>alert(1)</script>&amp;\u2028\x00\x1b[31m",
    "long": "天" * 70,
}
SHORT = SamplingParams(seed=6, max_new_tokens=6, ignore_eos=True)


def check(found, engine):
    """What holds of every document."""
    json.dumps(found, allow_nan=False)
    read, rows = found["read_tokens"], found["tokens"]
    assert found["schema"] == "llmtrain.inspect/1"
    assert len(rows) == found["prompt_tokens"] + found["answer_tokens"] == read + 1
    assert [row["position"] for row in rows] == list(range(read + 1))
    assert [row["read"] for row in rows] == [True] * read + [False]
    pieces = found["vocabulary"]["pieces"]
    for row in rows:
        assert bytes.fromhex(row["bytes"]) == engine.tokenizer.token_bytes(row["id"])
        assert (row["text"] is None) == bool(row["parts"])
        assert row["text"] is None or row["text"] == pieces[str(row["id"])]
    attention = found["attention"]
    assert attention["first"] + attention["count"] == read
    for layer in attention["layers"]:
        for head in layer["heads"]:
            weights = iter(unpacked(head["weights"]).tolist())
            before = unpacked(head["before"]).tolist() if attention["first"] else [0.0] * attention["count"]
            for row, already in enumerate(before):
                assert already + sum(next(weights) for _ in range(row + 1)) == pytest.approx(1, abs=1e-5)
            assert next(weights, None) is None
    for layer in found["layer_lens"]["layers"]:
        assert unpacked(layer["ids"]).shape == (found["layer_lens"]["count"], found["layer_lens"]["candidates"])
    assert len(found["steps"]) == found["answer_tokens"]
    assert [step["token"] for step in found["steps"]] == [row["id"] for row in rows[found["prompt_tokens"] :]]
    assert len(as_text(found).splitlines()) > len(rows)


@pytest.mark.parametrize("name", PROMPTS)
def test_every_prompt_gives_a_right_document(engine, name):
    found = document(engine, record(engine, PROMPTS[name], SHORT), measure=False)
    check(found, engine)
    if isinstance(PROMPTS[name], str):
        assert found["prompt"] == PROMPTS[name]
        told = b"".join(bytes.fromhex(row["bytes"]) for row in found["tokens"] if row["source"] == "prompt")
        assert told.decode() == PROMPTS[name]
        assert not any(row["special"] for row in found["tokens"] if row["source"] == "prompt")


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_model_gives_a_right_document(make_engine, shape):
    engine = make_engine(**SHAPES[shape])
    found = document(engine, record(engine, "一 token", SHORT), measure=False)
    check(found, engine)
    model, config = found["model"], engine.model.config
    assert (model["layers"], model["heads"]) == (config.num_hidden_layers, config.num_attention_heads)
    assert model["parameters"] == sum(each.numel() for each in engine.model.parameters())
    assert found["positions"]["kind"] == config.position


def test_a_model_in_bf16_is_told_in_fp32_with_the_errors_it_has(tiny_config, byte_tok):
    model = build_model(tiny_config(initializer_range=0.2), seed=0, dtype=torch.bfloat16).eval()
    engine = Engine(model, byte_tok)
    found = document(engine, record(engine, "一 token", SHORT))
    check(found, engine)
    assert found["model"]["dtype"] == "bfloat16"
    assert found["cache"]["bytes_per_token"] == 2 * 2 * 2 * 2 * 16
    assert 1e-5 < found["checks"]["output"] < 0.05


def test_parts_of_characters_are_named_and_whole_ones_counted(engine):
    found = document(engine, record(engine, [6 + 0x41, *(6 + byte for byte in "好".encode()), 6 + 0xFF], SHORT))
    rows = found["tokens"][:5]
    assert [row["characters"] for row in rows] == [1, 0, 0, 0, 0]
    assert rows[0]["text"] == "A"
    assert rows[1]["parts"] == [{"character": "好", "first": 1, "last": 1, "of": 3}]
    assert rows[3]["parts"] == [{"character": "好", "first": 3, "last": 3, "of": 3}]
    assert rows[4]["parts"] == [{"character": None, "first": 1, "last": 1, "of": 1}]
    assert found["vocabulary"]["pieces"][str(6 + 0xFF)] == "‹ff›"


def test_the_end_is_told_exactly(engine, byte_tok):
    greedy = SamplingParams(temperature=0.0, max_new_tokens=12)
    first = record(engine, "好", greedy).completion
    finish = {
        "length": document(engine, record(engine, "好", greedy), measure=False)["finish"],
        "stop id": document(
            engine,
            record(engine, "好", SamplingParams(temperature=0.0, stop_ids=(first.token_ids[3],))),
            measure=False,
        )["finish"],
    }
    assert finish["length"] == {"reason": "length", "kind": "length", "limit": 12}
    assert (finish["stop id"]["kind"], finish["stop id"]["id"]) == ("stop_id", first.token_ids[3])
    ending = Engine(engine.model, byte_tok, eos_ids=[first.token_ids[2]])
    found = document(ending, record(ending, "好", greedy), measure=False)
    assert (found["finish"]["kind"], found["finish"]["id"]) == ("end_token", first.token_ids[2])
    assert "ended by the end token" in as_text(found)
    ascii_text = next(token for token in first.token_ids if 6 + 32 <= token < 6 + 127)
    letter = byte_tok.token_bytes(ascii_text).decode()
    params = SamplingParams(temperature=0.0, stop=("never", letter))
    found = document(engine, record(engine, "好", params), measure=False)
    assert found["finish"] == {"reason": "stop", "kind": "stop_string", "text": letter}
    narrow = Engine(engine.model, byte_tok, max_length=5)
    found = document(narrow, record(narrow, "好", greedy))
    assert found["finish"] == {"reason": "context", "kind": "context", "limit": 5}
    assert found["measured"]["lengths"] == []  # no room to measure in
    check(found, narrow)


def test_bytes_of_cache_are_those_of_the_cache(engine):
    recording = record(engine, "天下", SHORT)
    facts = timing.cache_facts(engine, recording, "float32")
    cache = KVCache.allocate(engine.model.config, 1, 64)
    assert facts["bytes_per_token"] == cache.bytes_per_token
    assert (
        facts["bytes"] == cache.bytes_per_token * facts["tokens"] == cache.bytes_per_token * 11
    )  # 6 and 6 tokens, the last never read
    assert facts["allocated_bytes"] == engine.stats.cache_bytes
    assert facts["ttft_seconds"] == pytest.approx(recording.completion.ttft_seconds, rel=1e-4)
    steps = document(engine, recording, measure=False)["steps"]
    assert steps[0]["seconds"] == facts["ttft_seconds"]
    assert 0 < sum(step["seconds"] for step in steps) <= 1.1 * recording.completion.seconds


def test_the_clock_runs_over_growing_lengths_and_leaves_the_engine_alone(engine):
    recording = record(engine, "天下", SHORT)
    counted = engine.stats.prefill_tokens
    found = timing.measure(engine, recording)
    assert [row["tokens"] for row in found["lengths"]] == [1, 2, 4, 8, 12, 16, 32, 64, 128, 250]
    assert all(row[key] > 0 for row in found["lengths"] for key in ("ttft_seconds", "with_cache", "without_cache"))
    assert engine.stats.prefill_tokens == counted
    assert not found["stopped_early"]


def test_the_clock_stops_when_patience_ends(engine, monkeypatch):
    monkeypatch.setattr(timing, "PATIENCE", 0.0)
    found = timing.measure(engine, record(engine, "天下", SHORT))
    assert (found["lengths"], found["stopped_early"]) == ([], True)


@pytest.mark.medium
def test_size_at_the_default_models_shape_and_with_a_thousand_tokens(byte_tok):
    from llmtrain.inspector.page import render

    config = ModelConfig(
        vocab_size=4096, hidden_size=192, intermediate_size=512, num_hidden_layers=5, num_attention_heads=6,
        num_key_value_heads=3, initializer_range=0.1,
    )  # fmt: skip
    engine = Engine(build_model(config, seed=0).eval(), byte_tok, max_rows=1)
    found = document(
        engine,
        record(engine, "床前明月光，疑是", SamplingParams(seed=1, max_new_tokens=64, ignore_eos=True)),
        measure=False,
    )
    check(found, engine)
    assert set(found["left_out"].values()) == {0}
    assert len(render(found).encode()) < 5_000_000
    long = document(
        engine, record(engine, "a" * 1000, SamplingParams(seed=1, max_new_tokens=20, ignore_eos=True)), measure=False
    )
    check(long, engine)
    assert long["read_tokens"] == 1019
    assert long["attention"]["first"] == long["layer_lens"]["first"] == long["left_out"]["attention_before"] > 0
    assert all(error < 1e-4 for error in long["checks"].values()), long["checks"]
    assert len(render(long).encode()) < 5_000_000
