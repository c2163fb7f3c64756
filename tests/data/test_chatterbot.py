"""The task `chatterbot`: how the corpus is read, what is cleaned away, and that no held-out question is trained on."""

import sys
import zipfile
from pathlib import Path

import pytest

from llmtrain.data.examples import encode_examples
from llmtrain.data.fetch import CHATTERBOT_CORPUS
from llmtrain.data.tasks import Task, build_task
from llmtrain.data.tasks.chatterbot import chain, clean, hold_out_questions, question_key, read_conversations
from llmtrain.tokenizer import byte_tokenizer

FILES = {
    "english/greetings.yml": "categories:\n- greetings\nconversations:\n- - Hello\n  - Hi\n- - hello!\n  - Hey\n",
    "english/emotion.yml": "conversations:\n- - You are vain\n  - No.\n  - Not at all.\n",
    "english/trivia.yml": "conversations:\n- Two - 2\n- - What year?\n  - 1963\n- - Nobody answers\n",
    "english/empty.yml": "categories: []\n",
    "chinese/greetings.yml": "conversations:\n- - 你好\n  - 嗨\n  - 你好吗?\n  - 很好\n",
    "french/greetings.yml": "conversations:\n- - Bonjour\n  - Salut\n",
}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / CHATTERBOT_CORPUS.file
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(f"chatterbot_corpus/data/{name}", content)
        archive.writestr("chatterbot_corpus/corpus.py", "raise SystemExit")
    return path


def test_conversations_are_read_from_the_folders_asked_for(wheel: Path) -> None:
    assert read_conversations(wheel, "chinese") == [["你好", "嗨", "你好吗?", "很好"]]
    assert read_conversations(wheel, "english") == [
        *(["You are vain", "No."], ["You are vain", "Not at all."]),  # answers beside each other, not turns
        *(["Hello", "Hi"], ["hello!", "Hey"]),
        ["What year?", "1963"],
    ]


def test_yaml_that_would_make_objects_is_refused(tmp_path: Path) -> None:
    import yaml

    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("chatterbot_corpus/data/english/a.yml", "!!python/object/apply:os.getcwd []")
    with pytest.raises(yaml.YAMLError):
        read_conversations(tmp_path / "a.whl", "english")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([[" a \n b ", "c\td"]], [["a b", "c d"]]),
        ([["a", "b"], ["A!", "b."], ["a", "c"]], [["a", "b"], ["a", "c"]]),  # one answer in two spellings
        ([["a", str(number)] for number in range(9)], [["a", "0"], ["a", "1"], ["a", "2"]]),
        ([["a", "b", "c"]], [["a", "b"]]),  # a question without an answer at the end
        ([["a", "?!"], ["", "b"], ["a"]], []),
        ([["a", "b", "c", "d" * 21], ["e" * 21, "f"]], [["a", "b"]]),
        ([["code", "```x```"]], []),
        ([["a", "b", "c", "d"], ["a", "b", "c", "d"]], [["a", "b", "c", "d"]]),
    ],
)
def test_cleaning(given: list[list[str]], kept: list[list[str]]) -> None:
    assert clean(given, longest_text=20, most_answers=3) == kept


def test_held_out_questions_are_asked_nowhere_else() -> None:
    conversations = [[f"q{number}", f"a{number}"] for number in range(40)]
    conversations += [[f"Q{number}?", "other"] for number in range(40)]  # in another spelling, with another answer
    conversations += [["q1", "x", f"q{number}!", "y"] for number in range(10)]
    train, test = hold_out_questions(conversations, 12, seed=1)
    asked = {question_key(text) for turns in train for text in turns[::2]}
    held = {question_key(turns[0]) for turns in test}
    assert len(test) == len(held) == 12
    assert not held & asked
    assert not held & {f"q{number}" for number in range(10)}  # which a longer conversation asks, too
    assert all(turns[1].startswith("a") for turns in test)
    assert len(train) == len(conversations) - 24
    assert hold_out_questions(conversations, 12, seed=1) == (train, test)
    assert hold_out_questions(conversations, 12, seed=2) != (train, test)
    for count in (0, 16):
        with pytest.raises(ValueError, match=rf"data.test_examples must lie between 1 and 15, got {count}"):
            hold_out_questions(conversations, count)


def test_chains_are_turns_of_one_language() -> None:
    items = [{"prompt": f"q{number}", "completion": f"a{number}"} for number in range(9)]
    items += [{"prompt": f"问{number}", "completion": f"答{number}"} for number in range(9)]
    made = chain(items, count=200, seed=1)
    assert len(made) == 200
    assert {len(each["messages"]) for each in made} == {4, 6}
    pairs = {(item["prompt"], item["completion"]) for item in items}
    for each in made:
        texts = [message["content"] for message in each["messages"]]
        assert set(zip(texts[::2], texts[1::2], strict=True)) <= pairs
        assert len({text[0] in "问答" for text in texts}) == 1
    assert made == chain(items, count=200, seed=1)
    assert chain(items, count=0) == chain(items[:2], count=5) == []


def test_the_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    texts = [f"- - question {number}\n  - answer {number}\n" for number in range(40)]
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("chatterbot_corpus/data/english/a.yml", "conversations:\n" + "".join(texts))
    module = sys.modules["llmtrain.data.tasks.chatterbot"]
    monkeypatch.setattr(module, "fetch_wheel", lambda wheel, **_: tmp_path / "a.whl")
    task: Task = build_task("chatterbot", test_examples=10, chains=5)
    assert (len(task.train), len(task.test), task.open_ended) == (30, 10, True)
    examples, report = encode_examples(task.train, byte_tokenizer(), max_length=64)
    assert report.summary()["kept"] == 30
    assert task.exercises is not None
    assert len(task.exercises([{"prompt": each.prompt, "completion": each.completion} for each in examples])) == 5
    with pytest.raises(ValueError, match=r"data.languages has \['klingon'\]: choose of english, chinese"):
        build_task("chatterbot", languages=["klingon"])
