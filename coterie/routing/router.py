"""Decides who answers, and how: by the names a caller sent, or by the content of the prompt.

A request that names no model is matched with the texts of the installed packages. Values that it
does not give are tuned: from a table by task type, and from the chosen adapter's decoding, format
and template. Values of the caller are never changed. The plan contains the reasons. Knows
specialists and adapters by their cards; knows no replicas, queues, blocks, tokens or files.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from coterie.core.adapters import AdapterCard, AdapterProfile
from coterie.core.aliases import NO_ALIASES, ModelAliases
from coterie.core.errors import InvalidRequest
from coterie.core.lru import LruCache
from coterie.core.plan import (
    AdapterChoice,
    AlternateSpecialist,
    ClassifierInput,
    RoutePlan,
    RouteTrace,
    TunedFields,
)
from coterie.core.request import Chat, InferenceRequest, Prompt, RouteHints, Sampling, Text
from coterie.core.sampling import VENDOR_DEFAULTS, resolve_sampling
from coterie.core.settings import RoutingSettings
from coterie.routing.classify.decide import ServedIntents, declared
from coterie.routing.classify.decide import decide as decide_specialist
from coterie.routing.classify.features import classifier_input
from coterie.routing.classify.trained import TrainedRouter
from coterie.routing.decide import (
    NOT_HERE,
    OTHER_BASE,
    AdapterDecision,
    AdapterScorer,
    ChoiceLimits,
    InstalledAdapters,
    ScoredAdapter,
    StoredScorer,
    choose,
    decide,
)
from coterie.routing.features.features import LANGUAGES, PromptFeatures, extract, routed_text
from coterie.routing.features.instruction import bounded
from coterie.routing.match.embed import DEFAULT, EMBEDDERS, embedding
from coterie.routing.protocols import (
    AdapterCatalog,
    AdapterMatch,
    Matcher,
    NoAdapters,
    NoOutcomes,
    OutcomeRates,
)
from coterie.routing.resolve import (
    NameResolver,
    RequestedNames,
    ResolvedRoute,
    Specialist,
    full_name,
)

__all__ = ["ResolvedRoute", "Router", "Specialist"]

# sets of rights whose experts are remembered: a byte for each expert
MAX_RIGHTS = 256
# adapters that are considered for one request
CANDIDATES = 30
NO_NAMES = RequestedNames(None)
_UNTUNED = TunedFields()
# the reason of a plan whose names came from the caller
NAMED = "named by the caller"
NOT_READY = "no experts: their index is not ready"


@dataclass(frozen=True, slots=True)
class StoredRouting:
    """What was stored of a decision by content."""

    # None = the trained router was not asked
    given: ClassifierInput | None
    # None = no adapters were installed
    candidates: Sequence[ScoredAdapter] | None
    # of the matcher; the settings may have another
    threshold: float


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
    intent: str = ""
    alternates: tuple[AlternateSpecialist, ...] = ()
    # None = the specialist was not chosen by content
    classified: ClassifierInput | None = None


class _UsableRows:
    """Which rows of the newest matcher a tenant may use: found once for each set of rights."""

    def __init__(self) -> None:
        self._found = _RowsOf(None)

    def of(self, matcher: Matcher, hints: RouteHints, names: NameResolver) -> NDArray[np.bool_]:
        found = self._found
        if found.matcher is not matcher:
            found = self._found = _RowsOf(matcher)

        def find() -> NDArray[np.bool_]:
            may_use = names.usable(hints)
            return np.array([may_use(item.card) for item in matcher.profiles], np.bool_)

        return found.rows.get_or_make((hints.allowed, hints.allowed_experts), find)


class _RowsOf:
    """By rights: the specialists and the experts that a tenant may use."""

    def __init__(self, matcher: Matcher | None) -> None:
        self.matcher = matcher
        self.rows: LruCache[tuple[tuple[str, ...], tuple[str, ...]], NDArray[np.bool_]] = LruCache(
            MAX_RIGHTS
        )


class Router:
    """The first specialist answers requests that name no model and match no adapter.

    `matcher` replaces the catalog's own, which changes with what is installed. `trained` chooses
    among specialists; without it only declared intents and structures do.
    """

    def __init__(
        self,
        specialists: Sequence[Specialist],
        catalog: AdapterCatalog | None = None,
        settings: RoutingSettings | None = None,
        outcomes: OutcomeRates | None = None,
        matcher: Matcher | None = None,
        trained: TrainedRouter | None = None,
        aliases: ModelAliases = NO_ALIASES,
    ) -> None:
        self._catalog = catalog or NoAdapters()
        self._names = NameResolver(specialists, self._catalog, aliases)
        self._settings = settings or RoutingSettings()
        self._outcomes = outcomes or NoOutcomes()
        self._matcher = matcher
        self._usable = _UsableRows()
        self._trained = trained
        self._served = ServedIntents.of((item.name, item.intents) for item in specialists)
        self._fixed_names = frozenset(
            fixed.profile.card.name for item in specialists for fixed in item.fixed
        )
        labels = () if trained is None else trained.labels
        self._classifies = self._served.can_route(labels) or self._served.serves_structure()

    @property
    def trained(self) -> TrainedRouter | None:
        return self._trained

    @property
    def router_version(self) -> str:
        """The version of the trained router; "" = none."""
        return "" if self._trained is None else self._trained.version

    def served_intents(self, hints: RouteHints) -> ServedIntents:
        """What a decision about the specialist of such a request depends on, beside its input."""
        return self._served.limited_to(hints.allowed)

    @property
    def specialists(self) -> Mapping[str, Specialist]:
        return self._names.specialists

    @property
    def aliases(self) -> ModelAliases:
        return self._names.aliases

    def named(self, hints: RouteHints) -> RouteHints:
        """The same hints, with the name that an alias means in place of the alias."""
        return self._names.named(hints)

    def resolve(self, hints: RouteHints) -> ResolvedRoute:
        """By names only. Refuses names that do not exist and adapters that do not fit."""
        return self._names.resolve(hints)

    def specialist(self, hints: RouteHints, prompt: Prompt) -> str:
        """The specialist that a plan would name now; content is read only if it decides the
        base."""
        several = len(self._names.specialists) > 1
        if several and self._is_routed(self._names.read(hints), prompt):
            return self._by_content(hints, prompt).specialist
        return self._named(hints)[0].specialist

    def fits(self, card: AdapterCard) -> Sequence[str]:
        """The specialists that an adapter was made for; an adapter without a base fits all."""
        return self._names.fits(card)

    def may_use(self, card: AdapterCard, hints: RouteHints) -> bool:
        """Whether the tenant may use an adapter, on a specialist that it may use."""
        return self._names.may_use(card, hints)

    def plan(self, request: InferenceRequest, vendor: Sampling = VENDOR_DEFAULTS) -> RoutePlan:
        """Makes the decision. `vendor` holds the defaults of the caller's dialect."""
        started = time.perf_counter()
        requested = self._names.read(request.hints)
        if self._is_routed(requested, request.prompt):
            draft = self._by_content(request.hints, request.prompt)
        else:
            draft = self._by_name(request, requested)
        self._add_fixed(draft, requested)
        specialist = self._names.specialists[draft.specialist]
        recommended = specialist.recommended.sampling_for(request.prompt)
        values: dict[str, float] = {}
        changed = _UNTUNED
        if draft.features is not None:
            stage_start = time.perf_counter()
            by_task = () if draft.decision is None else draft.decision.by_task
            draft.features = with_capabilities(draft.features, draft.primary, by_task)
            values = values_for(draft.features.task_type, draft.primary, recommended)
            alone = draft.primary if len(draft.adapters) == 1 else None
            changed = tuned(request, values, alone)
            draft.timings_ms["tune"] = _ms_since(stage_start)
        resolved = resolve_sampling(
            request.sampling, specialist.generation, vendor, values, recommended
        )
        draft.timings_ms["total"] = _ms_since(started)
        return RoutePlan(
            request_id=request.id,
            specialist=draft.specialist,
            adapters=draft.adapters,
            sampling=resolved,
            confidence=draft.confidence,
            reasons=draft.reasons,
            tuned=changed,
            trace=_trace(draft, self.router_version),
            intent=draft.intent,
            alternates=draft.alternates,
        )

    def _add_fixed(self, draft: _PlanDraft, requested: RequestedNames) -> None:
        """Put the adapters that the specialist always runs with before the others."""
        fixed = self._names.specialists[draft.specialist].fixed
        if not fixed:
            return
        stack = self._names.with_fixed(draft.specialist, draft.adapters)
        if stack.left_out and requested.adapters:
            raise InvalidRequest(f"the expert {stack.left_out[0]}", param="experts")
        draft.adapters = stack.adapters
        if draft.primary is None or len(stack.adapters) == 1:
            draft.primary = fixed[0].profile
        names = ", ".join(item.choice.name for item in fixed)
        draft.reasons += (f"{draft.specialist} always runs with {names}",)
        draft.degraded += tuple(f"dropped {text}" for text in stack.left_out)

    def _is_routed(self, requested: RequestedNames, prompt: Prompt) -> bool:
        """Adapters are for messages of users; requests with tools are answered by the base."""
        plain = isinstance(prompt, Chat) and not prompt.tools
        return self._settings.enabled and requested == NO_NAMES and plain

    def _by_name(self, request: InferenceRequest, requested: RequestedNames) -> _PlanDraft:
        hints = request.hints
        route, reason = self._named(hints)
        is_default = requested == NO_NAMES and not hints.intent
        if is_default and not self._settings.enabled:
            reason = "default specialist: routing is off"
        elif is_default and isinstance(request.prompt, Chat) and request.prompt.tools:
            reason = "default specialist: tools are given"
        draft = _PlanDraft(route.specialist, route.adapters, reasons=(reason,), intent=hints.intent)
        if hints.tune:
            draft.features = _features(hints, request.prompt, draft.timings_ms)
            if route.adapters:
                draft.primary = self._names.find(route.adapters[0].name)
        return draft

    def _named(self, hints: RouteHints) -> tuple[ResolvedRoute, str]:
        """By names, then by a declared intent; with the reason."""
        route = self._names.resolve(hints)
        requested = self._names.read(hints)
        able = declared(hints.intent, self.served_intents(hints)) if hints.intent else ()
        if requested != NO_NAMES:
            return route, NAMED
        if able:
            return replace(route, specialist=able[0]), f"declared intent {hints.intent}"
        return route, "default specialist"

    def _classify(self, draft: _PlanDraft, hints: RouteHints, text: str) -> None:
        """Choose the specialist by a declared intent, a structure, or the trained router."""
        if not (self._classifies or hints.intent) or draft.features is None:
            return
        stage_start = time.perf_counter()
        given = classifier_input(text, draft.features, EMBEDDERS[DEFAULT](), hints.intent)
        self._choose_specialist(draft, hints, given)
        draft.timings_ms["classify"] = _ms_since(stage_start)

    def _choose_specialist(
        self, draft: _PlanDraft, hints: RouteHints, given: ClassifierInput
    ) -> None:
        decision = decide_specialist(given, self.served_intents(hints), self._trained)
        draft.specialist, draft.intent = decision.specialist, decision.intent
        draft.alternates, draft.classified = decision.alternates, given
        draft.confidence, draft.reasons = decision.confidence, (decision.reason,)

    def _by_content(self, hints: RouteHints, prompt: Prompt) -> _PlanDraft:
        draft = _PlanDraft(self._names.default_of(hints.allowed))
        exclude = self._names.excluded(hints)
        draft.features = _features(hints, prompt, draft.timings_ms)
        text = routed_text(_instruction(hints, prompt), hints.document)
        matcher = self._matcher or self._catalog.matcher()
        if self._classifies or matcher is not None:
            _embed(draft, text)
        self._classify(draft, hints, text)
        if draft.classified is not None and self._names.specialists[draft.specialist].fixed:
            # it runs with its own adapters
            return draft
        if matcher is None:
            # those that are damaged are in no index
            return _without_experts(draft, bool(self._catalog.current_profiles()))
        draft.threshold = self._settings.threshold or matcher.threshold
        stage_start = time.perf_counter()
        matches = self._matches(matcher, text, draft.features, hints)
        draft.timings_ms["match"] = _ms_since(stage_start)
        stage_start = time.perf_counter()
        limits = self._choice_limits(hints, draft.threshold, exclude)
        only = draft.specialist if draft.classified is not None else ""
        decision = decide(
            matches, draft.features, limits, self._installed_adapters(hints, only), self._scorer()
        )
        draft.timings_ms["decide"] = _ms_since(stage_start)
        return _decided(draft, decision)

    def _matches(
        self, matcher: Matcher, text: str, features: PromptFeatures, hints: RouteHints
    ) -> Sequence[AdapterMatch]:
        """The most likely adapters of those that the tenant may use."""
        if not hints.allowed and not hints.allowed_experts:
            return matcher.match(text, features, CANDIDATES)
        among = self._usable.of(matcher, hints, self._names)
        return matcher.match(text, features, CANDIDATES, among)

    def plan_again(self, request_id: str, hints: RouteHints, stored: StoredRouting) -> RoutePlan:
        """The decision about a request of the past, from what was stored of it. Only who answers is
        decided, not the sampling."""
        draft = _PlanDraft(self._names.default_of(hints.allowed))
        if stored.given is not None:
            self._choose_specialist(draft, hints, stored.given)
        if draft.classified is not None and self._names.specialists[draft.specialist].fixed:
            # it runs with its own adapters
            pass
        elif stored.candidates is None:
            draft = _without_experts(draft, installed=False)
        else:
            only = draft.specialist if draft.classified is not None else ""
            draft = self._decide_again(draft, hints, stored.candidates, only, stored.threshold)
        self._add_fixed(draft, NO_NAMES)
        return RoutePlan(
            request_id=request_id,
            specialist=draft.specialist,
            adapters=draft.adapters,
            sampling=Sampling(),
            confidence=draft.confidence,
            reasons=draft.reasons,
            intent=draft.intent,
            alternates=draft.alternates,
        )

    def _decide_again(
        self,
        draft: _PlanDraft,
        hints: RouteHints,
        candidates: Sequence[ScoredAdapter],
        only: str,
        threshold: float,
    ) -> _PlanDraft:
        installed = self._installed_adapters(hints, only)
        figures = {full_name(item.profile): (item.success, item.memory) for item in candidates}
        scorer = StoredScorer(self._settings, figures, self._scorer())
        items = []
        for item in candidates:
            # without a probability it was only there because another one requires it
            if item.probability:
                profile, excluded = item.profile, item.excluded
                if excluded in ("", OTHER_BASE, NOT_HERE):
                    excluded = "" if installed.fits(profile.card) else installed.unfit
                scores = scorer.scores(profile, item.similarity)
                items.append(
                    ScoredAdapter(
                        profile, item.similarity, *scores, item.probability, excluded, item.part
                    )
                )
        exclude = self._names.excluded(hints)
        limits = self._choice_limits(hints, self._settings.threshold or threshold, exclude)
        return _decided(draft, choose(items, limits, installed, scorer))

    def _choice_limits(
        self, hints: RouteHints, threshold: float, exclude: tuple[str, ...]
    ) -> ChoiceLimits:
        if hints.max_adapters is None:
            return ChoiceLimits(threshold, self._settings.max_experts, exclude=exclude)
        return ChoiceLimits(threshold, hints.max_adapters, hints.max_adapters, exclude)

    def _installed_adapters(self, hints: RouteHints, only: str = "") -> InstalledAdapters:
        """`only`: the specialist that was chosen already; "" = any that the tenant may use."""
        may_use = self._names.usable(hints)

        def fits(card: AdapterCard) -> tuple[str, ...]:
            # what a specialist always runs with is for that specialist alone
            if only and card.name in self._fixed_names:
                return ()
            # it may be required by one that the tenant may use
            if not may_use(card):
                return ()
            able = (only,) if only else hints.allowed or self._names.specialists
            return tuple(name for name in self._names.fits(card) if name in able)

        profiles, find = self._catalog.current_profiles(), self._names.find
        if only or hints.allowed or hints.allowed_experts:
            return InstalledAdapters(profiles, find, fits, NOT_HERE)
        return InstalledAdapters(profiles, find, self._names.fits)

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


