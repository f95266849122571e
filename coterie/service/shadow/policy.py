"""Which requests get a shadow: unsure ones, those of fresh specialists and adapters, and a sample
for each demoted specialist, which is never cut.

A draw depends only on the request's id, so that a decision can be made again bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from coterie.core.quick_init import quick_init

# the share that is shadowed of fresh specialists under a spike, in relation to the usual one
SPIKE_FRESH = 0.25

UNSURE, FRESH, SAMPLE = "unsure", "fresh", "sample"


def draw(request_id: str, purpose: str) -> float:
    """A number from 0 to 1 (1 excluded) that is always the same for one request and purpose."""
    digest = blake2b(request_id.encode(), digest_size=8, person=purpose.encode()[:16]).digest()
    return int.from_bytes(digest, "little") / 2**64


@quick_init
@dataclass(frozen=True, slots=True)
class ShadowFacts:
    """What the policy knows about one request."""

    request_id: str
    confidence: float
    # after a spike has changed it
    shadow_below: float
    high_stakes: bool = False
    # too few answers of the specialist or of one of its adapters were judged
    is_fresh: bool = False
    # a spike cuts all shadows but the sample of demoted specialists
    under_spike: bool = False
    # the specialist that would answer is demoted
    is_demoted: bool = False


@dataclass(frozen=True, slots=True)
class ShadowPolicy:
    fresh_share: float
    sample_share: float

    def why(self, facts: ShadowFacts) -> str:
        """Why the request gets a shadow: `unsure`, `fresh`, `sample`; empty = it gets none."""
        if facts.is_demoted:
            return SAMPLE if draw(facts.request_id, "sample") < self.sample_share else ""
        if facts.confidence < self.threshold(facts):
            return UNSURE
        if facts.is_fresh:
            share = self.fresh_share * (SPIKE_FRESH if facts.under_spike else 1.0)
            return FRESH if draw(facts.request_id, "fresh") < share else ""
        return ""

    def threshold(self, facts: ShadowFacts) -> float:
        """Of a high-stakes intent half as many requests as usual go without a shadow."""
        if not facts.high_stakes:
            return facts.shadow_below
        return facts.shadow_below + (1 - facts.shadow_below) / 2
