"""Task data as people write it: three forms of JSON records, normalised to messages.

Says file and line of whatever is wrong. Deliberately unknown here: how files are parsed (`json_values`), token
ids, templates, masks, and how answers are scored.
"""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from llmtrain.data.files import find_files
from llmtrain.data.json_values import SUFFIXES, Place, read_json

logger = logging.getLogger(__name__)

Messages = list[dict[str, str]]

ROLES = ("system", "user", "assistant")
_FORMS = '{"prompt", "completion"}, {"instruction", "input", "output"} or {"messages": [{"role", "content"}, …]}'


@dataclass(frozen=True)
class Conversation:
    """Messages and where they were read from, such as `train.jsonl:12`."""

    messages: Messages
    where: str = ""


class EmptyExampleError(ValueError):
    """A well-formed record without a prompt or without an answer."""


@dataclass
class ExampleReport:
    """What became of the records of a data set; every entry of a list names the place and the reason.

    Attributes:
        read: Records seen.
        kept: Records that became examples, shortened ones included.
        cut: Kept, but shortened to the limit.
        too_long: Refused, the prompt leaves no room for an answer.
        empty: Refused, no prompt or no answer.
        malformed: Refused, not a record of an accepted form.
    """

    read: int = 0
    kept: int = 0
    cut: list[str] = field(default_factory=list)
    too_long: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, int]:
        """Counts by name."""
        counts = {name: len(getattr(self, name)) for name in ("cut", "too_long", "empty", "malformed")}
        return {"read": self.read, "kept": self.kept, **counts}

    def lines(self, limit: int = 5) -> list[str]:
        """One line per kind of fault: its count and the first `limit` places. Empty if nothing is wrong."""
        meanings = {
            "cut": "shortened to the limit",
            "too_long": "left out, the prompt is too long",
            "empty": "left out, empty",
            "malformed": "left out, malformed",
        }
        return [
            f"{len(places)} of {self.read} examples {meaning}: {_listed(places, limit)}"
            for name, meaning in meanings.items()
            if (places := getattr(self, name))
        ]


def _listed(places: Sequence[str], limit: int) -> str:
    more = f"; and {len(places) - limit} more" if len(places) > limit else ""
    return "; ".join(places[:limit]) + more


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise ValueError(f'"{key}" must be text, got {type(value).__name__}')
    return value


