from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.launch.composing import SettingsError, compose, is_override

CONFIGS = Path(__file__).parent / "fake" / "configs"


def composed(*overrides):
    return compose("generate", overrides, CONFIGS)


def test_defaults_groups_and_values():
    done = composed()
    assert done.choices == {"paths": "default", "data": "one", "experiment": None}
    assert done.settings.data == {"kind": "one", "length": 128}
    changed = composed("data=two", "data.path=/语 料", "data.length=64", "seed=1", "seed=2").settings
    assert changed.data == {"kind": "two", "length": 64, "path": "/语 料"}
    assert changed.seed == 2


def test_an_experiment_changes_several_and_the_command_line_still_wins():
    settings_ = composed("experiment=bigger", "data.length=32").settings
    assert (settings_.seed, settings_.data.length) == (7, 32)


def test_a_key_may_have_the_name_of_a_group_that_this_command_does_not_use():
    assert composed("model=/路径 x/y").settings.model == "/路径 x/y"


@settings(max_examples=15)
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=()), max_size=30))
def test_any_text_comes_back_from_compose(text):
    assert composed(f"prompt={text}").settings.prompt == text


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("sed=1", r"unknown key 'sed' \(did you mean seed\?\); `llmtrain generate --help` lists all keys"),
        ("depth=1", r"unknown key 'depth' \(did you mean nested\.depth\?\)"),
        ("dept=1", r"unknown key 'dept' \(did you mean nested\.depth\?\)"),
        ("+new=1", "unknown key 'new'"),
        ("~seed", "not of the form key=value; nothing can be removed"),
        ("data=tow", r"data=tow: there is no such option \(did you mean two\?\); data is one of one, two"),
        ("data=两", "there is no such option; data is one of one, two"),
        ("data=two", r"data\.path has no default and must be given: data\.path=… \(the folder to read\)"),
        ("seed=one", "seed=one: expected a number, such as 0"),
        ("seed=0,01", "seed=0,01 gives several values where one is taken; start one run for each"),
        ("numbers=1,2", r"numbers=1,2 gives several values where one is taken; a list is written numbers=\[1,2\]"),
        ("switch=1", "switch=1: expected true or false"),
        ("nested=1", "nested is a section, not a single value; set one of its keys: depth, free"),
        ("nested={dept: 1}", r"unknown key 'nested\.dept' \(did you mean nested\.depth"),
        ("resume.at=1", r"resume\.at=1: resume is null here; set it whole, as resume=\{at: 1\}"),
        ("temperature=${x}", "a setting refers to another that is not there"),
    ],
)
def test_mistakes_get_one_sentence(override, sentence):
    with pytest.raises(SettingsError, match=sentence) as caught:
        composed(override)
    assert "\n" not in str(caught.value)


def test_numbers_keep_the_kind_of_their_default():
    changed = composed("seed=1e6", "temperature=1", "nested.free.a.b=x", "nested.depth=auto").settings
    assert (changed.seed, type(changed.seed)) == (1_000_000, int)
    assert changed.temperature == 1
    assert changed.nested == {"depth": "auto", "free": {"a": {"b": "x"}}}


def test_a_whole_number_may_be_written_with_an_exponent_where_the_default_is_null():
    trainer = compose("pretrain", ["trainer.max_tokens=1e6", "trainer.max_epochs=0.5"]).settings.trainer
    assert (trainer.max_tokens, type(trainer.max_tokens), trainer.max_epochs) == (1_000_000, int, 0.5)


def test_what_is_an_override():
    assert all(map(is_override, ["a=1", "a.b=", "+a=1", "++a@b=1", "~a", "a=b\nc"]))
    assert not any(map(is_override, ["你=1", "a b=1", "E = mc²", "text", "=1", ""]))
