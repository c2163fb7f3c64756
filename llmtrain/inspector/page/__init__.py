"""The inspector's page: one HTML file that shows a recorded document, put together from the files beside this one.

Nothing is built and nothing is fetched: styles, scripts and the document itself stand in the page, which opens from
disk. Its policy lets only the scripts and styles of these files run, by their hashes, so text of a prompt or a token
could not run even if the page had a fault. Knows the files; of the document only that it is JSON.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SCRIPTS = (
    "words.js", "sampling.js", "colours.js", "elements.js", "recording.js", "chart.js",
    "tokens.js", "embedding.js", "position.js", "attention.js", "cache.js", "choice.js", "loop.js", "layers.js",
    "app.js",
)  # fmt: skip
"""The page's scripts, in the order in which they run; they share one scope."""

_ESCAPES = str.maketrans({each: f"\\u{ord(each):04x}" for each in "<>&\u2028\u2029"})


def render(document: dict[str, Any]) -> str:
    """The page for one document of the inspector, as the text of an HTML file.

    Args:
        document: What the inspector recorded; anything that JSON can hold, without NaN or infinity.

    Raises:
        ValueError: A number of the document is not finite.
    """
    script = "\n".join(_source(name).rstrip("\n") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}\n}})();\n'
    style = _source("style.css")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {"policy": policy, "style": style, "script": script, "document": embedded(document)}
    page = _source("page.html")
    before, *rest = page.split("{{")
    pieces = [before]
    for each in rest:  # one pass: what is put in is not looked at again
        name, after = each.split("}}", 1)
        pieces += [parts[name], after]
    return "".join(pieces)


def embedded(document: dict[str, Any]) -> str:
    """The document as JSON that can stand inside a script element: nothing in it can end or comment out the element."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone surrogate cannot be encoded as UTF-8; escaped it can.
    text = re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)
    return text.translate(_ESCAPES)


def _source(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
