"""Records of three forms become masked token ids; what is cut or refused is counted and named by line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.data.examples import Conversation, Example, encode_examples, hold_out, normalise, read_examples
from llmtrain.data.records import without_tested
from llmtrain.data.windows import IGNORED
from llmtrain.tokenizer import Tokenizer, byte_tokenizer, render_chat


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token per byte, so that lengths can be counted by hand."""
    return byte_tokenizer()


def encode_one(tokenizer: Tokenizer, *turns: str, max_length: int = 1000) -> Example:
    (example,), _ = encode_examples([conversation(*turns)], tokenizer, max_length=max_length)
    return example


def conversation(*turns: str) -> Conversation:
    """Turns of user, assistant, user, …"""
    roles = ("user", "assistant")
    return Conversation([{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)])


def trained_text(tokenizer: Tokenizer, example: Example) -> str:
    ids = [label for label in example.labels if label != IGNORED]
    return tokenizer.decode(ids, skip_special=False)


def write_lines(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


# --- what is trained


def test_exactly_the_answers_and_their_end_tokens_are_trained(tokenizer: Tokenizer) -> None:
    """Without its end token an answer never stops; with a header in the mask it echoes it."""
    example = encode_one(tokenizer, "hello", "hi!", "bye", "see you")
    assert trained_text(tokenizer, example) == "hi!<|end|>see you<|end|>"
    whole = "<|user|>hello<|assistant|>hi!<|end|><|user|>bye<|assistant|>see you<|end|>"
    assert tokenizer.decode([*example.input_ids, example.labels[-1]], skip_special=False) == whole


@settings(max_examples=40)
@given(
    turns=st.lists(st.text(min_size=1, max_size=9).filter(str.strip), min_size=2, max_size=6).filter(
        lambda turns: len(turns) % 2 == 0
    )
)
def test_labels_are_the_next_ids_where_the_template_trains_them(tokenizer: Tokenizer, turns: list[str]) -> None:
    messages = conversation(*turns).messages
    ids, trained = render_chat(messages, tokenizer)
    example = encode_one(tokenizer, *turns, max_length=100_000)
    assert example.input_ids == ids[:-1]
    assert example.labels == [token if train else IGNORED for token, train in zip(ids, trained, strict=True)][1:]
    assert example.trained_tokens == sum(trained)
    assert example.prompt_ids == render_chat(messages[:-1], tokenizer, add_generation_prompt=True)[0]
    assert example.prompt_ids + example.labels[len(example.prompt_ids) - 1 :] == ids
    assert (example.prompt, example.completion) == (turns[-2], turns[-1])


# --- the three forms


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"prompt": "p", "completion": "c"}, [("user", "p"), ("assistant", "c")]),
        ({"instruction": "i", "output": "o"}, [("user", "i"), ("assistant", "o")]),
        ({"instruction": "i", "input": "", "output": "o"}, [("user", "i"), ("assistant", "o")]),
        ({"instruction": "i", "input": "x", "output": "o"}, [("user", "i\nx"), ("assistant", "o")]),
        (
            {"system": "s", "prompt": "p", "completion": "c", "id": 7},
            [("system", "s"), ("user", "p"), ("assistant", "c")],
        ),
        (
            {"messages": [{"role": "user", "content": "你"}, {"role": "assistant", "content": "好"}]},
            [("user", "你"), ("assistant", "好")],
        ),
    ],
)
def test_all_forms_become_messages(record: dict, messages: list[tuple[str, str]]) -> None:
    assert [(message["role"], message["content"]) for message in normalise(record)] == messages


