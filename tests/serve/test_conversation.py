"""A conversation's ids: the template's, grown only at the end, and what goes when they no longer fit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.generation import Completion, Engine, SamplingParams
from llmtrain.model import ModelConfig, build_model
from llmtrain.serve.conversation import Conversation
from llmtrain.tokenizer import byte_tokenizer, render_chat

BYTES = byte_tokenizer()
SPECIAL = BYTES.special_ids
END, USER = SPECIAL["<|end|>"], SPECIAL["<|user|>"]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(sorted(SPECIAL))


def completion(ids, text="", reason="stop"):
    return Completion(text, list(ids), reason, 0, 0)


@settings(max_examples=100)
@given(system=st.none() | TEXTS, turns=st.lists(st.tuples(TEXTS, TEXTS), max_size=4), last=TEXTS)
def test_the_ids_are_those_of_the_template(system, turns, last):
    """In every turn, where the model's ids are those that its text has."""
    conversation = Conversation(BYTES, max_length=2000, system=system)
    for question, answer in turns:
        expected, _ = render_chat(
            [*conversation.messages(), {"role": "user", "content": question}], BYTES, add_generation_prompt=True
        )
        assert conversation.ask(question) == (expected, 0)
        conversation.add(question, completion([*BYTES.encode(answer), END], answer))
    expected, _ = render_chat(
        [*conversation.messages(), {"role": "user", "content": last}], BYTES, add_generation_prompt=True
    )
    assert conversation.ask(last).ids == expected


def test_a_family_with_a_begin_of_text_has_it_once(llama_tok):
    conversation = Conversation(llama_tok, max_length=100)
    end = llama_tok.special_ids["<|end|>"]
    conversation.add("a", completion([*llama_tok.encode("b"), end], "b"))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    expected, _ = render_chat([*messages, {"role": "user", "content": "c"}], llama_tok, add_generation_prompt=True)
    assert conversation.ask("c").ids == expected
    assert expected.count(llama_tok.special_ids["<s>"]) == 1


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled"])
def test_a_turn_begins_with_what_the_engine_holds_after_the_last(reason):
    """All it has read: the prompt and the answer without its last token, though the text would be encoded otherwise."""
    conversation = Conversation(BYTES, max_length=400, system="s")
    broken = [*BYTES.encode("好")[:2], *BYTES.encode("a")]  # half a character is U+FFFD as text, of three bytes
    for number in range(3):
        prompt = conversation.ask(f"q{number}").ids
        answer = [*broken, END] if reason == "stop" else broken
        held = [*prompt, *answer[:-1]]
        conversation.add(f"q{number}", completion(answer, "\ufffda", reason))
        following = conversation.ask("next").ids
        assert following[: len(held)] == held
        assert following[len(prompt) :][: len(broken) + 1] == [*broken, END]


def test_what_another_marker_ended_ends_as_a_turn_does():
    """The model went on as the user: the marker is no part of its answer."""
    conversation = Conversation(BYTES, max_length=400)
    assert set(conversation.stop_ids) == {SPECIAL[f"<|{name}|>"] for name in ("system", "user", "assistant", "end")}
    before = conversation.ask("q").ids
    conversation.add("q", completion([*BYTES.encode("a"), USER], "a"))
    assert conversation.ask("r").ids == [
        *before,
        *BYTES.encode("a"),
        END,
        *conversation.ask("r").ids[len(before) + 2 :],
    ]
    assert conversation.ask("r").ids.count(USER) == 2


def test_the_oldest_turns_go_and_the_system_message_stays():
    conversation = Conversation(BYTES, max_length=60, system="sys", room=20)
    for letter in "abc":  # 3 + 4 + 1 = 8 tokens each, after 4 of the system message
        conversation.add(letter * 2, completion([*BYTES.encode(letter * 3), END], letter * 3))
    assert conversation.ask("d" * 10).dropped == 0  # 4 + 24 + 12 = 40, as many as there may be
    assert len(conversation.turns) == 3
    prompt = conversation.ask("d" * 11)
    assert prompt.dropped == 1
    assert [turn.question for turn in conversation.turns] == ["bb", "cc"]
    expected, _ = render_chat(
        [*conversation.messages(), {"role": "user", "content": "d" * 11}], BYTES, add_generation_prompt=True
    )
    assert prompt.ids == expected
    assert BYTES.decode(prompt.ids[1:4]) == "sys"
    assert conversation.ask("d" * 34).dropped == 2
    assert conversation.turns == []


def test_what_cannot_fit_is_refused_and_nothing_is_lost():
    conversation = Conversation(BYTES, max_length=60, system="sys", room=20)
    conversation.add("aa", completion([END]))
    with pytest.raises(ValueError, match=r"has 37 tokens with its markers, 4 more come before it, .* may have 40, 20 "):
        conversation.ask("d" * 35)
    assert len(conversation.turns) == 1
    with pytest.raises(ValueError, match=r"the system message has 41 tokens, and of a context of 60 .* take 40"):
        Conversation(BYTES, max_length=60, system="s" * 40, room=20)
    with pytest.raises(ValueError, match="a context of 20 tokens cannot keep 20 for an answer"):
        Conversation(BYTES, max_length=20, room=20)


def test_an_engine_reads_only_what_is_new_and_answers_as_from_the_start(tiny_config):
    """Greedy; each prompt is also given to an engine that has seen nothing before."""
    config: ModelConfig = tiny_config(initializer_range=0.2)
    model = build_model(config, seed=0).eval()
    conversation = Conversation(BYTES, max_length=256)
    engine = Engine(model, BYTES, max_rows=1)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=12, stop_ids=tuple(conversation.stop_ids))
    held = 0
    for question in ("你好" * 8, "how are you?", "再见"):  # the engine keeps what is longer than 32 tokens
        prompt = conversation.ask(question).ids
        (answer,) = engine.generate([prompt], sampling)
        (fresh,) = Engine(model, BYTES, max_rows=1).generate([prompt], sampling)
        assert answer.token_ids == fresh.token_ids
        assert (answer.num_cached_tokens, fresh.num_cached_tokens) == (held, 0)
        held = len(prompt) + len(answer.token_ids) - 1  # the last token was chosen and never read
        conversation.add(question, answer)
    assert held > 60