def _embed(draft: _PlanDraft, text: str) -> None:
    """The vector is a feature too: what chooses a specialist and an adapter reads it."""
    stage_start = time.perf_counter()
    embedding(bounded(text), EMBEDDERS[DEFAULT]())
    took_ms = _ms_since(stage_start)
    draft.timings_ms["features.embedding"] = took_ms
    draft.timings_ms["features"] = round(draft.timings_ms["features"] + took_ms, 4)


def _instruction(hints: RouteHints, prompt: Prompt) -> str:
    return hints.instruction or _last_user_text(prompt)


def _last_user_text(prompt: Prompt) -> str:
    if isinstance(prompt, Chat):
        return next((m.content for m in reversed(prompt.messages) if m.role == "user"), "")
    return prompt.text if isinstance(prompt, Text) else ""


def _without_experts(draft: _PlanDraft, installed: bool) -> _PlanDraft:
    if installed:
        draft.reasons += ("base model alone: the index of experts is not ready",)
        draft.degraded = (NOT_READY,)
        draft.confidence = draft.confidence if draft.classified is not None else 0.0
    else:
        draft.reasons += ("base model alone: no experts are installed",)
    return draft


def _decided(draft: _PlanDraft, decision: AdapterDecision) -> _PlanDraft:
    draft.decision, draft.primary = decision, decision.primary
    if draft.classified is None:
        # otherwise the confidence is that of the specialist's choice
        draft.confidence = decision.confidence
    if decision.primary is None:
        best = max(decision.candidates, key=lambda c: c.probability, default=None)
        nearest = f" (nearest: {best.name}, {best.why})" if best is not None else ""
        draft.reasons += (f"base model alone: no expert is for this prompt{nearest}",)
        return draft
    draft.specialist = decision.specialist or draft.specialist
    draft.adapters = tuple(
        AdapterChoice(full_name(profile), profile.card.digest) for profile in decision.chosen
    )
    whys = {candidate.digest: candidate for candidate in decision.candidates}
    by_task = {profile.card.digest for profile in decision.by_task}
    for choice in draft.adapters:
        found = whys[choice.digest]
        probability = found.part if choice.digest in by_task else found.probability
        draft.reasons += (f"{choice.name}: {found.why}, probability {probability:.2f}",)
    return draft


