"""Who is chosen by content: of the matched adapters those that are likely enough, may be, and can
run together, in order of composition; and for each of the others why not.

A function of its arguments alone: the same matches, outcomes and wishes give the same decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from coterie.core.adapters import MAX_STACK, AdapterCard, AdapterProfile
from coterie.core.plan import Candidate
from coterie.core.settings import RoutingSettings
from coterie.routing.features.features import PromptFeatures
from coterie.routing.features.instruction import parted
from coterie.routing.features.language import UNKNOWN, detect
from coterie.routing.features.rules import compiled
from coterie.routing.protocols import AdapterMatch, OutcomeRates
from coterie.routing.resolve import (
    Lookup,
    conflict,
    first_conflict,
    full_name,
    means,
    same_purpose,
    too_long,
    with_required,
)

# of the likeliest one's odds: who has less is behind it whatever the scores say. A poor record must
# not hand a prompt to an adapter that is for something else
CLOSE_ODDS = 0.5
# what a further adapter must reach beside the first: of two that are half likely one is meant
SURE = 0.9
BELOW = "below threshold"
CHOSEN = "chosen"


@dataclass(frozen=True, slots=True)
class ChoiceLimits:
    """What settings and caller allow."""

    threshold: float
    # most that are chosen by content; what those require comes on top
    max_chosen: int
    # most in the whole stack: the caller's own limit, where there is one
    max_stack: int = MAX_STACK
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InstalledAdapters:
    """What is installed, and which specialists an adapter fits, the preferred one first."""

    # what every name means now, without aliases
    current: Mapping[str, AdapterProfile]
    find: Lookup
    fits: Callable[[AdapterCard], Sequence[str]]


@dataclass(slots=True)
class _ScoredCandidate:
    """A candidate under judgement."""

    profile: AdapterProfile
    similarity: float
    success: float
    memory: float
    score: float
    probability: float
    why: str = BELOW
    chosen: bool = False


@dataclass(frozen=True, slots=True)
class AdapterDecision:
    """`chosen` in order of composition; `primary` is the one that the prompt is for."""

    chosen: tuple[AdapterProfile, ...]
    primary: AdapterProfile | None
    # None = whoever answers by default
    specialist: str | None
    # of the choice, or of choosing nobody
    confidence: float
    candidates: tuple[Candidate, ...]


def decide(
    matches: Sequence[AdapterMatch],
    features: PromptFeatures,
    wish: ChoiceLimits,
    house: InstalledAdapters,
    scorer: AdapterScorer,
) -> AdapterDecision:
    seen: list[_ScoredCandidate] = []
    likely: list[_ScoredCandidate] = []
    best = 0.0
    for match in matches:
        # a matcher may be older than the catalog: what counts is what a name means now
        profile = house.current.get(match.profile.card.name)
        if profile is None:
            continue
        item = _ScoredCandidate(
            profile,
            match.similarity,
            *scorer.worth(profile, match.similarity),
            match.probability,
        )
        seen.append(item)
        bar = _bar(profile, features, wish, house)
        if bar:
            item.why = bar
            continue
        best = max(best, match.probability)
        if match.probability >= wish.threshold:
            likely.append(item)
    stack = _StackBuilder(wish, house, seen, scorer)
    close = CLOSE_ODDS * _odds(max((item.probability for item in likely), default=0.0))
    for item in sorted(likely, key=lambda item: (_odds(item.probability) < close, *_rank(item))):
        item.why = stack.offer(item)
    primary = stack.primary
    return AdapterDecision(
        chosen=stack.ordered(),
        primary=None if primary is None else primary.profile,
        specialist=stack.specialist,
        confidence=1.0 - best if primary is None else primary.probability,
        candidates=tuple(_candidate_of(item) for item in sorted(seen, key=_rank)),
    )


def _bar(
    profile: AdapterProfile, features: PromptFeatures, wish: ChoiceLimits, house: InstalledAdapters
) -> str:
    if wish.exclude and any(means(name, profile) for name in wish.exclude):
        return "excluded"
    if not house.fits(profile.card):
        return "made for another base model"
    served = languages_of(profile)
    if features.language not in (UNKNOWN, *served):
        return f"serves {', '.join(served)}, the prompt is in {features.language}"
    rule = compiled(profile.router_hint) if profile.router_hint else None
    if rule is not None and not rule(features):
        return "its router_hint does not hold"
    return ""


def _no_company(item: _ScoredCandidate, first: _ScoredCandidate) -> str:
    """Why a likely one is not composed with the first, "" if it is."""
    one, other = item.profile, first.profile
    alike = bool(one.examples) and same_purpose(one.examples, other.examples)
    if one.card.digest == other.card.digest or alike:
        return f"for the same prompts as {other.card.name}"
    close = _odds(item.probability) >= CLOSE_ODDS * _odds(first.probability)
    if min(item.probability, first.probability) >= SURE and close:
        return ""
    return f"less likely than {other.card.name}"


def _odds(probability: float) -> float:
    return probability / max(1.0 - probability, 1e-6)


def _rank(item: _ScoredCandidate) -> tuple[float, str]:
    return -item.score, item.profile.card.name


@dataclass(slots=True)
class _StackBuilder:
    """Takes candidates, the best first, while they get along."""

    wish: ChoiceLimits
    house: InstalledAdapters
    # everyone that was looked at; what is pulled in joins them
    seen: list[_ScoredCandidate]
    scorer: AdapterScorer
    primary: _ScoredCandidate | None = None
    specialist: str | None = None
    members: list[_ScoredCandidate] = field(default_factory=list)
    # chosen for themselves
    count: int = 0

    def offer(self, item: _ScoredCandidate) -> str:
        """Takes it, with what it requires, or says why not."""
        if item.chosen:
            # already there for another's sake, which it says
            return item.why
        profiles = [member.profile for member in self.members]
        if self.count >= self.wish.max_chosen:
            return f"beyond the limit of {self.wish.max_chosen}"
        rival = conflict(item.profile, profiles)
        if rival is not None:
            return f"incompatible with {rival.card.name}"
        whole = with_required([*profiles, item.profile], self.house.find)
        if isinstance(whole, str):
            return whole
        why, specialist = self._fault(whole, whole[len(profiles) + 1 :])
        if not why and self.primary is not None:
            why = _no_company(item, self.primary)
        if why:
            return why
        self._take(item, whole[len(profiles) + 1 :], specialist)
        return CHOSEN

    def _fault(
        self, whole: list[AdapterProfile], needed: list[AdapterProfile]
    ) -> tuple[str, str | None]:
        if len(whole) > self.wish.max_stack:
            return f"needs {len(whole)} experts, and {self.wish.max_stack} are allowed", None
        for profile in needed:
            if any(means(name, profile) for name in self.wish.exclude):
                return f"requires {profile.card.name}, which is excluded", None
        pair = first_conflict(whole)
        if pair is not None:
            return f"{pair[0].card.name} is incompatible with {pair[1].card.name}", None
        short = too_long(whole)
        if short is not None:
            return f"{short.card.name} takes at most {short.max_chain} together", None
        if self.specialist is not None:
            able = all(self.specialist in self.house.fits(profile.card) for profile in whole)
            return ("" if able else "made for another base model"), self.specialist
        for name in self.house.fits(whole[0].card):
            if all(name in self.house.fits(profile.card) for profile in whole):
                return "", name
        return "what it requires was made for another base model", None

    def _take(
        self, item: _ScoredCandidate, needed: list[AdapterProfile], specialist: str | None
    ) -> None:
        self.primary = self.primary or item
        self.specialist = specialist
        self.count += 1
        self._join(item)
        known = {other.profile.card.digest: other for other in self.seen} if needed else {}
        for profile in needed:
            other = known.get(profile.card.digest)
            if other is None:
                other = _ScoredCandidate(profile, 0.0, *self.scorer.worth(profile, 0.0), 0.0)
                self.seen.append(other)
            other.why = f"required by {item.profile.card.name}"
            self._join(other)

    def _join(self, item: _ScoredCandidate) -> None:
        item.chosen = True
        self.members.append(item)

    def ordered(self) -> tuple[AdapterProfile, ...]:
        members = sorted(self.members, key=lambda m: (m.profile.load_order, *_rank(m)))
        return tuple(member.profile for member in members)


def _candidate_of(item: _ScoredCandidate) -> Candidate:
    profile = item.profile
    return Candidate(
        full_name(profile),
        profile.card.digest,
        item.similarity,
        item.success,
        item.memory,
        item.score,
        item.probability,
        item.chosen,
        item.why,
    )


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


# verdicts that a prior counts for
PRIOR_VERDICTS = 20
# between an author's priority of 0 and of 1
PRIORITY_SPAN = 0.1


class AdapterScorer:
    """Of one request: `budget_bytes` is the room for adapters, `usual_quality` stands for what a
    package without figures would reach."""

    def __init__(
        self,
        settings: RoutingSettings,
        outcomes: OutcomeRates,
        usual_quality: float,
        budget_bytes: int,
    ) -> None:
        self._settings, self._outcomes = settings, outcomes
        self._usual, self._budget = usual_quality, budget_bytes

    def worth(self, profile: AdapterProfile, similarity: float) -> tuple[float, float, float]:
        """(success, memory, score)."""
        settings, card = self._settings, profile.card
        prior = self._usual if profile.quality is None else profile.quality
        valid, judged = self._outcomes.rate(card.digest)
        success = smoothed(valid, judged, prior)
        memory = room_left(card.nbytes, self._budget)
        score = (
            settings.similarity_weight * similarity
            + settings.success_weight * success
            + settings.memory_weight * memory
            + PRIORITY_SPAN * (profile.priority - 0.5)
        )
        return success, memory, score


def smoothed(valid: int, judged: int, prior: float) -> float:
    """A rate that begins at `prior` and moves with every verdict: a new adapter is neither buried
    by one failure nor favoured by one success."""
    return (valid + PRIOR_VERDICTS * prior) / (judged + PRIOR_VERDICTS)


def room_left(nbytes: int, budget_bytes: int) -> float:
    """Share of the budget that stays free beside the adapter, 0 where it does not fit."""
    if nbytes >= budget_bytes:
        return 0.0
    return 1.0 - max(nbytes, 0) / budget_bytes
