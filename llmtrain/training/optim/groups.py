"""Which parameter is updated how: the split into optimiser groups.

It looks at shapes and at the modules that own the parameters, and knows nothing of the optimisers.

| group      | members                                                        | weight decay | optimiser |
|------------|----------------------------------------------------------------|--------------|-----------|
| `muon`     | hidden matrices, if asked for                                  | yes          | Muon      |
| `matrices` | all other matrices: the untied head; without Muon the hidden ones | yes       | AdamW     |
| `vectors`  | norms, biases, embeddings (a tied head included), trained rows of an embedding | no | AdamW |

Embeddings are not decayed: a row is touched by the loss only when its token occurs, so decay would
shrink rare tokens for no reason, and shrinking embeddings lets gradients grow in the first layers
(OLMo 2, arXiv 2501.00656, section 3.1).
"""

from typing import Any

from torch import nn


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    muon: bool = False,
    muon_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Splits the trainable parameters of a model into optimiser groups.

    Args:
        model: any module; a shared parameter counts once, frozen ones not at all.
        lr: learning rate of the AdamW groups.
        weight_decay: decoupled weight decay of `muon` and `matrices`.
        muon: whether hidden matrices form a group of their own.
        muon_lr: learning rate of that group; `lr` if None.

    Returns:
        Non-empty groups with the keys `params`, `name`, `muon`, `lr`, `weight_decay`. The `muon` group
        holds equal shapes next to each other, so that they can be updated in one batched product.

    Raises:
        ValueError: the model has no trainable parameter.
    """
    embedded = _embedding_parameters(model)
    head = {id(p) for name, p in model.named_parameters() if name.endswith("lm_head.weight")}
    hidden: list[nn.Parameter] = []
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in embedded or parameter.ndim < 2:
            vectors.append(parameter)
        elif muon and id(parameter) not in head:
            hidden.append(parameter)
        else:
            matrices.append(parameter)
    if not (hidden or matrices or vectors):
        raise ValueError("The model has no trainable parameter: every one has requires_grad=False.")

    hidden.sort(key=lambda p: tuple(p.shape))  # stable: equal shapes keep the model's order
    groups = [
        {"name": "muon", "muon": True, "params": hidden, "lr": muon_lr or lr, "weight_decay": weight_decay},
        {"name": "matrices", "muon": False, "params": matrices, "lr": lr, "weight_decay": weight_decay},
        {"name": "vectors", "muon": False, "params": vectors, "lr": lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _embedding_parameters(model: nn.Module) -> set[int]:
    """Ids of the parameters that are looked up by token: embeddings, and peft's trained rows of one."""
    found = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    found |= {id(p) for name, p in model.named_parameters() if "trainable_tokens" in name}
    return found
