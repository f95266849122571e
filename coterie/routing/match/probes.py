"""Learns each adapter's probe: from its package's examples, and from those of similar packages.

Probes are cached by the texts they depend on, so that after a small change of a catalog only the
changed ones are learnt again: the same weights may be packed again with other hints.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.core.adapters import AdapterProfile
from coterie.core.lru import LruCache
from coterie.routing.match.embed import Embedder, Vector, unit
from coterie.routing.match.sketch import (
    JOINT_WEIGHT,
    NUM_BUCKETS,
    SHAPE_WEIGHT,
    SketchRows,
    TextSketch,
    sketch,
)
from coterie.routing.resolve import same_purpose

# of one package
MAX_EXAMPLES = 640
# with fewer examples, a package's description and keywords count as examples too
FEW_EXAMPLES = 5
# neighbours whose examples count against an adapter, and the most rows of all of them
NEIGHBOURS = 16
MAX_OTHERS = 600
# similarity of vectors above which a text asks for the same as an example
SAME_MEANING = 0.95


@dataclass(frozen=True, slots=True)
class _PackageTexts:
    """The texts of one package."""

    # digest of these texts
    digest: str
    # the examples as written
    texts: frozenset[str]
    examples: list[TextSketch]
    counterexamples: list[TextSketch]
    synthetic: list[TextSketch]
    centre: Vector


# the inverse of a symmetric matrix, perhaps stored earlier
Invert = Callable[[NDArray[np.float64]], NDArray[np.float32]]


def inverted(matrix: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.linalg.inv(matrix).astype(np.float32)


_backgrounds: LruCache[str, BackgroundPrompts] = LruCache(4)
_texts_by_digest: LruCache[tuple[str, str], _PackageTexts] = LruCache(2000)
_probes: LruCache[tuple[str, ...], Probe] = LruCache(2000)


def probes(
    profiles: Sequence[AdapterProfile], embedder: Embedder, invert: Invert = inverted
) -> list[Probe]:
    """One probe for each profile, in the same order."""
    if not profiles:
        return []
    background = _backgrounds.get_or_make(
        embedder.name, lambda: BackgroundPrompts(ordinary_prompts(), embedder, invert)
    )
    packages = [_texts(profile, embedder) for profile in profiles]
    centres = np.stack([item.centre for item in packages])
    result = []
    for row, item in enumerate(packages):
        neighbours = _neighbours(packages, centres, row)
        key = (embedder.name, item.digest, *(other.digest for other in neighbours))
        training = ProbeExamples(
            item.examples, item.counterexamples, item.synthetic, *_others(item, neighbours)
        )
        result.append(_probes.get_or_make(key, partial(background.fit, training)))
    return result


def _texts(profile: AdapterProfile, embedder: Embedder) -> _PackageTexts:
    digest = texts_digest(profile)
    return _texts_by_digest.get_or_make(
        (embedder.name, digest), lambda: _read(profile, digest, embedder)
    )


def texts_digest(profile: AdapterProfile) -> str:
    """Digest of the texts that a probe is learnt from: equal for packages with equal texts."""
    texts = (profile.examples, profile.counterexamples, profile.keywords)
    few = len(profile.examples) < FEW_EXAMPLES
    extra = (profile.card.description, profile.card.name) if few else ()
    return sha256(repr((*texts, *extra)).encode()).hexdigest()


def _read(profile: AdapterProfile, digest: str, embedder: Embedder) -> _PackageTexts:
    texts = list(profile.examples[:MAX_EXAMPLES])
    misses = near_misses(profile.keywords, texts, _common())
    if len(texts) < FEW_EXAMPLES:
        texts += [profile.card.description, " ".join(profile.keywords), profile.card.name]
    examples = [sketch(text, embedder) for text in texts if text]
    counterexamples = [
        sketch(text, embedder) for text in profile.counterexamples[:MAX_EXAMPLES] if text
    ]
    synthetic = [sketch(text, embedder) for text in misses]
    centre = unit(np.sum([item.meaning for item in examples], axis=0, dtype=np.float32))
    return _PackageTexts(digest, frozenset(texts), examples, counterexamples, synthetic, centre)


@cache
def _common() -> Counter[str]:
    return word_counts(ordinary_prompts())


def _neighbours(
    packages: Sequence[_PackageTexts], centres: NDArray[np.float32], row: int
) -> list[_PackageTexts]:
    """The packages most similar to `row`, sorted by the digest of their texts; each text once, and
    none for the same prompts: a copy under another name is no evidence against the original."""
    neighbours: dict[str, _PackageTexts] = {}
    for other in np.argsort(-(centres @ centres[row]), kind="stable"):
        item = packages[other]
        if item.digest not in neighbours and not same_purpose(item.texts, packages[row].texts):
            neighbours[item.digest] = item
            if len(neighbours) == NEIGHBOURS:
                break
    return [neighbours[digest] for digest in sorted(neighbours)]


def _others(
    own: _PackageTexts, neighbours: Sequence[_PackageTexts]
) -> tuple[list[TextSketch], list[TextSketch]]:
    """The neighbours' examples, and their counterexamples, which are rarely for any adapter. A text
    that means nearly the same as one of our own examples is left out."""
    share = MAX_OTHERS // max(1, len(neighbours))
    examples = [example for item in neighbours for example in _spread(item.examples, share)]
    counterexamples = [text for item in neighbours for text in _spread(item.counterexamples, share)]
    if counterexamples:
        own_examples = np.stack([example.meaning for example in own.examples])
        alike = (np.stack([text.meaning for text in counterexamples]) @ own_examples.T).max(axis=1)
        counterexamples = [
            text for text, most in zip(counterexamples, alike, strict=True) if most < SAME_MEANING
        ]
    return examples, counterexamples


def _spread(items: Sequence[TextSketch], most: int) -> list[TextSketch]:
    """Items from the whole list: texts of one author are often next to each other."""
    count = min(most, len(items))
    return [items[index * len(items) // count] for index in range(count)]


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
# how often each frame is filled
PER_FRAME = 2
# phrases of the examples, in addition to the keywords
MAX_PHRASES = 10
# number of examples that must contain a phrase
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
    """`common` counts words in ordinary prompts. Empty if there are no keywords and no phrases."""
    topics = list(dict.fromkeys((*keywords, *phrases(examples, common))))
    if not topics:
        return []
    numbers = range(len(FRAMES) * PER_FRAME)
    return [FRAMES[number // PER_FRAME].format(topics[number % len(topics)]) for number in numbers]


def phrases(examples: Sequence[str], common: Counter[str]) -> list[str]:
    """Phrases of several examples that are rare in ordinary prompts, the most distinctive first."""
    counts: Counter[str] = Counter()
    for text in examples:
        counts.update(_runs([token.lower() for token in _TOKEN.findall(text)]))
    scores = {}
    for phrase, count in counts.items():
        parts = phrase.replace(",", "").split()
        if count >= _LEAST_EXAMPLES and not {parts[0], parts[-1]} & _SMALL:
            common_count = min(common[word] for word in parts)
            scores[phrase] = count * len(parts) ** 0.5 / (1 + common_count / 5)
    return sorted(scores, key=lambda phrase: (-scores[phrase], phrase))[:MAX_PHRASES]


def word_counts(texts: Iterable[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update({token.lower() for token in _TOKEN.findall(text)})
    return counts


def _runs(tokens: list[str]) -> set[str]:
    runs = set()
    for size in range(1, _MAX_PHRASE_WORDS + 1):
        for start in range(len(tokens) - size + 1):
            run = tokens[start : start + size]
            if run[0][0].isalnum() and run[-1][0].isalnum():
                runs.add(" ".join(run).replace(" ,", ","))
    return runs


_PROMPTS = Path(__file__).parent / "data" / "background.txt"
_RIDGE = 0.1
# weight of one row, compared with one ordinary prompt
FOR, AGAINST, SYNTHETIC, OTHERS = 2.0, 1.0, 0.3, 1.0


@dataclass(frozen=True, slots=True)
class ProbeExamples:
    """What one adapter's probe learns from, in addition to the background."""

    examples: Sequence[TextSketch]
    counterexamples: Sequence[TextSketch]
    # near misses made from frames
    synthetic: Sequence[TextSketch] = ()
    # examples of other adapters, and their near misses
    others: Sequence[TextSketch] = ()
    others_misses: Sequence[TextSketch] = ()