def _trace(draft: _PlanDraft, router_version: str) -> RouteTrace | None:
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
        classified=draft.classified,
        router_version="" if draft.classified is None else router_version,
    )


def _ms_since(stage_start: float) -> float:
    return round((time.perf_counter() - stage_start) * 1e3, 4)


# by task type
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
# an adapter that states its decoding was evaluated without a penalty unless it states one
_EVALUATED_WITH = {"repetition_penalty": 1.0}
_NO_PENALTY = 1.0
_PLACEHOLDER = re.compile(r"\{(prompt|body)\}")


# of an answer to tasks of different types: it has no form of its own
SEVERAL_TASKS = "transformation"


def with_capabilities(
    features: PromptFeatures,
    adapter: AdapterProfile | None,
    by_task: Sequence[AdapterProfile] = (),
) -> PromptFeatures:
    """The features with the task type and language of the chosen adapter (its `task:` and `tech:`
    capabilities), which have priority over what the prompt looks like. `by_task`: adapters that are
    each for a task of their own."""
    stated = {} if adapter is None else _stated(adapter)
    task, language = stated.get("task", ""), stated.get("tech", "")
    if len({_stated(item).get("task", "") for item in by_task}) > 1:
        task = SEVERAL_TASKS
    task = task if task in TASK_VALUES else features.task_type
    language = language if language in LANGUAGES else features.code_language
    if (task, language) == (features.task_type, features.code_language):
        return features
    return replace(features, task_type=task, code_language=language)


