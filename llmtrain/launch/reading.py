"""Reads the value of one `key=value` argument, so that free text and paths arrive whole.

Hydra's grammar cannot read `你好` or `a，b`, takes quotes off, and turns `007` into 7. So keys that hold text take it
as it stands, and for the others whatever Hydra's grammar cannot read is text. Knows keys by name only.
"""

from __future__ import annotations

import re
from typing import Any

# The last part of a key decides; everything else is read as Hydra reads it.
TEXT_NAMES = frozenset({"prompt", "text", "system"})
PATH_NAMES = frozenset({"model", "init", "resume", "run", "name", "path", "pattern"})  # text, but `null` is null
PATH_ENDINGS = ("_path", "_file", "_dir")
TEXT_LIST_NAMES = frozenset({"paths", "files", "prompts", "stop", "runs"})
TEXT_LIST_ENDINGS = ("_paths", "_files", "_prompts")

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?)")
_WORDS = {"null": None, "true": True, "false": False}


class SweepError(ValueError):
    """The value is a Hydra sweep (`1,2,3`): several runs, where one was asked for."""


def read_value(key: str, text: str) -> Any:
    """The value that `text` gives to `key`: str, int, float, bool, None, list or dict.

    Strings come back as an OmegaConf node holds them, `${` escaped where it is literal (see `literal`).

    Raises:
        SweepError: The text is a sweep of numbers or booleans.
    """
    name = key.rpartition(".")[2]
    if name in TEXT_NAMES:
        return literal(text)
    if name in PATH_NAMES or name.endswith(PATH_ENDINGS):
        return None if text == "null" else literal(text)
    if holds_text(key):
        return _read_text_list(text)
    return _read_as_hydra(text)


def holds_text(key: str) -> bool:
    """Whether a key holds text, a path or a list of either, in which a comma is a comma."""
    name = key.rpartition(".")[2]
    return name in TEXT_NAMES | PATH_NAMES | TEXT_LIST_NAMES or name.endswith((*PATH_ENDINGS, *TEXT_LIST_ENDINGS))


def check_text(text: str, where: str) -> None:
    """Refuses text with bytes that are not UTF-8 (from the command line) or half a surrogate pair (from JSON).

    Raises:
        ValueError: Says where the first one is.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} is not UTF-8 from character {error.start + 1} on ({text[error.start]!r}): convert it first"
        ) from None


def literal(text: str) -> str:
    r"""Escapes text so that OmegaConf gives it back unchanged: `${a}` → `\${a}`."""
    if text == "???":  # OmegaConf's mark of a missing value, which has no escape
        return "${llmtrain.question_marks:}"
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", text)


def _read_text_list(text: str) -> Any:
    stripped = text.strip()
    if stripped in ("null", "auto"):
        return None if stripped == "null" else stripped
    if stripped.startswith("[") and stripped.endswith("]"):
        structure = _Structure(stripped, bare_is_text=True).read()
        if structure is not None:
            return structure
    return [literal(text)]


def _read_as_hydra(text: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(f"key={text}")
    except HydraException:
        stripped = text.strip()
        if stripped[:1] + stripped[-1:] in ("[]", "{}"):
            structure = _Structure(stripped, bare_is_text=False).read()
            if structure is not None:
                return structure
        return literal(text)
    if override.is_sweep_override():
        parts = [part.strip() for part in text.split(",")]
        if all(not isinstance(_scalar(part), str) for part in parts):
            raise SweepError(text)
        return literal(text)
    return override.value()


def _scalar(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if _NUMBER.fullmatch(text):
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    return literal(text)


class _Structure:
    """A reader of `[a b, "c,d", {path: 语料/e.txt, weight: 2}]`; None from `read` means that it is no structure."""

    def __init__(self, text: str, *, bare_is_text: bool) -> None:
        self.text = text
        self.at = 0
        self.bare_is_text = bare_is_text

    def read(self) -> Any:
        try:
            value = self._value("")
        except IndexError:  # the text ended inside a bracket or a quotation
            return None
        return value if not self.text[self.at :].strip() else None

    def _value(self, stops: str) -> Any:
        self._skip_space()
        start = self.text[self.at]
        if start == "[":
            return self._list()
        if start == "{":
            return self._dict()
        if start in "'\"":
            quoted = self._quoted(start)
            self._skip_space()
            if self.text[self.at] in stops:
                return literal(quoted)
            raise IndexError
        bare = self._bare(stops)
        return literal(bare) if self.bare_is_text and "}" not in stops else _scalar(bare)

    def _list(self) -> list[Any]:
        items: list[Any] = []
        self.at += 1
        self._skip_space()
        while self.text[self.at] != "]":
            items.append(self._value(",]"))
            self._skip_space()
            if self.text[self.at] == ",":
                self.at += 1
                self._skip_space()
            elif self.text[self.at] != "]":
                raise IndexError
        self.at += 1
        return items

    def _dict(self) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        self.at += 1
        self._skip_space()
        while self.text[self.at] != "}":
            key = self._quoted(self.text[self.at]) if self.text[self.at] in "'\"" else self._bare(":")
            self._skip_space()
            if self.text[self.at] != ":":
                raise IndexError
            self.at += 1
            pairs[key] = self._value(",}")
            self._skip_space()
            if self.text[self.at] == ",":
                self.at += 1
                self._skip_space()
            elif self.text[self.at] != "}":
                raise IndexError
        self.at += 1
        return pairs

    def _bare(self, stops: str) -> str:
        start = self.at
        while self.text[self.at] not in stops:
            self.at += 1
        return self.text[start : self.at].strip()

    def _quoted(self, quote: str) -> str:
        self.at += 1
        characters = []
        while self.text[self.at] != quote:
            if self.text[self.at] == "\\" and self.text[self.at + 1] in (quote, "\\"):
                self.at += 1
            characters.append(self.text[self.at])
            self.at += 1
        self.at += 1
        return "".join(characters)

    def _skip_space(self) -> None:
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1
