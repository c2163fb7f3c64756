"""Shows tokens to a person: piece, id and bytes in columns that line up, Chinese and emoji included.

Pure functions from ids to text; what they are printed on is the caller's affair.
"""

import unicodedata
from collections.abc import Sequence

from llmtrain.tokenizer.tokenizer import Tokenizer

_VISIBLE = {"\n": "⏎", "\r": "␍", "\t": "⇥", " ": "␣"}


def token_table(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """A table with one line per token: its piece, its id, its bytes in hex.

    A token that is only a part of a character shows which of its bytes it is, `‹好 1-2/3›`; a byte that belongs to no
    character is U+FFFD. White space is made visible (␣ ⏎ ⇥).
    """
    rows = [("piece", "id", "bytes")]
    pieces = [tokenizer.token_bytes(token_id) for token_id in ids]
    for number, raw, shown in zip(ids, pieces, _pieces(pieces), strict=True):
        rows.append((shown, str(number), raw.hex(" ")))
    piece_width = max(display_width(row[0]) for row in rows)
    id_width = max(len(row[1]) for row in rows)
    lines = []
    for piece, token_id, hexadecimal in rows:
        lines.append(
            f"{piece}{' ' * (piece_width - display_width(piece))}  {token_id:>{id_width}}  {hexadecimal}".rstrip()
        )
    return "\n".join(lines)


def display_width(text: str) -> int:
    """How many columns a terminal gives a text: wide characters take two, combining marks none."""
    width = 0
    for character in text:
        if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
            continue
        width += 2 if unicodedata.east_asian_width(character) in "WF" else 1
    return width


def _pieces(tokens: Sequence[bytes]) -> list[str]:
    """What to show for each token, with the characters that are spread over several tokens put together again."""
    characters = character_spans(b"".join(tokens))
    shown, position, index = [], 0, 0
    for token in tokens:
        end = position + len(token)
        text = ""
        while index < len(characters) and characters[index][1] < end:
            character, first, behind = characters[index]
            visible = _VISIBLE.get(character, character if character.isprintable() else f"U+{ord(character):04X}")
            if position <= first and behind <= end:
                text += visible
            else:
                own_first, own_last = max(first, position) - first + 1, min(behind, end) - first
                part = f"{own_first}" if own_first == own_last else f"{own_first}-{own_last}"
                text += f"‹{visible} {part}/{behind - first}›"
            if behind > end:
                break  # the next token holds more of it
            index += 1
        shown.append(text)
        position = end
    return shown


def character_spans(raw: bytes) -> list[tuple[str, int, int]]:
    """Each character with its first byte and the byte behind it; a byte that is not UTF-8 counts as one U+FFFD."""
    characters, position = [], 0
    while position < len(raw):
        lead = raw[position]
        length = 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        try:
            character = raw[position : position + length].decode()
        except UnicodeDecodeError:
            length, character = 1, "\ufffd"
        characters.append((character, position, position + length))
        position += length
    return characters
