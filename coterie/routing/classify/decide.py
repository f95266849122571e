"""Decides which specialist a prompt is for. Pure: the same input, served intents and router give
the same decision, so that a logged one can be made again.

First a declared intent, then a structure that a specialist serves, then the trained router.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from coterie.core.errors import InvalidRequest
from coterie.core.plan import AlternateSpecialist, ClassifierInput
from coterie.core.quick_init import quick_init
from coterie.routing.classify.structure import STRUCTURES
from coterie.routing.classify.trained import REJECT, TrainedRouter

# confidence where a structure decided: it is a rule, and the text around it may ask for another
STRUCTURE_CONFIDENCE = 0.9
MAX_ALTERNATES = 3
MAX_LISTED = 12


@dataclass(frozen=True, slots=True)
class ServedIntents:
    """Which specialists serve which intent, the first in order of configuration first. A
    specialist's own name is an intent too."""

    # answers what is for no other
    default: str
    specialists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # the first intent that the default lists: that of prompts which are for no other
    default_intent: str = ""

    @classmethod
    def of(cls, listed: Iterable[tuple[str, Iterable[str]]]) -> ServedIntents:
        """From (specialist, its intents) in order of configuration; the first is the default."""
        entries = [(name, tuple(intents)) for name, intents in listed]
        known: dict[str, list[str]] = {}
        for name, intents in entries:
            for intent in intents:
                if name not in known.setdefault(intent, []):
                    known[intent].append(name)
        for name, _ in entries:
            known.setdefault(name, [name])
        default, own = entries[0]
        served = {intent: tuple(names) for intent, names in known.items()}
        return cls(default, served, own[0] if own else "")

    def limited_to(self, allowed: Collection[str]) -> ServedIntents:
        """Without the specialists that a tenant may not use; empty = it may use all."""
        if not allowed:
            return self
        kept = {
            intent: tuple(name for name in names if name in allowed)
            for intent, names in self.specialists.items()
        }
        if self.default in allowed:
            return ServedIntents(self.default, kept, self.default_intent)
        first = next((name for names in kept.values() for name in names), self.default)
        return ServedIntents(first, kept)

    def can_route(self, labels: Iterable[str]) -> bool:
        """Whether a label leads to another specialist than the default."""
        return any(set(self.specialists.get(label, ())) - {self.default} for label in labels)

    def serves_structure(self) -> bool:
        return any(self.specialists.get(name) for name in STRUCTURES)


@quick_init
@dataclass(frozen=True, slots=True)
class SpecialistDecision:
    specialist: str
    # "" = none is known
    intent: str
    # calibrated, if the trained router decided
    confidence: float
    reason: str
    # the most likely first
    alternates: tuple[AlternateSpecialist, ...] = ()


def decide(
    given: ClassifierInput, served: ServedIntents, router: TrainedRouter | None
) -> SpecialistDecision:
    """`router` is None if none was trained; its `version` belongs to the decision."""
    likely = {} if router is None else _by_specialist(given, served, router)
    viable_at = 1.0 if router is None else router.calibration.viable_at
    if given.declared:
        names = declared(given.declared, served)
        return _chosen(names, given.declared, 1.0, "declared intent", likely, viable_at)
    for structure in given.structures:
        if names := served.specialists.get(structure, ()):
            reason = f"the text contains: {structure}"
            return _chosen(names, structure, STRUCTURE_CONFIDENCE, reason, likely, viable_at)
    if router is None:
        return SpecialistDecision(
            served.default, served.default_intent, 1.0, "default specialist: no trained router"
        )
    best = next(iter(likely))
    probability, label = likely[best]
    for name, (chance, its_label) in likely.items():
        if chance > probability:
            best, probability, label = name, chance, its_label
    names = () if label == REJECT else served.specialists.get(label, ())
    what = f"classified as {label}"
    if label == REJECT:
        what = "no specialist is for this prompt"
    elif not names:
        what += f", for which the caller has no specialist: {best} answers"
    reason = f"{what}, probability {probability:.2f} (router {router.version})"
    intent = label if names else served.default_intent
    names = names or (best,)
    return _chosen(names, intent, probability, reason, likely, viable_at)


def declared(intent: str, served: ServedIntents) -> tuple[str, ...]:
    """The specialists that serve a declared intent; refuses one that nobody serves."""
    names = served.specialists.get(intent, ())
    if not names:
        known = sorted(intent for intent, able in served.specialists.items() if able)
        more = f" and {len(known) - MAX_LISTED} more" if len(known) > MAX_LISTED else ""
        raise InvalidRequest(
            f"no specialist serves the intent {intent[:80]!r}; there is: "
            f"{', '.join(known[:MAX_LISTED])}{more}",
            param="intent",
        )
    return names


def _by_specialist(
    given: ClassifierInput, served: ServedIntents, router: TrainedRouter
) -> dict[str, tuple[float, str]]:
    """Specialist -> (its probability, its most likely label). What nobody serves is the default's;
    several that serve one label all have its probability."""
    specialists, default = served.specialists, served.default
    totals: dict[str, float] = {}
    best: dict[str, tuple[float, str]] = {}
    for label, chance in zip(router.labels, router.chances(given), strict=True):
        names = () if label == REJECT else specialists.get(label, ())
        for name in names or (default,):
            if name not in totals:
                totals[name], best[name] = chance, (chance, label)
                continue
            totals[name] += chance
            if chance > best[name][0]:
                best[name] = chance, label
    return {name: (total if total < 1.0 else 1.0, best[name][1]) for name, total in totals.items()}


def _chosen(
    names: tuple[str, ...],
    intent: str,
    confidence: float,
    reason: str,
    likely: Mapping[str, tuple[float, str]],
    viable_at: float,
) -> SpecialistDecision:
    """The first of `names` answers. The others serve the same intent and are always viable."""
    first, *same = names
    others = [AlternateSpecialist(name, round(confidence, 6), True) for name in same]
    ranked = sorted([(-chance, name) for name, (chance, _) in likely.items() if name not in names])
    others += [
        AlternateSpecialist(name, round(-negative, 6), -negative >= viable_at)
        for negative, name in ranked[:MAX_ALTERNATES]
    ]
    return SpecialistDecision(
        first, intent, round(confidence, 6), reason, tuple(others[:MAX_ALTERNATES])
    )
