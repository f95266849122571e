"""A text as a list of words: lower case, without accents, numbers by their length. Bounded work.

Only the beginning and the end of a long text are read: they say what is wanted, what lies between
is material. Knows no vector.
"""

from __future__ import annotations

import re
import unicodedata

HEAD_CHARS = 900
TAIL_CHARS = 300
_WORD = re.compile(r"[^\W\d_]+|\d+|[^\w\s]")


def bounded(text: str) -> str:
    if len(text) <= HEAD_CHARS + TAIL_CHARS:
        return text
    return f"{text[:HEAD_CHARS]}\n{text[-TAIL_CHARS:]}"


def words(text: str) -> list[str]:
    """Runs of letters, runs of digits and single marks of a bounded text."""
    text = text.lower()
    if not text.isascii():
        parts = unicodedata.normalize("NFKD", text)
        text = "".join(char for char in parts if not unicodedata.combining(char))
    return _WORD.findall(text)
