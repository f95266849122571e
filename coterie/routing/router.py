"""Decides who answers, and how: by the names a caller sent, or by the content of the prompt.

A request that names no model is matched with the texts of the installed packages, and values that
it does not give are tuned. The plan contains the reasons. Knows specialists and adapters by their
cards; knows no replicas, queues, blocks, tokens or files.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from coterie.core.adapters import AdapterCard, AdapterProfile
from coterie.core.plan import AdapterChoice, RoutePlan, RouteTrace, TunedFields
from coterie.core.request import Chat, InferenceRequest, Prompt, RouteHints, Sampling, Text
from coterie.core.resolve import VENDOR_DEFAULTS, resolve_sampling
from coterie.core.settings import RoutingSettings
from coterie.routing.decide import (
    AdapterDecision,
    AdapterScorer,
    ChoiceLimits,
    InstalledAdapters,
    decide,
)
from coterie.routing.features.features import PromptFeatures, extract, routed_text
from coterie.routing.protocols import AdapterCatalog, Matcher, NoAdapters, NoOutcomes, OutcomeRates
from coterie.routing.resolve import (
    NameResolver,
    RequestedNames,
    ResolvedRoute,
    Specialist,
    full_name,
)
from coterie.routing.tune import tuned, values_for, with_capabilities, with_defaults

__all__ = ["ResolvedRoute", "Router", "Specialist"]

# adapters that are considered for one request
CANDIDATES = 16
NO_NAMES = RequestedNames(None)


@dataclass(slots=True)
class _PlanDraft:
    """The plan of one request while it is made."""

    specialist: str
    adapters: tuple[AdapterChoice, ...] = ()
    confidence: float = 1.0
    reasons: tuple[str, ...] = ()
    # its decoding is used; its format and template only if it is the only adapter
    primary: AdapterProfile | None = None
    features: PromptFeatures | None = None
    decision: AdapterDecision | None = None
    threshold: float = 0.0
    degraded: tuple[str, ...] = ()
    timings_ms: dict[str, float] = field(default_factory=dict)


class Router:
    """The first specialist answers requests that name no model and match no adapter.

    `matcher` replaces the catalog's own, which changes with what is installed.
    """

    def __init__(
        self,
        specialists: Sequence[Specialist],
        catalog: AdapterCatalog | None = None,
        settings: RoutingSettings | None = None,
        outcomes: OutcomeRates | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        self._catalog = catalog or NoAdapters()
        self._names = NameResolver(specialists, self._catalog)
        self._settings = settings or RoutingSettings()
        self._outcomes = outcomes or NoOutcomes()
        self._matcher = matcher

    def resolve(self, hints: RouteHints) -> ResolvedRoute:
        """By names only. Refuses names that do not exist and adapters that do not fit."""
        return self._names.resolve(hints)

    def specialist(self, hints: RouteHints, prompt: Prompt) -> str:
        """The specialist that a plan would name now; content is read only if it decides the
        base."""
        several = len(self._names.specialists) > 1
        if several and self._is_routed(self._names.read(hints), prompt):
            return self._by_content(hints, prompt).specialist
        return self._names.resolve(hints).specialist

    def fits(self, card: AdapterCard) -> Sequence[str]:
        """The specialists that an adapter was made for; an adapter without a base fits all."""
        return self._names.fits(card)

    def plan(self, request: InferenceRequest, vendor: Sampling = VENDOR_DEFAULTS) -> RoutePlan:
        """Makes the decision. `vendor` holds the defaults of the caller's dialect."""
        started = time.perf_counter()
        requested = self._names.read(request.hints)
        if self._is_routed(requested, request.prompt):
            draft = self._by_content(request.hints, request.prompt)
        else:
            draft = self._by_name(request, requested)
        sampling, changed = request.sampling, TunedFields()
        if draft.features is not None:
            stage_start = time.perf_counter()
            draft.features = with_capabilities(draft.features, draft.primary)
            values = values_for(draft.features.task_type, draft.primary)
            sampling = with_defaults(sampling, values)
            alone = draft.primary if len(draft.adapters) == 1 else None
            changed = tuned(request, values, alone)
            draft.timings_ms["tune"] = _ms_since(stage_start)
        generation = self._names.specialists[draft.specialist].generation
        resolved = resolve_sampling(sampling, generation, vendor)
        draft.timings_ms["total"] = _ms_since(started)
        return RoutePlan(
            request_id=request.id,
            specialist=draft.specialist,
            adapters=draft.adapters,
            sampling=resolved,
            confidence=draft.confidence,
            reasons=draft.reasons,
            tuned=changed,
            trace=_trace(draft),
        )

    def _is_routed(self, requested: RequestedNames, prompt: Prompt) -> bool:
        """Adapters are for messages of users; requests with tools are answered by the base."""
        plain = isinstance(prompt, Chat) and not prompt.tools
        return self._settings.enabled and requested == NO_NAMES and plain

    def _by_name(self, request: InferenceRequest, requested: RequestedNames) -> _PlanDraft:
        hints = request.hints
        route = self._names.resolve(hints)
        reason = "default specialist" if requested == NO_NAMES else "named by the caller"
        if requested == NO_NAMES and not self._settings.enabled:
            reason = "default specialist: routing is off"
        elif requested == NO_NAMES and isinstance(request.prompt, Chat) and request.prompt.tools:
            reason = "default specialist: tools are given"
        draft = _PlanDraft(route.specialist, route.adapters, reasons=(reason,))
        if hints.tune:
            draft.features = _features(hints, request.prompt, draft.timings_ms)
            if route.adapters:
                draft.primary = self._names.find(route.adapters[0].name)
        return draft

    def _by_content(self, hints: RouteHints, prompt: Prompt) -> _PlanDraft:
        draft = _PlanDraft(self._names.default)
        exclude = self._names.excluded(hints.exclude)
        draft.features = _features(hints, prompt, draft.timings_ms)
        matcher = self._matcher or self._catalog.matcher()
        if matcher is None:
            return _without_experts(draft, any(True for _ in self._catalog.names()))
        draft.threshold = self._settings.threshold or matcher.threshold
        stage_start = time.perf_counter()
        text = routed_text(_instruction(hints, prompt), hints.document)
        matches = matcher.match(text, draft.features, CANDIDATES)
        draft.timings_ms["match"] = _ms_since(stage_start)
        stage_start = time.perf_counter()
        limits = self._choice_limits(hints, draft.threshold, exclude)
        decision = decide(
            matches, draft.features, limits, self._installed_adapters(), self._scorer()
        )
        draft.timings_ms["decide"] = _ms_since(stage_start)
        return _decided(draft, decision)

    def _choice_limits(
        self, hints: RouteHints, threshold: float, exclude: tuple[str, ...]
    ) -> ChoiceLimits:
        if hints.max_adapters is None:
            return ChoiceLimits(threshold, self._settings.max_experts, exclude=exclude)
        return ChoiceLimits(threshold, hints.max_adapters, hints.max_adapters, exclude)

    def _installed_adapters(self) -> InstalledAdapters:
        return InstalledAdapters(
            self._catalog.current_profiles(), self._names.find, self._names.fits
        )

    def _scorer(self) -> AdapterScorer:
        adapter_bytes = self._names.specialists[self._names.default].adapter_bytes
        return AdapterScorer(
            self._settings, self._outcomes, self._catalog.usual_quality(), adapter_bytes
        )


