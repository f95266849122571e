"""Who answers, and how: by the names a caller sent, or by what the prompt is about.

A request that names nobody is matched with what the installed packages say. Values left open are
tuned: a table by task type, and the chosen adapter's own decoding, format and template; what the
caller gave always stands. The plan carries the reasons. Knows specialists and adapters by their
cards; knows no replicas, queues, blocks, tokens or files.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coterie.core.adapters import AdapterCard, AdapterProfile
from coterie.core.plan import AdapterChoice, RoutePlan, RouteTrace, TunedFields
from coterie.core.request import Chat, InferenceRequest, Prompt, RouteHints, Sampling, Text
from coterie.core.sampling import TUNED_FIELDS, VENDOR_DEFAULTS, resolve_sampling
from coterie.core.settings import RoutingSettings
from coterie.routing.decide import (
    AdapterDecision,
    AdapterScorer,
    ChoiceLimits,
    InstalledAdapters,
    decide,
)
from coterie.routing.features.features import LANGUAGES, PromptFeatures, extract, routed_text
from coterie.routing.protocols import AdapterCatalog, Matcher, NoAdapters, NoOutcomes, OutcomeRates
from coterie.routing.resolve import (
    NameResolver,
    RequestedNames,
    ResolvedRoute,
    Specialist,
    full_name,
)

__all__ = ["ResolvedRoute", "Router", "Specialist"]

# adapters that are looked at for one request
CANDIDATES = 16
NOBODY = RequestedNames(None)


@dataclass(slots=True)
class _PlanDraft:
    """What is known of one request while its plan is made."""

    specialist: str
    adapters: tuple[AdapterChoice, ...] = ()
    confidence: float = 1.0
    reasons: tuple[str, ...] = ()
    # of whom decoding, format and template are taken; alone = nobody else runs
    primary: AdapterProfile | None = None
    features: PromptFeatures | None = None
    decision: AdapterDecision | None = None
    threshold: float = 0.0
    degraded: tuple[str, ...] = ()
    timings_ms: dict[str, float] = field(default_factory=dict)


class Router:
    """The first specialist answers requests that name nobody and are for no adapter.

    `matcher` stands in for the catalog's own, which changes with what is installed.
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
        """By names alone. Refuses those that do not exist and adapters that do not fit."""
        return self._names.resolve(hints)

    def specialist(self, hints: RouteHints, prompt: Prompt) -> str:
        """Whom a plan would name now; content is looked at only where that tells bases apart."""
        several = len(self._names.specialists) > 1
        if several and self._is_routed(self._names.read(hints), prompt):
            return self._by_content(hints, prompt).specialist
        return self._names.resolve(hints).specialist

    def fits(self, card: AdapterCard) -> Sequence[str]:
        """The specialists that an adapter was made for; one that names no base fits every one."""
        return self._names.fits(card)

    def plan(self, request: InferenceRequest, vendor: Sampling = VENDOR_DEFAULTS) -> RoutePlan:
        """Decide. `vendor` holds what the caller's dialect documents for values left open."""
        begun = time.perf_counter()
        asked = self._names.read(request.hints)
        if self._is_routed(asked, request.prompt):
            known = self._by_content(request.hints, request.prompt)
        else:
            known = self._by_name(request, asked)
        sampling, changed = request.sampling, TunedFields()
        if known.features is not None:
            marked = time.perf_counter()
            known.features = suited(known.features, known.primary)
            values = values_for(known.features.task_type, known.primary)
            sampling = filled(sampling, values)
            alone = known.primary if len(known.adapters) == 1 else None
            changed = tuned(request, values, alone)
            known.timings_ms["tune"] = _ms_since(marked)
        generation = self._names.specialists[known.specialist].generation
        resolved = resolve_sampling(sampling, generation, vendor)
        known.timings_ms["total"] = _ms_since(begun)
        return RoutePlan(
            request_id=request.id,
            specialist=known.specialist,
            adapters=known.adapters,
            sampling=resolved,
            confidence=known.confidence,
            reasons=known.reasons,
            tuned=changed,
            trace=_trace(known),
        )

    def _is_routed(self, asked: RequestedNames, prompt: Prompt) -> bool:
        """Adapters are for what a user says; the calls of a loop with tools are the base's."""
        plain = isinstance(prompt, Chat) and not prompt.tools
        return self._settings.enabled and asked == NOBODY and plain

    def _by_name(self, request: InferenceRequest, asked: RequestedNames) -> _PlanDraft:
        hints = request.hints
        route = self._names.resolve(hints)
        reason = "default specialist" if asked == NOBODY else "named by the caller"
        if asked == NOBODY and not self._settings.enabled:
            reason = "default specialist: routing is off"
        elif asked == NOBODY and isinstance(request.prompt, Chat) and request.prompt.tools:
            reason = "default specialist: tools are given"
        known = _PlanDraft(route.specialist, route.adapters, reasons=(reason,))
        if hints.tune:
            known.features = _features(hints, request.prompt, known.timings_ms)
            if route.adapters:
                known.primary = self._names.find(route.adapters[0].name)
        return known

    def _by_content(self, hints: RouteHints, prompt: Prompt) -> _PlanDraft:
        known = _PlanDraft(self._names.default)
        exclude = self._names.excluded(hints.exclude)
        known.features = _features(hints, prompt, known.timings_ms)
        matcher = self._matcher or self._catalog.matcher()
        if matcher is None:
            return _without_experts(known, any(True for _ in self._catalog.names()))
        known.threshold = self._settings.threshold or matcher.threshold
        marked = time.perf_counter()
        text = routed_text(_instruction(hints, prompt), hints.document)
        matches = matcher.match(text, known.features, CANDIDATES)
        known.timings_ms["match"] = _ms_since(marked)
        marked = time.perf_counter()
        wish = self._choice_limits(hints, known.threshold, exclude)
        decision = decide(matches, known.features, wish, self._installed_adapters(), self._scorer())
        known.timings_ms["decide"] = _ms_since(marked)
        return _decided(known, decision)

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
        room = self._names.specialists[self._names.default].adapter_bytes
        return AdapterScorer(self._settings, self._outcomes, self._catalog.usual_quality(), room)


