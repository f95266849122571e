"""A Lark grammar without recursion as one regular expression.

The input of a custom tool is text inside a JSON string, which a schema can hold to a pattern. Codex
gives its patch tool such a grammar. A rule that refers to itself has no pattern and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MAX_PATTERN = 32_000
MAX_RULES = 200
MAX_NESTING = 50
MAX_REPEATS = 100

# Lark's `common` terminals that have a short form
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
}
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\f]+|//[^\n]*)
    |(?P<line>\n)
    |(?P<text>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?:[^/\\\n]|\\.)+/[imslux]*)
    |(?P<name>[?!]*[a-zA-Z_][a-zA-Z0-9_]*)
    |(?P<number>[0-9]+)
    |(?P<sign>->|\.\.|[|?*+()\[\]:~.%,])""",
    re.VERBOSE,
)
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", '"': '"', "\\": "\\"}
_CONTROLS = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\f": r"\f"}
Token = tuple[str, str]
_END: Token = ("end", "")


class NoPattern(ValueError):
    """The grammar is not valid, or has no pattern; the text says why."""


def lark_pattern(grammar: str) -> str:
    """The pattern of the rule `start`."""
    if len(grammar) > MAX_PATTERN:
        raise NoPattern(f"it is longer than {MAX_PATTERN} characters")
    return _Expansion(_rules(_tokens(grammar))).rule("start")


def _tokens(grammar: str) -> list[Token]:
    found: list[Token] = []
    at = 0
    while at < len(grammar):
        token = _TOKEN.match(grammar, at)
        if token is None:
            line = grammar.count("\n", 0, at) + 1
            raise NoPattern(f"line {line} is not Lark")
        at = token.end()
        if token.lastgroup != "space":
            found.append((token.lastgroup or "", token[0]))
    return found


def _rules(tokens: list[Token]) -> dict[str, list[Token]]:
    """The tokens of each rule, by name."""
    rules: dict[str, list[Token]] = {}
    at = 0
    while at < len(tokens):
        kind, text = tokens[at]
        if kind == "line":
            at += 1
            continue
        end = _end(tokens, at)
        if text == "%":
            _directive([token for token in tokens[at:end] if token[0] != "line"], rules)
        else:
            name, colon = text.lstrip("?!"), _colon(tokens, at)
            if kind != "name" or not colon or name in rules:
                raise NoPattern(f"'{text[:40]}' begins no rule, or a second one of its name")
            rules[name] = [token for token in tokens[colon + 1 : end] if token[0] != "line"]
        if len(rules) > MAX_RULES:
            raise NoPattern(f"it has more than {MAX_RULES} rules")
        at = end
    return rules


def _colon(tokens: list[Token], at: int) -> int:
    """Where the colon of a rule is that begins at `at`; 0 if none begins there. A priority may
    stand before it."""
    kinds = [
        token[0] if token[0] in ("name", "number") else token[1] for token in tokens[at : at + 4]
    ]
    if kinds[:2] == ["name", ":"]:
        return at + 1
    return at + 3 if kinds == ["name", ".", "number", ":"] else 0


def _end(tokens: list[Token], at: int) -> int:
    """Where the statement ends that begins at `at`: before a line that begins another."""
    for place in range(at + 1, len(tokens)):
        if tokens[place - 1][0] == "line" and (
            tokens[place][1] == "%" or _colon(tokens, place) or tokens[at][1] == "%"
        ):
            return place
    return len(tokens)


def _directive(tokens: list[Token], rules: dict[str, list[Token]]) -> None:
    words = [text for _, text in tokens[1:]]
    if words[:3] != ["import", "common", "."] and words[:3] != ["import", "common", "("]:
        raise NoPattern(f"%{' '.join(words[:3])[:40]} is not available")
    if words[2] == "(":
        names = [(word, word) for word in words[3:] if word not in (",", ")")]
    else:
        names = [(words[3] if len(words) > 3 else "", words[-1])]
    for name, own in names:
        if name not in _COMMON:
            raise NoPattern(f"%import common.{name[:40]} is not available")
        rules[own] = [("pattern", _COMMON[name])]


