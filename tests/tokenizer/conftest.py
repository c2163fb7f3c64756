"""A small BPE trained on Chinese, English and code, for all tests of the tokenizer."""

from __future__ import annotations

import pytest

from llmtrain.tokenizer import Tokenizer, train_bpe

CHINESE = (
    "话说天下大势，分久必合，合久必分。周末七国分争，并入于秦。及秦灭之后，楚、汉分争，又并入于汉。\n"
    "汉朝自高祖斩白蛇而起义，一统天下，后来光武中兴，传至献帝，遂分为三国。玄德曰：“此张角也！可速战！”\n"
)
ENGLISH = "It was the best of times, it was the worst of times; it's said they'll be 1984 and 2026.\n\n"
CODE = "def f(x: int) -> int:\n    if x > 10:\n        return x - 1\n    return f(x + 11)\n"


@pytest.fixture(scope="session")
def small_texts() -> list[str]:
    return [CHINESE * 3, ENGLISH * 3, CODE * 3]


@pytest.fixture(scope="session")
def small_bpe(small_texts: list[str]) -> Tokenizer:
    return train_bpe(small_texts, vocab_size=420)
