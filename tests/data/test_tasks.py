"""The built-in tasks: what they generate, that train and test never meet, and how answers are scored."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.data.examples import encode_examples
from llmtrain.data.tasks import TASKS, Task, build_task
from llmtrain.data.tasks.date_iso import FORMS
from llmtrain.data.tasks.hsk_pinyin import (
    MEMBER,
    ReadingTable,
    cut_pieces,
    draw_rows,
    parse_sentences,
    split_units,
    syllables,
)
from llmtrain.data.tasks.zh_number import chinese_number
from llmtrain.tokenizer import byte_tokenizer

GENERATED = ("zh_number", "date_iso")


@pytest.mark.parametrize("name", GENERATED)
def test_generated_tasks_are_repeatable_and_their_parts_never_meet(name: str) -> None:
    task = build_task(name, seed=3)
    assert (len(task.train), len(task.test)) == (6000, 500)
    again, other = build_task(name, seed=3), build_task(name, seed=4)
    assert (task.train, task.test) == (again.train, again.test)
    assert task.train[:100] != other.train[:100]
    answers = [{item["completion"] for item in part} for part in (task.train, task.test)]
    assert not answers[0] & answers[1]
    assert task.metric == "exact_match"
    assert task.guess == task.train[0]["completion"]  # answers are all different: the first met


@pytest.mark.parametrize("name", GENERATED)
def test_train_and_test_are_alike(name: str) -> None:
    """The parts are drawn alike: their mean prompt lengths differ by less than five standard errors."""
    task = build_task(name)
    lengths = [[len(item["prompt"]) for item in part] for part in (task.train, task.test)]
    means = [sum(part) / len(part) for part in lengths]
    spread = (sum((length - means[0]) ** 2 for length in lengths[0]) / 6000) ** 0.5
    assert abs(means[0] - means[1]) < 5 * spread / 500**0.5


def test_items_are_examples() -> None:
    task = build_task("zh_number", train_examples=20, test_examples=5)
    examples, report = encode_examples(task.train, byte_tokenizer(), max_length=128)
    assert report.summary()["kept"] == 20
    assert examples[0].completion == task.train[0]["completion"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *((0, "零"), (7, "七"), (10, "十"), (15, "十五"), (20, "二十"), (101, "一百零一"), (110, "一百一十")),
        *((115, "一百一十五"), (1000, "一千"), (1001, "一千零一"), (1010, "一千零一十"), (9051, "九千零五十一")),
        *((10_000, "一万"), (10_001, "一万零一"), (20_600, "二万零六百"), (90_051, "九万零五十一")),
        *(
            (100_000, "十万"),
            (120_300, "十二万零三百"),
            (2_002_000, "二百万二千"),
            (99_999_999, "九千九百九十九万九千九百九十九"),
        ),
    ],
)
def test_numbers_are_written_as_in_chinese(number: int, text: str) -> None:
    assert chinese_number(number) == text


def test_liang_stands_before_thousands_and_ten_thousands_only() -> None:
    assert chinese_number(22_222, liang=True) == "两万两千二百二十二"
    assert chinese_number(120_000, liang=True) == "十二万"
    assert chinese_number(200, liang=True) == "二百"


@given(number=st.integers(0, 10**8 - 1), liang=st.booleans())
def test_numerals_can_be_read_back(number: int, liang: bool) -> None:
    """An independent reader: digits times units, added up within each 万."""
    total = part = digit = 0
    for character in chinese_number(number, liang=liang).replace("两", "二"):
        if character in "零一二三四五六七八九":
            digit = "零一二三四五六七八九".index(character)
        elif character == "万":
            total, part, digit = (part + digit) * 10_000, 0, 0
        else:
            part, digit = part + max(digit, 1) * {"十": 10, "百": 100, "千": 1000}[character], 0
    assert total + part + digit == number


def test_dates_come_in_six_forms_in_equal_parts() -> None:
    from datetime import date

    assert [form(date(2010, 6, 1)) for form in FORMS.values()] == list(FORMS)
    task = build_task("date_iso", train_examples=600, test_examples=60)
    for part in (task.train, task.test):
        shapes = [sum(mark in item["prompt"] for item in part) for mark in ("号", "日", ",", "/")]
        sixth = len(part) // 6
        assert shapes == [sixth, 2 * sixth, sixth, sixth]
    assert {"prompt": "December 28, 1942", "completion": "1942-12-28"} in build_task("date_iso").test


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "zh_numbers",
            {},
            "there is no task 'zh_numbers': choose one of zh_number, date_iso, hsk_pinyin, chatterbot, jsonl",
        ),
        ("zh_number", {"digits": 4}, "task zh_number has no setting digits: it takes train_examples, test_examples"),
        ("zh_number", {"max_number": 100}, "6500 different numbers need max_number between 9285 and 99999999, got 100"),
        ("zh_number", {"test_examples": 0}, "at least one training and one test example"),
        ("date_iso", {"first_year": 2000, "last_year": 2001}, "date_iso can give 2 .. 731 examples from 2000 to 2001"),
        ("date_iso", {"first_year": 900}, "needs 1000 <= first_year <= last_year <= 9999, got 900 and 2099"),
    ],
)
def test_impossible_settings_are_refused(name: str, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_task(name, **settings)


def test_every_registered_task_has_its_config() -> None:
    configs = Path(__file__).parents[2] / "configs" / "data"
    for name in TASKS:
        assert f"\nkind: {name} #" in (configs / f"{name}.yaml").read_text(encoding="utf-8")


def test_the_guess_is_the_most_common_training_answer() -> None:
    train = [{"prompt": f"{n}", "completion": "yes" if n % 3 else "no"} for n in range(9)]
    assert Task("any", train, [], "exact_match").guess == "yes"


# --- pinyin


def test_a_spoken_er_joins_the_syllable_before() -> None:
    assert split_units("请给我一点儿水。", ["qǐng", "gěi", "wǒ", "yī", "diǎnr", "shuǐ"]) == [
        "请",
        "给",
        "我",
        "一",
        "点儿",
        "水",
    ]
    assert split_units("女儿来了！", ["nǚ", "ér", "lái", "le"]) == ["女", "儿", "来", "了"]
    assert split_units("十二儿", ["shí"]) is None


def test_the_reading_table_takes_the_most_frequent_reading() -> None:
    table = ReadingTable([("长大", "zhǎng dà"), ("很长", "hěn cháng"), ("长。", "cháng"), ("一点儿", "yī diǎnr")])
    assert table("他长大，一点儿") == "? cháng dà yī diǎnr"


def hsk_content(count: int) -> bytes:
    """As many different sentences, in the form of the wheel's member."""
    digits = "零一二三四五六七八九"
    readings = ["líng", "yī", "èr", "sān", "sì", "wǔ", "liù", "qī", "bā", "jiǔ"]
    records = []
    for number in range(count):
        figures = [int(figure) for figure in f"{number:04d}"]
        chinese = "".join(digits[figure] for figure in figures) + "。"
        records.append({"chinese": chinese, "pinyin": " ".join(readings[figure] for figure in figures)})
    return json.dumps(records).encode()


