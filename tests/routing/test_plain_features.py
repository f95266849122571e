"""Features that are computed in a fast way equal those of a plain one, on random texts."""

from __future__ import annotations

import random
import re
import zlib
from itertools import pairwise

import numpy as np

from coterie.routing.classify import features, signs
from coterie.routing.classify.features import FORM_SCALE, FORM_UNIT, MEANING_UNIT
from coterie.routing.classify.structure import STRUCTURES
from coterie.routing.features import features as prompt_features
from coterie.routing.features import language
from coterie.routing.features.instruction import PromptInstruction, bounded, instruction, words
from coterie.routing.match import sketch
from coterie.routing.match.embed import EMBEDDERS, StaticEmbedder

_PIECES = (  # noqa: SIM905
    "12 km in metres|inkm|5kg|3 g as mg|unit: cm|the|translate 'good morning' into French|select a "
    "from b where c|insert into|update t set a = 1|create table x(|how many|yesterday|time zone|12h"
    "|am or pm|a.m./p.m. now|don't|instead of|summarise|add a column|$5|°|m/s|UTC|2024|99|Is it?"
    "|JSON|{\"a\": 1}|[{|def f(x):\n|class A:\n|#include <x.h>\n|fn main(|public class B|=>|</div>"
    "|```python\nx\n```|a, b, c|t(id, name)|->|→|/tmp|é|größer|こんにちは|привет|ação|²|½|_x1_|\t\n"
    "|Write a poem about|What's the difference between|classify:|A B C|the fourth of July|NASA|tion"
    "|wanting|\"quoted text of some length\"|Please|extract name and age as JSON|>|<b>|:|;|!|. Then"
).split("|")  # fmt: skip


def random_texts(seed: int, count: int = 250) -> list[str]:
    rng = random.Random(seed)
    letters = "abcdefghijklmnoprstuvwzäß0123456789 .,:'\"\n"

    def piece() -> str:
        if rng.random() < 0.3:
            return "".join(rng.choice(letters) for _ in range(rng.randrange(9)))
        return rng.choice(_PIECES)

    texts = [" ".join(piece() for _ in range(rng.randrange(30))) for _ in range(count)]
    return ["", " ", *texts, " ".join(piece() for _ in range(600))]


def test_hashed_words_equal_hashes_of_written_grams() -> None:
    embedder = EMBEDDERS["hashed"]()
    for text in random_texts(1):
        text = bounded(text)
        request = instruction(text)
        first = _plain_buckets(_plain_grams(words(text)))
        second = _plain_buckets(_plain_grams(request.words) | _plain_opening(request))
        half = sketch.NUM_BUCKETS // 2
        expected = first + [half + bucket for bucket in second]
        found = sketch.sketch(text, embedder)
        assert found.grams.tolist() == expected
        assert found.form.tobytes() == _plain_shape(text).tobytes()


def test_known_words_are_forgotten_when_there_are_too_many() -> None:
    pairs = sketch._PairBuckets(" ")
    for number in range(sketch._MAX_KNOWN_PAIRS + 10):
        assert pairs["a", f"x{number}"] == zlib.crc32(f"a x{number}".encode()) % (1 << 14)
    assert len(pairs) == 10


def test_signs_and_structures_equal_their_patterns() -> None:
    for text in random_texts(2):
        text = bounded(text)
        assert signs.signs(text, instruction(text)) == _plain_signs(text)
        assert prompt_features.code_in(text, text.lower()) == _plain_code(text, text.lower())


def test_letter_runs_equal_runs_that_are_hashed_one_by_one() -> None:
    for text in random_texts(3):
        assert features.letter_runs(text).tolist() == _plain_runs(text)


def test_the_form_is_the_shape_and_one_unit_for_each_flag() -> None:
    embedder = EMBEDDERS["hashed"]()
    for text in random_texts(4, 100):
        found = prompt_features.extract(text)
        whole = prompt_features.routed_text(text)
        given = features.classifier_input(whole, found, embedder)
        drawn = sketch.sketch(whole, embedder)
        flags = (
            *(found.task_type == name for name in features.TASK_TYPES),
            *(found.intent == name for name in features.VERBS),
            *(found.language == name for name in features.LANGUAGES),
            found.language not in features.LANGUAGES,
            found.has_json,
            found.has_code,
            found.code_language == "sql",
            found.has_document,
            *(name in given.structures for name in STRUCTURES),
            *signs.signs(whole, instruction(bounded(whole))),
        )
        scaled = drawn.form * np.float32(1 / FORM_SCALE)
        form = np.concatenate([scaled, np.array(flags, np.float32)])
        units = np.minimum(np.rint(form * FORM_UNIT), 255).astype(np.uint8)
        assert given.form == units.tobytes() and len(units) == features.FORM_DIM
        assert given.meaning == np.rint(drawn.meaning * MEANING_UNIT).astype("<i2").tobytes()