def _features(hints: RouteHints, prompt: Prompt, timings_ms: dict[str, float]) -> PromptFeatures:
    stage_start = time.perf_counter()
    features = extract(_instruction(hints, prompt), hints.document)
    timings_ms["features"] = _ms_since(stage_start)
    return features


def _instruction(hints: RouteHints, prompt: Prompt) -> str:
    return hints.instruction or _last_user_text(prompt)


def _last_user_text(prompt: Prompt) -> str:
    if isinstance(prompt, Chat):
        return next((m.content for m in reversed(prompt.messages) if m.role == "user"), "")
    return prompt.text if isinstance(prompt, Text) else ""


def _without_experts(draft: _PlanDraft, installed: bool) -> _PlanDraft:
    if installed:
        draft.reasons = ("base model alone: the index of experts is not ready",)
        draft.degraded = ("no experts: their index is not ready",)
        draft.confidence = 0.0
    else:
        draft.reasons = ("base model alone: no experts are installed",)
    return draft


def _decided(draft: _PlanDraft, decision: AdapterDecision) -> _PlanDraft:
    draft.decision, draft.primary = decision, decision.primary
    draft.confidence = decision.confidence
    if decision.primary is None:
        best = max(decision.candidates, key=lambda c: c.probability, default=None)
        nearest = f" (nearest: {best.name}, {best.why})" if best is not None else ""
        draft.reasons = (f"base model alone: no expert is for this prompt{nearest}",)
        return draft
    draft.specialist = decision.specialist or draft.specialist
    draft.adapters = tuple(
        AdapterChoice(full_name(profile), profile.card.digest) for profile in decision.chosen
    )
    whys = {candidate.digest: candidate for candidate in decision.candidates}
    draft.reasons = tuple(
        f"{choice.name}: {whys[choice.digest].why}, probability "
        f"{whys[choice.digest].probability:.2f}"
        for choice in draft.adapters
    )
    return draft


def _trace(draft: _PlanDraft) -> RouteTrace | None:
    features = draft.features
    if features is None:
        return None
    timings = {f"features.{name}": ms for name, ms in features.timings_ms.items()}
    return RouteTrace(
        task_type=features.task_type,
        language=features.language,
        features=features.public_fields(),
        candidates=() if draft.decision is None else draft.decision.candidates,
        threshold=draft.threshold,
        degraded=draft.degraded,
        timings_ms=timings | draft.timings_ms,
    )


def _ms_since(stage_start: float) -> float:
    return round((time.perf_counter() - stage_start) * 1e3, 4)
