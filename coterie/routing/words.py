"""A text as a short list of words: lower case, numbers by their shape. Bounded work."""

from __future__ import annotations

import re

# the beginning and the end of a long text say what is wanted; what lies between is material
HEAD_CHARS = 1200
TAIL_CHARS = 400
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?|\d+|[?:{}()\[\]=<>\"*/]")


def bounded(text: str) -> str:
    if len(text) <= HEAD_CHARS + TAIL_CHARS:
        return text
    return f"{text[:HEAD_CHARS]}\n{text[-TAIL_CHARS:]}"


def tokens(text: str) -> list[str]:
    found: list[str] = _WORD.findall(bounded(text).lower())
    return [f"#{min(len(word), 5)}" if word.isdigit() else word for word in found]
