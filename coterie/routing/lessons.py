"""What each adapter's probe learns from: its package's examples, and those of its neighbours.

Probes are kept by the texts they depend on, so that a catalog that changes a little is learnt again
only where it changed: the same weights may be packed again with other hints. Knows no request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from coterie.core.adapters import AdapterProfile
from coterie.routing.embed import Embedder, Vector, unit
from coterie.routing.kept import KeptCache
from coterie.routing.near_misses import near_misses, word_counts
from coterie.routing.probe import Background, Lesson, Probe, ordinary_prompts
from coterie.routing.sketch import Sketch, sketch
from coterie.routing.stack import same_purpose

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
class _Said:
    """The texts of one package."""

    # of these texts
    digest: str
    # the examples as they are written
    texts: frozenset[str]
    examples: list[Sketch]
    counterexamples: list[Sketch]
    made_up: list[Sketch]
    centre: Vector


_backgrounds: KeptCache[Background] = KeptCache(4)
_said: KeptCache[_Said] = KeptCache(2000)
_probes: KeptCache[Probe] = KeptCache(2000)


def probes(profiles: Sequence[AdapterProfile], embedder: Embedder) -> list[Probe]:
    """One for each profile, in their order."""
    if not profiles:
        return []
    background = _backgrounds.get(embedder.name, lambda: Background(ordinary_prompts(), embedder))
    said = [_texts(profile, embedder) for profile in profiles]
    centres = np.stack([item.centre for item in said])
    made = []
    for row, item in enumerate(said):
        near = _neighbours(said, centres, row)
        key = (embedder.name, item.digest, *(other.digest for other in near))
        lesson = Lesson(item.examples, item.counterexamples, item.made_up, *_others(item, near))
        made.append(_probes.get(key, partial(background.fit, lesson)))
    return made


def _texts(profile: AdapterProfile, embedder: Embedder) -> _Said:
    digest = said_by(profile)
    return _said.get((embedder.name, digest), lambda: _read(profile, digest, embedder))


def said_by(profile: AdapterProfile) -> str:
    """The digest of what a probe is learnt from: of two packages that say the same, one digest."""
    texts = (profile.examples, profile.counterexamples, profile.keywords)
    few = len(profile.examples) < FEW_EXAMPLES
    also = (profile.card.description, profile.card.name) if few else ()
    return sha256(repr((*texts, *also)).encode()).hexdigest()


def _read(profile: AdapterProfile, digest: str, embedder: Embedder) -> _Said:
    texts = list(profile.examples[:MAX_EXAMPLES])
    misses = near_misses(profile.keywords, texts, _common())
    if len(texts) < FEW_EXAMPLES:
        texts += [profile.card.description, " ".join(profile.keywords), profile.card.name]
    examples = [sketch(text, embedder) for text in texts if text]
    against = [sketch(text, embedder) for text in profile.counterexamples[:MAX_EXAMPLES] if text]
    made_up = [sketch(text, embedder) for text in misses]
    centre = unit(np.sum([item.meaning for item in examples], axis=0, dtype=np.float32))
    return _Said(digest, frozenset(texts), examples, against, made_up, centre)


@cache
def _common() -> Counter[str]:
    return word_counts(ordinary_prompts())


def _neighbours(said: Sequence[_Said], centres: NDArray[np.float32], row: int) -> list[_Said]:
    """Those most like `row`, in the order of their texts' digests; each text once, and none that is
    for the same prompts: a copy under another name is no evidence against the original."""
    found: dict[str, _Said] = {}
    for other in np.argsort(-(centres @ centres[row]), kind="stable"):
        item = said[other]
        if item.digest not in found and not same_purpose(item.texts, said[row].texts):
            found[item.digest] = item
            if len(found) == NEIGHBOURS:
                break
    return [found[digest] for digest in sorted(found)]


def _others(own: _Said, near: Sequence[_Said]) -> tuple[list[Sketch], list[Sketch]]:
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


def _spread(items: Sequence[Sketch], most: int) -> list[Sketch]:
    """From the whole of them: one hand's texts often stand together."""
    count = min(most, len(items))
    return [items[place * len(items) // count] for place in range(count)]
