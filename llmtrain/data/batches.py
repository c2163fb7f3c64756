"""Examples of unequal lengths as one batch: a row each, padded; or several to a row, packed.

How a micro-batch is laid out changes how many positions are computed and nothing else: it holds the same examples
either way, and so has the same loss. Knows examples and arrays; not which examples a step has.

Shapes: B rows, T positions.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from llmtrain.data.examples import Example
from llmtrain.data.windows import IGNORED, Int64Array

Batch = dict[str, Tensor]


def pad_examples(examples: Sequence[Example], *, pad_id: int, rows: int) -> Batch:
    """Examples as the rows of a batch, padded to the longest; rows beyond them hold padding only.

    Returns:
        {"input_ids", "labels"}, each (rows, T) int64; T is 1 if there is no example.
    """
    length = max((len(example.input_ids) for example in examples), default=1)
    inputs, labels = _empty(rows, length, pad_id)
    for row, example in enumerate(examples):
        inputs[row, : len(example.input_ids)] = example.input_ids
        labels[row, : len(example.labels)] = example.labels
    return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}


def pack_examples(examples: Sequence[Example], *, pad_id: int, length: int) -> Batch:
    """Examples end to end in as few rows as first-fit, longest first, finds, and those as short as they can be.

    Args:
        examples: None longer than `length`; there may be none.
        pad_id: Fills the ends of the rows.
        length: The most positions of a row.

    Returns:
        {"input_ids", "labels", "document_ids"}, each (B, T) int64. An example's document id is its place in its row;
        the padding of a row is a document of its own.
    """
    packed = pack_level([len(example.input_ids) for example in examples], length) or [[]]
    longest = max(1, *(sum(len(examples[number].input_ids) for number in row) for row in packed))
    inputs, labels = _empty(len(packed), longest, pad_id)
    documents: Int64Array = np.zeros_like(inputs)
    for row, numbers in enumerate(packed):
        start = 0
        for place, number in enumerate(numbers):
            example = examples[number]
            stop = start + len(example.input_ids)
            inputs[row, start:stop], labels[row, start:stop] = example.input_ids, example.labels
            documents[row, start:stop] = place
            start = stop
        documents[row, start:] = len(numbers)
    arrays = {"input_ids": inputs, "labels": labels, "document_ids": documents}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def pack_level(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """As `pack`, with rows as even as they can be, as a last row that is nearly empty is padded to the others' length.

    Raises:
        ValueError: An item is longer than a row.
    """
    rows = pack(lengths, capacity)
    even = max(-(-sum(lengths) // max(1, len(rows))), max(lengths, default=0))
    for lower in range(even, capacity):
        levelled = pack(lengths, lower)
        if len(levelled) == len(rows):
            return levelled
    return rows


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Which items share a row: each goes into the first row with room for it, the longest items first.

    Raises:
        ValueError: An item is longer than a row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        size = lengths[number]
        if size > capacity:
            raise ValueError(
                f"trainer.packing_length={capacity} is less than the longest example's {size} tokens; raise it, or "
                "lower data.max_length."
            )
        row = next((row for row, free in enumerate(room) if free >= size), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(number)
        room[row] -= size
    return rows


def _empty(rows: int, length: int, pad_id: int) -> tuple[Int64Array, Int64Array]:
    return np.full((rows, length), pad_id, dtype=np.int64), np.full((rows, length), IGNORED, dtype=np.int64)
