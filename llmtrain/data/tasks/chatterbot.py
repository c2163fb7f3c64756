"""The task `chatterbot`: small talk in English and Chinese, 你好 → 嗨. Real data, and many right answers.

The conversations of the wheel `chatterbot-corpus` 1.3.3 (BSD 3-clause), fetched and read as a zip, never installed and
never part of this project. Its Chinese is for the greater part a machine's translation of its English, and reads so.
Deliberately unknown here: token ids, and how a model's answers are judged; no metric says how sensible an answer is.
"""

import random
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import yaml

from llmtrain.data.fetch import CHATTERBOT_CORPUS, fetch_wheel
from llmtrain.data.tasks.task import Task

LANGUAGES = ("english", "chinese")

# In these files of the English folder what follows the first line is one answer beside the other, not turn after turn.
_ALTERNATIVES = ("english/computers", "english/emotion")

_LONGEST_CHAIN = 3  # turns
_CODE = "```"  # what it fences would lose its lines

Turns = list[str]


def chatterbot(
    *,
    data_dir: str | Path = "data",
    languages: Sequence[str] = LANGUAGES,
    longest_text: int = 120,
    most_answers: int = 3,
    chains: int = 800,
    test_examples: int = 50,
    seed: int = 0,
) -> Task:
    """Conversations to train on, and `test_examples` openings held out whose question nothing else asks.

    Args:
        data_dir: Where the wheel is kept once fetched.
        languages: Folders of the corpus, of `LANGUAGES`.
        longest_text: Conversations end before the first text of more characters than this.
        most_answers: Of the answers to one question the first so many different ones are kept.
        chains: How many conversations of several turns are drawn from the single ones and trained on beside them.
        test_examples: How many questions to hold out.
        seed: Decides which questions are held out, and what is drawn.

    Raises:
        ValueError: The wheel cannot be had or is not as pinned, a language is not in it, or too many questions would
            be held out.
    """
    unknown = [language for language in languages if language not in LANGUAGES]
    if unknown or not languages:
        raise ValueError(f"data.languages has {unknown or 'none'}: choose of {', '.join(LANGUAGES)}")
    path = fetch_wheel(CHATTERBOT_CORPUS, data_dir=data_dir, instead="data=jsonl")
    turns = [each for language in languages for each in read_conversations(path, language)]
    conversations = clean(turns, longest_text=longest_text, most_answers=most_answers)
    train, test = hold_out_questions(conversations, test_examples, seed=seed)
    items = [{"messages": messages(each)} for each in train]
    tested = [{"messages": messages(each)} for each in test]
    return Task(
        name="chatterbot",
        train=items,
        test=tested,
        metric="exact_match",
        exercises=partial(chain, count=chains, seed=seed),
        open_ended=True,
    )


def read_conversations(path: Path, language: str) -> list[Turns]:
    """The conversations of one folder of the wheel, as they stand: texts in turn, the first one a user's.

    Where the corpus lists several answers to one question, each becomes a conversation of its own; what is no list of
    texts is passed over.
    """
    found: list[Turns] = []
    with zipfile.ZipFile(path) as archive:
        for member in sorted(archive.namelist()):
            place = re.fullmatch(rf"chatterbot_corpus/data/({language}/\w+)\.yml", member)
            if place is None:
                continue
            for entry in _entries(yaml.safe_load(archive.read(member))):
                found += [[entry[0], each] for each in entry[1:]] if place[1] in _ALTERNATIVES else [entry]
    return found


def _entries(content: Any) -> Iterable[Turns]:
    listed = content.get("conversations") if isinstance(content, dict) else None
    for entry in listed or ():
        if isinstance(entry, list) and len(entry) > 1 and all(isinstance(text, str | int | float) for text in entry):
            yield [str(text) for text in entry]


def question_key(text: str) -> str:
    """What two spellings of one question share: its letters and digits, in lower case."""
    return re.sub(r"[\W_]+", "", text).casefold()


def clean(conversations: Iterable[Turns], *, longest_text: int, most_answers: int) -> list[Turns]:
    """Conversations of one kind of white space that end with an answer, each once; the arguments are `chatterbot`'s."""
    answers: dict[str, set[str]] = defaultdict(set)
    kept: list[Turns] = []
    for conversation in conversations:
        texts: Turns = []
        for text in conversation:
            text = " ".join(text.split())
            if not question_key(text) or len(text) > longest_text or _CODE in text:
                break
            texts.append(text)
        texts = texts[: len(texts) // 2 * 2]
        if not texts:
            continue
        known = answers[question_key(texts[0])]
        said = "\n".join(map(question_key, texts[1:]))
        if said not in known and (len(texts) > 2 or len(known) < most_answers):
            known.add(said)
            kept.append(texts)
    return kept


def hold_out_questions(conversations: Sequence[Turns], count: int, *, seed: int = 0) -> tuple[list[Turns], list[Turns]]:
    """Sets `count` questions aside, of those that are asked in single turns only, each with its first answer.

    Returns:
        What is left, in which no user asks one of these questions in any spelling; and the held-out single turns.

    Raises:
        ValueError: `count` is below 1, or not even twice as many questions can be held out.
    """
    asked = {question_key(each[0]) for each in conversations if len(each) == 2}
    inside = {question_key(text) for each in conversations if len(each) > 2 for text in each[::2]}
    keys = sorted(asked - inside, key=lambda key: blake2b(f"{seed} {key}".encode()).digest())
    if not 1 <= count <= len(keys) // 2:
        raise ValueError(f"data.test_examples must lie between 1 and {len(keys) // 2}, got {count}")
    held = set(keys[:count])
    train = [each for each in conversations if question_key(each[0]) not in held]
    firsts: dict[str, Turns] = {}
    for each in conversations:
        firsts.setdefault(question_key(each[0]), each)
    return train, [firsts[key] for key in keys[:count]]


def messages(turns: Sequence[str]) -> list[dict[str, str]]:
    """Texts in turn as messages, the user's first."""
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(turns)]


def chain(items: Sequence[Mapping[str, str]], *, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations of two or three turns out of single ones, so that a later turn is answered as a first one is.

    The corpus hardly has any. Each draws its turns from one language: those with Chinese characters or those without.

    Args:
        items: {"prompt", "completion"}, all to be drawn from.
        count: How many to make.
        seed: Of the draw.
    """
    draw = random.Random(f"chains {seed}")
    languages: tuple[list[Mapping[str, str]], list[Mapping[str, str]]] = ([], [])
    for item in items:
        languages[bool(re.search("[\u3400-\u9fff]", item["prompt"]))].append(item)
    pools = [pool for pool in languages if len(pool) >= _LONGEST_CHAIN]
    made = []
    for _ in range(count if pools else 0):
        turns = draw.sample(draw.choice(pools), draw.randint(2, _LONGEST_CHAIN))
        made.append({"messages": messages([text for each in turns for text in (each["prompt"], each["completion"])])})
    return made
