"""A text as the matcher sees it: its vector, its shape, its words and those of its instruction.

The similarity of two sketches is the sum of five parts; `alike` computes this kernel.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.core.quick_init import quick_init
from coterie.routing.features.instruction import (
    NUM_KINDS,
    OPENINGS,
    PromptInstruction,
    bounded,
    instruction,
    words,
)
from coterie.routing.match.embed import Embedder, Vector, embedding

# hash buckets for words and pairs: one half for the whole text, one half for its instruction
NUM_BUCKETS = 1 << 15
_HALF = NUM_BUCKETS // 2
# weights relative to the meaning: words of each half, shape, and meaning times shape
WORD_WEIGHT = np.float32(0.7)
SHAPE_WEIGHT = np.float32(0.3)
JOINT_WEIGHT = np.float32(2.5)
# numbers of words after the opening word that are combined with its kind, and with the word itself
_OPENED_WORDS, _NEXT_WORDS = 12, 7
_STEM = 5
_LONGEST_NUMBER = 5
# words and pairs of words whose buckets are remembered
_MAX_KNOWN_WORDS, _MAX_KNOWN_PAIRS = 50_000, 50_000


@quick_init
@dataclass(frozen=True, slots=True)
class TextSketch:
    # unit length [dim]
    meaning: Vector
    # [shape.DIM]
    form: Vector
    # unique, each below NUM_BUCKETS: of the text, then of the instruction
    grams: NDArray[np.int32]
    # one for each of the grams: the weights of each half have a norm of sqrt(WORD_WEIGHT)
    weights: Vector


def sketch(text: str, embedder: Embedder) -> TextSketch:
    return _sketch(bounded(text), embedder)


class ReadText(NamedTuple):
    """What a sketch is made of, and what the choice of a specialist reads of it."""

    # unit length [dim]
    meaning: Vector
    # the entries of the shape that do not describe the opening, before they are scaled
    shape: tuple[float, ...]
    # one of OPENINGS
    opening: str
    # unique, each below NUM_BUCKETS: of the text, then of the instruction
    grams: list[int]
    # how many of them are of the text
    num_first: int


# one request asks twice, for its specialist and for its adapters
@lru_cache(maxsize=4)
def read_text(text: str, embedder: Embedder) -> ReadText:
    """`text` has a limited length."""
    tokens, request = words(text), instruction(text)
    seen = _buckets(tokens)
    first = sorted(seen)
    # without material the words of the instruction are those of the text
    asked = seen if request.words == tokens else _buckets(request.words)
    second = sorted(asked.union(_opening_buckets(request)))
    grams = first + [bucket + _HALF for bucket in second]
    values = _shape_values(text, tokens, request)
    return ReadText(embedding(text, embedder), values, request.opening, grams, len(first))


@lru_cache(maxsize=4)
def _sketch(text: str, embedder: Embedder) -> TextSketch:
    read = read_text(text, embedder)
    first = read.num_first
    grams = np.array(read.grams, np.int32)
    weights = np.empty(len(grams), np.float32)
    weights[:first] = _word_scale(first)
    weights[first:] = _word_scale(len(grams) - first)
    return TextSketch(read.meaning, _form(read.shape, read.opening), grams, weights)


def _bucket(gram: str) -> int:
    return zlib.crc32(gram.encode()) % _HALF


class _WordBuckets(dict[str, tuple[int, ...]]):
    """Word -> the buckets of the word and of its beginning. Most words of a text were seen
    before."""

    def __missing__(self, token: str) -> tuple[int, ...]:
        word = _number_class(token)
        found: tuple[int, ...] = (_bucket(word),)
        if len(word) > _STEM:
            found += (_bucket(f"~{word[:_STEM]}"),)
        if len(self) >= _MAX_KNOWN_WORDS:
            self.clear()
        self[token] = found
        return found


class _PairBuckets(dict[tuple[str, str], int]):
    """Two words -> the bucket of both, with `joint` between them."""

    def __init__(self, joint: str) -> None:
        super().__init__()
        self.joint = joint

    def __missing__(self, pair: tuple[str, str]) -> int:
        found = _bucket(self.joint.join(map(_number_class, pair)))
        if len(self) >= _MAX_KNOWN_PAIRS:
            self.clear()
        self[pair] = found
        return found


_word_buckets = _WordBuckets()
_next_to, _opened_by, _begun_by = _PairBuckets(" "), _PairBuckets(">"), _PairBuckets(">>")


def _buckets(tokens: list[str]) -> set[int]:
    """Of words, beginnings of words and pairs of words."""
    # most numbers were not seen before, but their classes were
    tokens = [_number_class(token) if token.isdigit() else token for token in tokens]
    found = set(chain.from_iterable(map(_word_buckets.__getitem__, tokens)))
    found.update(map(_next_to.__getitem__, pairwise(["<s>", *tokens, "</s>"])))
    return found


def _opening_buckets(request: PromptInstruction) -> list[int]:
    """Of combinations of the opening word or its kind with the words after it."""
    start, tokens = request.opening_index, request.words
    after = tokens[start + 1 : start + _OPENED_WORDS]
    far = [word for word in after if len(word) > 2 and not word.isdigit()]
    near = [word for word in after[: _NEXT_WORDS - 1] if len(word) > 2 and not word.isdigit()]
    found = [_opened_by[request.opening, word] for word in far]
    return found + [_begun_by[tokens[start], word] for word in near]


def _number_class(word: str) -> str:
    return f"#{min(len(word), _LONGEST_NUMBER)}" if word.isdigit() else word


@lru_cache(maxsize=4096)
def _word_scale(count: int) -> float:
    return float(np.sqrt(WORD_WEIGHT / max(1, count)))


class SketchRows:
    """Many sketches as arrays."""

    def __init__(self, sketches: Sequence[TextSketch]) -> None:
        self.meaning = np.stack([item.meaning for item in sketches])
        self.form = np.stack([item.form for item in sketches])
        self.grams = np.concatenate([item.grams for item in sketches])
        self.weights = np.concatenate([item.weights for item in sketches])
        self.counts = np.array([len(item.grams) for item in sketches])
        used = np.unique(self.grams)
        self._row_of_bucket = np.full(NUM_BUCKETS, -1, np.int32)
        self._row_of_bucket[used] = np.arange(len(used))
        # [used buckets, rows]: a column holds the weights of a text's words
        self._word_weights = np.zeros((len(used), len(sketches)), np.float32)
        columns = np.repeat(np.arange(len(sketches)), self.counts)
        self._word_weights[self._row_of_bucket[self.grams], columns] = self.weights

    def alike(self, others: Sequence[TextSketch]) -> NDArray[np.float32]:
        """The kernel of every other sketch with every row: [len(others), rows]."""
        meaning = np.stack([item.meaning for item in others]) @ self.meaning.T
        form = np.stack([item.form for item in others]) @ self.form.T
        word_similarity = np.stack([self._words_alike(item) for item in others])
        total: NDArray[np.float32] = (
            meaning + word_similarity + SHAPE_WEIGHT * form + JOINT_WEIGHT * meaning * form
        )
        return total

    def _words_alike(self, item: TextSketch) -> NDArray[np.float32]:
        rows = self._row_of_bucket[item.grams]
        used = rows >= 0
        total: NDArray[np.float32] = item.weights[used] @ self._word_weights[rows[used]]
        return total


_ASKING = frozenset({"what", "who", "when", "where", "why", "how"})
_OPENING = _ASKING | frozenset(
    "which is are do does can could should will would did".split()  # noqa: SIM905
)
_QUOTED = re.compile(r"\"[^\"]{12,}\"|“[^”]+”|(?<!\w)'[^'\n]{12,}'(?!\w)")
_NUM_PATTERNS = 16
_DIGIT, _YEAR = re.compile(r"\d"), re.compile(r"\d{4}")
# a table with its columns, a list of three
_TABLE, _LIST = re.compile(r"\w ?\(\w+(, ?\w+)+\)"), re.compile(r"\w, \w+, \w")
_NEXT_SENTENCE = re.compile(r"[.?!]\s+\S")
_CAPITALS, _THREE_LINES = re.compile(r"\b[A-Z]{2,}\b"), re.compile(r"\n(?:.*\n){2}")
_ASKS_AT_END = re.compile(r"\?\s*$")
_CAPITALISED = re.compile(r"\b[A-Z][a-z]+")
_FOREIGN = re.compile(r"[^\u0000-\u0250]")
# the squares of the entries sum to about one for a typical text
SHAPE_SCALE = np.float32(math.sqrt(0.1))
# number of entries that do not describe the opening of the instruction
_NUM_GENERAL = 18 + NUM_KINDS + _NUM_PATTERNS
_OPENING_PLACE = {name: _NUM_GENERAL + place for place, name in enumerate(OPENINGS)}
DIM = _NUM_GENERAL + len(OPENINGS)


def shape(
    text: str, tokens: list[str] | None = None, request: PromptInstruction | None = None
) -> NDArray[np.float32]:
    """`DIM` numbers; `text` has a limited length, `tokens` are its words, `request` is its
    instruction."""
    tokens = words(text) if tokens is None else tokens
    request = instruction(text) if request is None else request
    return _form(_shape_values(text, tokens, request), request.opening)


def _form(values: tuple[float, ...], opening: str) -> NDArray[np.float32]:
    form = np.zeros(DIM, np.float32)
    form[:_NUM_GENERAL] = values
    form[_OPENING_PLACE[opening]] = 1.0
    form *= SHAPE_SCALE
    return form


def _shape_values(text: str, tokens: list[str], request: PromptInstruction) -> tuple[float, ...]:
    """`_NUM_GENERAL` of them."""
    count, first = len(tokens), tokens[0] if tokens else ""
    return (
        1.0,
        first in _OPENING,
        first in _ASKING,
        first.endswith("ing"),
        ('"' in text or "“" in text or "'" in text) and _QUOTED.search(text) is not None,
        not text.isascii() and len(_FOREIGN.findall(text)) > 3,
        math.log1p(count) / 4,
        count < 5,
        count < 9,
        count > 15,
        count > 40,
        len(_CAPITALISED.findall(text)) / max(1, count),
        request.material > 0,
        request.material > 3,
        request.material > 8,
        "?" in request.words,
        len(request.words) < 6,
        len(request.words) < 10,
        *request.kinds(),
        *_patterns(text),
    )


def _patterns(text: str) -> tuple[bool, ...]:
    """`_NUM_PATTERNS` of them. A pattern is searched for only if the text has what every match
    contains."""
    has_digit, asks, has_line = _DIGIT.search(text) is not None, "?" in text, "\n" in text
    has_brace = "{" in text
    return (
        has_digit,
        has_digit and _YEAR.search(text) is not None,
        "(" in text and _TABLE.search(text) is not None,
        ", " in text and _LIST.search(text) is not None,
        has_brace,
        "<" in text,
        has_brace or ";" in text or "=" in text or "}" in text,
        _NEXT_SENTENCE.search(text) is not None,
        _CAPITALS.search(text) is not None,
        "/" in text,
        "->" in text or "→" in text,
        asks,
        ":" in text,
        has_line,
        has_line and _THREE_LINES.search(text) is not None,
        asks and _ASKS_AT_END.search(text) is not None,
    )