def _stated(adapter: AdapterProfile) -> dict[str, str]:
    return dict(c.split(":", 1) for c in adapter.capabilities if ":" in c)


def values_for(
    task_type: str, adapter: AdapterProfile | None, recommended: Mapping[str, float]
) -> dict[str, float]:
    """The adapter's values have priority over those of the task type. Where the model's authors
    recommend a temperature, a task type makes an answer no wilder than they do: above it, or with a
    penalty that they leave out, a small model writes nonsense."""
    values = dict(TASK_VALUES[task_type])
    if "temperature" in recommended:
        for name in ("temperature", "repetition_penalty"):
            if values[name] > recommended.get(name, _NO_PENALTY):
                # resolved as in a request that is not tuned
                del values[name]
    if adapter is not None and adapter.decoding:
        values |= _EVALUATED_WITH | dict(adapter.decoding)
    return values


def tuned(
    request: InferenceRequest, values: Mapping[str, float], adapter: AdapterProfile | None
) -> TunedFields:
    """`adapter` is the chosen one if it was the only one."""
    hints, tokens = request.hints, None
    if hints.tune and request.limits.max_tokens is None:
        tokens = int(values["max_tokens"])
    if adapter is None:
        return TunedFields(max_tokens=tokens, sampling=values)
    chat = request.prompt if isinstance(request.prompt, Chat) else None
    response_format, pattern = request.response_format, ""
    if response_format is None and not (chat is not None and chat.tools):
        response_format, pattern = adapter.response_format, adapter.answer_pattern
    prompt = None
    if chat is not None and adapter.template:
        prompt = rewritten(chat, adapter.template, hints.instruction, hints.document)
    own = response_format if response_format is not request.response_format else None
    return TunedFields(prompt, tokens, own, pattern, values)


def rewritten(chat: Chat, template: str, instruction: str, document: str) -> Prompt | None:
    """The chat with its last message written by `template`. None if that message is not the
    caller's plain text, so that a template of the caller is kept."""
    last = chat.messages[-1] if chat.messages else None
    if last is None or last.role != "user":
        return None
    request_text = instruction or last.content
    if last.content not in (request_text, f"{request_text}\n\n{document}"):
        return None
    parts = {"prompt": request_text, "body": document}
    text = _PLACEHOLDER.sub(lambda match: parts[match.group(1)], template)
    if document and "{body}" not in template:
        text = f"{text}\n\n{document}"
    return replace(chat, messages=(*chat.messages[:-1], replace(last, content=text)))
