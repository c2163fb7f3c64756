"""What the model did while it read the text: embedding, positions, attention, and what each layer would have said.

The text is read once more in one pass (`llmtrain.model.watching`), because the engine's decode step keeps nothing but
keys and values; how far the two are apart is part of what is said. Of a long text attention and layers are kept for
its last positions, the window.

Shapes: T positions read, N in the window, C hidden, H heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from llmtrain.inspector.arrays import packed, rounded
from llmtrain.model import ModelConfig, ModelDelta, RowDeltas, Transformer
from llmtrain.model.positions import rotary_frequencies, rotate
from llmtrain.model.watching import Watched

ATTENTION_BYTES = 3 << 19
"""The weights of all heads together take at most so many bytes (1.5 MiB): 161 positions of 30 heads."""

LAYER_CANDIDATES = 5
"""So many tokens are listed of what each layer would have said."""

NEIGHBOURS = 8
TABLE_ROWS_BYTES = 1 << 18
POSITION_BYTES = 1 << 18
CHUNK = 8192  # rows of the embedding table that are compared at once


def window(config: ModelConfig, time: int) -> int:
    """The first position that attention and layers are kept for."""
    heads = config.num_hidden_layers * config.num_attention_heads
    kept = time
    while kept > 8 and 4 * heads * kept * (kept + 1) // 2 > ATTENTION_BYTES:
        kept -= 1
    return time - kept


@torch.inference_mode()
def embedding(model: Transformer, ids: Sequence[int], adapter: ModelDelta | None) -> dict[str, Any]:
    """The rows that are looked up, with the rows of the table that point the same way.

    With an adapter that replaced rows, these are the rows.
    """
    table = model.model.embed_tokens.weight
    if adapter is not None and adapter.embedding is not None:
        table = table.clone()
        table[adapter.embedding.ids] = adapter.embedding.rows
    distinct = sorted(set(ids))
    rows = table[torch.tensor(distinct, device=table.device)].float()  # (n, C)
    directions = torch.nn.functional.normalize(rows, dim=-1)
    likeness = torch.cat(
        [directions @ torch.nn.functional.normalize(part.float(), dim=-1).mT for part in table.split(CHUNK)], 1
    )
    own = torch.arange(len(distinct), device=table.device)
    likeness[own, torch.tensor(distinct, device=table.device)] = -torch.inf  # not its own neighbour
    near = likeness.topk(min(NEIGHBOURS, table.shape[0] - 1), dim=-1)
    width = max(1, min(rows.shape[1], TABLE_ROWS_BYTES // (4 * len(distinct))))
    return {
        "rows": table.shape[0],
        "width": table.shape[1],
        "tied": model.config.tie_word_embeddings,
        "mean_norm": rounded(float(table.float().norm(dim=-1).mean())),
        "tokens": [
            {
                "id": token,
                "norm": rounded(float(rows[place].norm())),
                "row": packed(rows[place, :width]),
                "neighbours": [
                    {"id": each, "cosine": rounded(cosine)}
                    for each, cosine in zip(near.indices[place].tolist(), near.values[place].tolist(), strict=True)
                ],
            }
            for place, token in enumerate(distinct)
        ],
    }


@torch.inference_mode()
def positions(model: Transformer, time: int) -> dict[str, Any]:
    """How the model marks positions, from the table that it uses itself."""
    config, tables = model.config, model.model.table(model.lm_head.weight.device)
    sinusoidal = config.position == "sinusoidal"
    width = config.hidden_size if sinusoidal else config.head_dim
    # The latest positions, where not all fit: those that the window shows.
    first = max(0, time - max(1, POSITION_BYTES // (4 * width)))
    shown = slice(first, time)
    found: dict[str, Any] = {"kind": config.position, "first": first, "count": time - first}
    if sinusoidal:
        found["vectors"] = packed(tables[0][shown])
    else:
        half = config.head_dim // 2
        frequencies, factor = rotary_frequencies(config)
        cos, sin = (table[shown] for table in tables)
        found |= {
            "theta": config.rope_theta,
            "scaling": config.rope_scaling,
            "factor": factor,
            "pairs": half,
            "frequencies": packed(frequencies),
            "cos": packed(cos[:, :half]),
            "sin": packed(sin[:, half:]),
        }
    found["distance"] = _by_distance(config, tables, time)
    return found


def _by_distance(config: ModelConfig, tables: tuple[Tensor, ...], time: int) -> dict[str, Any]:
    """The dot product of two like vectors set down at two positions, for several places of the first.

    Rotary: a vector of D equal parts and length 1, turned by both positions. Sinusoidal: the vectors themselves, over
    the product's value at distance 0.
    """
    limit = min(config.max_position_embeddings, 2048)
    furthest = min(limit - 1, max(time - 1, 63))
    distances = torch.arange(furthest + 1)
    places = sorted({0, (limit - 1 - furthest) // 2, limit - 1 - furthest})
    curves = []
    for place in places:
        there = place + distances.to(tables[0].device)
        if config.position == "sinusoidal":
            products = tables[0][there] @ tables[0][place] / (tables[0][0] @ tables[0][0])
        else:
            one = torch.full((1, config.head_dim), config.head_dim**-0.5, device=tables[0].device)
            query, keys = (rotate(one, *(table[at] for table in tables)) for at in (there, slice(place, place + 1)))
            products = (query @ keys.mT)[:, 0]
        curves.append(products.float().cpu())
    spread = torch.stack(curves).amax(0) - torch.stack(curves).amin(0)
    return {
        "furthest": furthest,
        "places": places,
        "products": [packed(curve) for curve in curves],
        "largest_difference": rounded(float(spread.max())),
    }


@torch.inference_mode()
def attention(config: ModelConfig, watched: Watched, first: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Every head's weights, and how they stand every test: rows, triangle, and the layer's own output.

    Returns:
        The weights of positions `first` … T − 1 on each other, with what fell on earlier ones; and the largest errors.
    """
    time = watched.stream[0].shape[0]
    below = torch.ones(time - first, time - first, dtype=torch.bool).tril()
    group = config.num_attention_heads // config.num_key_value_heads
    layers, worst = [], {"row_sum": 0.0, "above_diagonal": 0.0, "output": 0.0}
    for number, layer in enumerate(watched.layers):
        weights = layer.weights(first)  # (H, N, T)
        worst["output"] = max(worst["output"], layer.error(weights, first))
        weights = weights.cpu()
        worst["row_sum"] = max(worst["row_sum"], float((weights.double().sum(-1) - 1).abs().max()))
        worst["above_diagonal"] = max(worst["above_diagonal"], float(weights[:, :, first:][:, ~below].abs().sum()))
        entropies = torch.special.entr(weights).sum(-1)  # (H, N), in nats
        heads = []
        for head in range(config.num_attention_heads):
            entry = {
                "head": head,
                "kv_head": head // group,
                "mean_entropy": rounded(float(entropies[head].mean())),
                "entropy": packed(entropies[head]),
                "weights": packed(weights[head, :, first:][below]),
            }
            if first:
                entry["before"] = packed(weights[head, :, :first].sum(-1))
            heads.append(entry)
        layers.append({"layer": number, "heads": heads})
    found = {"first": first, "count": time - first, "heads_per_kv_head": group, "layers": layers}
    return found, worst


