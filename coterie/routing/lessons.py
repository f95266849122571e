"""What each adapter's probe learns from: its package's examples, and those of its neighbours.

Probes are kept by the texts they depend on, so that a catalog that changes a little is learnt again
only where it changed: the same weights may be packed again with other hints. Knows no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from coterie.core.adapters import AdapterProfile
from coterie.routing.embed import Embedder, Vector, unit
from coterie.routing.kept import KeptCache
from coterie.routing.probe import Background, Lesson, Probe, ordinary_prompts
from coterie.routing.sketch import Sketch, sketch

# of one package
MAX_EXAMPLES = 100
# below it a package's description and keywords are examples too
FEW_EXAMPLES = 5
# neighbours whose examples are held against an adapter, and rows of all of them
NEIGHBOURS = 16
MAX_OTHERS = 96


@dataclass(frozen=True, slots=True)
class _Said:
    """The texts of one package."""

    # of these texts
    digest: str
    examples: list[Sketch]
    counterexamples: list[Sketch]
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
        near = [said[other] for other in _neighbours(centres, row)]
        key = (embedder.name, item.digest, *(other.digest for other in near))
        lesson = Lesson(item.examples, item.counterexamples, _others(near))
        made.append(_probes.get(key, partial(background.fit, lesson)))
    return made


def _texts(profile: AdapterProfile, embedder: Embedder) -> _Said:
    digest = _digest(profile)
    return _said.get((embedder.name, digest), lambda: _read(profile, digest, embedder))


def _digest(profile: AdapterProfile) -> str:
    card = profile.card
    texts = (profile.examples, profile.counterexamples, profile.keywords, card.description)
    return sha256(repr((*texts, card.name)).encode()).hexdigest()


def _read(profile: AdapterProfile, digest: str, embedder: Embedder) -> _Said:
    texts = list(profile.examples[:MAX_EXAMPLES])
    if len(texts) < FEW_EXAMPLES:
        texts += [profile.card.description, " ".join(profile.keywords), profile.card.name]
    examples = [sketch(text, embedder) for text in texts if text]
    against = [sketch(text, embedder) for text in profile.counterexamples[:MAX_EXAMPLES] if text]
    centre = unit(np.sum([item.meaning for item in examples], axis=0, dtype=np.float32))
    return _Said(digest, examples, against, centre)


def _neighbours(centres: NDArray[np.float32], row: int) -> list[int]:
    """The rows most like `row`, without it, in their order."""
    alike = centres @ centres[row]
    alike[row] = -2.0
    count = min(NEIGHBOURS, len(alike) - 1)
    return sorted(int(other) for other in np.argsort(-alike, kind="stable")[:count])


def _others(near: Sequence[_Said]) -> list[Sketch]:
    share = MAX_OTHERS // max(1, len(near))
    return [example for item in near for example in item.examples[:share]]