@dataclass(frozen=True, slots=True)
class Probe:
    """score = [1, form] @ joint @ [1, meaning] + words @ weights; about 1 for, -1 against."""

    # [1 + shape.DIM, 1 + dim]
    joint: NDArray[np.float16]
    # [NUM_BUCKETS], times `scale`: one byte per bucket, so that thousands of probes fit in memory
    words: NDArray[np.int8]
    scale: float


class BackgroundPrompts:
    """Ordinary prompts, which are for no adapter, and the inverse of their kernel."""

    def __init__(self, texts: Sequence[str], embedder: Embedder, invert: Invert = inverted) -> None:
        self._sketches = [sketch(text, embedder) for text in texts]
        self._rows = SketchRows(self._sketches)
        kernel = self._rows.alike(self._sketches).astype(np.float64) + 1.0
        self._inverse = invert(kernel + _RIDGE * np.eye(len(texts)))

    def fit(self, training: ProbeExamples) -> Probe:
        parts = (
            (training.examples, FOR), (training.counterexamples, AGAINST),
            (training.synthetic, SYNTHETIC), (training.others, OTHERS),
            (training.others_misses, OTHERS),
        )  # fmt: skip
        own = [item for part, _ in parts for item in part]
        weights = np.concatenate([np.full(len(part), each) for part, each in parts])
        targets = np.where(np.arange(len(own)) < len(training.examples), 1.0, -1.0)
        rows = SketchRows(own)
        inside = rows.alike(own).astype(np.float64) + 1.0 + np.diag(_RIDGE / weights)
        across = self._rows.alike(own) + np.float32(1.0)
        # block elimination: the targets of the background are all -1
        reduced = across @ self._inverse
        own_share = np.linalg.solve(inside - reduced @ across.T, targets + reduced.sum(axis=1))
        background_share = -self._inverse.sum(axis=1) - own_share @ reduced
        joint = _joint(rows, own_share) + _joint(self._rows, background_share)
        words = _words(rows, own_share) + _words(self._rows, background_share)
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
    words: NDArray[np.float64] = np.bincount(rows.grams, amounts, NUM_BUCKETS).astype(np.float64)
    return words


@cache
def ordinary_prompts() -> tuple[str, ...]:
    lines = _PROMPTS.read_text(encoding="utf-8").splitlines()
    return tuple(line.replace("\\n", "\n") for line in lines if line)
