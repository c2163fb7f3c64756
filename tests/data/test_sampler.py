"""The order of samples: a permutation per epoch, a function of the index alone, weights kept in every stretch."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.data.sampler import (
    MIXTURE_PERIOD,
    EpochOrder,
    MixtureSampler,
    WindowSampler,
    global_indices,
    mixture_pattern,
)


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64), epoch=st.integers(0, 10**6))
def test_every_epoch_visits_every_item_once(size: int, seed: int, epoch: int) -> None:
    epochs, items = EpochOrder(size, seed=seed).draw(np.arange(size) + epoch * size)
    assert (epochs == epoch).all()
    assert sorted(items.tolist()) == list(range(size))


@given(size=st.integers(1, 2**62), seed=st.integers(0, 100), data=st.data())
@settings(max_examples=50)
def test_large_orders_stay_in_range_and_do_not_collide(size: int, seed: int, data: st.DataObject) -> None:
    positions = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=50))
    _, items = EpochOrder(size, seed=seed).draw(np.array(sorted(positions)))
    assert items.min() >= 0
    assert items.max() < size
    assert len(set(items.tolist())) == len(positions)


@settings(max_examples=30)
@given(order=st.permutations(range(40)))
def test_a_sample_does_not_depend_on_what_is_drawn_with_it(order: list[int]) -> None:
    sampler = EpochOrder(7, seed=3)
    together = sampler.draw(np.array(order))[1]
    alone = [sampler.draw(np.array([index]))[1][0] for index in order]
    assert together.tolist() == alone


def test_seeds_epochs_and_streams_have_orders_of_their_own() -> None:
    first = EpochOrder(1000, seed=1).draw(np.arange(2000))[1]
    others = [
        first[1000:],
        EpochOrder(1000, seed=2).draw(np.arange(1000))[1],
        EpochOrder(1000, seed=1, stream=1).draw(np.arange(1000))[1],
    ]
    for other in others:
        # Two independent orders agree in about one place; in ten or more once in ten million cases.
        assert (first[:1000] == other).sum() < 10


def test_the_order_is_frozen() -> None:
    """A changed order would break the resuming of every run that is under way."""
    assert EpochOrder(10, seed=0).draw(np.arange(10))[1].tolist() == [4, 7, 8, 5, 0, 6, 3, 2, 9, 1]
    assert WindowSampler(1000, 100, seed=0).draw(np.array([0, 10, 20])).tolist() == [452, 773, 42]


def test_the_order_looks_random() -> None:
    """Positions spread evenly over places, and neighbours in the corpus do not stay neighbours."""
    size, seeds = 64, 2000
    table = np.zeros((size, size))
    adjacent = 0
    for seed in range(seeds):
        items = EpochOrder(size, seed=seed).draw(np.arange(size))[1]
        table[np.arange(size), items] += 1
        adjacent += int((np.diff(items) == 1).sum())
    expected = seeds / size
    chi_square = ((table - expected) ** 2 / expected).sum()
    degrees = (size - 1) ** 2
    # Five standard deviations: a false alarm once in some three million such tests (and the seeds are fixed).
    assert abs(chi_square - degrees) < 5 * np.sqrt(2 * degrees)
    # In a random order one pair in `size` is adjacent: 1969 ± 44 here, five standard deviations again.
    assert abs(adjacent - seeds * (size - 1) / size) < 5 * 44


def test_a_trillion_windows_cost_nothing() -> None:
    sampler = WindowSampler(512 * 10**12, 512, seed=7)
    indices = np.arange(10**12 - 4, 10**12 + 4)  # across the end of the epoch
    sampler.draw(indices)
    durations = []
    for _ in range(20):
        begin = time.perf_counter()
        starts = sampler.draw(indices)
        durations.append(time.perf_counter() - begin)
    assert min(durations) < 0.005  # in fact about a ten-thousandth of a second
    assert len(set(starts.tolist())) == 8


@given(tokens=st.integers(2, 2000), length=st.integers(1, 40), seed=st.integers(0, 50), epoch=st.integers(0, 9))
def test_windows_of_an_epoch_do_not_overlap(tokens: int, length: int, seed: int, epoch: int) -> None:
    if tokens <= length:
        return
    sampler = WindowSampler(tokens, length, seed=seed)
    count = sampler.windows_per_epoch
    starts = sampler.draw(np.arange(count) + epoch * count)
    targets = (starts[:, None] + 1 + np.arange(length)) % tokens
    assert len(np.unique(targets)) == count * length
    assert tokens - count * length < length


def test_the_grid_of_windows_moves_between_epochs() -> None:
    sampler = WindowSampler(10_001, 100, seed=0)
    offsets = sampler.offsets(np.arange(200))
    assert offsets.min() >= 0
    assert offsets.max() < 100
    assert len(set(offsets.tolist())) > 60


def test_a_corpus_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match=r"windows of 512 tokens .* at least 513 tokens, but it has 512: lower"):
        WindowSampler(512, 512, seed=0)


@settings(max_examples=30)
@given(weights=st.lists(st.floats(0.05, 10), min_size=1, max_size=6), start=st.integers(0, 5000))
def test_weights_hold_in_every_thousand_samples(weights: list[float], start: int) -> None:
    sampler = MixtureSampler([1000 + 37 * n for n in range(len(weights))], weights, 10, seed=0)
    sources, _ = sampler.draw(np.arange(start, start + MIXTURE_PERIOD))
    counts = np.bincount(sources, minlength=len(weights))
    shares = np.array(weights) / sum(weights) * MIXTURE_PERIOD
    assert (abs(counts - shares) < 1).all()


def test_short_stretches_keep_the_weights_too() -> None:
    pattern = mixture_pattern([0.7, 0.2, 0.1])
    for start in range(0, MIXTURE_PERIOD - 20):
        counts = np.bincount(pattern[start : start + 20], minlength=3)
        assert (abs(counts - [14, 4, 2]) <= 2).all()


def test_each_source_of_a_mixture_goes_through_its_own_epochs() -> None:
    sampler = MixtureSampler([1000, 300], [3, 1], 10, seed=5)
    sources, starts = sampler.draw(np.arange(2000))
    for source, tokens in enumerate([1000, 300]):
        own = WindowSampler(tokens, 10, seed=5, stream=source)
        mine = starts[sources == source]
        assert mine.tolist() == own.draw(np.arange(len(mine))).tolist()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, 0], "must be positive and finite"),
        ([1, float("nan")], "must be positive and finite"),
        ([], "must be positive and finite"),
        ([1, 0.0001], "source 1 has 0.01% of the total weight, less than one sample in 1000"),
    ],
)
def test_useless_weights_are_refused(weights: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixture_pattern(weights)


@given(step=st.integers(0, 10**9), splits=st.sampled_from([(8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 2, 4), (1, 8, 1)]))
def test_a_step_has_the_same_samples_however_it_is_split(step: int, splits: tuple[int, int, int]) -> None:
    micro_batch_size, accumulation, world_size = splits
    seen = np.concatenate(
        [
            global_indices(
                range(step, step + 2),
                micro_batch_size=micro_batch_size,
                accumulation=accumulation,
                world_size=world_size,
                rank=rank,
            ).reshape(2, -1)
            for rank in range(world_size)
        ],
        axis=1,
    )
    assert sorted(seen[0].tolist()) == list(range(step * 8, step * 8 + 8))
    assert sorted(seen[1].tolist()) == list(range(step * 8 + 8, step * 8 + 16))


def test_where_a_sample_goes_is_the_documented_formula() -> None:
    indices = global_indices(range(3, 5), micro_batch_size=2, accumulation=3, world_size=4, rank=1)
    for step in (3, 4):
        for micro in range(3):
            for row in range(2):
                assert indices[step - 3, micro, row] == ((step * 3 + micro) * 4 + 1) * 2 + row