def _features(hints: RouteHints, prompt: Prompt, timings_ms: dict[str, float]) -> PromptFeatures:
    marked = time.perf_counter()
    features = extract(_instruction(hints, prompt), hints.document)
    timings_ms["features"] = _ms_since(marked)
    return features


def _instruction(hints: RouteHints, prompt: Prompt) -> str:
    return hints.instruction or _last_words(prompt)


def _last_words(prompt: Prompt) -> str:
    if isinstance(prompt, Chat):
        return next((m.content for m in reversed(prompt.messages) if m.role == "user"), "")
    return prompt.text if isinstance(prompt, Text) else ""


def _without_experts(known: _PlanDraft, installed: bool) -> _PlanDraft:
    if installed:
        known.reasons = ("base model alone: the index of experts is not ready",)
        known.degraded = ("no experts: their index is not ready",)
        known.confidence = 0.0
    else:
        known.reasons = ("base model alone: no experts are installed",)
    return known


def _decided(known: _PlanDraft, decision: AdapterDecision) -> _PlanDraft:
    known.decision, known.primary = decision, decision.primary
    known.confidence = decision.confidence
    if decision.primary is None:
        best = max(decision.candidates, key=lambda c: c.probability, default=None)
        nearest = f" (nearest: {best.name}, {best.why})" if best is not None else ""
        known.reasons = (f"base model alone: no expert is for this prompt{nearest}",)
        return known
    known.specialist = decision.specialist or known.specialist
    known.adapters = tuple(
        AdapterChoice(full_name(profile), profile.card.digest) for profile in decision.chosen
    )
    whys = {candidate.digest: candidate for candidate in decision.candidates}
    known.reasons = tuple(
        f"{choice.name}: {whys[choice.digest].why}, probability "
        f"{whys[choice.digest].probability:.2f}"
        for choice in known.adapters
    )
    return known


def _trace(known: _PlanDraft) -> RouteTrace | None:
    features = known.features
    if features is None:
        return None
    timings = {f"features.{name}": ms for name, ms in features.timings_ms.items()}
    return RouteTrace(
        task_type=features.task_type,
        language=features.language,
        features=features.told(),
        candidates=() if known.decision is None else known.decision.candidates,
        threshold=known.threshold,
        degraded=known.degraded,
        timings_ms=timings | known.timings_ms,
    )


def _ms_since(marked: float) -> float:
    return round((time.perf_counter() - marked) * 1e3, 4)


