"""Chooses adapters by content. Of the matched adapters, takes those that are likely enough,
allowed, and able to run together, in order of composition; gives the reason for each of the others.

Depends only on its arguments: the same matches, outcomes and limits give the same decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from coterie.core.adapters import MAX_STACK, AdapterCard, AdapterProfile
from coterie.core.plan import Candidate
from coterie.core.quick_init import quick_init
from coterie.core.settings import RoutingSettings
from coterie.routing.features.features import PromptFeatures
from coterie.routing.features.instruction import split_material
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

# share of the highest odds: an adapter below it is ranked after the most likely one, whatever the
# scores. Poor results of an adapter must not give its prompts to one with another purpose
CLOSE_ODDS = 0.5
# least probability of a further adapter and of the first: if both are half likely, only one is
# meant
MIN_PROBABILITY_TOGETHER = 0.9
BELOW = "below threshold"
CHOSEN, CHOSEN_FOR_PART = "chosen", "chosen for a part of the prompt"
EXCLUDED, NO_HINT, OTHER_LANGUAGE = "excluded", "its router_hint does not hold", "serves "
OTHER_BASE, NOT_HERE = "made for another base model", "not for this specialist"


@quick_init
@dataclass(frozen=True, slots=True)
class ChoiceLimits:
    """What the settings and the caller allow."""

    threshold: float
    # most adapters chosen by content; those that they require are not counted
    max_chosen: int
    # most adapters in the whole stack: the caller's limit, if there is one
    max_stack: int = MAX_STACK
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InstalledAdapters:
    """The installed adapters, and the specialists that an adapter fits, the preferred one first."""

    # the current version of every name, without aliases
    current: Mapping[str, AdapterProfile]
    find: Lookup
    fits: Callable[[AdapterCard], Sequence[str]]
    # what is said of an adapter that fits none
    unfit: str = OTHER_BASE


@dataclass(slots=True)
class ScoredAdapter:
    """A matched adapter with its scores, before the decision."""

    profile: AdapterProfile
    similarity: float
    success: float
    memory: float
    score: float
    probability: float
    # why it cannot be chosen for this request, one of the texts of `_exclusion_reason`; "" = it may
    excluded: str = ""
    # probability for a part of the prompt that no other adapter is for; 0 = there is no such part
    part: float = 0.0


@dataclass(slots=True)
class _ScoredCandidate:
    """A candidate with its scores, while it is decided on."""

    profile: AdapterProfile
    similarity: float
    success: float
    memory: float
    score: float
    probability: float
    part: float
    # the prompt has two tasks, and it is for one of them
    has_own_task: bool = False
    why: str = BELOW
    chosen: bool = False

    @property
    def likelihood(self) -> float:
        """Decides whether it is chosen."""
        return max(self.probability, self.part) if self.has_own_task else self.probability


@quick_init
@dataclass(frozen=True, slots=True)
class AdapterDecision:
    """`chosen` is in order of composition; `primary` is the adapter that the prompt is for."""

    chosen: tuple[AdapterProfile, ...]
    primary: AdapterProfile | None
    # None = the default specialist
    specialist: str | None
    # in the chosen adapter, or in choosing none
    confidence: float
    candidates: tuple[Candidate, ...]
    # chosen adapters that are each for a task of their own; () = the prompt has one task
    by_task: tuple[AdapterProfile, ...] = ()


def decide(
    matches: Sequence[AdapterMatch],
    features: PromptFeatures,
    limits: ChoiceLimits,
    installed: InstalledAdapters,
    scorer: AdapterScorer,
) -> AdapterDecision:
    items: list[ScoredAdapter] = []
    for match in matches:
        # a matcher may be older than the catalog: the current version counts
        profile = installed.current.get(match.profile.card.name)
        if profile is None:
            continue
        scores = scorer.scores(profile, match.similarity)
        reason = _exclusion_reason(profile, features, limits, installed)
        items.append(
            ScoredAdapter(profile, match.similarity, *scores, match.probability, reason, match.part)
        )
    return choose(items, limits, installed, scorer)


def choose(
    items: Sequence[ScoredAdapter],
    limits: ChoiceLimits,
    installed: InstalledAdapters,
    scorer: AdapterScorer,
) -> AdapterDecision:
    """The decision, from adapters with their scores; a logged one can be made again from them."""
    candidates: list[_ScoredCandidate] = []
    likely: list[_ScoredCandidate] = []
    best = 0.0
    tasks = sum(not item.excluded and item.part >= limits.threshold for item in items)
    for scored in items:
        item = _ScoredCandidate(
            scored.profile,
            scored.similarity,
            scored.success,
            scored.memory,
            scored.score,
            scored.probability,
            scored.part,
        )
        candidates.append(item)
        if scored.excluded:
            item.why = scored.excluded
            continue
        if tasks > 1 and scored.part >= limits.threshold:
            item.has_own_task = True
        best = max(best, item.likelihood)
        if item.likelihood >= limits.threshold:
            likely.append(item)
    stack = _StackBuilder(limits, installed, candidates, scorer)
    close = CLOSE_ODDS * _odds(max((item.likelihood for item in likely), default=0.0))
    for item in sorted(likely, key=lambda item: (_odds(item.likelihood) < close, *_rank(item))):
        item.why = stack.try_add(item)
    primary = stack.primary
    return AdapterDecision(
        chosen=stack.ordered(),
        primary=None if primary is None else primary.profile,
        specialist=stack.specialist,
        confidence=1.0 - best if primary is None else primary.likelihood,
        candidates=tuple(_candidate_of(item) for item in sorted(candidates, key=_rank)),
        by_task=stack.by_task(),
    )


def exclusion_in(why: str) -> str:
    """`why` if a candidate with this reason was excluded before the decision, else ""."""
    is_exclusion = why in (EXCLUDED, OTHER_BASE, NOT_HERE, NO_HINT) or why.startswith(
        OTHER_LANGUAGE
    )
    return why if is_exclusion else ""


def _exclusion_reason(
    profile: AdapterProfile,
    features: PromptFeatures,
    limits: ChoiceLimits,
    installed: InstalledAdapters,
) -> str:
    if limits.exclude and any(means(name, profile) for name in limits.exclude):
        return EXCLUDED
    served = languages_of(profile)
    if features.language not in (UNKNOWN, *served):
        return f"{OTHER_LANGUAGE}{', '.join(served)}, the prompt is in {features.language}"
    rule = compiled(profile.router_hint) if profile.router_hint else None
    if rule is not None and not rule(features):
        return NO_HINT
    # last: it depends on the specialist, the others on the prompt alone
    return "" if installed.fits(profile.card) else installed.unfit


def _why_not_together(item: _ScoredCandidate, first: _ScoredCandidate) -> str:
    """Why a likely adapter is not composed with the first; "" if it is."""
    one, other = item.profile, first.profile
    alike = bool(one.examples) and same_purpose(one.examples, other.examples)
    if one.card.digest == other.card.digest or alike:
        return f"for the same prompts as {other.card.name}"
    if item.has_own_task and first.has_own_task:
        return ""
    close = _odds(item.probability) >= CLOSE_ODDS * _odds(first.probability)
    if min(item.probability, first.probability) >= MIN_PROBABILITY_TOGETHER and close:
        return ""
    return f"less likely than {other.card.name}"


def _odds(probability: float) -> float:
    return probability / max(1.0 - probability, 1e-6)


def _rank(item: _ScoredCandidate) -> tuple[float, str]:
    return -item.score, item.profile.card.name


@dataclass(slots=True)
class _StackBuilder:
    """Adds candidates, the best first, as long as they can run together."""

    limits: ChoiceLimits
    installed: InstalledAdapters
    # all candidates; required adapters are added to them
    candidates: list[_ScoredCandidate]
    scorer: AdapterScorer
    primary: _ScoredCandidate | None = None
    specialist: str | None = None
    members: list[_ScoredCandidate] = field(default_factory=list)
    # chosen by content, without those that are required
    count: int = 0

    def try_add(self, item: _ScoredCandidate) -> str:
        """Adds it with the adapters it requires, or returns why not."""
        if item.chosen:
            # already added because another one requires it; `why` says so
            return item.why
        profiles = [member.profile for member in self.members]
        if self.count >= self.limits.max_chosen:
            return f"beyond the limit of {self.limits.max_chosen}"
        rival = conflict(item.profile, profiles)
        if rival is not None:
            return f"incompatible with {rival.card.name}"
        whole = with_required([*profiles, item.profile], self.installed.find)
        if isinstance(whole, str):
            return whole
        why, specialist = self._why_impossible(whole, whole[len(profiles) + 1 :])
        if not why and self.primary is not None:
            why = _why_not_together(item, self.primary)
        if why:
            return why
        self._add(item, whole[len(profiles) + 1 :], specialist)
        return CHOSEN_FOR_PART if item.has_own_task else CHOSEN

    def _why_impossible(
        self, whole: list[AdapterProfile], needed: list[AdapterProfile]
    ) -> tuple[str, str | None]:
        if len(whole) > self.limits.max_stack:
            return f"needs {len(whole)} experts, and {self.limits.max_stack} are allowed", None
        for profile in needed:
            if any(means(name, profile) for name in self.limits.exclude):
                return f"requires {profile.card.name}, which is excluded", None
        pair = first_conflict(whole)
        if pair is not None:
            return f"{pair[0].card.name} is incompatible with {pair[1].card.name}", None
        short = too_long(whole)
        if short is not None:
            return f"{short.card.name} takes at most {short.max_chain} together", None
        if self.specialist is not None:
            able = all(self.specialist in self.installed.fits(profile.card) for profile in whole)
            return ("" if able else "made for another base model than the first"), self.specialist
        for name in self.installed.fits(whole[0].card):
            if all(name in self.installed.fits(profile.card) for profile in whole):
                return "", name
        return "what it requires was made for another base model", None

    def _add(
        self, item: _ScoredCandidate, needed: list[AdapterProfile], specialist: str | None
    ) -> None:
        self.primary = self.primary or item
        self.specialist = specialist
        self.count += 1
        self._append(item)
        by_digest = (
            {other.profile.card.digest: other for other in self.candidates} if needed else {}
        )
        for profile in needed:
            other = by_digest.get(profile.card.digest)
            if other is None:
                other = _ScoredCandidate(profile, 0.0, *self.scorer.scores(profile, 0.0), 0.0, 0.0)
                self.candidates.append(other)
            other.why = f"required by {item.profile.card.name}"
            self._append(other)

    def _append(self, item: _ScoredCandidate) -> None:
        item.chosen = True
        self.members.append(item)

    def ordered(self) -> tuple[AdapterProfile, ...]:
        members = sorted(self.members, key=lambda m: (m.profile.load_order, *_rank(m)))
        return tuple(member.profile for member in members)

    def by_task(self) -> tuple[AdapterProfile, ...]:
        able = [member.profile for member in self.members if member.has_own_task]
        return tuple(able) if len(able) > 1 else ()


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
        item.part,
    )


DEFAULT = "en"
# share of its examples in a language that makes it one of its languages: detection makes errors
MIN_LANGUAGE_SHARE = 0.2


def languages_of(profile: AdapterProfile) -> tuple[str, ...]:
    return profile.languages or _languages_in(profile.examples)


@lru_cache(maxsize=20_000)
def _languages_in(examples: tuple[str, ...]) -> tuple[str, ...]:
    counts = Counter(detect(split_material(text)[0]) for text in examples)
    least = max(1.0, MIN_LANGUAGE_SHARE * len(examples))
    often = (name for name, count in sorted(counts.items()) if count >= least)
    return (DEFAULT, *(name for name in often if name not in (DEFAULT, UNKNOWN)))


# how many verdicts the prior counts as
PRIOR_VERDICTS = 20
# difference in score between an author's priority of 0 and of 1
PRIORITY_SPAN = 0.1


class AdapterScorer:
    """For one request: `budget_bytes` is the memory for adapters, `usual_quality` is assumed for a
    package without figures."""

    def __init__(
        self,
        settings: RoutingSettings,
        outcomes: OutcomeRates,
        usual_quality: float,
        budget_bytes: int,
    ) -> None:
        self._settings, self._outcomes = settings, outcomes
        self._usual, self._budget = usual_quality, budget_bytes

    def scores(self, profile: AdapterProfile, similarity: float) -> tuple[float, float, float]:
        """(success, memory, score)."""
        settings, card = self._settings, profile.card
        prior = self._usual if profile.quality is None else profile.quality
        valid, num_judged = self._outcomes.rate(card.digest)
        success = smoothed(valid, num_judged, prior)
        memory = free_share(card.nbytes, self._budget)
        return success, memory, score_of(profile, similarity, success, memory, settings)


def score_of(
    profile: AdapterProfile,
    similarity: float,
    success: float,
    memory: float,
    settings: RoutingSettings,
) -> float:
    return (
        settings.similarity_weight * similarity
        + settings.success_weight * success
        + settings.memory_weight * memory
        + PRIORITY_SPAN * (profile.priority - 0.5)
    )


class StoredScorer(AdapterScorer):
    """Gives the figures that adapters had when a decision was made. `stored`: success and memory by
    name@version; another adapter has those of today."""

    def __init__(
        self,
        settings: RoutingSettings,
        stored: Mapping[str, tuple[float, float]],
        today: AdapterScorer,
    ) -> None:
        self._settings, self._stored, self._today = settings, stored, today

    def scores(self, profile: AdapterProfile, similarity: float) -> tuple[float, float, float]:
        found = self._stored.get(full_name(profile))
        if found is None:
            return self._today.scores(profile, similarity)
        return *found, score_of(profile, similarity, *found, self._settings)


def smoothed(valid: int, judged: int, prior: float) -> float:
    """A rate that starts at `prior` and moves with every verdict: one failure or one success
    changes the rate of a new adapter only a little."""
    return (valid + PRIOR_VERDICTS * prior) / (judged + PRIOR_VERDICTS)


def free_share(nbytes: int, budget_bytes: int) -> float:
    """Share of the budget that stays free next to the adapter; 0 if it does not fit."""
    if nbytes >= budget_bytes:
        return 0.0
    return 1.0 - max(nbytes, 0) / budget_bytes
