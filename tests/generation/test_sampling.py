"""Sampling against tables of numbers worked out by hand, and by counting."""

import math
import random

import pytest
import torch

from llmtrain.generation.params import SamplingParams
from llmtrain.generation.sampling import (
    BatchSampling,
    choose,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    most_likely,
    penalize_repetition,
)

OUT = -math.inf


def logits_of(*probabilities):
    return torch.tensor(probabilities).log()


def kept(logits):
    return torch.isfinite(logits).int().tolist()


@pytest.mark.parametrize(
    ("k", "expected"),
    [(0, [1, 1, 1, 1]), (1, [0, 1, 0, 0]), (2, [0, 1, 0, 1]), (3, [1, 1, 0, 1]), (4, [1, 1, 1, 1]), (9, [1, 1, 1, 1])],
)
def test_top_k(k, expected):
    assert kept(keep_top_k(logits_of(0.2, 0.4, 0.1, 0.3), k)) == expected


def test_top_k_keeps_ties_of_the_last_one():
    assert kept(keep_top_k(torch.tensor([1.0, 2.0, 1.0, 0.0]), 2)) == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0.01, [0, 1, 0, 0]),  # the most likely one always stays
        (0.39, [0, 1, 0, 0]),
        (0.41, [0, 1, 0, 1]),
        (0.69, [0, 1, 0, 1]),
        (0.71, [1, 1, 0, 1]),
        (0.91, [1, 1, 1, 1]),
        (1.0, [1, 1, 1, 1]),
    ],
)
def test_top_p(p, expected):
    assert kept(keep_top_p(logits_of(0.2, 0.4, 0.1, 0.3), p)) == expected


def test_top_p_counts_what_an_earlier_filter_left():
    left = keep_top_k(logits_of(0.2, 0.4, 0.1, 0.3), 2)  # 0.4 and 0.3, renormalised 0.571 and 0.429
    assert kept(keep_top_p(left, 0.57)) == [0, 1, 0, 0]
    assert kept(keep_top_p(left, 0.58)) == [0, 1, 0, 1]


def test_top_p_of_one_keeps_tokens_that_rounding_would_lose():
    logits = torch.cat([torch.zeros(1), torch.full((2000,), -30.0)])
    assert kept(keep_top_p(logits, 1.0)) == [1] * 2001


def test_top_p_looks_at_the_whole_row_when_the_first_guess_does_not_suffice():
    flat = torch.arange(4096.0) * 1e-6  # nearly equal: 0.9 of the mass needs about 3,686 tokens
    assert sum(kept(keep_top_p(flat, 0.9))) == pytest.approx(0.9 * 4096, rel=0.01)


@pytest.mark.parametrize(
    ("p", "expected"), [(0.0, [1, 1, 1, 1]), (0.3, [1, 1, 0, 1]), (0.6, [0, 1, 0, 1]), (1.0, [0, 1, 0, 0])]
)
def test_min_p(p, expected):
    assert kept(keep_min_p(logits_of(0.2, 0.4, 0.1, 0.3), p)) == expected


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    logits = torch.tensor([2.0, -2.0, 2.0, -2.0])
    seen = torch.tensor([True, True, False, False])
    assert penalize_repetition(logits, seen, 2.0).tolist() == [1.0, -4.0, 2.0, -2.0]


def test_filters_take_one_value_per_row():
    logits = logits_of(0.2, 0.4, 0.1, 0.3).expand(3, 4)
    assert kept(keep_top_k(logits, torch.tensor([0, 1, 2]))) == [[1, 1, 1, 1], [0, 1, 0, 0], [0, 1, 0, 1]]
    assert kept(keep_top_p(logits, torch.tensor([1.0, 0.39, 0.41]))) == [[1, 1, 1, 1], [0, 1, 0, 0], [0, 1, 0, 1]]
    assert kept(keep_min_p(logits, torch.tensor([0.0, 1.0, 0.6]))) == [[1, 1, 1, 1], [0, 1, 0, 0], [0, 1, 0, 1]]


