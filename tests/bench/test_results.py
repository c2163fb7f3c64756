"""What a result says: whether its mark is met, and how it is shown."""

import json

import pytest

from llmtrain.bench.results import Comparison, machine_facts, table
from llmtrain.bench.rounds import Ratio
from llmtrain.launch.training_memory import Measured


def comparison(ours: list[float], yardstick: list[float], **changes) -> Comparison:
    values = {"name": "x", "what": "training", "theirs": "a loop", "unit": "tokens/s", "mark": 0.9, **changes}
    return Comparison(ratio=Ratio(ours, yardstick), **values)


@pytest.mark.parametrize(
    ("ours", "changes", "met"),
    [
        ([89, 90, 300], {}, True),
        ([89, 89, 300], {}, False),
        ([110, 110, 110], {"mark": None, "at_most": 1.15}, True),
        ([20, 20, 20], {"mark": None, "at_most": 1.15}, True),
        ([120, 120, 120], {"mark": None, "at_most": 1.15}, False),
        ([110, 110, 110], {"mark": 0.85, "at_most": 1.15}, True),
        ([120, 120, 120], {"mark": 0.85, "at_most": 1.15}, False),
        ([80, 80, 80], {"mark": 0.85, "at_most": 1.15}, False),
        ([120, 120, 120], {"mark": None}, None),
    ],
)
def test_the_median_decides_whether_a_mark_is_met(ours, changes, met) -> None:
    assert comparison(ours, [100, 100, 100], **changes).met is met


def test_memory_that_is_far_from_the_plan_misses_its_mark_on_either_side() -> None:
    for peak, met in ((0.9, True), (1.1, True), (1.2, False), (0.8, False), (0.2, False)):
        measured = Measured("deepspeed_2", 2, "bf16", 10**9, 5 * 10**9, int(peak * 5e9))
        assert measured.comparison().met is met


def test_wide_spread_is_called_noisy() -> None:
    assert comparison([100, 126, 100], [100, 100, 100]).noisy
    assert not comparison([100, 124, 100], [100, 100, 100]).noisy


def test_table_names_both_sides_the_spread_and_the_mark() -> None:
    lines = table(
        [
            comparison([6100, 6200, 6300], [6600, 6500, 6700]),
            comparison([400, 400, 400], [390, 390, 390], what="memory", theirs="100 MB", mark=0.85, at_most=1.15),
            comparison([100, 150, 50], [100, 100, 100], mark=None),
        ]
    ).splitlines()
    assert lines[0].split() == ["ours", "theirs", "ratio", "min–max", "mark"]
    assert lines[1] == "training against a loop  6.20k tokens/s  6.60k tokens/s   0.94  0.92–0.95     ≥ 0.90  met"
    assert lines[2].endswith("0.85–1.15  met")
    assert lines[3].endswith("noisy")


def test_a_result_is_plain_data() -> None:
    result = comparison([90, 91, 92], [100, 100, 100]).to_dict()
    assert json.loads(json.dumps(result)) == result
    assert (result["median"], result["min"], result["max"], result["met"]) == (0.91, 0.9, 0.92, True)
    assert result["per_round"] == [0.9, 0.91, 0.92]


def test_machine_facts_name_threads_and_versions() -> None:
    facts = machine_facts(threads=2)
    assert facts["threads"] == 2
    assert facts["torch"]
    assert json.dumps(facts)