@torch.inference_mode()
def layer_lens(
    model: Transformer, watched: Watched, ids: Sequence[int], first: int, adapter: ModelDelta | None
) -> dict[str, Any]:
    """What each layer would have said: final norm and output layer on the residual stream behind it.

    Args:
        model: The model.
        watched: The text as it was read.
        ids: All tokens; the one after a position is what came next there.
        first: The window's first position.
        adapter: As for the reading.
    """
    following = torch.tensor(list(ids[first + 1 : watched.stream[0].shape[0] + 1]))
    candidates = min(LAYER_CANDIDATES, model.config.vocab_size)
    layers = []
    for number, stream in enumerate(watched.stream):
        logits = logits_of(model, model.model.norm(stream[first:]), adapter)  # (N, V)
        chances = logits.softmax(-1)
        top = chances.topk(candidates, dim=-1)
        said = chances[torch.arange(len(following)), following]
        rank = (chances[: len(following)] > said[:, None]).sum(-1) + 1
        layers.append(
            {
                "layer": number,
                "ids": packed(top.indices),
                "probabilities": packed(top.values),
                "entropy": packed(torch.special.entr(chances).sum(-1)),
                "next_probability": packed(said),
                "next_rank": packed(rank),
            }
        )
    return {
        "first": first,
        "count": len(following),
        "candidates": candidates,
        "layers": layers,
    }


@torch.inference_mode()
def logits_of(model: Transformer, hidden: Tensor, adapter: ModelDelta | None) -> Tensor:
    """(N, C) after the final norm → (N, V) fp32 on the CPU."""
    deltas = RowDeltas.of([adapter] * len(hidden), hidden.device)
    return model.logits(hidden, deltas).float().cpu()
