"""The chat page: a handful of files that the server sends as they stand, each at a path of its own.

Nothing is built, and nothing comes from elsewhere: the policy makes the browser refuse every other origin and every
script that is not one of these files, so that a model's text could not run even if the page had a fault. Knows which
files there are; does not know the server.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
FILES = {
    "/": ("index.html", "text/html"),
    "/style.css": ("style.css", "text/css"),
    "/app.js": ("app.js", "text/javascript"),
    "/answer.js": ("answer.js", "text/javascript"),
    "/api.js": ("api.js", "text/javascript"),
    "/words.js": ("words.js", "text/javascript"),
}
"""The paths of the page, each with its file and what kind of file that is."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
