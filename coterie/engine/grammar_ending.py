"""Finds a short way to end a text that keeps to a grammar, from wherever it stands.

A search over the grammar's states, byte by byte: the cheapest text first, states that look alike
once. Its work is bounded by a count, never by a clock, so that the same state always has the same
way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from heapq import heappop, heappush
from re import _parser  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.core.request import ResponseFormat

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from coterie.models.grammar.grammar import GrammarVocabulary

# longer ways are not looked for
MAX_TOKENS = 512
# bytes of a way
MAX_BYTES = 4096
# states looked at in one search, about 10 us each: with a way in hand, without one, at the start
FEW, SOME, MANY = 200, 1000, 6000
# where more bytes than these may follow, a text is open
OPEN = 64
# what a state costs that looks like one before it, up to so many of them
AGAIN, MAX_AGAIN = 0.5, 8
# circles of a walk that are looked at
MAX_CUTS = 24
LONGEST_WORD = 32

# what a byte costs beside its length: the higher, the later it is tried
_PRICES = dict.fromkeys(b'"}])', 0.0) | dict.fromkeys(b",:", 1.0) | dict.fromkeys(b"{[(", 4.0)
_PRICES |= dict.fromkeys(b" \n\t\r", 3.0) | dict.fromkeys(b"\\", 6.0)
_PLAIN = frozenset(range(33, 127)) - {92}
_MARKS = b'"}]){[(,:\\'
# states are told apart by how far each of these goes, and whether an end or a quote comes behind
_ENDS = (b'"}', b'"]', b'",', b"}}", b"]}")
_FILLS = (b"a", b"0", b"A", b"aa", b"00", b"AA")


class SearchPass(NamedTuple):
    """How a search is made: narrow and blunt first."""

    # states with the same number of bytes that are gone on from
    width: int
    # last bytes by which states are told apart that allow the same
    context: int
    # of the effort
    share: float


SEARCH_PASSES = (SearchPass(4, 0, 0.25), SearchPass(16, 1, 0.25))
# what it costs a walk to come back to a state that looks the same, and its share of the effort
WALKS = ((0.4, 0.4), (3.0, 0.1))


class EndingFinder:
    """Over one vocabulary. Any thread may use it."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._ids = vocabulary.byte_ids
        self.num_words, self.end = vocabulary.num_letter_words, vocabulary.end
        known = [token for token in self._ids if token >= 0]
        # the words of a mask that tell of bytes, and where in them
        self._places = np.array(sorted({token // 32 for token in known}), dtype=np.int64)
        place_of = {word: place for place, word in enumerate(self._places.tolist())}
        self._bits = np.array(
            [place_of[t // 32] * 32 + t % 32 if t >= 0 else 0 for t in self._ids], dtype=np.int64
        )
        # bytes that the model has a token for
        self._is_byte = np.array([0 <= token < vocabulary.num_ids for token in self._ids])
        self._byte_of = {token: bytes([byte]) for byte, token in enumerate(self._ids)}
        fills = [self.spell(text) for text in _FILLS]
        quote = self._ids[34]
        self._probes = [self.spell(text) for text in _ENDS]
        self._probes += [[*fill, last] for fill in fills for last in (quote, vocabulary.end)]
        self._tokens = {
            word: token
            for token, word in enumerate(vocabulary.words)
            if 0 < len(word) <= LONGEST_WORD and token not in vocabulary.specials
        }

    def id_of(self, byte: int) -> int:
        return self._ids[byte]

    def byte_of(self, token: int) -> int:
        """255 for a special token."""
        return self._byte_of.get(token, b"\xff")[0]

    def spell(self, text: bytes) -> list[int]:
        return [self._ids[byte] for byte in text]

    def find(
        self, matcher: LLMatcher, limit: int, hints: EndingHints, effort: int = SOME
    ) -> list[int] | None:
        """At most `limit` tokens behind which the text may end; None = no way was found.

        `matcher` is over bytes, and as it was when this returns.
        """
        if matcher.is_accepting():
            return []
        search = _Search(self, matcher, min(limit, MAX_TOKENS), hints)
        try:
            for again, share in WALKS:
                way = search.walk(again, int(effort * share))
                if way is not None:
                    return way
            for manner in SEARCH_PASSES:
                way = search.spread(manner, int(effort * manner.share))
                if way is not None:
                    return way
        except _Failed:
            # the matcher gave up: no way is known from here
            return None
        return None

    def mask(self, matcher: LLMatcher, words: NDArray[np.uint32]) -> NDArray[np.uint32]:
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return words[self._places]

    def allowed(self, found: NDArray[np.uint32]) -> list[int]:
        bits = np.unpackbits(found.view(np.uint8), bitorder="little")
        return [int(b) for b in np.flatnonzero(bits[self._bits].view(np.bool_) & self._is_byte)]

    def sign(self, matcher: LLMatcher, found: NDArray[np.uint32]) -> bytes:
        """The same for states that go on alike, as far as can be told cheaply."""
        ends = bytes(matcher.validate_tokens(probe) for probe in self._probes)
        return found.tobytes() + ends

    def segment(self, path: list[int]) -> list[int]:
        """The fewest tokens that spell a path of single bytes and special tokens."""
        way: list[int] = []
        text = b""
        for token in path:
            byte = self._byte_of.get(token)
            if byte is None:
                way += [*self._fewest(text), token]
                text = b""
            else:
                text += byte
        return way + self._fewest(text)

    def _fewest(self, text: bytes) -> list[int]:
        # (tokens so far, the last one, where it begins)
        best: list[tuple[int, int, int]] = [(0, -1, 0)]
        for end in range(1, len(text) + 1):
            options = [
                (best[start][0] + 1, token, start)
                for start in range(max(end - LONGEST_WORD, 0), end)
                if (token := self._tokens.get(text[start:end])) is not None
            ]
            # a byte that no token spells: such a way is far too long
            best.append(min(options, default=(MAX_BYTES, -1, end - 1)))
        way: list[int] = []
        end = len(text)
        while end:
            way.append(best[end][1])
            end = best[end][2]
        return way[::-1]


class _Failed(Exception):
    """The grammar is too much for its matcher, which is of no use any more."""


class _Search:
    """One state's. `looks` counts the states that were looked at."""

    def __init__(
        self, closer: EndingFinder, matcher: LLMatcher, limit: int, hints: EndingHints
    ) -> None:
        self.closer, self.matcher, self.limit, self.hints = closer, matcher, limit, hints
        self.looks = 0
        self._words = np.zeros(closer.num_words, dtype=np.uint32)
        self._texts = [closer.spell(text) for text in hints.texts]
        # by what a state looks like, the numbers of bytes at which one was met
        self._seen: dict[bytes, set[int]] = {}

    def walk(self, again: float, effort: int) -> list[int] | None:
        """Straight on: to the next state that is cheap and was not often come by. Every text that
        may be begun can be ended, so this only has to leave the circles."""
        matcher = self.matcher
        path: list[int] = []
        # by number of bytes: what the state there looks like
        marks: dict[int, bytes] = {0: b""}
        visits: dict[bytes, int] = {}
        last, ended = self.looks + effort, False
        while not ended and self.looks < last and len(path) < MAX_BYTES:
            best: tuple[float, bytes, list[int]] | None = None
            for cost, move in self._moves():
                mark = self._look(move)
                if mark is None:
                    continue
                price = cost + again * visits.get(mark, 0)
                if not mark or best is None or price < best[0]:
                    best = price, mark, move
                if not mark:
                    break
            if best is None or not matcher.consume_tokens(best[2]):
                break
            path += best[2]
            ended = not best[1]
            marks[len(path)] = best[1]
            visits[best[1]] = visits.get(best[1], 0) + 1
        if path:
            matcher.rollback(len(path))
        return self._fitting(self._straight(path, marks)) if ended else None

    def _look(self, move: list[int]) -> bytes | None:
        """What the state behind `move` looks like; empty where the text may end, None for none."""
        matcher, closer = self.matcher, self.closer
        self.looks += 1
        if not matcher.consume_tokens(move):
            raise _Failed
        mark: bytes | None = None
        if matcher.is_accepting():
            mark = b""
        elif not matcher.is_stopped():
            mark = closer.sign(matcher, closer.mask(matcher, self._words))
        matcher.rollback(len(move))
        return mark

    def _straight(self, path: list[int], marks: dict[int, bytes]) -> list[int]:
        """Without the circles that a walk made, where it can do without."""
        firsts: dict[bytes, int] = {}
        cuts = [(firsts.setdefault(mark, at), at) for at, mark in marks.items()]
        for start, end in sorted(cuts, key=lambda cut: cut[0] - cut[1])[:MAX_CUTS]:
            if start < end:
                shorter = path[:start] + path[end:]
                if self._ends(shorter):
                    return shorter
        return path

    def _ends(self, path: list[int]) -> bool:
        whole = [*path, self.closer.end]
        return bool(self.matcher.validate_tokens(whole) == len(whole))

    def _fitting(self, path: list[int]) -> list[int] | None:
        way = self.closer.segment(path)
        return way if len(way) <= self.limit and -1 not in way else None

    def spread(self, manner: SearchPass, effort: int) -> list[int] | None:
        # (price, order, path)
        queue: list[tuple[float, int, list[int]]] = [(0.0, 0, [])]
        self._seen.clear()
        served: dict[int, int] = {}
        order, last = 0, self.looks + effort
        while queue and self.looks < last:
            price, _, path = heappop(queue)
            size = len(path)
            if served.get(size, 0) >= manner.width or size > MAX_BYTES:
                continue
            served[size] = served.get(size, 0) + 1
            for cost, ended, further in self._expand(path, price, manner.context):
                if ended:
                    way = self._fitting(further)
                    if way is not None:
                        return way
                    continue
                order += 1
                heappush(queue, (cost, order, further))
        return None

    def _expand(
        self, path: list[int], price: float, context: int
    ) -> list[tuple[float, bool, list[int]]]:
        """What may follow `path`: its price, whether the text may end there, and the path to it."""
        matcher = self.matcher
        if path and not matcher.consume_tokens(path):
            raise _Failed
        found: list[tuple[float, bool, list[int]]] = []
        for cost, move in self._moves():
            mark, further, total = self._look(move), path + move, price + cost
            if mark is None:
                continue
            if mark:
                sizes = self._seen.setdefault(mark + self._context(further, context), set())
                if len(further) in sizes:
                    continue
                total += AGAIN * min(len(sizes), MAX_AGAIN)
                sizes.add(len(further))
            found.append((total, not mark, further))
        if path:
            matcher.rollback(len(path))
        return found

    def _context(self, path: list[int], size: int) -> bytes:
        """The last bytes, those alike made equal: two places in a pattern may allow the same."""
        spelt = [self.closer.byte_of(token) for token in path[len(path) - size :]]
        return bytes(byte if byte in self.hints.letters else _kind(byte) for byte in spelt)

    def _moves(self) -> Iterable[tuple[float, list[int]]]:
        matcher, closer = self.matcher, self.closer
        forced = matcher.compute_ff_bytes()
        if forced:
            spelt = closer.spell(forced)
            if matcher.validate_tokens(spelt) == len(spelt):
                return [(1 + len(spelt) / 4, spelt)]
        allowed = closer.allowed(closer.mask(matcher, self._words))
        is_open = len(allowed) > OPEN
        few = sorted((_price(byte, is_open), byte) for byte in self._few(allowed))
        moves = [(1 + price, [self.closer.id_of(byte)]) for price, byte in few]
        named = [(1.0, [token]) for token in self.hints.tokens]
        named += [(1 + len(text) / 4, text) for text in self._texts]
        for cost, move in named:
            if matcher.validate_tokens(move) == len(move):
                moves.append((cost, move))
        return moves

    def _few(self, allowed: list[int]) -> list[int]:
        """Of the bytes that may follow, those worth a look."""
        letters = self.hints.letters
        plain = [byte for byte in allowed if byte in letters or byte in _PLAIN] or allowed[:4]
        if len(allowed) <= OPEN // 4:
            return plain
        if len(allowed) > OPEN and not letters:
            # any text will do, and blanks come many to a token
            return [byte for byte in b'"' if byte in allowed] + [32 if 32 in allowed else plain[0]]
        kept, kinds = list[int](), set[int]()
        for byte in plain:
            kind = _kind(byte)
            if byte in letters or kind not in kinds:
                kept.append(byte)
                kinds.add(kind)
        return kept


def _price(byte: int, is_open: bool) -> float:
    if byte >= 128:
        return 4.0
    usual = 0.5 if bytes([byte]).isalnum() else 0.6
    # inside an open text every mark is a letter, but for the quote that ends it
    return usual if is_open and byte not in b'"\\' else _PRICES.get(byte, usual)


def _kind(byte: int) -> int:
    """A byte that stands for its like."""
    if 48 <= byte <= 57:
        return 48 if byte == 48 else 49
    if 97 <= byte <= 122:
        return 97
    if 65 <= byte <= 90:
        return 65
    return byte if byte in _MARKS else 33 if 32 < byte < 127 else 32 if byte < 128 else 128


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