def test_votes_and_vectors_of_words_do_not_depend_on_what_was_read_before() -> None:
    texts = [text for text in random_texts(5) if text.strip()]
    fresh, used = StaticEmbedder(), StaticEmbedder()
    for text in texts:
        used.embed(text)
    for text in texts[:60]:
        first = language.detect(text)
        vector = used.embed(text)
        language._known_votes.clear()
        language._known_votes.update(language._WORD_VOTES)
        fresh._word_rows.clear()
        assert language.detect(text) == first
        assert fresh.embed(text).tobytes() == vector.tobytes()


def _plain_class(word: str) -> str:
    return f"#{min(len(word), 5)}" if word.isdigit() else word


def _plain_grams(tokens: list[str]) -> set[str]:
    seen = [_plain_class(word) for word in tokens]
    grams = {*seen, *(f"~{word[:5]}" for word in seen if len(word) > 5)}
    return grams | {" ".join(pair) for pair in pairwise(["<s>", *seen, "</s>"])}


def _plain_opening(request: PromptInstruction) -> set[str]:
    start = request.opening_index
    tokens = [_plain_class(word) for word in request.words[start : start + 12]]
    first, *after = tokens or [""]
    grams = {f"{request.opening}>{word}" for word in after if len(word) > 2}
    return grams | {f"{first}>>{word}" for word in after[:6] if len(word) > 2}


def _plain_buckets(grams: set[str]) -> list[int]:
    return sorted({zlib.crc32(gram.encode()) % (sketch.NUM_BUCKETS // 2) for gram in grams})


_SHAPE_PATTERNS = (
    r"\d", r"\d{4}", r"\w ?\(\w+(, ?\w+)+\)", r"\w, \w+, \w", r"\{", r"<", r"[;={}]",
    r"[.?!]\s+\S", r"\b[A-Z]{2,}\b", r"/", r"->|→", r"\?", r":", r"\n", r"\n(?:.*\n){2}",
    r"\?\s*$",
)  # fmt: skip


def _plain_shape(text: str) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """The shape, with every pattern searched for."""
    found = sketch.shape(text)
    at = sketch._NUM_GENERAL - len(_SHAPE_PATTERNS)
    for place, pattern in enumerate(_SHAPE_PATTERNS, at):
        found[place] = np.float32(re.search(pattern, text) is not None) * sketch.SHAPE_SCALE
    return found


def _plain_signs(text: str) -> tuple[bool, ...]:
    """With every pattern searched for."""
    request, lowered = instruction(text), signs._ends(text).lower()
    wish = " ".join(request.words[: signs._MAX_WORDS])
    bare = request.opening == "other" and not request.material and "?" not in text
    return (
        *signs._directions(lowered),
        signs._FOREIGN_UNIT.search(lowered) is not None,
        signs._RELATIVE.search(lowered) is not None,
        signs._ZONE.search(lowered) is not None,
        signs._HALF_DAY.search(lowered) is not None,
        signs._CHANGES.search(wish) is not None,
        signs._REFUSES.search(lowered) is not None,
        signs._REPLIES.search(wish) is not None,
        bare and ":" not in text,
    )


def _plain_code(text: str, lowered: str) -> tuple[bool, str]:
    """Without looking for words first, apart from the code fences."""
    if "```" in text:
        return prompt_features.code_in(text, lowered)
    for name, needed, pattern in prompt_features._CODE_PATTERNS:
        if any(word in text for word in needed) and pattern.search(text):
            return True, name
    return (True, "sql") if prompt_features._SQL.search(lowered) else (False, "")


def _plain_runs(text: str) -> list[int]:
    if len(text) > 360:
        text = f"{text[:240]} {text[-120:]}"
    joined = re.sub(r"\s+", " ", text.lower()).strip()
    data = f" {joined} ".encode(errors="replace")
    buckets = set()
    for size in (4, 5):
        if len(data) < 5:
            break
        for start in range(len(data) - size + 1):
            code = 0
            for byte in data[start : start + size]:
                code = (code * 0x01000193 + byte) & 0xFFFFFFFF
            code = ((code ^ (code >> 15)) * 0x9E3779B1) & 0xFFFFFFFF
            buckets.add(code >> 18)
    return sorted(sketch.NUM_BUCKETS + bucket for bucket in buckets)