def normalise(record: Any) -> Messages:
    """One record of any accepted form as messages.

    `instruction` and a non-empty `input` are joined by a newline. The first two forms may carry a `system`
    text.

    Raises:
        EmptyExampleError: The prompt or an answer holds nothing but white space.
        ValueError: The record has none of the accepted forms; the message says what is wrong.
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"expected an object of the form {_FORMS}, found {type(record).__name__}")
    if "messages" in record:
        messages = _checked_messages(record["messages"])
    elif "prompt" in record and "completion" in record:
        messages = _single_turn(record, _text(record, "prompt"), _text(record, "completion"))
    elif "instruction" in record and "output" in record:
        parts = [_text(record, "instruction")]
        if record.get("input"):
            parts.append(_text(record, "input"))
        messages = _single_turn(record, "\n".join(parts), _text(record, "output"))
    else:
        raise ValueError(f"expected {_FORMS}, found the fields {sorted(map(str, record))}")
    for message in messages:
        if not message["content"].strip():
            raise EmptyExampleError(f"the {message['role']} text is empty")
        try:
            message["content"].encode()
        except (
            UnicodeEncodeError
        ) as error:  # JSON can write half of a surrogate pair, "\\ud83d", which no tokenizer takes
            raise ValueError(f"the {message['role']} text holds half a surrogate pair at {error.start}") from error
    return messages


def _single_turn(record: Mapping[str, Any], prompt: str, completion: str) -> Messages:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    if record.get("system"):
        messages.insert(0, {"role": "system", "content": _text(record, "system")})
    return messages


def _checked_messages(messages: Any) -> Messages:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValueError(f'"messages" must be a list, got {type(messages).__name__}')
    if not messages:
        raise EmptyExampleError('"messages" is empty')
    result = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ValueError(f'message {number} needs "role" and "content"')
        role, content = message["role"], _text(message, "content")
        if role not in ROLES or (role == "system" and number > 0):
            allowed = "user or assistant" if number else "system, user or assistant"
            raise ValueError(f"message {number} has the role {role!r}, expected {allowed}")
        result.append({"role": role, "content": content})
    roles = [message["role"] for message in result]
    if roles[-1] != "assistant":
        raise ValueError(f"the last message must be the assistant's, but its role is {roles[-1]!r}")
    if "user" not in roles[: roles.index("assistant")]:
        raise EmptyExampleError("no user message before the first answer")
    return result


def read_examples(
    paths: str | Path | Sequence[str | Path],
    *,
    skip_malformed: bool = False,
    encoding: str = "utf-8",
    report: ExampleReport | None = None,
) -> tuple[list[Conversation], ExampleReport]:
    """Read files of records.

    Args:
        paths: .jsonl and .json files (also .gz), folders of them, or patterns with `*`.
        skip_malformed: Leave malformed records out (and report them) where the default is to refuse the file.
        encoding: Of the files.
        report: Entries are added to this one, a new one otherwise.

    Returns:
        The conversations, in the files' order, and the report, with `read`, `empty` and `malformed` filled
        in.

    Raises:
        ValueError: A path is missing, a file cannot be read, a record is malformed, or no record is usable;
            with file and line.
    """
    report = report or ExampleReport()
    conversations = []
    files = find_files([paths] if isinstance(paths, str | Path) else paths, SUFFIXES)
    for file in files:
        for place, record in read_json(file, encoding):
            report.read += 1
            where = _where(place)
            try:
                if isinstance(record, ValueError):
                    raise ValueError(f"does not parse as JSON: {record}")
                conversations.append(Conversation(normalise(record), where))
            except EmptyExampleError as error:
                report.empty.append(f"{where} {error}")
            except ValueError as error:
                report.malformed.append(f"{where} {error}")
    if report.malformed and not skip_malformed:
        raise ValueError(
            f"{len(report.malformed)} of {report.read} examples are malformed: {_listed(report.malformed, 3)}. "
            "Mend them, or leave them out with data.skip_malformed=true"
        )
    if not conversations:
        reasons = _listed(report.empty + report.malformed, 1) or "the files hold no records"
        raise ValueError(f"no usable example in {', '.join(map(str, files))}: {reasons}")
    return conversations, report


def _where(place: Place) -> str:
    """As editors and compilers write it: `train.jsonl:12`; `train.json[3]` is the third element of an array."""
    path, what, number = place
    return f"{path}:{number}" if what == "line" else f"{path}[{number}]"


def hold_out(
    conversations: Sequence[Conversation], count: int, *, seed: int = 0
) -> tuple[list[Conversation], list[Conversation]]:
    """Set at least `count` conversations aside for testing, those with equal prompts together.

    Which ones depends on the seed and on each conversation's own prompt: adding records to the file moves few others.
    Prompts are taken whole until `count` is reached, so the last may go beyond it; one that would leave less to train
    on than to test on (or than `count` leaves) is passed over.

    Returns:
        (train, test), both in the order of the input.

    Raises:
        ValueError: There are fewer than two different prompts, or `count` is below 1 or leaves nothing to train on.
    """
    rows = Counter(_digest(conversation, seed) for conversation in conversations)
    if len(rows) < 2:
        raise ValueError(
            f"fine-tuning needs at least 2 different prompts in usable examples, one to train on and one to test on, "
            f"and there {'is 1' if rows else 'are 0'}: add examples, or give data.test_paths"
        )
    total = len(conversations)
    if not 1 <= count < total:
        raise ValueError(
            f"cannot hold out {count} of {total} examples: set data.test_examples between 1 and {total - 1}, or add "
            "examples"
        )
    chosen, held = set(), 0
    for key in sorted(rows):
        if held < count and held + rows[key] <= max(count, total // 2):
            chosen.add(key)
            held += rows[key]
    train = [each for each in conversations if _digest(each, seed) not in chosen]
    test = [each for each in conversations if _digest(each, seed) in chosen]
    logger.info("%d of %d examples are held out: %d of %d different prompts", held, total, len(chosen), len(rows))
    return train, test


def without_tested(train: Sequence[Conversation], test: Sequence[Conversation]) -> list[Conversation]:
    """The conversations to train on whose prompts are not tested.

    Raises:
        ValueError: None is left.
    """
    tested = {_digest(conversation, 0) for conversation in test}
    kept = [conversation for conversation in train if _digest(conversation, 0) not in tested]
    if not kept:
        raise ValueError(
            f"all {len(train)} examples of data.paths have prompts that data.test_paths tests, and none is left to "
            "train on: give test files of their own, or leave data.test_paths out to hold out a part"
        )
    if len(kept) < len(train):
        logger.warning(
            "%d of %d examples are not trained on: data.test_paths tests their prompts",
            len(train) - len(kept),
            len(train),
        )
    return kept


def _digest(conversation: Conversation, seed: int) -> bytes:
    """Names the prompt, all before the last answer."""
    text = json.dumps([seed, conversation.messages[:-1]], ensure_ascii=False, sort_keys=True)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
