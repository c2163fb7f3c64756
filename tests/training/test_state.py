"""The files of a training state: the safetensors format, stretches of tensors, and which parameter goes to whom."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from llmtrain.training import state
from llmtrain.training.state import Fragment, Shard
from llmtrain.training.tensorfile import TensorReader, TensorWriter

SHAPES = {"a/master": (3, 5), "a/exp_avg": (3, 5), "empty": (0,), "b/master": (7,), "c": (2, 3, 4)}


def values(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_library_reads_what_is_written_tensor_by_tensor(tmp_path):
    expected = {name: values(shape, number) for number, (name, shape) in enumerate(SHAPES.items())}
    expected["a/master"][0, 0] = -0.0
    writer = TensorWriter(tmp_path / "x.safetensors", SHAPES)
    for name, value in expected.items():
        writer.write(name, value.flatten())
    writer.close()
    got = load_file(tmp_path / "x.safetensors")
    assert {name: tuple(value.shape) for name, value in got.items()} == SHAPES
    assert all(torch.equal(got[name].view(torch.int32), expected[name].view(torch.int32)) for name in SHAPES)


def test_a_file_that_lacks_a_tensor_is_not_ended_quietly(tmp_path):
    writer = TensorWriter(tmp_path / "x.safetensors", {"a": (2,), "b": (2,)})
    writer.write("a", torch.zeros(2))
    with pytest.raises(AssertionError, match="b was announced and not written"):
        writer.close()


@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=3), data=st.data())
@settings(max_examples=60)
def test_any_stretch_of_any_shape(tmp_path_factory, shape: list[int], data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("stretch")
    tensor = values(tuple(shape))
    save_file({"t": tensor}, folder / "x.safetensors")
    start = data.draw(st.integers(0, math.prod(shape) - 1))
    count = data.draw(st.integers(1, math.prod(shape) - start))
    got = TensorReader(folder).read("x.safetensors", "t", start=start, count=count)
    assert torch.equal(got, tensor.flatten()[start : start + count])


def flat_shard(shapes: dict[str, tuple[int, ...]], *, seed: int = 0) -> Shard:
    """All parameters end to end in one vector, as ZeRO 1 keeps them, padded at the end; with Adam's state."""
    total = sum(math.prod(shape) for shape in shapes.values())
    flat, fragments, at = values((total + 3,), seed), [], 0
    for name, shape in shapes.items():
        fragments.append(Fragment(name, flat, at, 0, math.prod(shape)))
        at += math.prod(shape)
    moments = {"step": torch.tensor(7.0), "exp_avg": values((total + 3,), 1), "exp_avg_sq": values((total + 3,), 2)}
    return Shard(shapes, fragments, {flat: moments}, torch.device("cpu"))


def whole_shard(shapes: dict[str, tuple[int, ...]]) -> Shard:
    """Each parameter by itself, before the first step."""
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    fragments = [Fragment(name, p, 0, 0, p.numel()) for name, p in parameters.items()]
    return Shard(shapes, fragments, {}, torch.device("cpu"))


def test_from_one_flat_vector_to_parameters_of_their_own(tmp_path):
    shapes = {"matrix": (3, 4), "vector": (5,)}
    flat, whole = flat_shard(shapes), whole_shard(shapes)
    plan = state.plan(flat)
    assert state.stored_bytes(plan) == 3 * 4 * 17
    state.save(flat, plan, tmp_path)
    state.load(whole, tmp_path)
    for fragment, source in zip(whole.fragments, flat.fragments, strict=True):
        assert torch.equal(fragment.holder.detach().flatten(), source.of(source.holder))
        ours, theirs = whole.optimizer_state[fragment.holder], flat.optimizer_state[source.holder]
        assert float(ours["step"]) == 7.0
        assert ours["step"].dtype == torch.float32
        assert ours["exp_avg"].shape == shapes[fragment.name]
        assert torch.equal(ours["exp_avg"].flatten(), source.of(theirs["exp_avg"]))


def test_parameters_that_were_not_updated_alike_are_told_of_when_they_share_a_count(tmp_path, caplog):
    shapes = {"often": (2,), "rarely": (2,), "never": (2,)}
    whole = whole_shard(shapes)
    for fragment, steps in zip(whole.fragments, (9, 4), strict=False):
        whole.optimizer_state[fragment.holder] = {"step": torch.tensor(float(steps)), "exp_avg": torch.ones(2)}
    state.save(whole, state.plan(whole), tmp_path)
    flat = flat_shard(shapes)
    flat.optimizer_state.clear()
    state.load(flat, tmp_path)
    (moments,) = flat.optimizer_state.values()
    assert moments["exp_avg"][:6].tolist() == [1, 1, 1, 1, 0, 0]
    assert float(moments["step"]) == 9
    assert "The optimiser's step differs between parameters" in caplog.text


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"matrix": (4, 3), "vector": (5,)}, r"matrix is of shape \[3, 4\] there and of shape \[4, 3\] here"),
        ({"matrix": (3, 4)}, r"vector is of shape \[5\] there and not trained here"),
        ({"matrix": (3, 4), "vector": (5,), "more": (1,)}, r"more is not trained there and of shape \[1\] here"),
    ],
)
def test_another_models_state_is_refused_by_name(tmp_path, shapes, message):
    saved = flat_shard({"matrix": (3, 4), "vector": (5,)})
    state.save(saved, state.plan(saved), tmp_path)
    with pytest.raises(ValueError, match=message):
        state.load(whole_shard(shapes), tmp_path)


def test_damaged_files_are_named(tmp_path):
    shard = flat_shard({"matrix": (3, 4)})
    with pytest.raises(ValueError, match=r"state\.json cannot be read .*; resume from another checkpoint"):
        state.load(shard, tmp_path)
    state.save(shard, state.plan(shard), tmp_path)
    (tmp_path / "state-00001-of-00001.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"state-00001-of-00001\.safetensors cannot be read"):
        state.load(shard, tmp_path)
    (tmp_path / "state.json").write_text('{"version": 9, "parameters": {}}')
    with pytest.raises(ValueError, match="is of version 9 of the training state and this program reads 1"):
        state.load(shard, tmp_path)


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ({"a": [10, 0], "b": [0, 10], "c": [6, 4]}, {"a": 0, "b": 1, "c": 0}),
        ({"a": [5, 5], "b": [4, 4], "c": [3, 3], "d": [1, 1]}, {"a": 0, "b": 1, "c": 1, "d": 0}),
    ],
    ids=["to whom holds most", "else by size"],
)
def test_parameters_are_dealt_over_the_ranks(monkeypatch, held, expected):
    tables = [
        {name: (counts[rank], ("master",), {}) for name, counts in held.items() if counts[rank]} for rank in (0, 1)
    ]
    monkeypatch.setattr(state, "_from_all_ranks", lambda mine: tables)
    shard = Shard({name: (sum(counts),) for name, counts in held.items()}, [], {}, torch.device("cpu"))
    plan = state.plan(shard)
    assert {name: entry.owner for name, entry in plan.items()} == expected
    assert {name for name, entry in plan.items() if entry.whole} == {n for n, counts in held.items() if 0 in counts}
