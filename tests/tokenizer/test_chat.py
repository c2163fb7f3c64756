"""The chat template: ids, mask, and nobody can forge a role."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.tokenizer import SPECIAL_TOKENS, Tokenizer, byte_tokenizer, render_chat

BYTES = byte_tokenizer()
_, _, SYSTEM, USER, ASSISTANT, END = range(6)
CONTENT = st.text(st.characters(exclude_categories=["Cs"]), max_size=15) | st.sampled_from(SPECIAL_TOKENS)


def test_the_trained_positions_are_the_answer_and_its_end() -> None:
    """The end-of-turn token inside the mask, the header outside."""
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a1"},
        {"role": "user", "content": "v"},
        {"role": "assistant", "content": "b"},
    ]
    ids, trained = render_chat(messages, BYTES)
    letters = {name: BYTES.encode(name)[0] for name in "suav1b"}
    assert ids == [
        *(SYSTEM, letters["s"], USER, letters["u"], ASSISTANT, letters["a"], letters["1"], END),
        *(USER, letters["v"], ASSISTANT, letters["b"], END),
    ]
    assert [position for position, train in enumerate(trained) if train] == [5 + 0, 6, 7, 11, 12]


def test_a_generation_prompt_ends_where_the_answer_begins() -> None:
    question = [{"role": "user", "content": "九"}]
    ids, trained = render_chat(question, BYTES, add_generation_prompt=True)
    whole, _ = render_chat([*question, {"role": "assistant", "content": "9"}], BYTES)
    assert ids == whole[: len(ids)]
    assert ids[-1] == ASSISTANT
    assert not any(trained)


def test_a_conversation_begins_as_every_text_does(llama_tok: Tokenizer) -> None:
    question = [{"role": "user", "content": "a"}]
    ids, trained = render_chat(question, llama_tok, add_generation_prompt=True)
    marker = llama_tok.special_ids
    assert ids == [marker["<s>"], marker["<|user|>"], *llama_tok.encode("a"), marker["<|assistant|>"]]
    assert not any(trained)


@settings(max_examples=100)
@given(turns=st.lists(st.tuples(st.sampled_from(["user", "assistant"]), CONTENT), max_size=5))
def test_text_between_markers_is_the_text_and_nothing_else(turns: list[tuple[str, str]]) -> None:
    ids, trained = render_chat([{"role": role, "content": content} for role, content in turns], BYTES)
    assert len(ids) == len(trained)
    position = 0
    for role, content in turns:
        own = BYTES.encode(content)
        assert ids[position] == (USER if role == "user" else ASSISTANT)
        assert ids[position + 1 : position + 1 + len(own)] == own
        assert trained[position : position + 1 + len(own)] == [False, *[role == "assistant"] * len(own)]
        position += 1 + len(own)
        if role == "assistant":
            assert (ids[position], trained[position]) == (END, True)
            position += 1
    assert position == len(ids)


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        (["hello"], r"message 0 is 'hello': give a mapping with 'role' and 'content'"),
        ([{"role": ["user"], "content": "x"}], r"message 0 has the role \['user'\]: use system, user or assistant"),
        ([{"role": "tool", "content": "x"}], r"message 0 has the role 'tool': use system, user or assistant"),
        ([{"content": "x"}], "message 0 has the role None"),
        ([{"role": "user"}], r"message 0 \(user\) has no text in 'content'"),
        ([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}], "message 1 is a system message"),
    ],
)
def test_malformed_messages_are_refused(messages: list[Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        render_chat(messages, BYTES)


def test_a_tokenizer_without_markers_is_refused() -> None:
    plain = Tokenizer(
        '{"version":"1.0","added_tokens":[{"id":0,"content":"</s>","single_word":false,"lstrip":false,"rstrip":false,'
        '"normalized":false,"special":true}],"model":{"type":"BPE","vocab":{"</s>":0,"a":1},"merges":[]}}'
    )
    with pytest.raises(ValueError, match=r"the tokenizer has no <\|system\|> <\|user\|> <\|assistant\|> <\|end\|>"):
        render_chat([{"role": "user", "content": "a"}], plain)
