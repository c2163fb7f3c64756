"""Laying examples out: padded rows, packed rows, and that a packed batch has the loss and gradients of its parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.data.batches import pack, pack_examples, pack_level, pad_examples
from llmtrain.data.examples import Example
from llmtrain.data.windows import IGNORED


def example(length: int, trained: int, seed: int) -> Example:
    ids = torch.randint(6, 260, (length + 1,), generator=torch.Generator().manual_seed(seed)).tolist()
    labels = [IGNORED] * (length - trained) + ids[length + 1 - trained :]
    return Example(ids[:-1], labels, prompt="", completion="", prompt_ids=[])


EXAMPLES = [
    example(*sizes, seed=seed) for seed, sizes in enumerate([(9, 3), (20, 20), (5, 1), (31, 0), (14, 9), (2, 2)])
]


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120))
def test_every_item_is_in_one_row_and_no_row_is_too_full(lengths, capacity):
    rows = pack(lengths, capacity)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    totals = [sum(lengths[number] for number in row) for row in rows]
    assert all(0 < total <= capacity for total in totals)
    # First-fit leaves at most one row half empty: any two of those would have shared a row.
    assert sum(total <= capacity / 2 for total in totals) <= 1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(50, 120))
def test_level_rows_are_as_few_and_no_longer(lengths, capacity):
    rows, level = pack(lengths, capacity), pack_level(lengths, capacity)
    assert sorted(number for row in level for number in row) == list(range(len(lengths)))
    assert len(level) == len(rows)
    fullest = [max(sum(lengths[number] for number in row) for row in each) for each in (level, rows)]
    assert fullest[0] <= fullest[1]


def test_two_rows_share_what_one_and_a_bit_would_hold():
    assert [sum([11] * len(row)) for row in pack([11] * 16, 128)] == [121, 55]
    assert [sum([11] * len(row)) for row in pack_level([11] * 16, 128)] == [88, 88]


def test_what_is_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match=r"trainer\.packing_length=19 is less than the longest example's 31 tokens"):
        pack([len(each.input_ids) for each in EXAMPLES], 19)


def test_rows_hold_the_examples_whole_and_say_which_is_which():
    batch = pack_examples(EXAMPLES, pad_id=1, length=40)
    assert batch.keys() == {"input_ids", "labels", "document_ids"}
    found = []
    for inputs, labels, documents in zip(*(batch[name].tolist() for name in batch), strict=True):
        assert documents == sorted(documents)
        for document in sorted(set(documents)):
            places = [place for place, each in enumerate(documents) if each == document]
            found.append(([inputs[place] for place in places], [labels[place] for place in places]))
    padding = [part for part in found if set(part[0]) == {1}]
    assert all(set(labels) == {IGNORED} for _, labels in padding)
    parts = sorted((each.input_ids, each.labels) for each in EXAMPLES)
    assert sorted(part for part in found if part not in padding) == parts


def test_no_example_is_one_row_of_one_ignored_position():
    batch = pack_examples([], pad_id=1, length=40)
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[1]], "labels": [[IGNORED]], "document_ids": [[0]]
    }  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"position": "sinusoidal"}, {"qk_norm": True, "num_key_value_heads": 4}])
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_pack_has_the_loss_and_gradients_of_its_parts(tiny_config, changes, recomputed):
    from llmtrain.model import build_model, loss_sum

    def loss_and_gradients(batches):
        model = build_model(tiny_config(**changes), seed=0).train()
        model.gradient_checkpointing = recomputed
        totals, count = [], 0
        for batch in batches:
            total, trained = loss_sum(model, **batch)
            totals.append(total)
            count += int(trained)
        mean = sum(totals) / count
        mean.backward()
        return mean.item(), [parameter.grad for parameter in model.parameters()]

    alone, apart = loss_and_gradients([pad_examples([each], pad_id=1, rows=1) for each in EXAMPLES])
    packed, together = loss_and_gradients([pack_examples(EXAMPLES, pad_id=1, length=40)])
    assert packed == pytest.approx(alone, rel=1e-5)
    for one, other in zip(together, apart, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-5


def test_nothing_leaks_from_one_example_to_another(tiny_model):
    """Whatever stands in a document, the logits of the others do not change by a bit."""
    batch = pack_examples(EXAMPLES, pad_id=1, length=90)
    documents, inputs = batch["document_ids"], batch["input_ids"].clone()
    before = tiny_model(inputs, document_ids=documents)
    for document in documents[0].unique():
        changed = torch.where(documents == document, (inputs + 7) % 256, inputs)
        after = tiny_model(changed, document_ids=documents)
        others = documents != document
        assert torch.equal(after[others], before[others])
        assert not torch.equal(after[~others], before[~others])


def test_one_document_is_an_ordinary_row(tiny_model):
    ids = torch.tensor([EXAMPLES[1].input_ids])
    packed = tiny_model(ids, document_ids=torch.zeros_like(ids))
    torch.testing.assert_close(packed, tiny_model(ids), rtol=1e-5, atol=1e-6)
