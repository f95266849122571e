"""Finds a short ending for a text that follows a grammar, from any state of the grammar.

It is a search over the grammar's states, byte by byte: the cheapest text first, and of similar
states only one. The work is limited by a count, not by a clock, so the same state always gets the
same ending. A "path" is a list of single bytes and special tokens, an ending is a list of tokens.
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
from coterie.engine.grammar_time import CLOCK, consumed, follows

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from coterie.models.grammar.grammar import GrammarVocabulary

# longer endings are not searched
MAX_TOKENS = 512
# most bytes of an ending
MAX_BYTES = 4096
# states that one search may visit, about 0.2 ms each: if an ending is known, if not, at the start
FEW, SOME, MANY = 200, 1000, 6000
# if more different bytes than this may follow, the state is inside free text
OPEN = 64
# additional cost of a state that is similar to earlier ones: per earlier state, at most so many
AGAIN, MAX_AGAIN = 0.5, 8
# loops of a walk that are tried to be cut out
MAX_CUTS = 24
LONGEST_WORD = 32

# cost of a byte in addition to its length: bytes with higher cost are tried later
_PRICES = dict.fromkeys(b'"}])', 0.0) | dict.fromkeys(b",:", 1.0) | dict.fromkeys(b"{[(", 4.0)
_PRICES |= dict.fromkeys(b" \n\t\r", 3.0) | dict.fromkeys(b"\\", 6.0)
_PLAIN = frozenset(range(33, 127)) - {92}
_MARKS = b'"}]){[(,:\\'
# texts that distinguish states, by how many of their bytes are accepted: these ends, and each fill
# followed by a quote or by the end of the text
_ENDS = (b'"}', b'"]', b'",', b"}}", b"]}")
_FILLS = (b"a", b"0", b"A", b"aa", b"00", b"AA")


class SearchPass(NamedTuple):
    """Settings of one pass of the search: the narrow and coarse pass is first."""

    # how many states with the same number of bytes are continued
    width: int
    # how many last bytes distinguish states that allow the same bytes
    context: int
    # share of the effort
    share: float


SEARCH_PASSES = (SearchPass(4, 0, 0.25), SearchPass(16, 1, 0.25))
# walks: cost of returning to a similar state, and the share of the effort
WALKS = ((0.4, 0.4), (3.0, 0.1))


class EndingFinder:
    """Finds endings for one vocabulary. Any thread may use it."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._ids = vocabulary.byte_ids
        self.num_words, self.end = vocabulary.num_letter_words, vocabulary.end
        known = [token for token in self._ids if token >= 0]
        # which words of a token mask contain byte tokens, and at which bits
        self._places = np.array(sorted({token // 32 for token in known}), dtype=np.int64)
        place_of = {word: place for place, word in enumerate(self._places.tolist())}
        self._bits = np.array(
            [place_of[t // 32] * 32 + t % 32 if t >= 0 else 0 for t in self._ids], dtype=np.int64
        )
        # whether the model has a token for the byte
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
        """At most `limit` tokens after which the text may end; None if no ending was found.

        `matcher` works on bytes. When this returns, it is in the same state as before.
        """
        if matcher.is_accepting():
            return []
        search = _Search(self, matcher, min(limit, MAX_TOKENS), hints)
        try:
            for again, share in WALKS:
                ending = search.walk(again, int(effort * share))
                if ending is not None:
                    return ending
            for search_pass in SEARCH_PASSES:
                ending = search.spread(search_pass, int(effort * search_pass.share))
                if ending is not None:
                    return ending
        except _Failed:
            # the matcher failed: no ending is known from here
            return None
        return None

    def mask(self, matcher: LLMatcher, words: NDArray[np.uint32]) -> NDArray[np.uint32]:
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return words[self._places]

    def allowed(self, mask_words: NDArray[np.uint32]) -> list[int]:
        bits = np.unpackbits(mask_words.view(np.uint8), bitorder="little")
        return [int(b) for b in np.flatnonzero(bits[self._bits].view(np.bool_) & self._is_byte)]

    def sign(self, matcher: LLMatcher, mask_words: NDArray[np.uint32]) -> bytes:
        """A signature that is equal for states with the same continuations, as far as a cheap check
        can see."""
        ends = bytearray()
        for probe in self._probes:
            CLOCK.check()
            ends.append(matcher.validate_tokens(probe))
            CLOCK.check_call()
        return mask_words.tobytes() + ends

    def segment(self, path: list[int]) -> list[int]:
        """The shortest list of tokens that spells a path of single bytes and special tokens."""
        ending: list[int] = []
        text = b""
        for token in path:
            byte = self._byte_of.get(token)
            if byte is None:
                ending += [*self._fewest(text), token]
                text = b""
            else:
                text += byte
        return ending + self._fewest(text)

    def _fewest(self, text: bytes) -> list[int]:
        # (number of tokens, the last token, its start)
        best: list[tuple[int, int, int]] = [(0, -1, 0)]
        for end in range(1, len(text) + 1):
            options = [
                (best[start][0] + 1, token, start)
                for start in range(max(end - LONGEST_WORD, 0), end)
                if (token := self._tokens.get(text[start:end])) is not None
            ]
            # no token spells this byte: the result is too long to be used
            best.append(min(options, default=(MAX_BYTES, -1, end - 1)))
        ending: list[int] = []
        end = len(text)
        while end:
            ending.append(best[end][1])
            end = best[end][2]
        return ending[::-1]


class _Failed(Exception):
    """The matcher failed, for example at its own limits; it cannot be used any more."""


class _Search:
    """The search from one state. `looks` counts the visited states."""

    def __init__(
        self, finder: EndingFinder, matcher: LLMatcher, limit: int, hints: EndingHints
    ) -> None:
        self.finder, self.matcher, self.limit, self.hints = finder, matcher, limit, hints
        self.looks = 0
        self._words = np.zeros(finder.num_words, dtype=np.uint32)
        self._texts = [finder.spell(text) for text in hints.texts]
        # signature of a state -> numbers of bytes at which such a state was met
        self._seen: dict[bytes, set[int]] = {}

    def walk(self, again: float, effort: int) -> list[int] | None:
        """Go on without branching, always to the cheapest state that was not visited often. Every
        valid beginning can be completed, so the walk only has to get out of loops."""
        matcher = self.matcher
        path: list[int] = []
        # number of bytes -> signature of the state there
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
            if best is None or not consumed(matcher, best[2]):
                break
            path += best[2]
            ended = not best[1]
            marks[len(path)] = best[1]
            visits[best[1]] = visits.get(best[1], 0) + 1
        if path:
            matcher.rollback(len(path))
        return self._fitting(self._straight(path, marks)) if ended else None

    def _look(self, move: list[int]) -> bytes | None:
        """The signature of the state after `move`; empty if the text may end there, None if the
        matcher has stopped."""
        matcher, finder = self.matcher, self.finder
        self.looks += 1
        CLOCK.visit()
        if not consumed(matcher, move):
            raise _Failed
        mark: bytes | None = None
        if matcher.is_accepting():
            mark = b""
        elif not matcher.is_stopped():
            mark = finder.sign(matcher, finder.mask(matcher, self._words))
        matcher.rollback(len(move))
        return mark

    def _straight(self, path: list[int], marks: dict[int, bytes]) -> list[int]:
        """The path without a loop that the walk made, if it still ends without it."""
        firsts: dict[bytes, int] = {}
        cuts = [(firsts.setdefault(mark, at), at) for at, mark in marks.items()]
        for start, end in sorted(cuts, key=lambda cut: cut[0] - cut[1])[:MAX_CUTS]:
            if start < end:
                shorter = path[:start] + path[end:]
                if self._ends(shorter):
                    return shorter
        return path

    def _ends(self, path: list[int]) -> bool:
        return follows(self.matcher, [*path, self.finder.end], self.hints.may_be_ambiguous)

    def _fitting(self, path: list[int]) -> list[int] | None:
        ending = self.finder.segment(path)
        return ending if len(ending) <= self.limit and -1 not in ending else None

    def spread(self, search_pass: SearchPass, effort: int) -> list[int] | None:
        # (cost, order of insertion, path)
        queue: list[tuple[float, int, list[int]]] = [(0.0, 0, [])]
        self._seen.clear()
        served: dict[int, int] = {}
        order, last = 0, self.looks + effort
        while queue and self.looks < last:
            price, _, path = heappop(queue)
            size = len(path)
            if served.get(size, 0) >= search_pass.width or size > MAX_BYTES:
                continue
            served[size] = served.get(size, 0) + 1
            for cost, ended, further in self._expand(path, price, search_pass.context):
                if ended:
                    ending = self._fitting(further)
                    if ending is not None:
                        return ending
                    continue
                order += 1
                heappush(queue, (cost, order, further))
        return None

    def _expand(
        self, path: list[int], price: float, context: int
    ) -> list[tuple[float, bool, list[int]]]:
        """What may follow `path`: (cost, whether the text may end there, the longer path)."""
        matcher = self.matcher
        if path and not consumed(matcher, path):
            raise _Failed
        next_steps: list[tuple[float, bool, list[int]]] = []
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
            next_steps.append((total, not mark, further))
        if path:
            matcher.rollback(len(path))
        return next_steps

    def _context(self, path: list[int], size: int) -> bytes:
        """The last bytes, with similar bytes made equal. They distinguish positions in a pattern
        that allow the same bytes."""
        spelt = [self.finder.byte_of(token) for token in path[len(path) - size :]]
        return bytes(byte if byte in self.hints.letters else _kind(byte) for byte in spelt)

    def _moves(self) -> Iterable[tuple[float, list[int]]]:
        matcher, finder = self.matcher, self.finder
        forced = matcher.compute_ff_bytes()
        if forced:
            spelt = finder.spell(forced)
            if follows(matcher, spelt, self.hints.may_be_ambiguous):
                return [(1 + len(spelt) / 4, spelt)]
        allowed = finder.allowed(finder.mask(matcher, self._words))
        is_open = len(allowed) > OPEN
        few = sorted((_price(byte, is_open), byte) for byte in self._few(allowed))
        moves = [(1 + price, [self.finder.id_of(byte)]) for price, byte in few]
        named = [(1.0, [token]) for token in self.hints.tokens]
        named += [(1 + len(text) / 4, text) for text in self._texts]
        for cost, move in named:
            if follows(matcher, move, self.hints.may_be_ambiguous):
                moves.append((cost, move))
        return moves

    def _few(self, allowed: list[int]) -> list[int]:
        """The bytes that are worth trying, of those that may follow."""
        letters = self.hints.letters
        plain = [byte for byte in allowed if byte in letters or byte in _PLAIN] or allowed[:4]
        if len(allowed) <= OPEN // 4:
            return plain
        if len(allowed) > OPEN and not letters:
            # any text is fine here; spaces need the fewest tokens
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
    # in free text every punctuation mark costs as much as a letter, except the quote that ends it
    return usual if is_open and byte not in b'"\\' else _PRICES.get(byte, usual)


def _kind(byte: int) -> int:
    """A byte that represents all similar bytes."""
    if 48 <= byte <= 57:
        return 48 if byte == 48 else 49
    if 97 <= byte <= 122:
        return 97
    if 65 <= byte <= 90:
        return 65
    return byte if byte in _MARKS else 33 if 32 < byte < 127 else 32 if byte < 128 else 128


# most texts of a grammar that are tried as a whole
MAX_HINTS = 48
# characters of an example
MAX_EXAMPLE = 256
# bytes that occur in the formats of JSON schemas
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
    """Parts of a grammar's text that may lead to its end: bytes, whole texts, special tokens."""

    letters: frozenset[int]
    texts: tuple[bytes, ...]
    tokens: tuple[int, ...]
    # whether a text may have several readings in the grammar; following it may then take long
    may_be_ambiguous: bool


_ESCAPE = re.compile(r"\\(?:[pP]\{\w*\}|[dDwWsSbBAzZpP]|x\{?[0-9A-Fa-f]+\}?|u\{?[0-9A-Fa-f]+\}?)")
_RUN = re.compile(r"(?:[A-Za-z0-9 _@:/,;=\"'<>!#%&~`-]|\\[^A-Za-z0-9]){2,}")
_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
_TOKEN = re.compile(r"<\[(\d+)\]>")


def hints_of(answer_format: ResponseFormat) -> EndingHints:
    """Hints in a grammar, roughly read: a missed hint only makes a search longer."""
    letters, texts, tokens = set[int](), dict[bytes, None](), dict[int, None]()
    may_be_ambiguous = answer_format.kind in ("lark", "gbnf")

    def pattern(text: str) -> None:
        plain = _ESCAPE.sub(".", text)
        if "\\s" in text:
            letters.add(32)
        letters.update(byte for byte in plain.encode() if 32 <= byte < 127)
        for run in _RUN.findall(re.sub(r"\[[^\]]*\]|\{[0-9,]*\}", ".", plain)):
            texts[re.sub(r"\\(.)", r"\1", run).encode()] = None
        # line ends and similar characters are escapes in the pattern, but plain in the example
        sample = example(text)
        letters.update(sample)
        texts[sample] = None

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

    if answer_format.kind == "regex":
        pattern(answer_format.text)
    elif answer_format.kind == "json_schema":
        with suppress(RecursionError):
            schema(json.loads(answer_format.text))
    elif may_be_ambiguous:
        rest = _schemas_out(answer_format.text, schema)
        for literal in _STRING.findall(rest):
            pattern(re.escape(literal))
        for body in re.findall(r"/((?:[^/\\\n]|\\.)+)/", rest):
            pattern(body)
        tokens = dict.fromkeys(int(number) for number in _TOKEN.findall(rest))
    kept = sorted((text for text in texts if len(text) > 1), key=len)[:MAX_HINTS]
    return EndingHints(frozenset(letters), tuple(kept), tuple(tokens)[:MAX_HINTS], may_be_ambiguous)


def example(pattern: str) -> bytes:
    """A short text that matches, or nearly matches; empty if Python cannot parse the pattern."""
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
    codes: list[int] = []
    for kind, value in items:
        if str(kind) == "LITERAL":
            codes.append(value)
        elif str(kind) == "RANGE":
            codes += range(value[0], min(value[1], value[0] + 128) + 1)
    return codes


def _schemas_out(text: str, schema: Any) -> str:
    """The Lark text without its JSON schemas; `schema` is called with each of them."""
    decoder, parts, start = json.JSONDecoder(), list[str](), 0
    for match in re.finditer(r"%json\s*", text):
        if match.start() < start:
            continue
        try:
            value, end = decoder.raw_decode(text, match.end())
            schema(value)
        except (ValueError, RecursionError):
            continue
        parts.append(text[start : match.start()])
        start = end
    return "".join((*parts, text[start:]))
