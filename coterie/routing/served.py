"""Which languages an adapter is for: those its package names, else English and its examples' own.

A prompt in another language is the base model's: nobody has measured the adapter there.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from coterie.core.adapters import AdapterProfile
from coterie.routing.instruction import parted
from coterie.routing.language import UNKNOWN, detect

DEFAULT = "en"
# of its examples, to count as one of its languages: detection errs now and then
LEAST_SHARE = 0.2


def languages_of(profile: AdapterProfile) -> tuple[str, ...]:
    return profile.languages or _spoken(profile.examples)


@lru_cache(maxsize=20_000)
def _spoken(examples: tuple[str, ...]) -> tuple[str, ...]:
    found = Counter(detect(parted(text)[0]) for text in examples)
    least = max(1.0, LEAST_SHARE * len(examples))
    often = (name for name, count in sorted(found.items()) if count >= least)
    return (DEFAULT, *(name for name in often if name not in (DEFAULT, UNKNOWN)))