@pytest.mark.parametrize(
    ("uniform", "expected"), [(0.0, 1), (0.19, 1), (0.21, 2), (0.49, 2), (0.51, 4), (0.999999, 4), (1 - 2**-53, 4)]
)
def test_draw_inverts_the_cumulative_distribution_and_skips_what_is_filtered(uniform, expected):
    logits = torch.tensor([OUT, math.log(0.2), math.log(0.3), OUT, math.log(0.5), OUT])
    assert draw(logits, torch.tensor(uniform, dtype=torch.float64)).item() == expected


@pytest.mark.parametrize("bad", [[0.0, math.nan], [0.0, math.inf], [OUT, OUT]])
def test_rows_that_are_not_finite_are_marked(bad):
    rows = torch.tensor([bad, [1.0, 0.0]])
    assert most_likely(rows).tolist() == [-1, 0]
    assert draw(rows, torch.tensor([0.5, 0.1])).tolist() == [-1, 0]


def choose_one(logits, **settings):
    return choose(logits[None], BatchSampling.of([SamplingParams(**settings)]), torch.tensor([0.999])).item()


@pytest.mark.parametrize(
    "settings",
    [{}, {"top_k": 3}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.1, "min_p": 0.5}, {"top_k": 0, "min_p": 0.01}],
)
def test_temperature_0_is_the_arg_max_whatever_top_k_and_top_p_say(settings):
    """Neither a draw nor a division by 0."""
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    assert choose_one(logits, temperature=0.0, **settings) == int(logits.argmax())


def test_a_tiny_temperature_is_the_arg_max_too_and_never_nan():
    assert choose_one(torch.tensor([0.0, 30.0, 29.0]), temperature=1e-40) == 1


def test_rows_of_unlike_settings_get_what_they_get_alone():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 40, generator=generator)
    uniform = torch.rand(7, generator=generator)
    seen = torch.rand(7, 40, generator=generator) < 0.3
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, top_k=3),
        SamplingParams(temperature=2.0, top_p=0.7),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=1.5, repetition_penalty=1.7),
        SamplingParams(temperature=0.0, repetition_penalty=3.0),
    ]
    together = choose(logits, BatchSampling.of(params), uniform, seen)
    alone = [
        choose(logits[i : i + 1], BatchSampling.of([each]), uniform[i : i + 1], seen[i : i + 1]).item()
        for i, each in enumerate(params)
    ]
    assert together.tolist() == alone


def chi_square_limit(degrees):
    """The value that chi-square exceeds with odds of one in a million (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 4.753 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"temperature": 1.0}, [0.05, 0.4, 0.15, 0.3, 0.1]),
        ({"temperature": 0.5}, [0.0025, 0.16, 0.0225, 0.09, 0.01]),
        ({"temperature": 1.0, "top_k": 3}, [0, 0.4, 0.15, 0.3, 0]),
        ({"temperature": 1.0, "top_p": 0.6}, [0, 0.4, 0, 0.3, 0]),
        ({"temperature": 1.0, "min_p": 0.3}, [0, 0.4, 0.15, 0.3, 0]),
        ({"temperature": 2.0, "top_k": 4, "top_p": 0.9}, [0, 0.4**0.5, 0.15**0.5, 0.3**0.5, 0.1**0.5]),
    ],
)
def test_frequencies_are_the_probabilities(settings, expected):
    """20,000 draws; a right sampler fails with odds of one in a million, and the numbers are the same in every run."""
    count = 20_000
    numbers = random.Random(0)
    uniform = torch.tensor([numbers.random() for _ in range(count)])
    logits = logits_of(0.05, 0.4, 0.15, 0.3, 0.1).expand(count, 5)
    ids = choose(logits, BatchSampling.of([SamplingParams(**settings)] * count), uniform)
    counts = torch.bincount(ids, minlength=5).tolist()
    total = sum(expected)
    wanted = [count * value / total for value in expected]
    assert all(found == 0 for found, want in zip(counts, wanted, strict=True) if want == 0)
    chi_square = sum((found - want) ** 2 / want for found, want in zip(counts, wanted, strict=True) if want)
    assert chi_square < chi_square_limit(sum(want > 0 for want in wanted) - 1)