def test_hsk_pinyin_holds_out_and_reports_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_member(wheel: object, member: str, **_: object) -> bytes:
        assert member == MEMBER
        return hsk_content(600)

    import sys

    monkeypatch.setattr(sys.modules["llmtrain.data.tasks.hsk_pinyin"], "read_member", read_member)
    task: Task = build_task("hsk_pinyin", test_examples=100)
    assert task.train[0]["completion"].startswith(task.train[0]["prompt"][0])
    prompts = [{item["prompt"] for item in part} for part in (task.train, task.test)]
    assert not prompts[0] & prompts[1]
    assert (len(prompts[0]), len(prompts[1])) == (500, 100)
    spoken = [" ".join(syllables(item["completion"])) for item in task.test]
    assert task.baselines == {"most_frequent_reading": spoken}
    with pytest.raises(ValueError, match="test_examples must be between 1 and 599, got 600"):
        build_task("hsk_pinyin", test_examples=600)


def test_pieces_of_a_sentence_are_stretches_with_their_own_reading() -> None:
    sentence, pinyin = "他花了一点儿钱，很高兴。", "tā huā le yī diǎnr qián hěn gāo xìng"
    reading = dict(zip(["他", "花", "了", "一", "点儿", "钱", "很", "高", "兴"], pinyin.split(), strict=True))
    found = cut_pieces(sentence, pinyin, count=40, seed=1)
    assert len(found) == 40
    for piece in found:
        units = split_units(piece["prompt"], syllables(piece["completion"]))
        assert units is not None
        assert piece["completion"] == " ".join(unit + reading[unit] for unit in units)
        assert piece["prompt"] == " ".join("".join(units))
        assert "".join(units) in sentence.replace("，", "")
        assert len(units) < len(reading)
    assert found == cut_pieces(sentence, pinyin, count=40, seed=1)
    assert found != cut_pieces(sentence, pinyin, count=40, seed=2)
    assert cut_pieces("好", "hǎo", count=3) == []
    assert cut_pieces("你好", "nǐ", count=3) == []


