"""An adapter laid onto a model without being merged, so that rows of one batch can use different ones.

Knows the names of a model's modules and an adapter's tensors. DoRA's rescaling depends on the base's weights alone and
is worked out here, once.
"""

import torch
from torch import Tensor

from llmtrain.adapters.deltas import AdapterDeltas, AdapterError, LowRank
from llmtrain.model import ModelDelta, Transformer
from llmtrain.model.deltas import LinearDelta, TableDelta


def lay_onto(model: Transformer, deltas: AdapterDeltas) -> ModelDelta:
    """What `Engine.add_adapter` takes: an adapter's change in the model's dtype and on its device.

    Raises:
        AdapterError: The adapter changes a layer that the model does not have, or not in this shape.
    """
    linear = {}
    for name, change in deltas.low_rank.items():
        try:
            layer = model.get_submodule(name)
        except AttributeError:
            layer = None
        weight = getattr(layer, "weight", None)
        if layer is None or weight is None or weight.shape != (change.b.shape[0], change.a.shape[1]):
            raise AdapterError(f"The adapter does not fit the model: {name} is missing there or has another shape.")
        linear[layer] = _linear(change, weight)
    tables = {name: _table(model, deltas, name) for name in deltas.token_rows}
    embedding = tables.get("model.embed_tokens.weight")
    head = embedding if model.config.tie_word_embeddings else tables.get("lm_head.weight")
    return ModelDelta(linear=linear, embedding=embedding, head=head)


def _linear(change: LowRank, weight: Tensor) -> LinearDelta:
    ratio = None
    if change.magnitude is not None:
        whole = weight.detach().float() + change.scale * (
            change.b.to(weight.device).float() @ change.a.to(weight).float()
        )
        ratio = (change.magnitude.to(weight.device).float() / torch.linalg.norm(whole, dim=1)).to(weight.dtype)
    return LinearDelta(change.a.to(weight), change.b.to(weight), change.scale, ratio)


def _table(model: Transformer, deltas: AdapterDeltas, name: str) -> TableDelta:
    rows, ids = deltas.token_rows[name], deltas.token_ids[name]
    weight = model.model.embed_tokens.weight
    if rows.shape[1] != weight.shape[1] or max(ids) >= weight.shape[0]:
        raise AdapterError(f"The adapter does not fit the model: it replaces rows of {name} that are not there.")
    listed = torch.tensor(ids, device=weight.device)
    place = torch.full((weight.shape[0],), -1, device=weight.device)
    place[listed] = torch.arange(len(ids), device=weight.device)
    return TableDelta(listed, rows.detach().to(weight), place)
