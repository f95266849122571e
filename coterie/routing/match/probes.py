"""What each adapter's probe learns from: its package's examples, and those of its neighbours.

Probes are kept by the texts they depend on, so that a catalog that changes a little is learnt again
only where it changed: the same weights may be packed again with other hints.
"""

from __future__ import annotations

import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.core.adapters import AdapterProfile
from coterie.routing.match.embed import Embedder, Vector, unit
from coterie.routing.match.sketch import (
    JOINT_WEIGHT,
    PLACES,
    SHAPE_WEIGHT,
    SketchRows,
    TextSketch,
    sketch,
)
from coterie.routing.resolve import same_purpose

Value = TypeVar("Value")


class KeptCache(Generic[Value]):
    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """What is kept, or what `make` answers; two threads may both make it."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = make()
        with self._lock:
            self._kept[key] = made
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return made


# of one package
MAX_EXAMPLES = 640
# below it a package's description and keywords are examples too
FEW_EXAMPLES = 5
# neighbours whose examples are held against an adapter, and rows of all of them
NEIGHBOURS = 16
MAX_OTHERS = 600
# of vectors: a text this like an example is asking for the same
SAME_MEANING = 0.95


@dataclass(frozen=True, slots=True)
class _PackageTexts:
    """The texts of one package."""

    # of these texts
    digest: str
    # the examples as they are written
    texts: frozenset[str]
    examples: list[TextSketch]
    counterexamples: list[TextSketch]
    made_up: list[TextSketch]
    centre: Vector


_backgrounds: KeptCache[BackgroundPrompts] = KeptCache(4)
_said: KeptCache[_PackageTexts] = KeptCache(2000)
_probes: KeptCache[Probe] = KeptCache(2000)


def probes(profiles: Sequence[AdapterProfile], embedder: Embedder) -> list[Probe]:
    """One for each profile, in their order."""
    if not profiles:
        return []
    background = _backgrounds.get(
        embedder.name, lambda: BackgroundPrompts(ordinary_prompts(), embedder)
    )
    said = [_texts(profile, embedder) for profile in profiles]
    centres = np.stack([item.centre for item in said])
    made = []
    for row, item in enumerate(said):
        near = _neighbours(said, centres, row)
        key = (embedder.name, item.digest, *(other.digest for other in near))
        lesson = ProbeExamples(
            item.examples, item.counterexamples, item.made_up, *_others(item, near)
        )
        made.append(_probes.get(key, partial(background.fit, lesson)))
    return made


def _texts(profile: AdapterProfile, embedder: Embedder) -> _PackageTexts:
    digest = texts_digest(profile)
    return _said.get((embedder.name, digest), lambda: _read(profile, digest, embedder))


def texts_digest(profile: AdapterProfile) -> str:
    """The digest of what a probe is learnt from: of two packages that say the same, one digest."""
    texts = (profile.examples, profile.counterexamples, profile.keywords)
    few = len(profile.examples) < FEW_EXAMPLES
    also = (profile.card.description, profile.card.name) if few else ()
    return sha256(repr((*texts, *also)).encode()).hexdigest()


def _read(profile: AdapterProfile, digest: str, embedder: Embedder) -> _PackageTexts:
    texts = list(profile.examples[:MAX_EXAMPLES])
    misses = near_misses(profile.keywords, texts, _common())
    if len(texts) < FEW_EXAMPLES:
        texts += [profile.card.description, " ".join(profile.keywords), profile.card.name]
    examples = [sketch(text, embedder) for text in texts if text]
    against = [sketch(text, embedder) for text in profile.counterexamples[:MAX_EXAMPLES] if text]
    made_up = [sketch(text, embedder) for text in misses]
    centre = unit(np.sum([item.meaning for item in examples], axis=0, dtype=np.float32))
    return _PackageTexts(digest, frozenset(texts), examples, against, made_up, centre)


@cache
def _common() -> Counter[str]:
    return word_counts(ordinary_prompts())


def _neighbours(
    said: Sequence[_PackageTexts], centres: NDArray[np.float32], row: int
) -> list[_PackageTexts]:
    """Those most like `row`, in the order of their texts' digests; each text once, and none that is
    for the same prompts: a copy under another name is no evidence against the original."""
    found: dict[str, _PackageTexts] = {}
    for other in np.argsort(-(centres @ centres[row]), kind="stable"):
        item = said[other]
        if item.digest not in found and not same_purpose(item.texts, said[row].texts):
            found[item.digest] = item
            if len(found) == NEIGHBOURS:
                break
    return [found[digest] for digest in sorted(found)]


def _others(
    own: _PackageTexts, near: Sequence[_PackageTexts]
) -> tuple[list[TextSketch], list[TextSketch]]:
    """What the neighbours are for, and what they are not for: hardly anybody is for that. A text
    that says about the same as an own example is neither."""
    share = MAX_OTHERS // max(1, len(near))
    examples = [example for item in near for example in _spread(item.examples, share)]
    against = [text for item in near for text in _spread(item.counterexamples, share)]
    if against:
        mine = np.stack([example.meaning for example in own.examples])
        alike = (np.stack([text.meaning for text in against]) @ mine.T).max(axis=1)
        against = [text for text, most in zip(against, alike, strict=True) if most < SAME_MEANING]
    return examples, against


def _spread(items: Sequence[TextSketch], most: int) -> list[TextSketch]:
    """From the whole of them: one hand's texts often stand together."""
    count = min(most, len(items))
    return [items[place * len(items) // count] for place in range(count)]


FRAMES = (
    "What is {}?",
    "What does {} mean?",
    "Explain {} to a beginner.",
    "What is the difference between {} and its alternatives?",
    "Why do people use {}?",
    "Who invented {}?",
    "What is the history of {}?",
    "How do I learn {}?",
    "How long should {} be?",
    "How many kinds of {} are there?",
    "Is {} important?",
    "Which tool is best for {}?",
    "Give me five tips for {}.",
    "Write a poem about {}.",
    "Write a short story about {}.",
    "Tell me a joke about {}.",
    "Write a blog post about {}.",
    "Find a rhyme for {}.",
    'Translate "{}" into French.',
    "Translate the words {} into German.",
    "What is another word for {}?",
    "Write a Python function for {}.",
    "Write a program that checks {}.",
    "Write a regex that matches {}.",
    "Fix the bug in my {} generator: it prints everything twice.",
    "My {} tool gives the wrong result. What could be the cause?",
    "Why does my {} function fail?",
    "Train a model for {}.",
    "Design an app for {}.",
    "Write unit tests for the {} module.",
    "Is this a good {}? Give reasons.",
    "Make up a funny {}.",
    "List ten examples of {}.",
    "Who is responsible for {} in a company?",
    "Delete the {} from yesterday.",
    "Compare these two {} and say which is better.",
    "How do I change the {} in the settings?",
)
# times each frame is filled
PER_FRAME = 2
# phrases of the examples, beside the keywords
MAX_PHRASES = 10
# examples that a phrase must be in
_LEAST_EXAMPLES = 3
_MAX_PHRASE_WORDS = 5
_TOKEN = re.compile(r"[^\W\d_][\w'-]*|[^\w\s]")
_SMALL_WORDS = (
    "the a an of for to in is this and or as it my i you with what which one on from by me please "
    "that are was not be only"
)
_SMALL = frozenset(_SMALL_WORDS.split())


def near_misses(
    keywords: Sequence[str], examples: Sequence[str], common: Counter[str]
) -> list[str]:
    """`common` says how often words occur in ordinary prompts. Empty where nothing is known."""
    topics = list(dict.fromkeys((*keywords, *phrases(examples, common))))
    if not topics:
        return []
    places = range(len(FRAMES) * PER_FRAME)
    return [FRAMES[place // PER_FRAME].format(topics[place % len(topics)]) for place in places]


def phrases(examples: Sequence[str], common: Counter[str]) -> list[str]:
    """What several examples say and ordinary prompts do not, the most telling first."""
    having: Counter[str] = Counter()
    for text in examples:
        having.update(_runs([token.lower() for token in _TOKEN.findall(text)]))
    worth = {}
    for phrase, count in having.items():
        said = phrase.replace(",", "").split()
        if count >= _LEAST_EXAMPLES and not {said[0], said[-1]} & _SMALL:
            usual = min(common[word] for word in said)
            worth[phrase] = count * len(said) ** 0.5 / (1 + usual / 5)
    return sorted(worth, key=lambda phrase: (-worth[phrase], phrase))[:MAX_PHRASES]


def word_counts(texts: Iterable[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update({token.lower() for token in _TOKEN.findall(text)})
    return counts


def _runs(tokens: list[str]) -> set[str]:
    found = set()
    for size in range(1, _MAX_PHRASE_WORDS + 1):
        for start in range(len(tokens) - size + 1):
            run = tokens[start : start + size]
            if run[0][0].isalnum() and run[-1][0].isalnum():
                found.add(" ".join(run).replace(" ,", ","))
    return found


_PROMPTS = Path(__file__).parent / "data" / "background.txt"
_RIDGE = 0.1
# how much one row counts, beside one ordinary prompt
FOR, AGAINST, MADE_UP, OTHERS = 2.0, 1.0, 0.3, 1.0


@dataclass(frozen=True, slots=True)
class ProbeExamples:
    """What one adapter's probe learns from, beside the background."""

    examples: Sequence[TextSketch]
    counterexamples: Sequence[TextSketch]
    # near misses that nobody wrote
    made_up: Sequence[TextSketch] = ()
    # what other adapters are for, and near misses of theirs
    others: Sequence[TextSketch] = ()
    others_misses: Sequence[TextSketch] = ()


@dataclass(frozen=True, slots=True)
class Probe:
    """score = [1, form] @ joint @ [1, meaning] + words @ weights; about 1 for, -1 against."""

    # [1 + shape.DIM, 1 + dim]
    joint: NDArray[np.float16]
    # [PLACES], times `scale`: one byte a place, so that thousands of probes fit
    words: NDArray[np.int8]
    scale: float


class BackgroundPrompts:
    """Ordinary prompts, which are for no adapter, and the inverse of their kernel."""

    def __init__(self, texts: Sequence[str], embedder: Embedder) -> None:
        self._sketches = [sketch(text, embedder) for text in texts]
        self._rows = SketchRows(self._sketches)
        kernel = self._rows.alike(self._sketches).astype(np.float64) + 1.0
        inverse = np.linalg.inv(kernel + _RIDGE * np.eye(len(texts)))
        self._inverse = inverse.astype(np.float32)

    def fit(self, lesson: ProbeExamples) -> Probe:
        parts = (
            (lesson.examples, FOR), (lesson.counterexamples, AGAINST), (lesson.made_up, MADE_UP),
            (lesson.others, OTHERS), (lesson.others_misses, OTHERS),
        )  # fmt: skip
        own = [item for part, _ in parts for item in part]
        worth = np.concatenate([np.full(len(part), each) for part, each in parts])
        wanted = np.where(np.arange(len(own)) < len(lesson.examples), 1.0, -1.0)
        rows = SketchRows(own)
        inside = rows.alike(own).astype(np.float64) + 1.0 + np.diag(_RIDGE / worth)
        across = self._rows.alike(own) + np.float32(1.0)
        # block elimination: the background's answers are all -1
        reduced = across @ self._inverse
        left = np.linalg.solve(inside - reduced @ across.T, wanted + reduced.sum(axis=1))
        rest = -self._inverse.sum(axis=1) - left @ reduced
        joint = _joint(rows, left) + _joint(self._rows, rest)
        words = _words(rows, left) + _words(self._rows, rest)
        scale = max(float(np.abs(words).max()), 1e-9) / 127
        return Probe(joint.astype(np.float16), np.rint(words / scale).astype(np.int8), scale)


def _joint(rows: SketchRows, share: NDArray[np.float64]) -> NDArray[np.float64]:
    meaning = np.insert(rows.meaning, 0, 1.0, axis=1)
    form = np.insert(rows.form, 0, 1.0, axis=1)
    joint: NDArray[np.float64] = form.T @ (meaning * share[:, None])
    joint[1:, 0] *= SHAPE_WEIGHT
    joint[1:, 1:] *= JOINT_WEIGHT
    return joint


def _words(rows: SketchRows, share: NDArray[np.float64]) -> NDArray[np.float64]:
    amounts = np.repeat(share, rows.counts) * rows.weights
    words: NDArray[np.float64] = np.bincount(rows.grams, amounts, PLACES).astype(np.float64)
    return words


@cache
def ordinary_prompts() -> tuple[str, ...]:
    lines = _PROMPTS.read_text(encoding="utf-8").splitlines()
    return tuple(line.replace("\\n", "\n") for line in lines if line)