def test_rows_draw_rare_and_frequent_characters_alike() -> None:
    table = ReadingTable([("他他他他他他", "tā tā tā tā tā tā"), ("一点儿", "yī diǎnr")])
    rows = draw_rows(table, count=300, seed=1)
    units = [unit for row in rows for unit in split_units(row["prompt"], syllables(row["completion"])) or ()]
    counts = [units.count(unit) for unit in ("他", "一", "点儿")]
    assert sum(counts) == len(units)
    # About 2,550 units, a third each: 5 standard deviations are 120. A false alarm: less than one in a million.
    assert max(counts) - min(counts) < 240
    assert all(" ".join(syllables(row["completion"])) == table(row["prompt"]) for row in rows)
    assert draw_rows(ReadingTable([]), count=3) == []


def test_exercises_are_made_of_the_items_that_are_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    member = lambda *_, **__: hsk_content(50)  # noqa: E731
    monkeypatch.setattr(sys.modules["llmtrain.data.tasks.hsk_pinyin"], "read_member", member)
    task = build_task("hsk_pinyin", test_examples=10, pieces=3, drills=20)
    assert len(task.train) == 40  # exercises are made once validation items have been set aside
    assert task.exercises is not None
    found = task.exercises([{"prompt": "零一二三。", "completion": "líng yī èr sān"}])
    assert len(found) == 23
    assert set("".join(item["prompt"] for item in found)) == set("零一二三 ")
    with pytest.raises(ValueError, match="pieces and drills must be at least 0, got -1 and 0"):
        build_task("hsk_pinyin", test_examples=10, pieces=-1, drills=0)


def test_sentences_that_differ_in_punctuation_are_one() -> None:
    records = [{"chinese": text, "pinyin": "nǐ hǎo"} for text in ("你好。", "你好！", "你，好")]
    assert parse_sentences(json.dumps(records).encode()) == [{"prompt": "你 好 。", "completion": "你nǐ 好hǎo"}]
    odd = [{"chinese": "你好", "pinyin": "nǐ"}]  # cannot be laid side by side
    assert parse_sentences(json.dumps(odd).encode()) == [{"prompt": "你 好", "completion": "nǐ"}]


# --- the user's files


def write(path: Path, *prompts: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": p, "completion": "c"}) + "\n" for p in prompts), encoding="utf-8")
    return path


def test_own_files_are_split_or_given_apart(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *map(str, range(50)), "")
    task = build_task("jsonl", paths=[path])
    assert (len(task.train), len(task.test)) == (45, 5)
    assert task.report is not None
    assert task.report.summary()["empty"] == 1
    assert task.guess == "c"
    apart = build_task("jsonl", paths=path, test_paths=write(tmp_path / "b.jsonl", "x", "y"))
    assert (len(apart.train), len(apart.test)) == (50, 2)
    with pytest.raises(ValueError, match="leave one out"):
        build_task("jsonl", paths=path, test_paths=path, test_examples=3)
