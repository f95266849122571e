"""Who is chosen by content: of the matched adapters those that are likely enough, may be, and can
run together, in order of composition; and for each of the others why not.

A function of its arguments alone: the same matches, outcomes and wishes give the same decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coterie.core.adapters import MAX_STACK, AdapterProfile
from coterie.core.route_trace import Candidate
from coterie.routing.features import Features
from coterie.routing.protocols import Match
from coterie.routing.rules import compiled
from coterie.routing.score import Scorer, Worth
from coterie.routing.stack import (
    Lookup,
    called,
    conflict,
    first_conflict,
    means,
    too_long,
    with_required,
)

BELOW = "below threshold"
CHOSEN = "chosen"


@dataclass(frozen=True, slots=True)
class Wish:
    """What settings and caller allow."""

    threshold: float
    # most that are chosen by content; what those require comes on top
    max_chosen: int
    # most in the whole stack: the caller's own limit, where there is one
    max_stack: int = MAX_STACK
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class House:
    """What is installed, and which specialists an adapter fits, the preferred one first."""

    find: Lookup
    fits: Callable[[AdapterProfile], Sequence[str]]


@dataclass(slots=True)
class _Seen:
    """A candidate under judgement."""

    profile: AdapterProfile
    worth: Worth
    probability: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """`chosen` in order of composition; `primary` is the one that the prompt is for."""

    chosen: tuple[AdapterProfile, ...]
    primary: AdapterProfile | None
    # None = whoever answers by default
    specialist: str | None
    # of the choice, or of choosing nobody
    confidence: float
    candidates: tuple[Candidate, ...]


def decide(
    matches: Sequence[Match], features: Features, wish: Wish, house: House, scorer: Scorer
) -> Decision:
    seen = [item for match in matches if (item := _seen(match, house, scorer)) is not None]
    for item in seen:
        item.why = _bar(item, features, wish, house)
    allowed = [item for item in seen if not item.why]
    likely = sorted((s for s in allowed if s.probability >= wish.threshold), key=_rank)
    for item in allowed:
        item.why = BELOW
    stack = _Stack(wish, house, {item.profile.card.digest: item for item in seen}, scorer)
    for item in likely:
        item.why = stack.offer(item)
    primary = stack.primary
    best = max((item.probability for item in allowed), default=0.0)
    everyone = sorted([*seen, *stack.pulled_in], key=_rank)
    return Decision(
        chosen=stack.ordered(),
        primary=None if primary is None else primary.profile,
        specialist=stack.specialist,
        confidence=1.0 - best if primary is None else primary.probability,
        candidates=tuple(_told(item, stack) for item in everyone),
    )


def _seen(match: Match, house: House, scorer: Scorer) -> _Seen | None:
    """A matcher may be older than the catalog: what counts is what a name means now."""
    profile = house.find(match.profile.card.name)
    if profile is None or profile.card.name != match.profile.card.name:
        return None
    return _Seen(profile, scorer.worth(profile, match.similarity), match.probability)


def _bar(item: _Seen, features: Features, wish: Wish, house: House) -> str:
    if any(means(name, item.profile) for name in wish.exclude):
        return "excluded"
    if not house.fits(item.profile):
        return "made for another base model"
    rule = compiled(item.profile.router_hint)
    if rule is not None and not rule(features):
        return "its router_hint does not hold"
    return ""


def _rank(item: _Seen) -> tuple[float, str]:
    return -item.worth.score, item.profile.card.name


@dataclass(slots=True)
class _Stack:
    """Takes candidates, the best first, while they get along."""

    wish: Wish
    house: House
    seen: dict[str, _Seen]
    scorer: Scorer
    primary: _Seen | None = None
    specialist: str | None = None
    members: list[_Seen] = field(default_factory=list)
    pulled_in: list[_Seen] = field(default_factory=list)
    # chosen for themselves
    count: int = 0

    def offer(self, item: _Seen) -> str:
        """Takes it, with what it requires, or says why not."""
        profiles = [member.profile for member in self.members]
        if any(p.card.digest == item.profile.card.digest for p in profiles):
            # already there for another's sake, which it says
            return item.why
        if self.count >= self.wish.max_chosen:
            return f"beyond the limit of {self.wish.max_chosen}"
        rival = conflict(item.profile, profiles)
        if rival is not None:
            return f"incompatible with {rival.card.name}"
        whole = with_required([*profiles, item.profile], self.house.find)
        if isinstance(whole, str):
            return whole
        why, specialist = self._fault(whole, whole[len(profiles) + 1 :])
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
            able = all(self.specialist in self.house.fits(profile) for profile in whole)
            return ("" if able else "made for another base model"), self.specialist
        for name in self.house.fits(whole[0]):
            if all(name in self.house.fits(profile) for profile in whole):
                return "", name
        return "what it requires was made for another base model", None

    def _take(self, item: _Seen, needed: list[AdapterProfile], specialist: str | None) -> None:
        self.primary = self.primary or item
        self.specialist = specialist
        self.count += 1
        self.members.append(item)
        for profile in needed:
            known = self.seen.get(profile.card.digest)
            if known is None:
                known = _Seen(profile, self.scorer.worth(profile, 0.0), 0.0)
                self.pulled_in.append(known)
            known.why = f"required by {item.profile.card.name}"
            self.members.append(known)

    def ordered(self) -> tuple[AdapterProfile, ...]:
        members = sorted(self.members, key=lambda m: (m.profile.load_order, *_rank(m)))
        return tuple(member.profile for member in members)


def _told(item: _Seen, stack: _Stack) -> Candidate:
    worth = item.worth
    return Candidate(
        name=called(item.profile),
        digest=item.profile.card.digest,
        similarity=worth.similarity,
        success=worth.success,
        memory=worth.memory,
        score=worth.score,
        probability=item.probability,
        chosen=any(member is item for member in stack.members),
        why=item.why,
    )
