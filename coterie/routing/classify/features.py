"""The features that a router is trained on: meaning, form and words of a prompt, as small integers.

Sums of integers do not depend on their order, so that a decision can be made again, bit for bit,
from what a receipt holds.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import InvalidRequest
from coterie.core.plan import ClassifierInput
from coterie.routing.classify.signs import NAMES as SIGNS
from coterie.routing.classify.signs import signs
from coterie.routing.classify.structure import STRUCTURES, structures
from coterie.routing.features.features import PromptFeatures, extract, routed_text
from coterie.routing.features.instruction import OPENINGS, bounded
from coterie.routing.features.instruction import instruction as instruction_of
from coterie.routing.features.language import UNKNOWN
from coterie.routing.match.embed import Embedder
from coterie.routing.match.sketch import DIM as SHAPE_DIM
from coterie.routing.match.sketch import NUM_BUCKETS as WORD_BUCKETS
from coterie.routing.match.sketch import SHAPE_SCALE, read_text

TASK_TYPES = (
    "json_parsing", "code_generation", "classification", "extraction", "transformation",
    "creative_writing", "question_answering", "conversation",
)  # fmt: skip
VERBS = (
    "extract", "convert", "translate", "summarise", "classify", "code", "write", "calculate",
    "explain", "ask", "chat",
)  # fmt: skip
LANGUAGES = ("en", UNKNOWN, "fr", "zh", "de", "es", "ja")
_FLAGS = 4
_NUM_FOUND = len(STRUCTURES) + len(SIGNS)
FORM_DIM = SHAPE_DIM + len(TASK_TYPES) + len(VERBS) + len(LANGUAGES) + 1 + _FLAGS + _NUM_FOUND
# units of one: of the meaning, and of the form. The form of a sketch is scaled by sqrt(0.1)
MEANING_UNIT, FORM_UNIT = 16384, 64
FORM_SCALE = float(np.sqrt(0.1))
_MAX_FORM = 255
# runs of this many bytes and one more, and the length read at each end of a text
_RUN = 4
_FACTOR, _SPREAD, _FOLD = np.uint32(0x01000193), np.uint32(0x9E3779B1), np.uint32(15)
# of the letters of a run
_POWERS = np.array([0x01000193**power % 2**32 for power in range(_RUN - 1, -1, -1)], np.uint32)
_HEAD_CHARS, _TAIL_CHARS = 240, 120
_RUN_BITS = 14
_DROPPED = np.uint32(32 - _RUN_BITS)
# hashed features: words of the text, words of the instruction, runs of letters
NUM_HASHED = WORD_BUCKETS + (1 << _RUN_BITS)
_FIRST_RUN = np.uint32(WORD_BUCKETS)
_STARTS = np.array((WORD_BUCKETS // 2, WORD_BUCKETS), np.uint16)
# norm of each of the three, squared
_NORMS = (0.7, 0.7, 1.5)
VERSION = "1"


@lru_cache(maxsize=16)
def features_name(embedder: Embedder) -> str:
    """Names the way features are made; a router only reads those it was trained on."""
    return f"{embedder.name}-{embedder.dim}.{FORM_DIM}.{NUM_HASHED}.v{VERSION}"


def prompt_input(
    instruction: str, document: str, embedder: Embedder, declared: str = ""
) -> ClassifierInput:
    """The input for a prompt, with all features computed."""
    return classifier_input(
        routed_text(instruction, document), extract(instruction, document), embedder, declared
    )


def classifier_input(
    text: str, features: PromptFeatures, embedder: Embedder, declared: str = ""
) -> ClassifierInput:
    """`text` is that of `routed_text`; `features` are those of the same prompt."""
    text_read = bounded(text)
    found, read = structures(text), read_text(text_read, embedder)
    form = b"".join(
        (
            bytes(map(_units.__getitem__, read.shape)),
            _OPENING_UNITS[read.opening],
            _flags(features, found, signs(text, instruction_of(text_read))),
        )
    )
    meaning = read.meaning * MEANING_UNIT
    words = np.array(read.grams, "<u2").tobytes() + letter_runs(text).tobytes()
    return ClassifierInput(
        declared,
        found,
        features_name(embedder),
        np.rint(meaning, out=meaning).astype("<i2").tobytes(),
        form,
        words,
    )


class _Units(dict[float, int]):
    """An entry of a shape -> its units, as it is rounded with all others in an array."""

    def __missing__(self, value: float) -> int:
        scaled = np.float32(value) * SHAPE_SCALE * np.float32(1 / FORM_SCALE)
        units = min(int(np.rint(scaled * np.float32(FORM_UNIT))), _MAX_FORM)
        if len(self) >= _MAX_KNOWN_UNITS:
            self.clear()
        self[value] = units
        return units


_MAX_KNOWN_UNITS = 10_000
_units = _Units()
_OPENING_UNITS = {
    name: bytes(FORM_UNIT * (other == name) for other in OPENINGS) for name in OPENINGS
}


def _places(names: Iterable[str], start: int) -> dict[str, int]:
    return {name: start + place for place, name in enumerate(names)}


_TASK_PLACES = _places(TASK_TYPES, 0)
_VERB_PLACES = _places(VERBS, len(_TASK_PLACES))
_LANGUAGE_PLACES = _places(LANGUAGES, len(_TASK_PLACES) + len(_VERB_PLACES))
_OTHER_LANGUAGE = len(_TASK_PLACES) + len(_VERB_PLACES) + len(_LANGUAGE_PLACES)
_STRUCTURE_PLACES = _places(STRUCTURES, _OTHER_LANGUAGE + 1 + _FLAGS)
_FIRST_SIGN = _OTHER_LANGUAGE + 1 + _FLAGS + len(_STRUCTURE_PLACES)


def _flags(features: PromptFeatures, found: Sequence[str], signs: Sequence[bool]) -> bytearray:
    """The part of the form after the shape: what is true is one unit."""
    flags = bytearray(FORM_DIM - SHAPE_DIM)
    for place in (_TASK_PLACES.get(features.task_type), _VERB_PLACES.get(features.intent)):
        if place is not None:
            flags[place] = FORM_UNIT
    flags[_LANGUAGE_PLACES.get(features.language, _OTHER_LANGUAGE)] = FORM_UNIT
    after = _OTHER_LANGUAGE + 1
    flags[after] = FORM_UNIT * features.has_json
    flags[after + 1] = FORM_UNIT * features.has_code
    flags[after + 2] = FORM_UNIT * (features.code_language == "sql")
    flags[after + 3] = FORM_UNIT * features.has_document
    for name in found:
        flags[_STRUCTURE_PLACES[name]] = FORM_UNIT
    for place, sign in enumerate(signs, _FIRST_SIGN):
        if sign:
            flags[place] = FORM_UNIT
    return flags


def arrays(
    given: ClassifierInput,
) -> tuple[NDArray[np.int16], NDArray[np.uint8], NDArray[np.uint16]]:
    """(meaning, form, words) of an input."""
    return (
        np.frombuffer(given.meaning, "<i2"),
        np.frombuffer(given.form, np.uint8),
        np.frombuffer(given.words, "<u2"),
    )


def letter_runs(text: str) -> NDArray[np.uint16]:
    """Runs of letters at both ends of a text, hashed and sorted: they also find words that are
    misspelt, inflected or joined."""
    if len(text) > _HEAD_CHARS + _TAIL_CHARS:
        text = f"{text[:_HEAD_CHARS]} {text[-_TAIL_CHARS:]}"
    # as the pattern \s+ and a strip, in less time
    data = f" {' '.join(text.lower().split())} ".encode(errors="replace")
    letters = np.frombuffer(data, np.uint8).astype(np.uint32)
    count = len(letters) - _RUN + 1
    if count < 2:
        return np.zeros(0, "<u2")
    # the short runs, then the long ones
    hashes = np.empty(2 * count - 1, np.uint32)
    short, long = hashes[:count], hashes[count:]
    size = letters.itemsize
    np.ndarray((count, _RUN), np.uint32, letters, 0, (size, size)).dot(_POWERS, out=short)
    np.multiply(short[:-1], _FACTOR, out=long)
    long += letters[_RUN:]
    hashes ^= hashes >> _FOLD
    hashes *= _SPREAD
    hashes >>= _DROPPED
    hashes += _FIRST_RUN
    hashes.sort()
    # as np.unique, in less time
    is_first = np.empty(len(hashes), bool)
    is_first[0] = True
    np.not_equal(hashes[1:], hashes[:-1], out=is_first[1:])
    result: NDArray[np.uint16] = hashes[is_first].astype("<u2")
    return result


def hashed_parts(words: NDArray[np.uint16]) -> list[tuple[int, int, float]]:
    """(start, end, weight of each) of the three kinds of hashed features, which are sorted."""
    first, second = words.searchsorted(_STARTS).tolist()
    bounds = ((0, first), (first, second), (second, len(words)))
    return [
        (start, end, (norm / (end - start)) ** 0.5)
        for (start, end), norm in zip(bounds, _NORMS, strict=True)
        if end > start
    ]


def encoded(given: ClassifierInput) -> str:
    """One line of JSON, for a log or a receipt."""
    parts = (given.meaning, given.form, given.words)
    return json.dumps(
        [given.declared, list(given.structures), given.features, *map(_text, parts)],
        ensure_ascii=False,
    )


def decoded(text: str) -> ClassifierInput:
    """Refuses what `encoded` did not write."""
    try:
        declared, found, name, *parts = json.loads(text)
        meaning, form, words = (base64.b64decode(part, validate=True) for part in parts)
        given = ClassifierInput(
            str(declared), tuple(map(str, found)), str(name), meaning, form, words
        )
        sizes = len(meaning) % 2, len(words) % 2
    except (ValueError, TypeError) as error:
        raise InvalidRequest("this is no stored input of a router") from error
    if any(sizes):
        raise InvalidRequest("a stored input of a router is cut off")
    return given


def _text(part: bytes) -> str:
    return base64.b64encode(part).decode()
