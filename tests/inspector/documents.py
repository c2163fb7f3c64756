"""Documents of the inspector's schema of any shape, of random numbers of the right kinds.

What a page must survive (a thousand tokens, HTML in a token, no answer) no small model would write when asked.
"""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor

from llmtrain.generation.params import SamplingParams
from llmtrain.generation.sampling import BatchSampling, choose

VOCAB = 300


def packed(values: Tensor) -> dict[str, Any]:
    """A tensor as the schema has it."""
    values = values.float() if values.is_floating_point() else values.int()
    name = "float32" if values.is_floating_point() else "int32"
    return {"dtype": name, "shape": list(values.shape), "base64": base64.b64encode(values.numpy().tobytes()).decode()}


def made(
    pieces: list[str] | None = None,
    *,
    answer: list[str] | None = None,
    prompt: str | None = None,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    position: str = "rope",
    window: int = 128,
    sampling: dict[str, Any] | None = None,
    top: int | None = None,
) -> dict[str, Any]:
    """A document of the schema: a text of these pieces, and random numbers of the right kinds for all the rest."""
    torch.manual_seed(0)
    pieces = ["床", "前", "明", "月", "光", "，", "疑", "是"] if pieces is None else pieces
    answer = ["地", "上", "霜", "。"] if answer is None else answer
    texts = pieces + answer
    names = sorted(set(texts)) + [f"piece{index}" for index in range(VOCAB - len(set(texts)))]
    ids = [names.index(text) for text in texts]
    read = max(1, len(ids) - 1)
    first = max(0, read - window)
    count = read - first
    settings = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.0}
    settings |= {"max_new_tokens": len(answer), "seed": 7, "greedy": False} | (sampling or {})
    model = {
        "name": "made",
        "folder": "made",
        "parameters": 1_234_567,
        "dtype": "float32",
        "device": "cpu",
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": 16,
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": VOCAB,
        "tokenizer_vocab_size": VOCAB,
        "context": 1024,
        "max_length": 1024,
        "position": position,
        "qk_norm": False,
        "attention_bias": False,
        "tied": True,
    }
    return {
        "schema": "llmtrain.inspect/1",
        "model": model,
        "prompt": "".join(pieces) if prompt is None else prompt,
        "answer": "".join(answer),
        "finish": {"reason": "length", "kind": "length", "limit": len(answer)},
        "sampling": settings,
        "prompt_tokens": len(pieces),
        "answer_tokens": len(answer),
        "read_tokens": read,
        "tokens": [_token(text, names.index(text), place, len(pieces), read) for place, text in enumerate(texts)],
        "embedding": {
            "rows": VOCAB,
            "width": 64,
            "tied": True,
            "mean_norm": 1.0,
            "tokens": [
                {
                    "id": each,
                    "norm": 1.0,
                    "row": packed(torch.randn(64)),
                    "neighbours": [{"id": (each + far) % VOCAB, "cosine": 0.9 - far / 10} for far in range(1, 6)],
                }
                for each in sorted(set(ids))
            ],
        },
        "positions": _positions(position, read),
        "attention": {
            "first": first,
            "count": count,
            "heads_per_kv_head": heads // kv_heads,
            "layers": [
                {"layer": layer, "heads": [_head(head, heads // kv_heads, count, first) for head in range(heads)]}
                for layer in range(layers)
            ],
        },
        "cache": {
            "bytes_per_token": 2 * layers * kv_heads * 16 * 4,
            "bytes": 1,
            "tokens": read,
            "allocated_bytes": 1,
            "ttft_seconds": 0.012,
            "seconds": 0.1,
            "cached_prompt_tokens": 0,
        },
        "measured": {
            "rounds": 3,
            "steps": 6,
            "stopped_early": False,
            "lengths": [
                {"tokens": tokens, "ttft_seconds": tokens / 9000, "with_cache": 0.002, "without_cache": tokens / 9000}
                for tokens in (1, 2, 4, 8, 16, 32, 64, 128)
            ],
        },
        "steps": [_step(step, ids, len(pieces), settings, top) for step in range(len(answer))],
        "layer_lens": _lens(layers, read, first, ids),
        "checks": {"row_sum": 1e-7, "above_diagonal": 0.0, "output": 1e-6, "logits": 1e-5},
        "left_out": {},
        "vocabulary": {"size": VOCAB, "complete": True, "special": [], "pieces": dict(enumerate(names))},
    }


def _token(text: str, token: int, place: int, prompt: int, read: int) -> dict[str, Any]:
    return {
        "id": token,
        "bytes": text.encode().hex(),
        "text": text,
        "characters": len(text),
        "parts": [],
        "special": False,
        "position": place,
        "source": "prompt" if place < prompt else "answer",
        "read": place < read,
    }


def _positions(kind: str, read: int) -> dict[str, Any]:
    distance = {
        "furthest": 63,
        "places": [0, 9],
        "products": [packed(torch.linspace(1, 0.2, 64))] * 2,
        "largest_difference": 1e-6,
    }
    if kind == "sinusoidal":
        return {"kind": kind, "first": 0, "count": read, "vectors": packed(torch.randn(read, 64)), "distance": distance}
    frequencies = 10_000.0 ** -(torch.arange(8) / 8)
    angles = torch.outer(torch.arange(read), frequencies)
    return {
        "kind": kind,
        "first": 0,
        "count": read,
        "theta": 1e4,
        "scaling": None,
        "factor": 1.0,
        "pairs": 8,
        "frequencies": packed(frequencies),
        "cos": packed(angles.cos()),
        "sin": packed(angles.sin()),
        "distance": distance,
    }


def _head(head: int, group: int, count: int, first: int) -> dict[str, Any]:
    below = torch.ones(count, count, dtype=torch.bool).tril()
    weights = torch.randn(count, count).mul(2).masked_fill(~below, -torch.inf).softmax(-1)
    entropy = torch.special.entr(weights).sum(-1)
    before = {"before": packed(torch.full((count,), 0.1))} if first else {}
    return {
        "head": head,
        "kv_head": head // group,
        "mean_entropy": float(entropy.mean()),
        "entropy": packed(entropy),
        "weights": packed(weights[below]),
        **before,
    }


def _step(step: int, ids: list[int], prompt: int, settings: dict[str, Any], top: int | None) -> dict[str, Any]:
    logits, uniform = torch.randn(VOCAB) * 3, torch.rand(1)
    names = ("temperature", "top_k", "top_p", "min_p")
    params = BatchSampling.of([SamplingParams(**{name: settings[name] for name in names})])
    chosen = int(choose(logits[None], params, uniform)[0])
    listed = logits.topk(12).indices.tolist()
    listed += [each for each in (chosen,) if each not in listed]
    kept = logits.topk(top or VOCAB).indices.sort().values
    scores = {
        "kind": "top",
        "ids": packed(kept),
        "logits": packed(logits[kept]),
        "rest": VOCAB - len(kept),
        "rest_logsumexp": 0.0,
    }
    return {
        "step": step,
        "position": prompt + step,
        "token": chosen,
        "greedy": int(logits.argmax()),
        "uniform": None if settings["greedy"] else float(uniform),
        "rank": 1,
        "kept": 9,
        "entropy": 1.0,
        "seconds": 0.003,
        "candidates": [
            {"id": each, "logit": float(logits[each]), "probability": float(logits.softmax(-1)[each]), "chance": 0.1}
            for each in listed
        ],
        "scores": {"kind": "all", "logits": packed(logits)} if top is None else scores,
    }


def _lens(layers: int, read: int, first: int, ids: list[int]) -> dict[str, Any]:
    count = read - first
    following = max(0, min(count, len(ids) - first - 1))
    found = []
    for layer in range(layers + 1):
        top = torch.randn(count, VOCAB).mul(2).softmax(-1).topk(5, dim=-1)
        found.append(
            {
                "layer": layer,
                "ids": packed(top.indices),
                "probabilities": packed(top.values),
                "entropy": packed(torch.ones(count)),
                "next_probability": packed(torch.full((following,), 0.25)),
                "next_rank": packed(torch.full((following,), 3)),
            }
        )
    return {"first": first, "count": count, "candidates": 5, "layers": found}
