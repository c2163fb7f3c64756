"""The task `zh_number`: Chinese numerals to digits, 九千零五十一 → 9051. Generated, the same for the same seed."""

import random

from llmtrain.data.tasks.task import Task

_DIGITS = "零一二三四五六七八九"
_UNITS = ("", "十", "百", "千")


def chinese_number(number: int, *, liang: bool = False) -> str:
    """Write a number below 10^8 in Chinese numerals.

    One 零 stands for any run of zeros between two digits, the 一 before a leading 十 is left out (十五, but
    一百一十五).

    Args:
        number: 0 .. 99,999,999.
        liang: Write 两 for a 二 before 千 and 万, as is said more often.
    """
    if not 0 <= number < 10**8:
        raise ValueError(f"chinese_number writes 0 .. 99999999, got {number}")
    high, low = divmod(number, 10_000)
    if not high:
        text = _below_ten_thousand(low) or _DIGITS[0]
    else:
        gap = _DIGITS[0] if 0 < low < 1000 else ""
        text = _below_ten_thousand(high) + "万" + gap + _below_ten_thousand(low)
    if text.startswith("一十"):
        text = text[1:]
    if liang:
        text = text.replace("二千", "两千")
        if high == 2:
            text = text.replace("二万", "两万", 1)
    return text


def _below_ten_thousand(number: int) -> str:
    """1 .. 9999 in Chinese numerals; nothing for 0."""
    text, gap = "", False
    for place, digit in zip((3, 2, 1, 0), map(int, f"{number:04d}"), strict=True):
        if digit:
            text += (_DIGITS[0] if gap and text else "") + _DIGITS[digit] + _UNITS[place]
        gap = not digit
    return text


def zh_number(*, train_examples: int = 6000, test_examples: int = 500, max_number: int = 9999, seed: int = 0) -> Task:
    """Numbers 0 .. `max_number`; no number is in both parts.

    Half are drawn uniformly; in the other half each digit after the first becomes 0 with probability one
    half, since 零 and missing units are where the difficulty lies and round numbers are what people say.

    Raises:
        ValueError: The range has too few numbers for the examples asked for.
    """
    wanted = train_examples + test_examples
    if min(train_examples, test_examples) < 1:
        raise ValueError("zh_number needs at least one training and one test example")
    if not wanted <= (max_number + 1) * 0.7 <= 0.7 * 10**8:  # drawing stays quick up to about that share
        raise ValueError(
            f"{wanted} different numbers need max_number between {int(wanted / 0.7)} and 99999999, got {max_number}"
        )
    draw = random.Random(f"zh_number {seed}")
    numbers: dict[int, None] = {}
    while len(numbers) < wanted:
        digits = str(draw.randint(0, max_number))
        if draw.random() < 0.5:
            digits = digits[0] + "".join(draw.choice((digit, "0")) for digit in digits[1:])
        numbers[int(digits)] = None
    items = [
        {"prompt": chinese_number(number, liang=draw.random() < 0.5), "completion": str(number)} for number in numbers
    ]
    draw.shuffle(items)  # the first numbers drawn are the likelier ones: without this the parts would differ
    train, test = items[:train_examples], items[train_examples:]
    return Task("zh_number", train, test, "exact_match")
