"""Intervals and tests against what they are by definition, and two models item by item."""

import math
import random
from itertools import product

import numpy as np
import pytest

from llmtrain.evaluation import compare_items
from llmtrain.evaluation.intervals import mcnemar, paired_difference, score_interval


def test_the_interval_of_a_share_is_about_as_wide_as_theory_says():
    """200 items, half right: 1.96 standard deviations are 0.0693; the bootstrap's own noise is a few percent."""
    low, high = score_interval([(number % 2, 1) for number in range(200)])
    assert low == pytest.approx(0.5 - 0.0693, abs=0.01)
    assert high == pytest.approx(0.5 + 0.0693, abs=0.01)
    assert (low, high) == score_interval([(number % 2, 1) for number in range(200)])
    assert score_interval([(1, 1)] * 5) == (1.0, 1.0)


def test_items_are_drawn_with_their_weight():
    """A ratio of sums, not a mean of ratios: every resample is points / possible of the items drawn."""
    pairs = [(1, 1), (0, 9)]
    low, high = score_interval(pairs, resamples=4000)
    assert (low, high) == (0.0, 1.0)  # both twice the one or twice the other, a quarter each
    values = {sum(p for p, _ in drawn) / sum(q for _, q in drawn) for drawn in product(pairs, repeat=2)}
    assert values == {0.0, 0.1, 1.0}


def test_an_interval_holds_the_truth_as_often_as_it_says():
    """150 samples of 80 items at 0.3; of a true 95 % fewer than 88 % have a chance of 1 in 3,000 (seeded anyway)."""
    draw = random.Random(5)
    inside = 0
    for _ in range(150):
        low, high = score_interval([(draw.random() < 0.3, 1) for _ in range(80)], resamples=500)
        inside += low <= 0.3 <= high
    assert inside >= 0.88 * 150


def test_many_items_are_resampled_in_parts(monkeypatch):
    pairs = [(number % 3 == 0, 1) for number in range(300)]
    whole = score_interval(pairs)
    monkeypatch.setattr("llmtrain.evaluation.intervals._AT_ONCE", 1000)
    assert score_interval(pairs) == pytest.approx(whole, abs=0.02)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (3, 5), (0, 10), (12, 2), (400, 520)])
def test_mcnemar_is_the_binomial_test(first, second):
    total = first + second
    tail = sum(math.comb(total, chosen) for chosen in range(min(first, second) + 1)) / 2**total
    assert mcnemar(first, second) == pytest.approx(min(1.0, 2 * tail))


def test_the_paired_difference_sees_what_two_intervals_do_not():
    """B is a little better on every item, and the items differ much more than A and B do."""
    draw = np.random.default_rng(0)
    scores = draw.random(100) * 0.8
    a, b = [(value, 1) for value in scores], [(value + 0.05, 1) for value in scores]
    (low, high), p_value = paired_difference(a, b)
    assert (low, high) == (pytest.approx(0.05), pytest.approx(0.05))
    assert p_value < 0.01
    assert score_interval(a)[1] > score_interval(b)[0]
    assert paired_difference(a, a)[1] == 1.0


def item(prompt, points, *, possible=1, metric="exact_match", reference="r"):
    return {"prompt": prompt, "reference": reference, "metric": metric, "points": points, "possible": possible}


def test_items_are_matched_and_counted():
    first = [item("a", 1), item("b", 1), item("c", 0), item("d", 0), item("only a", 1), item("a", 0)]
    second = [item("d", 0), item("c", 1), item("b", 0), item("a", 1), item("a", 1), item("only b", 0)]
    found = compare_items(first, second)
    counts = [found[key] for key in ("n", "both_right", "only_a", "only_b", "both_wrong")]
    assert counts == [5, 1, 1, 2, 1]
    assert (found["unmatched_a"], found["unmatched_b"]) == (1, 1)
    assert found["test"] == "mcnemar"
    assert found["p_value"] == mcnemar(1, 2) == 1.0
    assert found["difference"] == pytest.approx(1 / 5)
    assert found["interval"][0] <= found["difference"] <= found["interval"][1]
    assert [(a["prompt"], a["points"], b["points"]) for a, b in found["differ_most"]] == [
        ("b", 1, 0),
        ("c", 0, 1),
        ("a", 0, 1),
    ]


def test_graded_items_get_the_bootstrap_and_errors_are_better_few():
    first = [item(str(number), 3, possible=10, metric="character_error_rate") for number in range(30)]
    second = [item(str(number), 0, possible=10, metric="character_error_rate") for number in range(30)]
    found = compare_items(first, second, most=4)
    assert (found["test"], found["only_b"], len(found["differ_most"])) == ("bootstrap", 30, 4)
    assert found["p_value"] < 0.01
    foreign = compare_items([item("x", -3.5, metric="perplexity")], [item("x", -3.0, metric="perplexity")])
    assert foreign["test"] == "bootstrap"
    assert compare_items([item("x", 1.0, metric="acc")], [item("x", 0.0, metric="acc")])["test"] == "mcnemar"


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="none of the 1 items of the first"):
        compare_items([item("a", 1)], [item("a", 1, reference="another")])
    with pytest.raises(ValueError, match="scored by exact_match and prefix_match: evaluate both"):
        compare_items([item("a", 1)], [item("a", 1, metric="prefix_match")])