USER, ASSISTANT = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (["prompt"], "expected an object of the form .* found list"),
        ({"question": "q"}, r'expected \{"prompt", "completion"\}.* found the fields \[\'question\'\]'),
        ({"prompt": "p", "completion": 9051}, '"completion" must be text, got int'),
        ({"prompt": "  ", "completion": "c"}, "the user text is empty"),
        ({"prompt": "p", "completion": "\n"}, "the assistant text is empty"),
        (json.loads(r'{"prompt": "a\ud83d", "completion": "c"}'), "the user text holds half a surrogate pair at 1"),
        ({"messages": []}, '"messages" is empty'),
        ({"messages": "hello"}, '"messages" must be a list, got str'),
        ({"messages": [{"role": "user"}]}, 'message 0 needs "role" and "content"'),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "message 1 has the role 'tool', expected user or"),
        ({"messages": [USER, ASSISTANT, {"role": "system", "content": "x"}]}, "message 2 has the role 'system'"),
        ({"messages": [USER, ASSISTANT, USER]}, "the last message must be the assistant's, but its role is 'user'"),
        ({"messages": [ASSISTANT]}, "no user message before the first answer"),
    ],
)
def test_other_records_are_refused_with_the_reason(record: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        normalise(record)


# --- too long


def test_a_long_answer_is_cut_counted_and_keeps_its_end_token(tokenizer: Tokenizer) -> None:
    items = [conversation("ask", "short"), conversation("ask", "0123456789")]
    examples, report = encode_examples(items, tokenizer, max_length=11)
    assert [trained_text(tokenizer, example) for example in examples] == ["short<|end|>", "012345<|end|>"]
    assert len(examples[1].input_ids) == 11
    assert examples[1].completion == "0123456789"
    assert report.summary() == {"read": 2, "kept": 2, "cut": 1, "too_long": 0, "empty": 0, "malformed": 0}
    assert report.lines() == ["1 of 2 examples shortened to the limit: example 2 from 15 to 11 tokens"]


def test_an_example_that_just_fits_is_left_alone(tokenizer: Tokenizer) -> None:
    example = encode_one(tokenizer, "ask", "0123456789", max_length=15)
    assert trained_text(tokenizer, example) == "0123456789<|end|>"


def test_a_cut_never_splits_a_character(tokenizer: Tokenizer) -> None:
    for max_length in range(8, 15):  # 5 ids of prompt, then room for one character of three bytes, and more
        example = encode_one(tokenizer, "问", "三国演", max_length=max_length)
        text = trained_text(tokenizer, example)
        assert text.endswith("<|end|>")
        assert "三国演".startswith(text.removesuffix("<|end|>"))
        assert len(example.input_ids) > max_length - 3


@pytest.mark.parametrize(("answer", "width"), [("好好好", 3), ("🌍🌍", 4), ("é" * 4, 2)])
def test_less_than_a_character_is_no_answer(answer: str, width: int, tokenizer: Tokenizer) -> None:
    for room in range(1, width):
        with pytest.raises(ValueError, match=r"has 3 tokens, the limit of \d leaves no room"):
            encode_one(tokenizer, "p", answer, max_length=3 + room)
    assert trained_text(tokenizer, encode_one(tokenizer, "p", answer, max_length=3 + width)) == f"{answer[0]}<|end|>"


def test_an_answer_may_hold_replacement_characters(tokenizer: Tokenizer) -> None:
    example = encode_one(tokenizer, "p", "\ufffd" * 9, max_length=3 + 6)
    assert trained_text(tokenizer, example) == "\ufffd\ufffd<|end|>"


def test_late_turns_go_before_any_answer_is_cut(tokenizer: Tokenizer) -> None:
    turns = ("ask", "answer", "more", "again", "more", "last")
    whole = encode_one(tokenizer, *turns[:4])
    for max_length in (len(whole.input_ids), len(whole.input_ids) + 5):
        (example,), report = encode_examples([conversation(*turns)], tokenizer, max_length=max_length)
        assert example == whole
        assert report.summary()["cut"] == 1
    example = encode_one(tokenizer, *turns, max_length=9)
    assert trained_text(tokenizer, example) == "answ<|end|>"
    assert example.completion == "answer"


def test_a_prompt_that_leaves_no_room_refuses_its_example_by_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl",
        {"prompt": "p", "completion": "c"},
        {"prompt": "x" * 50, "completion": "c"},
    )
    conversations, _ = read_examples(path)
    examples, report = encode_examples(conversations, tokenizer, max_length=20)
    assert len(examples) == 1
    assert report.too_long == [f"{path}:2 its prompt has 52 tokens, the limit of 20 leaves no room"]
    with pytest.raises(
        ValueError,
        match=r"is left to train on: 1 of 1 examples left out, the prompt is too long.*raise data.max_length=20",
    ):
        encode_examples(conversations[1:], tokenizer, max_length=20)


