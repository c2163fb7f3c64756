"""How vocabularies write raw bytes as printable characters.

Byte-level vocabularies (GPT-2's way, ours too) give each of the 256 bytes a visible character; sentencepiece ones write
`<0xE4>` for a byte and `▁` for a space. Knows nothing of ids or merges.
"""

import re

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_characters() -> list[str]:
    """GPT-2's table: bytes that print in Latin-1 stand for themselves, the others are shifted to U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, shifted = [], 0x100
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(shifted))
            shifted += 1
    return characters


CHARACTER_OF_BYTE: list[str] = _byte_characters()
BYTE_OF_CHARACTER: dict[str, int] = {character: byte for byte, character in enumerate(CHARACTER_OF_BYTE)}


def plain_bytes(token: str) -> bytes:
    """The bytes of a token of a vocabulary that is not byte-level: `<0xE4>` is one byte, `▁` a space."""
    fallback = _BYTE_FALLBACK.fullmatch(token)
    if fallback:
        return bytes([int(fallback.group(1), 16)])
    return token.replace("\u2581", " ").encode()
