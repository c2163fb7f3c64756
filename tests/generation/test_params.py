"""Settings are refused with the value, the limit and the remedy."""

import math

import pytest

from llmtrain.generation import SamplingParams


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, r"temperature must lie in \[0, 1000\] \(0 is greedy\), got -0.1"),
        ({"temperature": math.nan}, "temperature must be a finite number"),
        ({"temperature": math.inf}, "temperature must be a finite number"),
        ({"temperature": "hot"}, "temperature must be a finite number, got 'hot'"),
        ({"top_k": -1}, r"top_k must lie in \[0, "),
        ({"top_k": 10**20}, r"top_k must lie in \[0, "),
        ({"temperature": 1e39}, r"temperature must lie in \[0, 1000\]"),
        ({"repetition_penalty": 1e-46}, r"repetition_penalty must lie in \[0.01, 100\]"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        ({"top_p": 1.1}, r"top_p must lie in \(0, 1\]"),
        ({"min_p": -0.1}, r"min_p must lie in \[0, 1\]"),
        ({"repetition_penalty": 0}, r"repetition_penalty must lie in \[0.01, 100\]"),
        ({"max_new_tokens": 0}, r"max_new_tokens must lie in \[1, "),
        ({"stop": [""]}, "stop strings must be non-empty text, got ''"),
        ({"stop": ["x"] * 65}, "stop takes at most 64 strings, got 65"),
        ({"stop_ids": ["x"]}, "stop_ids must be a whole number"),
        ({"seed": -1}, "seed must lie in"),
        ({"seed": 2**63}, "seed must lie in"),
        ({"seed": True}, "seed must be a whole number"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**settings)


def test_lists_and_a_bare_stop_string_become_tuples():
    assert SamplingParams(stop=["a", "b"], stop_ids=[1]).stop == ("a", "b")
    assert SamplingParams(stop="ab").stop == ("ab",)