@given(
    turns=st.lists(st.text("ab三🌍", min_size=1, max_size=8), min_size=2, max_size=6).filter(
        lambda turns: len(turns) % 2 == 0
    ),
    max_length=st.integers(4, 60),
)
def test_whatever_is_kept_fits_and_trains_something(tokenizer: Tokenizer, turns: list[str], max_length: int) -> None:
    try:
        example = encode_one(tokenizer, *turns, max_length=max_length)
    except ValueError as error:
        assert "the prompt is too long" in str(error)  # noqa: PT017
        assert len(tokenizer.encode(turns[0])) + 2 + len(turns[1][0].encode()) > max_length
        return
    assert len(example.input_ids) == len(example.labels) <= max_length
    text = trained_text(tokenizer, example)
    assert any(answer.startswith(text.split("<|end|>")[0]) for answer in turns[1::2])
    assert "\ufffd" not in text
    assert example.labels[-1] == tokenizer.end_id


# --- files


def test_files_folders_arrays_and_gzip_are_read(tmp_path: Path) -> None:
    record = {"prompt": "问，", "completion": "答"}
    write_lines(tmp_path / "a.jsonl", record, "", record)
    (tmp_path / "b").mkdir()
    with gzip.open(tmp_path / "b" / "b.jsonl.gz", "wt", encoding="utf-8") as stream:
        stream.write(json.dumps(record))
    (tmp_path / "c.json").write_text("\ufeff" + json.dumps([record, record], indent=1), encoding="utf-8")
    (tmp_path / "notes.txt").write_text("not read")
    write_lines(tmp_path / "d.JSONL", record)
    for hidden in (".ipynb_checkpoints/a.jsonl", "b/.b.jsonl"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        write_lines(tmp_path / hidden, {**record, "prompt": "an older version"})
    conversations, report = read_examples(tmp_path)
    assert [item.where.removeprefix(f"{tmp_path}/") for item in conversations] == [
        *("a.jsonl:1", "a.jsonl:3", "b/b.jsonl.gz:1", "c.json[1]", "c.json[2]", "d.JSONL:1")
    ]
    assert report.read == 6
    assert all(item.messages == normalise(record) for item in conversations)


def test_malformed_lines_are_named_and_refused_or_left_out(tmp_path: Path) -> None:
    good = {"prompt": "p", "completion": "c"}
    path = write_lines(tmp_path / "a.jsonl", good, '{"prompt": "p",', good, {"prompt": "p"}, {**good, "prompt": ""})
    with pytest.raises(
        ValueError, match=r"2 of 5 examples are malformed: .*a\.jsonl:2 does not parse as JSON: .*column 16; .*:4 exp"
    ):
        read_examples(path)
    conversations, report = read_examples(path, skip_malformed=True)
    assert len(conversations) == 2
    assert report.summary() | {"read": 5, "empty": 1, "malformed": 2} == report.summary()
    assert report.empty == [f"{path}:5 the user text is empty"]


def test_patterns_the_home_folder_and_encodings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"prompt": "问", "completion": "答"}
    for name in ("1.jsonl", "2.jsonl", "other.jsonl"):
        (tmp_path / name).write_text(json.dumps(record, ensure_ascii=False), encoding="gb18030")
    monkeypatch.setenv("HOME", str(tmp_path))
    conversations, _ = read_examples("~/[12].jsonl", encoding="gb18030")
    assert [item.where for item in conversations] == [f"{tmp_path}/{number}.jsonl:1" for number in (1, 2)]
    assert conversations[0].messages == normalise(record)


