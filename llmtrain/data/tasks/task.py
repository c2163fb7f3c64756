"""What a task is: text to train on and to be tested on. How answers are scored is `llmtrain.evaluation`'s to know."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmtrain.data.records import Conversation, ExampleReport, normalise

Item = Mapping[str, Any] | Conversation


@dataclass(frozen=True)
class Task:
    """Text to train on and text to be tested on, without overlap.

    Attributes:
        name: As in the registry.
        train: Items of any form that `encode_examples` takes; built-in tasks give {"prompt", "completion"}.
        test: Held-out items of the same form.
        metric: Name of the metric that answers are scored by.
        baselines: Answers to the test items by simple methods without a model, by the method's name.
        report: What reading the user's files had to leave out; empty for generated data.
        exercises: Makes further items to train on from {"prompt", "completion"} items that are trained on; None where
            there are none.
        open_ended: Many answers are right, so they are to be read; the metric says how often the reference was met.
    """

    name: str
    train: Sequence[Item]
    test: Sequence[Item]
    metric: str
    baselines: Mapping[str, Sequence[str]] = field(default_factory=dict)
    report: ExampleReport | None = None
    exercises: Callable[[Sequence[Mapping[str, str]]], Sequence[Item]] | None = None
    open_ended: bool = False

    @property
    def guess(self) -> str:
        """What to answer to everything without a look at the prompt: the most common training completion."""
        return Counter(map(completion, self.train)).most_common(1)[0][0]  # of several the first met


def completion(item: Item) -> str:
    """Text of an item's last answer."""
    messages = item.messages if isinstance(item, Conversation) else normalise(item)
    return messages[-1]["content"]
