"""An end of a command that is neither whole nor a fault: it has results to print, and an exit code of its own."""

from __future__ import annotations

from typing import Any


class Ended(Exception):
    """Raised by a command in the place of returning.

    Args:
        results: The line of JSON.
        code: The exit code.
    """

    def __init__(self, results: dict[str, Any], code: int) -> None:
        super().__init__(code)
        self.results = results
        self.code = code
