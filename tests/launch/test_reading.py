from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from llmtrain.launch.reading import SweepError, read_value

OmegaConf.register_new_resolver("llmtrain.question_marks", lambda: "???", replace=True)

# Whatever a command line can carry: no NUL; bytes that are not UTF-8 arrive as lone surrogates.
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=()), max_size=40)
NASTY = st.text(st.sampled_from("${}[]()'\"\\,，=: \n\t#?!&~@%^*|<>/.-_a1你🌍"), max_size=12)
ANY_TEXT = st.one_of(TEXT, NASTY, st.sampled_from(["???", "null", "true", "1e3", "007", "[a]", "${x}", "\\${x}", ""]))


def seen(key, text):
    """What a command sees when it reads the key: the value as an OmegaConf node gives it back."""
    config = OmegaConf.create({"value": read_value(key, text)})
    value = OmegaConf.to_container(config, resolve=True)["value"]
    assert isinstance(value, list | dict) or value == config.value
    return value


@settings(max_examples=300)
@given(ANY_TEXT)
def test_text_arrives_as_it_was_typed(text):
    assert seen("prompt", text) == text


@settings(max_examples=300)
@given(ANY_TEXT.filter(lambda text: text != "null"))
def test_a_path_arrives_as_it_was_typed(text):
    assert seen("model", text) == text
    assert seen("paths.run_dir", text) == text


@settings(max_examples=100)
@given(st.lists(ANY_TEXT, max_size=4))
def test_a_list_of_paths_arrives_as_it_was_quoted(texts):
    quoted = ['"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"' for text in texts]
    assert seen("data.paths", "[" + ", ".join(quoted) + "]") == texts


@settings(max_examples=150)
@given(ANY_TEXT)
def test_any_text_is_read_as_something_or_refused_as_a_sweep(text):
    try:
        value = read_value("optim.anything", text)
    except SweepError:
        return
    assert value is None or isinstance(value, str | int | float | bool | list | dict)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("seed", "3", 3),
        ("optim.lr", "1e-3", 0.001),
        ("trainer.compile", "true", True),
        ("optim.betas", "[0.9, 0.95]", [0.9, 0.95]),
        ("model.rope_scaling", "{factor: 2.0, rope_type: linear}", {"factor": 2.0, "rope_type": "linear"}),
        ("init", "null", None),
        ("resume", "auto", "auto"),
        ("model", "/路径 x/y", "/路径 x/y"),
        ("model", "007", "007"),
        ("note", "你好，a=b", "你好，a=b"),
        ("note", "it's", "it's"),
        ("data.paths", "[语料/a.txt,b c.txt]", ["语料/a.txt", "b c.txt"]),
        ("data.paths", "['a,b.txt', \"c]d\"]", ["a,b.txt", "c]d"]),
        ("data.paths", "one,file.txt", ["one,file.txt"]),
        ("data.paths", "[broken", ["[broken"]),
        ("data.paths", "[]", []),
        ("callbacks.prompts", "auto", "auto"),
        ("data.test_paths", "null", None),
        ("callbacks.prompts", "一句话", ["一句话"]),
        ("data.paths", "[{path: 语料/a.txt, weight: 2}, b]", [{"path": "语料/a.txt", "weight": 2}, "b"]),
        ("sampling.stop", "[。, 1]", ["。", "1"]),
        ("weights", "[你, 2, 0.5, null]", ["你", 2, 0.5, None]),
        ("table", "{你: [1, 二], 'b c': x}", {"你": [1, "二"], "b c": "x"}),
    ],
)
def test_values(key, text, value):
    assert seen(key, text) == value


def test_a_sweep_of_numbers_is_refused_and_words_with_commas_are_text():
    with pytest.raises(SweepError):
        read_value("seed", "1,2,3")
    assert read_value("note", "a,b") == "a,b"
