"""What adapters change in a forward pass, for each row of a batch another: low-rank changes added to linear layers.

The weights stay as they are, so one model answers with many adapters at once, none of them merged. Knows modules and
tensors of one model; not files, peft, or who asked.

Shapes: B rows (or single positions), T time, I in features, O out features, R rank, C hidden, V vocabulary, N trained
rows of a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LinearDelta:
    """The change of one linear layer: W x becomes W x + scale · B A x, with DoRA all of it times `ratio`."""

    a: Tensor  # (R, I)
    b: Tensor  # (O, R)
    scale: float
    ratio: Tensor | None = None  # (O,), DoRA only: magnitude / row norm of the changed weight

    def __call__(self, x: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
        """(..., I) input and (..., O) output of the layer → (..., O) output with the change."""
        changed = y + self.scale * ((x @ self.a.mT) @ self.b.mT)
        if self.ratio is None:
            return changed
        return changed * self.ratio if bias is None else (changed - bias) * self.ratio + bias


@dataclass(frozen=True)
class TableDelta:
    """Rows of a table of V rows (embedding or output layer) that are replaced."""

    ids: Tensor  # (N,)
    rows: Tensor  # (N, C)
    place: Tensor  # (V,), the row's number or −1


@dataclass(frozen=True, eq=False)
class ModelDelta:
    """One adapter, laid onto the modules of one model. Two are the same only if they are one object."""

    linear: Mapping[nn.Module, LinearDelta] = field(default_factory=dict)
    embedding: TableDelta | None = None
    head: TableDelta | None = None


class RowDeltas:
    """Which adapter each row of a batch uses.

    Args:
        rows: One adapter, or None, for each of the B rows.
    """

    def __init__(self, rows: Sequence[ModelDelta | None], device: torch.device) -> None:
        found = {id(delta): delta for delta in rows if delta is not None}
        self._groups: list[tuple[ModelDelta, Tensor | slice]] = []
        for delta in found.values():
            members = [row for row, each in enumerate(rows) if each is delta]
            alone = len(members) == len(rows)
            self._groups.append((delta, slice(None) if alone else torch.tensor(members, device=device)))

    @classmethod
    def of(cls, rows: Sequence[ModelDelta | None], device: torch.device) -> RowDeltas | None:
        """The rows' adapters, or None if none has one."""
        return cls(rows, device) if any(delta is not None for delta in rows) else None

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """(B, …, I) → (B, …, O): the layer and, for the rows whose adapter changes it, the change."""
        y = layer(x)
        for delta, rows in self._groups:
            change = delta.linear.get(layer)
            if change is not None:
                y[rows] = change(x[rows], y[rows], layer.bias)
        return y

    def embedded(self, input_ids: Tensor, x: Tensor) -> Tensor:
        """Puts replaced rows of the embedding table into (B, T, C) embeddings of (B, T) ids."""
        for delta, rows in self._groups:
            if delta.embedding is not None:
                place = delta.embedding.place[input_ids[rows]].unsqueeze(-1)  # (b, T, 1)
                own = delta.embedding.rows[place.squeeze(-1).clamp(min=0)]
                x[rows] = torch.where(place >= 0, own, x[rows])
        return x

    def scored(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """Puts the scores of replaced rows of the output layer into (B, …, V) logits of (B, …, C) hidden states."""
        for delta, rows in self._groups:
            if delta.head is not None:
                of_rows = logits[rows]
                of_rows[..., delta.head.ids] = hidden[rows] @ delta.head.rows.mT
                logits[rows] = of_rows
        return logits
