"""The task `date_iso`: dates as people write them to ISO 8601, 二〇一〇年六月一日 → 2010-06-01.

Six forms, three Chinese and three English. All-digit English dates are month/day/year, as in the United
States: 6/1/2010 is the first of June. Generated, the same for the same seed.
"""

import random
from collections.abc import Callable
from datetime import date, timedelta

from llmtrain.data.tasks.task import Task
from llmtrain.data.tasks.zh_number import chinese_number

_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)  # not strftime("%B"), which speaks the machine's language


def _year(day: date, zero: str) -> str:
    return "".join((zero + "一二三四五六七八九")[int(digit)] for digit in str(day.year))


FORMS: dict[str, Callable[[date], str]] = {
    "二〇一〇年六月一日": lambda d: f"{_year(d, '〇')}年{chinese_number(d.month)}月{chinese_number(d.day)}日",
    "二零一零年六月一号": lambda d: f"{_year(d, '零')}年{chinese_number(d.month)}月{chinese_number(d.day)}号",
    "2010年6月1日": lambda d: f"{d.year}年{d.month}月{d.day}日",
    "June 1, 2010": lambda d: f"{_MONTHS[d.month - 1]} {d.day}, {d.year}",
    "1 June 2010": lambda d: f"{d.day} {_MONTHS[d.month - 1]} {d.year}",
    "6/1/2010": lambda d: f"{d.month}/{d.day}/{d.year}",
}
"""Each form, named by what it makes of the first of June 2010."""


def date_iso(
    *,
    train_examples: int = 6000,
    test_examples: int = 500,
    first_year: int = 1900,
    last_year: int = 2099,
    seed: int = 0,
) -> Task:
    """Days of `first_year` .. `last_year`, each in one form, the forms in equal parts; no day is in both parts.

    Raises:
        ValueError: The years are out of order or out of 1000 .. 9999, or have too few days for the examples
            asked for.
    """
    if not 1000 <= first_year <= last_year <= 9999:
        raise ValueError(f"date_iso needs 1000 <= first_year <= last_year <= 9999, got {first_year} and {last_year}")
    start = date(first_year, 1, 1)
    days = (date(last_year, 12, 31) - start).days + 1
    wanted = train_examples + test_examples
    if min(train_examples, test_examples) < 1 or wanted > days:
        raise ValueError(
            f"date_iso can give 2 .. {days} examples from {first_year} to {last_year}, at least one to test, "
            f"but was asked for {train_examples} to train and {test_examples} to test"
        )
    draw = random.Random(f"date_iso {seed}")
    forms = list(FORMS.values())
    items = []
    for number, offset in enumerate(draw.sample(range(days), wanted)):
        day = start + timedelta(days=offset)
        items.append({"prompt": forms[number % len(forms)](day), "completion": day.isoformat()})
    train, test = items[:train_examples], items[train_examples:]
    return Task("date_iso", train, test, "exact_match")