class _Expansion:
    """Writes rules as patterns, each in the place of its name."""

    def __init__(self, rules: Mapping[str, list[Token]]) -> None:
        self._rules = rules
        self._done: dict[str, str] = {}
        # the rules that are being written
        self._open: list[str] = []

    def rule(self, name: str) -> str:
        if name in self._done:
            return self._done[name]
        if name in self._open:
            raise NoPattern(f"the rule {name[:40]} refers to itself")
        if name not in self._rules:
            raise NoPattern(f"there is no rule {name[:40]}")
        if len(self._open) >= MAX_NESTING:
            raise NoPattern(f"its rules are nested deeper than {MAX_NESTING}")
        self._open.append(name)
        reader = _Reader(self, self._rules[name])
        pattern = reader.alternatives(0)
        if reader.peek() != _END:
            raise NoPattern(f"the rule {name[:40]} has '{reader.peek()[1][:40]}' in a wrong place")
        self._open.pop()
        self._done[name] = pattern
        return pattern


class _Reader:
    """Reads the tokens of one rule."""

    def __init__(self, rules: _Expansion, tokens: list[Token]) -> None:
        self._rules, self._tokens, self._at = rules, tokens, 0

    def peek(self) -> Token:
        return self._tokens[self._at] if self._at < len(self._tokens) else _END

    def take(self) -> Token:
        token = self.peek()
        self._at += 1
        return token

    def takes(self, sign: str) -> bool:
        found = self.peek() == ("sign", sign)
        self._at += found
        return found

    def alternatives(self, depth: int) -> str:
        if depth > MAX_NESTING:
            raise NoPattern(f"its groups are nested deeper than {MAX_NESTING}")
        parts = [self._sequence(depth)]
        size = len(parts[0])
        while self.takes("|"):
            parts.append(self._sequence(depth))
            size += len(parts[-1])
            _check_size(size)
        return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"

    def _sequence(self, depth: int) -> str:
        pattern = ""
        while self.peek() not in (_END, ("sign", "|"), ("sign", ")"), ("sign", "]")):
            if self.takes("->"):
                # a name for the tree
                self.take()
                continue
            pattern += self._repeated(self._atom(depth))
            _check_size(len(pattern))
        return pattern

    def _repeated(self, atom: str) -> str:
        for sign in "?*+":
            if self.takes(sign):
                return f"(?:{atom}){sign}"
        if not self.takes("~"):
            return atom
        low = high = self._count()
        if self.takes(".."):
            high = self._count()
        if low > high:
            raise NoPattern("a repetition ends before it begins")
        return f"(?:{atom}){{{low},{high}}}"

    def _count(self) -> int:
        kind, text = self.take()
        if kind != "number" or len(text) > 3 or int(text) > MAX_REPEATS:
            raise NoPattern(f"a repetition must be a number, at most {MAX_REPEATS}")
        return int(text)

    def _atom(self, depth: int) -> str:
        kind, text = self.take()
        if kind == "pattern":
            return text
        if kind == "name":
            return self._rules.rule(text)
        if kind == "text":
            return self._text(text)
        if kind == "regex":
            return _regex(text)
        for opening, closing, more in (("(", ")", ""), ("[", "]", "?")):
            if text == opening:
                inner = self.alternatives(depth + 1)
                if not self.takes(closing):
                    raise NoPattern(f"a '{opening}' is not closed")
                return f"(?:{inner}){more}"
        raise NoPattern(f"'{text[:40]}' is in a wrong place")

    def _text(self, text: str) -> str:
        if not self.takes(".."):
            pattern = "".join(map(_escaped, _value(text)))
            return f"(?i:{pattern})" if text.endswith("i") else pattern
        _, last = self.take()
        ends = _value(text), _value(last) if last.startswith('"') else ""
        if len(ends[0]) != 1 or len(ends[1]) != 1 or ends[0] > ends[1]:
            raise NoPattern("a range must be between two characters")
        return f"[{_escaped(ends[0])}-{_escaped(ends[1])}]"


def _check_size(size: int) -> None:
    """A name of two characters may stand for a long rule."""
    if size > MAX_PATTERN:
        raise NoPattern(f"its pattern is longer than {MAX_PATTERN} characters")


def _regex(text: str) -> str:
    body, _, flags = text[1:].rpartition("/")
    kept = "".join(flag for flag in flags if flag in "imsx")
    return f"(?{kept}:{body})".replace(r"\/", "/") if kept else f"(?:{body})".replace(r"\/", "/")


def _value(text: str) -> str:
    """What a literal says. As in Lark, a backslash before any other character is one."""

    def said(escape: re.Match[str]) -> str:
        kind, digits = escape[1][0], escape[1][1:]
        if digits:
            return chr(int(digits, 16))
        return _ESCAPES.get(kind, escape[0])

    return _ESCAPE.sub(said, text.removesuffix("i")[1:-1])


def _escaped(character: str) -> str:
    if character in _CONTROLS:
        return _CONTROLS[character]
    return _SPECIAL.sub(r"\\\g<0>", character)
