"""router_hint: a package's condition, a boolean expression over features and words.

    task_type == extraction and (json or "key value") and not has_code

`and`, `or`, `not` (also && || !), parentheses, a feature compared with a value, a feature that is
true or false, and words or "phrases" that occur in the prompt. Parsed by hand with limits, never
evaluated as code. A hint that cannot be parsed excludes nothing.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import lru_cache

from coterie.routing.features.features import PromptFeatures

Rule = Callable[[PromptFeatures], bool]

MAX_TOKENS = 200
MAX_DEPTH = 20
_TOKEN = re.compile(
    r"\s*(?:(?P<text>\"[^\"]*\"|'[^']*')|(?P<sign>&&|\|\||==|!=|<=|>=|[()!<>=:&|])"
    r"|(?P<word>[^\W_][\w.+#'-]*))"
)
# other spellings of an operator -> the parsed one
_SPELLINGS = {
    "&&": "and", "&": "and", "||": "or", "|": "or", "!": "not", "=": "==", ":": "==",
}  # fmt: skip
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_TEXTS: dict[str, Callable[[PromptFeatures], str]] = {
    "task_type": lambda features: features.task_type,
    "task": lambda features: features.task_type,
    "language": lambda features: features.language,
    "lang": lambda features: features.language,
    "intent": lambda features: features.intent,
    "code_language": lambda features: features.code_language,
}
_NUMBERS: dict[str, Callable[[PromptFeatures], float]] = {
    "num_characters": lambda features: features.num_characters,
    "length": lambda features: features.num_characters,
}
_FLAGS: dict[str, Callable[[PromptFeatures], bool]] = {
    "has_json": lambda features: features.has_json,
    "has_code": lambda features: features.has_code,
    "has_document": lambda features: features.has_document,
}
# capability prefixes that packages write before a word: tech=neo4j
_PREFIXES = ("tech", "format", "domain", "keyword", "contains")
_RESERVED = frozenset(("and", "or", "not", "(", ")", *_COMPARISONS))


class HintError(ValueError):
    """What is wrong with an expression, and where."""


@lru_cache(4096)
def compiled(hint: str) -> Rule | None:
    """None for an empty hint, and for one that cannot be parsed."""
    if not hint:
        return None
    try:
        return parse(hint)
    except HintError:
        return None


def parse(hint: str) -> Rule:
    parser = _Parser(_tokens(hint))
    rule = parser.any_of(0)
    if parser.rest:
        raise HintError(f"{parser.rest[0]!r} is not expected there")
    return rule


def _tokens(hint: str) -> list[str]:
    tokens: list[str] = []
    position = 0
    text = hint.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise HintError(f"nothing can be read at character {position + 1}")
        if len(tokens) == MAX_TOKENS:
            raise HintError(f"more than {MAX_TOKENS} words and signs")
        token = match.group().strip()
        if match.group("text") is None:
            token = token.lower()
            token = _SPELLINGS.get(token, token)
        tokens.append(token)
        position = match.end()
    return tokens


class _Parser:
    """Recursive descent; `rest` holds the tokens that were not read yet."""

    def __init__(self, tokens: list[str]) -> None:
        self.rest = tokens

    def any_of(self, depth: int) -> Rule:
        if depth > MAX_DEPTH:
            raise HintError(f"nested deeper than {MAX_DEPTH} levels")
        parts = [self._all_of(depth)]
        while self._take("or"):
            parts.append(self._all_of(depth))
        return parts[0] if len(parts) == 1 else lambda f: any(part(f) for part in parts)

    def _all_of(self, depth: int) -> Rule:
        parts = [self._operand(depth)]
        while self._take("and"):
            parts.append(self._operand(depth))
        return parts[0] if len(parts) == 1 else lambda f: all(part(f) for part in parts)

    def _operand(self, depth: int) -> Rule:
        if self._take("not"):
            if depth > MAX_DEPTH:
                raise HintError(f"nested deeper than {MAX_DEPTH} levels")
            inner = self._operand(depth + 1)
            return lambda f: not inner(f)
        if self._take("("):
            inner = self.any_of(depth + 1)
            self._need(")")
            return inner
        return self._test()

    def _test(self) -> Rule:
        name = self._value()
        if name in _PREFIXES and self._take("("):
            rule = contains_phrase(_bare(self._value()))
            self._need(")")
            return rule
        if self.rest and self.rest[0] in _COMPARISONS:
            return _compared(name, self.rest.pop(0), self._value())
        if name in _FLAGS:
            return _FLAGS[name]
        if name in _TEXTS or name in _NUMBERS:
            raise HintError(f"{name!r} must be compared with something")
        return contains_phrase(_bare(name))

    def _value(self) -> str:
        if not self.rest or self.rest[0] in _RESERVED:
            raise HintError("a word is missing")
        return self.rest.pop(0)

    def _take(self, token: str) -> bool:
        if self.rest and self.rest[0] == token:
            self.rest.pop(0)
            return True
        return False

    def _need(self, token: str) -> None:
        if not self._take(token):
            raise HintError(f"{token!r} is missing")


def contains_phrase(phrase: str) -> Rule:
    """Whether a word, or several words in sequence, occur in the prompt."""
    phrase = " ".join(phrase.lower().split())
    if not phrase:
        raise HintError("an empty text occurs everywhere")
    if re.fullmatch(r"[^\W_][\w'+#-]*", phrase):
        return lambda f: phrase in f.words
    pattern = re.compile(rf"(?<!\w){re.escape(phrase)}(?!\w)")
    return lambda f: pattern.search(f.text) is not None


def _compared(name: str, sign: str, value: str) -> Rule:
    value = _bare(value)
    if name in _NUMBERS:
        return _number_rule(_NUMBERS[name], sign, value)
    if sign not in ("==", "!="):
        raise HintError(f"{name!r} is no number")
    if name in _TEXTS:
        read = _TEXTS[name]
        condition: Rule = lambda f: read(f) == value.lower()  # noqa: E731
    elif name in _FLAGS:
        flag, expected = _FLAGS[name], value.lower() in ("true", "yes", "1")
        condition = lambda f: flag(f) == expected  # noqa: E731
    elif name in _PREFIXES:
        condition = contains_phrase(value)
    else:
        raise HintError(f"there is no feature {name!r}")
    return condition if sign == "==" else lambda f: not condition(f)


def _number_rule(read: Callable[[PromptFeatures], float], sign: str, value: str) -> Rule:
    try:
        number = float(value)
    except ValueError:
        raise HintError(f"{value!r} is no number") from None
    compare = _COMPARISONS[sign]
    return lambda f: compare(read(f), number)


def _bare(token: str) -> str:
    return token[1:-1] if token[:1] in ("'", '"') else token
