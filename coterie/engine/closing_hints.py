"""What a grammar's own text tells of short ways to its end: letters and texts worth a try.

Reads patterns, schemas and rules crudely on purpose: what is missed only makes a search longer, and
what is wrong is tried once and dropped. Compiles nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

from coterie.core.request import ResponseFormat

# texts of a grammar that are tried as a whole
MAX_HINTS = 48
# characters of an example
MAX_EXAMPLE = 256
# bytes that formats of JSON schemas are put together with
_FORMATS = b"@.:/-+TZPD0a"
_EXAMPLES = {
    "date": b"2000-01-01",
    "time": b"00:00:00Z",
    "date-time": b"2000-01-01T00:00:00Z",
    "duration": b"P0D",
    "email": b"a@b.co",
    "hostname": b"a",
    "ipv4": b"0.0.0.0",
    "ipv6": b"::",
    "uri": b"a:b",
    "uuid": b"00000000-0000-4000-8000-000000000000",
}


class EndingHints(NamedTuple):
    """What of a grammar's own text may lead to its end: bytes, whole texts, special tokens."""

    letters: frozenset[int]
    texts: tuple[bytes, ...]
    tokens: tuple[int, ...]


_ESCAPE = re.compile(r"\\(?:[pP]\{\w*\}|[dDwWsSbBAzZpP]|x\{?[0-9A-Fa-f]+\}?|u\{?[0-9A-Fa-f]+\}?)")
_RUN = re.compile(r"(?:[A-Za-z0-9 _@:/,;=\"'<>!#%&~`-]|\\[^A-Za-z0-9]){2,}")
_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
_TOKEN = re.compile(r"<\[(\d+)\]>")


def hints_of(wanted: ResponseFormat) -> EndingHints:
    """Crude on purpose: what is missed only makes a search longer."""
    letters, texts, tokens = set[int](), dict[bytes, None](), dict[int, None]()

    def pattern(text: str) -> None:
        plain = _ESCAPE.sub(".", text)
        if "\\s" in text:
            letters.add(32)
        letters.update(byte for byte in plain.encode() if 32 <= byte < 127)
        for run in _RUN.findall(re.sub(r"\[[^\]]*\]|\{[0-9,]*\}", ".", plain)):
            texts[re.sub(r"\\(.)", r"\1", run).encode()] = None
        # line ends and the like are written as escapes, but stand in the example as they are
        shown = example(text)
        letters.update(shown)
        texts[shown] = None

    def schema(value: Any) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                if key == "pattern" and isinstance(part, str):
                    pattern(part)
                elif key == "format" and isinstance(part, str):
                    letters.update(_FORMATS)
                    texts[_EXAMPLES.get(part, b"")] = None
                elif key == "patternProperties" and isinstance(part, dict):
                    for name in part:
                        pattern(name)
                    schema(list(part.values()))
                elif key not in ("enum", "const", "description", "title", "default", "examples"):
                    schema(part)
        elif isinstance(value, list):
            for part in value:
                schema(part)

    if wanted.kind == "regex":
        pattern(wanted.text)
    elif wanted.kind == "json_schema":
        with suppress(RecursionError):
            schema(json.loads(wanted.text))
    elif wanted.kind in ("lark", "gbnf"):
        rest = _schemas_out(wanted.text, schema)
        for literal in _STRING.findall(rest):
            pattern(re.escape(literal))
        for body in re.findall(r"/((?:[^/\\\n]|\\.)+)/", rest):
            pattern(body)
        tokens = dict.fromkeys(int(found) for found in _TOKEN.findall(rest))
    kept = sorted((text for text in texts if len(text) > 1), key=len)[:MAX_HINTS]
    return EndingHints(frozenset(letters), tuple(kept), tuple(tokens)[:MAX_HINTS])


def example(pattern: str) -> bytes:
    """A short text that matches, or something near it; empty for what Python does not read."""
    try:
        return _matching(_parser.parse(pattern))[:MAX_EXAMPLE].encode()
    except (re.error, RecursionError, OverflowError, Warning):
        return b""


def _matching(parsed: Iterable[tuple[Any, Any]]) -> str:
    text = ""
    for kind, value in parsed:
        name = str(kind)
        if len(text) > MAX_EXAMPLE:
            break
        if name == "LITERAL":
            text += chr(value)
        elif name == "ANY":
            text += "a"
        elif name == "NOT_LITERAL":
            text += "a" if value != 97 else "b"
        elif name == "IN":
            text += _member(value)
        elif name == "BRANCH":
            text += min((_matching(part) for part in value[1]), key=len)
        elif name in ("SUBPATTERN", "ATOMIC_GROUP"):
            text += _matching(value[-1] if name == "SUBPATTERN" else value)
        elif name.endswith("REPEAT"):
            text += _matching(value[2]) * min(value[0], MAX_EXAMPLE)
    return text[:MAX_EXAMPLE]


def _member(items: list[tuple[Any, Any]]) -> str:
    """One character of a class."""
    names = [str(kind) for kind, _ in items]
    if names[0] == "NEGATE":
        try:
            outside = re.compile("[" + re.escape("".join(map(chr, _listed(items)))) + "]")
        except re.error:
            return "a"
        return next((letter for letter in "a0A-_. " if not outside.match(letter)), "a")
    kind, value = names[0], items[0][1]
    if kind == "LITERAL":
        return chr(value)
    if kind == "RANGE":
        return chr(value[0])
    return {"CATEGORY_DIGIT": "0", "CATEGORY_SPACE": " "}.get(str(value), "a")


def _listed(items: list[tuple[Any, Any]]) -> list[int]:
    found: list[int] = []
    for kind, value in items:
        if str(kind) == "LITERAL":
            found.append(value)
        elif str(kind) == "RANGE":
            found += range(value[0], min(value[1], value[0] + 128) + 1)
    return found


def _schemas_out(text: str, schema: Any) -> str:
    """Lark without the JSON schemas in it, which `schema` is told."""
    decoder, parts, start = json.JSONDecoder(), list[str](), 0
    for found in re.finditer(r"%json\s*", text):
        if found.start() < start:
            continue
        try:
            value, end = decoder.raw_decode(text, found.end())
            schema(value)
        except (ValueError, RecursionError):
            continue
        parts.append(text[start : found.start()])
        start = end
    return "".join((*parts, text[start:]))
