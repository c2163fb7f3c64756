"""From the bytes of tokens to text, piece by piece: never half a character, never a stop string or what follows it.

The text depends only on the bytes, not on where tokens begin and end: of several stop strings the one that is complete
first ends the text. Knows nothing of ids, vocabularies, models or requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class StreamingDetokenizer:
    """Turns one request's tokens into text as they come.

    Bytes that are not UTF-8 become U+FFFD, as in the tokenizer's own `decode`. Text that may still turn out to be
    the beginning of a stop string is held back until that is decided.

    Args:
        stop: Strings that end the text.
    """

    def __init__(self, stop: Sequence[str] = ()):
        self._stop = tuple(stop)
        self._decoder = _utf8_decoder("replace")
        self._held = ""
        self.stopped = False

    def push(self, data: bytes) -> str:
        """Take one token's bytes and return the text that is now certain; then look at `stopped`."""
        return self._release(self._decoder.decode(data))

    def finish(self) -> str:
        """No more tokens will come: return what was held back (half a character as U+FFFD)."""
        text = self._release(self._decoder.decode(b"", True))
        text, self._held = text + self._held, ""
        return text

    def _release(self, piece: str) -> str:
        if self.stopped:
            return ""
        if not self._stop or not piece:
            return piece
        text = self._held + piece
        # (end, start) of each stop string's first occurrence; the one complete first counts, then the longer.
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _undecided(self, text: str) -> int:
        """The length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