def test_a_fault_that_hides_the_rest_of_a_file_refuses_it(tmp_path: Path) -> None:
    """To leave malformed records out is no leave to lose those behind them."""
    path = tmp_path / "a.json"
    for text, place in (
        ('[{"prompt": "p", "completion": "c"}, {oops}, {"prompt": "LOST", "completion": "c"}]', ", element 2"),
        ('[{"prompt": "p", "completion": "c"}]\n[{"prompt": "LOST", "completion": "c"}]', ", line 2"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"a\.json{place}: not JSON"):
            read_examples(path, skip_malformed=True)


def test_bad_bytes_and_missing_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(
        ValueError, match=r"a\.jsonl is not UTF-8: byte 0xff at offset 12, line 1; say what it is \(data\.enc"
    ):
        read_examples(path)
    (tmp_path / "b.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(ValueError, match=r"b\.jsonl\.gz is not a whole gzip file \(Not a gzipped file"):
        read_examples(tmp_path / "b.jsonl.gz")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}')[:15] + b"\0" * 30)
    with pytest.raises(ValueError, match=r"c\.jsonl\.gz is not a whole gzip file .* pack it again"):
        read_examples(tmp_path / "c.jsonl.gz")
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"a\.jsonl, element 1: not JSON"):
        read_examples(path)
    path.write_text('{"prompt": ' + "1" * 5000 + "}")
    with pytest.raises(ValueError, match=r"a\.jsonl:1 does not parse as JSON"):
        read_examples(path)
    with pytest.raises(ValueError, match=r"there is nothing at .*missing\.jsonl: correct the path"):
        read_examples(tmp_path / "missing.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no file of the kinds \.jsonl \.json \(each also with \.gz\) in .*empty"):
        read_examples(tmp_path / "empty")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"no usable example in .*empty\.jsonl: the files hold no records"):
        read_examples(tmp_path / "empty.jsonl")


def test_holding_out_keeps_equal_examples_together_and_hardly_moves_when_data_grows() -> None:
    items = [conversation(f"{number % 80}", "answer") for number in range(100)]
    train, test = hold_out(items, 20, seed=1)
    texts = [{item.messages[0]["content"] for item in part} for part in (train, test)]
    assert len(test) in (20, 21)  # prompts 0 to 19 stand there twice
    assert not texts[0] & texts[1]
    assert len(train) + len(test) == 100
    assert hold_out(items, 20, seed=1) == (train, test)
    grown = hold_out([*items, conversation("new", "answer")], 20, seed=1)[1]
    assert sum(item not in grown for item in test) <= 1
    with pytest.raises(
        ValueError, match=r"needs at least 2 different prompts in usable examples, .* and there is 1: add examples"
    ):
        hold_out([conversation("a", "b")] * 3, 1)
    with pytest.raises(ValueError, match=r"cannot hold out 100 of 100 examples: .* between 1 and 99"):
        hold_out(items, 100)


@pytest.mark.parametrize("seed", range(8))
def test_the_share_that_is_held_out_is_one_of_examples_not_of_prompts(seed: int, caplog) -> None:
    """120 rows of 14 prompts: a tenth is 12 rows, not 12 prompts with all that have them."""
    caplog.set_level("INFO")
    items = [conversation(f"{number % 14}", str(number)) for number in range(120)]
    train, test = hold_out(items, 12, seed=seed)
    assert 12 <= len(test) < 12 + 9
    assert not {item.messages[0]["content"] for item in train} & {item.messages[0]["content"] for item in test}
    prompts = len({item.messages[0]["content"] for item in test})
    assert f"{len(test)} of 120 examples are held out: {prompts} of 14 different prompts" in caplog.text
    most = [conversation("often", str(number)) for number in range(90)] + items[:30]
    train, test = hold_out(most, 12, seed=seed)
    assert len(test) < 30 < len(train)
    assert len(hold_out(items, 100, seed=seed)[1]) <= 100  # as many as are asked for, if they are


def test_a_tested_prompt_is_not_trained_on(caplog) -> None:
    items = [conversation(f"{number}", "answer") for number in range(10)]
    assert without_tested(items, [conversation("3", "another"), conversation("x", "y")]) == items[:3] + items[4:]
    assert "1 of 10 examples are not trained on: data.test_paths tests their prompts" in caplog.text
    with pytest.raises(ValueError, match=r"all 10 examples of data\.paths have prompts that data\.test_paths tests"):
        without_tested(items, items)