# by task type, as seed 000 has them and in its spirit
TASK_VALUES: dict[str, dict[str, float]] = {
    "json_parsing": {
        "temperature": 0.2, "max_tokens": 2048, "top_p": 0.95, "repetition_penalty": 1.0,
    },
    "code_generation": {
        "temperature": 0.4, "max_tokens": 8192, "top_p": 0.95, "repetition_penalty": 1.05,
    },
    "classification": {
        "temperature": 0.1, "max_tokens": 256, "top_p": 0.95, "repetition_penalty": 1.0,
    },
    "extraction": {
        "temperature": 0.2, "max_tokens": 2048, "top_p": 0.95, "repetition_penalty": 1.0,
    },
    "transformation": {
        "temperature": 0.3, "max_tokens": 4096, "top_p": 0.95, "repetition_penalty": 1.0,
    },
    "creative_writing": {
        "temperature": 0.8, "max_tokens": 4096, "top_p": 0.95, "repetition_penalty": 1.1,
    },
    "question_answering": {
        "temperature": 0.4, "max_tokens": 2048, "top_p": 0.95, "repetition_penalty": 1.1,
    },
    "conversation": {
        "temperature": 0.6, "max_tokens": 2048, "top_p": 0.95, "repetition_penalty": 1.1,
    },
}  # fmt: skip
# an adapter that says how it was judged was judged without a penalty unless it says so
_JUDGED = {"repetition_penalty": 1.0}
_PLACE = re.compile(r"\{(prompt|body)\}")


def suited(features: PromptFeatures, adapter: AdapterProfile | None) -> PromptFeatures:
    """What the chosen adapter is for is what is to be done: its `task:` and `tech:` capabilities
    over what the prompt looks like."""
    stated = (
        {} if adapter is None else dict(c.split(":", 1) for c in adapter.capabilities if ":" in c)
    )
    task, language = stated.get("task", ""), stated.get("tech", "")
    task = task if task in TASK_VALUES else features.task_type
    language = language if language in LANGUAGES else features.code_language
    if (task, language) == (features.task_type, features.code_language):
        return features
    return replace(features, task_type=task, code_language=language)


def values_for(task_type: str, adapter: AdapterProfile | None) -> dict[str, float]:
    """The adapter's own over those of the task type."""
    values = dict(TASK_VALUES[task_type])
    if adapter is not None and adapter.decoding:
        values |= _JUDGED | dict(adapter.decoding)
    return values


def filled(asked: Sampling, values: Mapping[str, float]) -> Sampling:
    """`asked` with `values` where it says nothing."""
    open_values: dict[str, Any] = {
        name: values[name]
        for name in TUNED_FIELDS
        if name in values and getattr(asked, name) is None
    }
    if "top_k" in open_values:
        open_values["top_k"] = int(open_values["top_k"])
    return replace(asked, **open_values) if open_values else asked


def tuned(
    request: InferenceRequest, values: Mapping[str, float], adapter: AdapterProfile | None
) -> TunedFields:
    """`adapter` is the one that was chosen alone, if one was."""
    hints, tokens = request.hints, None
    if hints.tune and request.limits.max_tokens is None:
        tokens = int(values["max_tokens"])
    if adapter is None:
        return TunedFields(max_tokens=tokens)
    chat = request.prompt if isinstance(request.prompt, Chat) else None
    wanted, pattern = request.response_format, ""
    if wanted is None and not (chat is not None and chat.tools):
        wanted, pattern = adapter.response_format, adapter.answer_pattern
    prompt = None
    if chat is not None and adapter.template:
        prompt = rewritten(chat, adapter.template, hints.instruction, hints.document)
    own = wanted if wanted is not request.response_format else None
    return TunedFields(prompt, tokens, own, pattern)


def rewritten(chat: Chat, template: str, instruction: str, document: str) -> Prompt | None:
    """The chat with its last message written by `template`; None where that message is not the
    caller's plain words: a template of the caller's own stands."""
    last = chat.messages[-1] if chat.messages else None
    if last is None or last.role != "user":
        return None
    words = instruction or last.content
    if last.content not in (words, f"{words}\n\n{document}"):
        return None
    parts = {"prompt": words, "body": document}
    text = _PLACE.sub(lambda place: parts[place.group(1)], template)
    if document and "{body}" not in template:
        text = f"{text}\n\n{document}"
    return replace(chat, messages=(*chat.messages[:-1], replace(last, content=text)))
