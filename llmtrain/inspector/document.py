"""The document that says all of one run: plain values for JSON, whose schema is docs/inspect.md.

Puts together what the other modules find; computes nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from llmtrain.generation import Engine
from llmtrain.inspector import choices, reading, timing
from llmtrain.inspector.arrays import unpacked
from llmtrain.inspector.recording import Recording
from llmtrain.inspector.tokens import piece_text, token_rows, vocabulary
from llmtrain.model import parameter_count
from llmtrain.model.watching import read_watched

SCHEMA = "llmtrain.inspect/1"
"""Keys are added under this name; when one changes its meaning or goes, the number grows."""


def document(
    engine: Engine, recording: Recording, *, facts: Mapping[str, Any] | None = None, measure: bool = True
) -> dict[str, Any]:
    """Everything about one answer.

    Args:
        engine: The one that gave it; it is left alone, so that others may go on with it.
        recording: What was recorded of it.
        facts: More about the model, such as `name` and `folder`.
        measure: Run the clock over growing lengths, too: some seconds.

    Raises:
        ValueError: The model's scores are not finite.
    """
    model, tokenizer, ids = engine.model, engine.tokenizer, recording.ids
    config, read = model.config, len(ids) - 1  # nothing ever reads the last token
    first = reading.window(config, read)
    watched = read_watched(model, ids[:read], recording.adapter)
    seen, checks = reading.attention(config, watched, first)
    steps = choices.step_entries(recording)
    found = {
        "schema": SCHEMA,
        "model": _model_facts(engine, facts or {}),
        "prompt": tokenizer.decode(recording.prompt_ids, skip_special=False),
        "answer": recording.completion.text,
        "finish": finish(recording, engine),
        "sampling": _sampling(recording),
        "prompt_tokens": len(recording.prompt_ids),
        "answer_tokens": len(recording.completion.token_ids),
        "read_tokens": read,
        "tokens": token_rows(ids, len(recording.prompt_ids), read, tokenizer),
        "embedding": reading.embedding(model, ids, recording.adapter),
        "positions": reading.positions(model, read),
        "attention": seen,
        "cache": timing.cache_facts(engine, recording, _dtype(engine)),
        "steps": steps,
        "layer_lens": reading.layer_lens(model, watched, ids, first, recording.adapter),
        "checks": checks | {"logits": _replay_error(engine, recording, watched.hidden)},
    }
    found["measured"] = timing.measure(engine, recording) if measure else None
    found["left_out"] = _left_out(found, first)
    found["vocabulary"] = vocabulary(tokenizer, config.vocab_size, _mentioned(found))
    return found


def _model_facts(engine: Engine, facts: Mapping[str, Any]) -> dict[str, Any]:
    config = engine.model.config
    return {
        "name": None,
        **facts,
        "parameters": parameter_count(config),
        "dtype": _dtype(engine),
        "device": str(engine.model.lm_head.weight.device),
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "tokenizer_vocab_size": engine.tokenizer.vocab_size,
        "context": config.max_position_embeddings,
        "max_length": engine.max_length,
        "position": config.position,
        "qk_norm": config.qk_norm,
        "attention_bias": config.attention_bias,
        "tied": config.tie_word_embeddings,
    }


def _dtype(engine: Engine) -> str:
    return str(engine.model.lm_head.weight.dtype).removeprefix("torch.")


def _sampling(recording: Recording) -> dict[str, Any]:
    values = asdict(recording.params)
    return {**values, "seed": recording.completion.seed, "greedy": recording.params.greedy}


def finish(recording: Recording, engine: Engine) -> dict[str, Any]:
    """Why the answer ended, and on what exactly."""
    completion, params = recording.completion, recording.params
    last = completion.token_ids[-1]
    found: dict[str, Any] = {"reason": completion.finish_reason, "kind": completion.finish_reason}
    if completion.finish_reason == "stop":
        if last in recording.stop_ids:
            own = last in engine.eos_ids and not params.ignore_eos
            found |= {"kind": "end_token" if own else "stop_id", "id": last, "text": piece_text(engine.tokenizer, last)}
        else:
            found |= {"kind": "stop_string", "text": _stop_string(recording, engine)}
    elif completion.finish_reason == "length":
        found["limit"] = params.max_new_tokens
    elif completion.finish_reason == "context":
        found["limit"] = engine.max_length
    return found


def _stop_string(recording: Recording, engine: Engine) -> str | None:
    """Of the stop strings in what was generated, the one complete first, as the engine's detokenizer decides."""
    text = engine.tokenizer.decode(recording.completion.token_ids)
    ends = [(place + len(stop), place, stop) for stop in recording.params.stop if (place := text.find(stop)) >= 0]
    return min(ends)[2] if ends else None


def _replay_error(engine: Engine, recording: Recording, hidden: Any) -> float:
    """The largest difference between the engine's scores and those of the one pass that the rest is from."""
    begin = len(recording.prompt_ids) - 1
    again = reading.logits_of(engine.model, hidden[begin:], recording.adapter)
    return max(float((row - step.logits).abs().max()) for row, step in zip(again, recording.steps, strict=True))


def _left_out(found: Mapping[str, Any], first: int) -> dict[str, Any]:
    """What a reader must not look for: positions before a window, scores beyond the likeliest, columns of rows."""
    vocab, width = found["model"]["vocab_size"], found["embedding"]["width"]
    kept = [step["scores"]["logits"]["shape"][0] for step in found["steps"]]
    shown = [token["row"]["shape"][0] for token in found["embedding"]["tokens"]]
    return {
        "attention_before": first,
        "layer_lens_before": first,
        "positions_before": found["positions"]["first"],
        "scores_per_step": vocab - min(kept),
        "embedding_columns": width - min(shown),
    }


def _mentioned(found: Mapping[str, Any]) -> set[int]:
    """Every id that the document speaks of."""
    ids = {token["id"] for token in found["tokens"]}
    for token in found["embedding"]["tokens"]:
        ids.update(each["id"] for each in token["neighbours"])
    for step in found["steps"]:
        ids.update(each["id"] for each in step["candidates"])
        if step["scores"]["kind"] == "top":
            ids.update(unpacked(step["scores"]["ids"]).tolist())
    for layer in found["layer_lens"]["layers"]:
        ids.update(unpacked(layer["ids"]).flatten().tolist())
    return ids
