"""The way of a request through the service: plan, fit, tokenise, admit, enqueue, events, validate,
record.

Refusals are raised before the first event; after it, everything is an event. Closing the iterator
aborts the request at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from coterie.core.batch import ENDED_STATES, OPEN_STATUSES
from coterie.core.errors import (
    AdmissionOffer,
    CoterieError,
    Overloaded,
    Unauthenticated,
    Unavailable,
    WeightsError,
    from_code,
)
from coterie.core.events import Delta, Event, Failed, Finished, InferenceMetrics, Started
from coterie.core.plan import AlternateSpecialist, RemoteAssignment, RoutePlan
from coterie.core.quick_init import quick_init
from coterie.core.request import (
    Chat,
    InferenceRequest,
    KeyRights,
    Prompt,
    ResponseFormat,
    RouteHints,
    Sampling,
    own_tenant,
)
from coterie.core.sampling import VENDOR_DEFAULTS
from coterie.core.settings import JobSettings
from coterie.models.grammar.check import GrammarCheck
from coterie.models.text.tokenizer import is_long
from coterie.obs.tracing.spans import InferenceTrace
from coterie.obs.tracing.tracer import RequestTracer
from coterie.service.adapters.admin import AdapterAdmin
from coterie.service.adapters.catalog import AdapterLease
from coterie.service.adapters.conversation import ConversationPredictor
from coterie.service.batches.service import BatchParts, BatchService
from coterie.service.begun_events import BegunEvents
from coterie.service.dashboard.activity import RequestActivity
from coterie.service.dashboard.feed import DashboardFeed
from coterie.service.dashboard.sections import DashboardSections
from coterie.service.encoders.service import EncodeCaller, EncoderService
from coterie.service.ensemble import EnsembleService, steer_request
from coterie.service.finish import Finisher
from coterie.service.fleet import (
    Fleet,
    ModelCard,
    ServedSpecialist,
    ServiceHealth,
    all_or_none,
)
from coterie.service.jobs.service import JobService
from coterie.service.jobs.store import JobStore
from coterie.service.meter import RequestMeter, RouteMeter
from coterie.service.plan import LeftOutAdapter, RequestPlanner, RequestRun, with_lowered_priority
from coterie.service.quotas import QuotaExceeded, QuotaState, QuotaUse, TenantQuotas
from coterie.service.receipts.encoding import EncodingAsked, EncodingReceipt
from coterie.service.receipts.stamp import OnReceipt, OpenReceipt, ReceiptWriter
from coterie.service.records.log import InferenceRecords
from coterie.service.responses.store import ResponseStore
from coterie.service.shadow.runner import ShadowRunner
from coterie.service.snapshot import ServingSnapshot
from coterie.service.submit.admission import AdmissionResult
from coterie.service.submit.submitter import Submitter, assignment, tokenise
from coterie.service.validate.validators import AnswerValidators
from coterie.workers.remote.body import check_format

if TYPE_CHECKING:
    from coterie.models.text.tokenizer import Tokenizer


# texts up to this many times the context are counted, for callers who want to know how much to cut
COUNTED = 4


@dataclass(frozen=True, slots=True)
class PipelineParts:
    """The parts of a pipeline."""

    fleet: Fleet
    adapters: AdapterAdmin
    records: InferenceRecords
    validators: AnswerValidators
    job_store: JobStore
    job_settings: JobSettings
    ensemble: EnsembleService
    responses: ResponseStore
    batches: BatchParts
    encoders: EncoderService
    # None = requests are not traced
    tracer: RequestTracer | None = None


@quick_init
@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request with its plan. It keeps its adapters until it has run or is dropped."""

    run: RequestRun
    lease: AdapterLease
    # the dialect's defaults for values that the request leaves out
    vendor: Sampling
    receipt: OpenReceipt

    @property
    def plan(self) -> RoutePlan:
        return self.run.plan

    @property
    def hints(self) -> RouteHints:
        """What the caller asked for; the name that an alias means stands for it."""
        return self.run.request.hints

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None if another server answers: then tokens are not known here."""
        return self.run.served.tokenizer

    def set_format(self, answer_format: ResponseFormat | None) -> None:
        """Constrain the answer to `answer_format`: the caller's format, written for the model that
        answers."""
        if answer_format is not self.run.request.response_format:
            self.run.request = replace(self.run.request, response_format=answer_format)
        self.run.response_format = answer_format or self.plan.tuned.response_format


class Pipeline:
    def __init__(self, parts: PipelineParts) -> None:
        self._fleet = parts.fleet
        self.registry = parts.fleet.registry
        self.adapters, self.records = parts.adapters, parts.records
        self.tracer = parts.tracer
        self.activity = RequestActivity()
        self.receipts = ReceiptWriter(
            parts.records, self._config_digest, parts.tracer, self.activity.ended
        )
        self.jobs = JobService(self, parts.job_store, parts.job_settings)
        self.responses = parts.responses
        self.batches = BatchService(parts.batches, self.jobs)
        self._validators = parts.validators
        self._routes = RouteMeter(self.registry)
        self._planner = RequestPlanner(parts.fleet, self._routes)
        killed = self.registry.value("coterie_recoveries", "grammars", "child_killed")
        self._grammars = GrammarCheck(killed.add)
        self._submitter = Submitter()
        self._conversations = ConversationPredictor(self.registry)
        self._finisher = Finisher(parts.validators, parts.records)
        self.quotas = TenantQuotas()
        self.encoders = parts.encoders
        self.encoders.bind(self.registry, self.quotas)
        self.ensemble = parts.ensemble
        self.records.on_verdict = self.ensemble.verdict
        self._counting = asyncio.Lock()
        self._started = False
        self._draining = False
        self._open = 0
        sections = DashboardSections(
            self._fleet, self.ensemble, self.jobs, self.activity, self.encoders, self.health
        )
        self.dashboard = DashboardFeed(sections, self.activity, self.records)

    @property
    def snapshot(self) -> ServingSnapshot:
        """The settings that a request which arrives now reads until its end."""
        return self._fleet.snapshot

    @property
    def fleet(self) -> Fleet:
        return self._fleet

    def set_rights(self, rights: Mapping[str, KeyRights] | None) -> None:
        """By tenant; a tenant that is not in it may do nothing. None = everybody has every
        right."""
        self._fleet.set_rights(rights)

    async def start(self) -> None:
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.start)
        await self.records.start()
        try:
            await all_or_none([self._fleet.start(), self.encoders.start()])
            runner = ShadowRunner(self._fleet, self._submitter, self._finisher, self._grammars)
            try:
                await self.ensemble.start(runner)
            except BaseException:
                await self._fleet.close()
                raise
        except BaseException:
            await self.encoders.close()
            await self.records.close()
            raise
        await self.jobs.start()
        await self.responses.start()
        await self.batches.start()
        self._started = True

    async def drain(self) -> None:
        """Refuse new requests and let the running ones end."""
        self.jobs.pause()
        self.batches.pause()
        self._draining = True
        self.dashboard.close()
        await self.ensemble.stop_shadows()
        await asyncio.gather(self._fleet.drain(), self.encoders.drain())

    async def close(self) -> None:
        self.dashboard.close()
        await self.jobs.close()
        await self.batches.close()
        self._draining = True
        await self.ensemble.close()
        await asyncio.gather(self._fleet.close(), self.encoders.close())
        await self._finisher.settled()
        await self.responses.close()
        await self.records.close()
        await self._validators.close()
        await self._grammars.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    def handle(
        self,
        request: InferenceRequest,
        vendor: Sampling = VENDOR_DEFAULTS,
        on_plan: Callable[[RoutePlan], None] | None = None,
        on_abort: Callable[[InferenceMetrics], None] | None = None,
        on_receipt: OnReceipt | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Plan and run: the events of `request`. `on_plan` is called with every plan, `on_receipt`
        with the receipt each time it changes."""
        planned = self.plan(request, vendor, on_receipt)
        if on_plan is not None:
            on_plan(planned.plan)
        return self.run(planned, on_plan, on_abort)

    def plan(
        self,
        request: InferenceRequest,
        vendor: Sampling = VENDOR_DEFAULTS,
        on_receipt: OnReceipt | None = None,
    ) -> PlannedRequest:
        """Decide who answers. `vendor`: the dialect's defaults for values that were left out.

        The request then uses the digests that its names mean at this moment. A refusal is stamped.
        """
        receipt, run = self.receipts.begin(request, on_receipt), None
        try:
            if self._draining:
                raise Unavailable("the server is shutting down")
            requested, snapshot = request.limits.priority, self._fleet.snapshot
            request = snapshot.within_rights(request)
            hints = snapshot.router.named(request.hints)
            self.encoders.refuse_generation(request.hints.model, hints.model)
            if hints is not request.hints:
                request = replace(request, hints=hints)
            run = self._planner.plan(request, vendor, snapshot)
            run = self._steered(run, vendor, receipt)
        except CoterieError as error:
            receipt.refused(error, run)
            if receipt.trace is not None and receipt.trace.owns_root:
                receipt.trace.root.end(request.id)
            raise
        if request.limits.priority < requested:
            run.plan = with_lowered_priority(run.plan, requested, request.limits.priority)
        if receipt.trace is not None:
            receipt.trace.planned()
        lease = self._fleet.catalog.hold(run.plan.adapters)
        return PlannedRequest(run, lease, vendor, receipt)

    def _steered(self, run: RequestRun, vendor: Sampling, receipt: OpenReceipt) -> RequestRun:
        """The run as breakers, load, canaries and shadows change it."""
        request = steer_request(run)
        try:
            steered = self.ensemble.steer(run, request)
        except CoterieError as error:
            self.registry.value("coterie_rejections", run.served.name, error.code).add()
            raise
        receipt.steered(run, request, steered, self.ensemble.control)
        return self._planner.plan_steered(run, vendor, steered)

    def run(
        self,
        planned: PlannedRequest,
        on_plan: Callable[[RoutePlan], None] | None = None,
        on_abort: Callable[[InferenceMetrics], None] | None = None,
    ) -> AsyncGenerator[Event, None]:
        """The events of the request. `on_plan` is called with a plan that replaces the first one,
        `on_abort` with the metrics of a request that was closed before its end."""
        plan, ended, trace = planned.plan, on_abort or _ignored, planned.receipt.trace
        if plan.alternates or plan.adapters or planned.run.served.is_remote:
            events: AsyncGenerator[Event, None] = BegunEvents(
                partial(self._begun, planned, on_plan or _ignored, ended)
            )
        else:
            events = self._events(planned, ended)
        return events if trace is None or not trace.owns_root else _traced(events, trace)

    async def _begun(
        self,
        planned: PlannedRequest,
        on_plan: Callable[[RoutePlan], None],
        on_abort: Callable[[InferenceMetrics], None],
    ) -> tuple[Event, AsyncGenerator[Event, None]]:
        """The first event, and the others. Before it another plan may take the place of this one,
        each kind once: without adapters that cannot be loaded and that the caller did not name;
        with the specialist that stands in for another server that failed; with an alternate that
        the router found likely enough, if there is no room."""
        attempt, is_remote = planned, planned.run.served.is_remote
        refusal: Overloaded | None = None
        while True:
            is_first = attempt is planned
            may_fail = is_first and (is_remote or bool(planned.plan.adapters))
            other: PlannedRequest | None = None
            events = self._events(attempt, on_abort)
            try:
                event = await anext(events)
                if not (may_fail and isinstance(event, Failed)):
                    return event, events
                await events.aclose()
                raise from_code(event.code, event.message, retry_after_s=event.retry_after_s)
            except Overloaded as refused:
                if refusal is not None:
                    # the first choice is what the caller should wait for
                    raise refusal from None
                # another specialist would cost the tenant as much
                if not planned.plan.alternates or isinstance(refused, QuotaExceeded):
                    raise
                other = self._alternate(planned)
                if other is None:
                    refused.offer = self._offer(planned, refused.offer)
                    raise
                refusal = refused
            except Unavailable:
                if is_first and is_remote:
                    other = self._stand_in(planned)
                if other is None:
                    raise
            except WeightsError:
                if not may_fail or is_remote:
                    raise
            attempt = other or await self._without_damaged(planned)
            on_plan(attempt.plan)

    def _offer(
        self, planned: PlannedRequest, offer: AdmissionOffer | None
    ) -> AdmissionOffer | None:
        """The offer of a refusal, with another specialist that has room: the caller may accept one
        that the router would not choose by itself."""
        for other in self._with_room(planned):
            return replace(offer or AdmissionOffer(), model=other.specialist)
        return offer

    def _alternate(self, planned: PlannedRequest) -> PlannedRequest | None:
        """The most likely viable alternate that could take a request now."""
        for other in self._with_room(planned):
            if other.viable:
                run = self._planner.plan_alternate(planned.run, planned.vendor, other)
                self.registry.value("coterie_recoveries", planned.plan.specialist, "rerouted").add()
                lease = self._fleet.catalog.hold(run.plan.adapters)
                return replace(planned, run=run, lease=lease)
        return None

    def _with_room(self, planned: PlannedRequest) -> Iterator[AlternateSpecialist]:
        """Alternates that the tenant may use, that no breaker took out and that have room."""
        allowed = planned.run.request.hints.allowed
        for other in planned.plan.alternates:
            if other.specialist == planned.plan.specialist:
                continue
            if (allowed and other.specialist not in allowed) or not self.ensemble.may_answer(
                other.specialist
            ):
                continue
            found = self._fleet.find(other.specialist)
            if found.replicas.has_room() and _reads_alike(planned.run, found):
                yield other

    def _stand_in(self, planned: PlannedRequest) -> PlannedRequest | None:
        """The same request for the specialist that stands in."""
        steered = self.ensemble.instead(planned.run)
        if steered is None:
            return None
        other = self._fleet.find(steered.specialist)
        # one attempt more, not a chain of them
        if other.is_remote or not _reads_alike(planned.run, other):
            return None
        run = self._planner.plan_steered(planned.run, planned.vendor, steered)
        lost = planned.plan.specialist
        self.registry.value("coterie_recoveries", lost, "stood_in").add()
        return replace(planned, run=run, lease=self._fleet.catalog.hold(run.plan.adapters))

    async def _without_damaged(self, planned: PlannedRequest) -> PlannedRequest:
        """The same request without the adapters that could not be loaded."""
        catalog, run, plan = self._fleet.catalog, planned.run, planned.plan
        damaged = await catalog.find_damaged(plan.adapters)
        gone = damaged or list(plan.adapters)
        names = ", ".join(item.name for item in gone)
        why = "its files are damaged" if damaged else "it could not be loaded"
        fixed = run.snapshot.fixed_digests(plan.specialist)
        named = plan.trace is None or run.snapshot.router.resolve(run.request.hints).adapters
        if named or any(item.digest in fixed for item in gone):
            raise Unavailable(f"{names}: {why} on this server; it has to be installed again")
        self.registry.value("coterie_recoveries", run.served.name, "expert_left_out").add()
        left_out = [LeftOutAdapter(item, why) for item in gone]
        other = self._planner.plan_without(run, planned.vendor, left_out)
        return replace(planned, run=other, lease=catalog.hold(other.plan.adapters))

    def _config_digest(self) -> str:
        snapshot = self._fleet.current_snapshot
        return "" if snapshot is None else snapshot.config.digest

    def count_request(self, request: InferenceRequest) -> QuotaUse:
        """Count a request that will run later. Raises Overloaded if its tenant's quota is used
        up."""
        return self.quotas.enter(self._fleet.snapshot.config.tenant(request.tenant))

    def quota_states(self, tenant: str) -> Sequence[QuotaState]:
        """What is left of the tenant's quotas; nothing for a tenant without quotas."""
        snapshot = self._fleet.current_snapshot
        settings = None if snapshot is None else snapshot.config.tenant(tenant)
        return () if settings is None else self.quotas.state(settings)

    def within_rights(self, request: InferenceRequest) -> InferenceRequest:
        """`request` limited to the rights of its tenant."""
        return self._fleet.snapshot.within_rights(request)

    async def _events(
        self, planned: PlannedRequest, on_abort: Callable[[InferenceMetrics], None]
    ) -> AsyncGenerator[Event, None]:
        run, receipt, lease = planned.run, planned.receipt, planned.lease
        meter = RequestMeter(run.served.series, run.request.arrived_at, run.num_choices)
        with lease, self.ensemble.primary(run.served), self.activity.follow(run, meter):
            try:
                is_job = run.request.submitted_at is not None
                with self.quotas.enter(run.tenant, is_accepted=is_job) as quota:
                    if run.plan.adapters:
                        self._submitter.preload(run.served, run.plan.adapters)
                    work = await assignment(run, lease.virtual_tokens, self._grammars)
                    if receipt.trace is not None and isinstance(work, RemoteAssignment):
                        work = replace(work, trace=receipt.trace)
                    quota.reserve(work.num_prompt_tokens, (run.max_tokens or 0) * run.num_choices)
                    submitted = await self._submitter.enqueue(
                        run.served,
                        work,
                        partial(self._admitted, planned, meter),
                        partial(self._moved, planned),
                        is_accepted=is_job,
                    )
                self._conversations.turn(run.request, run.plan.adapters)
            except CoterieError as error:
                self.registry.value("coterie_rejections", run.served.name, error.code).add()
                receipt.refused(error, run)
                raise
            except asyncio.CancelledError:
                metrics = self._finisher.so_far(run, meter)
                receipt.cut_off(run, metrics)
                on_abort(metrics)
                raise
            meter.max_tokens = run.max_tokens
            run.replica = submitted.replica.name
            ended, is_first, keeps_text = False, True, run.may_be_validated
            self._open += 1
            try:
                while not ended:
                    events = await submitted.events.take()
                    meter.observe(events)
                    if is_first and _is_cut_before_start(events) and run.has_place:
                        yield Started(
                            run.request.id,
                            run.replica,
                            work.num_prompt_tokens,
                            0,
                            max_tokens=run.max_tokens,
                            prompt_ids=run.prompt_ids,
                        )
                    is_first = False
                    for event in events:
                        if isinstance(event, Delta):
                            if keeps_text:
                                run.read(event)
                        elif isinstance(event, Started):
                            lease.start()
                            event = Started(
                                event.request_id,
                                event.replica,
                                event.prompt_tokens,
                                event.cached_tokens,
                                event.prompt_logprobs,
                                run.max_tokens,
                                run.prompt_ids,
                                event.stored_tokens,
                                event.at,
                            )
                        else:
                            if isinstance(event, Failed) and meter.first_token_s is None:
                                # as a refusal; another specialist may answer and count it
                                quota.cancel()
                            event = await self._ended(planned, event, meter)
                            ended = True
                        yield event
            finally:
                quota.settle(meter.num_tokens)
                self._open -= 1
                submitted.events.end()
                if not ended:
                    metrics = self._finisher.abandoned(run, meter)
                    receipt.cut_off(run, metrics)
                    on_abort(metrics)
                    await submitted.abort()

    def _admitted(
        self, planned: PlannedRequest, meter: RequestMeter, result: AdmissionResult
    ) -> None:
        """Stamp the receipt before the request is sent. One that was rerouted stays so."""
        # a worker may tell its verdict together with the first token
        meter.admitted_at = time.monotonic()
        run = planned.run
        run.has_place = result.outcome == "admitted"
        outcome = run.admission or result.outcome
        self.registry.value("coterie_admissions", run.served.name, outcome).add()
        if result.reason and result.reason not in run.plan.reasons:
            run.plan = replace(run.plan, reasons=(*run.plan.reasons, result.reason))
        planned.receipt.admitted(run, result.replica.name, outcome)

    def _moved(self, planned: PlannedRequest, left: str, replica: str) -> None:
        planned.run.replica = replica
        planned.receipt.moved(left, replica)

    async def _ended(
        self, planned: PlannedRequest, event: Finished | Failed, meter: RequestMeter
    ) -> Finished | Failed:
        run, receipt = planned.run, planned.receipt
        if isinstance(event, Failed):
            receipt.cut_off(run, self._finisher.failed(run, event, meter))
            self.ensemble.failed(run, event.code)
            return event
        finished = receipt.finished(run, await self._finisher.finished(run, event))
        self.ensemble.answered(run, planned.vendor)
        self._routes.finished(finished)
        for adapters in self._conversations.ahead(run.request):
            self._submitter.load_ahead(run.served, adapters, self._fleet.catalog)
        return finished

    def named(self, hints: RouteHints) -> RouteHints:
        """`hints` with the name that an alias means in place of the alias."""
        return self._fleet.router.named(hints)

    def resolve(
        self, hints: RouteHints, prompt: Prompt | None = None, tenant: str | None = None
    ) -> str:
        """The specialist that would answer now: by name only, or by the content of `prompt`. With a
        tenant one that it may use."""
        router = self._fleet.router
        self.encoders.refuse_generation(hints.model, router.named(hints).model)
        if tenant is not None:
            hints = self._fleet.snapshot.with_allowed(hints, tenant)
        if prompt is None:
            return router.resolve(hints).specialist
        return router.specialist(hints, prompt)

    async def check_format(self, request: InferenceRequest) -> None:
        """Raises InvalidRequest if the requested answer format cannot be enforced."""
        if request.response_format is not None:
            served = self._fleet.find(self.resolve(request.hints))
            if served.tokenizer is None:
                check_format(request.response_format)
            else:
                tenant = own_tenant(request.tenant)
                await self._grammars.check(request.response_format, served.tokenizer, tenant)

    async def tokenise(
        self, specialist: str | None, prompt: Prompt, hints: RouteHints | None = None
    ) -> list[int]:
        """The tokens of a prompt for `specialist`, with the adapters that `hints` name. A prompt
        that does not fit is tokenised too, up to `COUNTED` times the context; long prompts one at a
        time."""
        prompt = self.readable(specialist, prompt, hints)
        served = self._fleet.find(specialist)
        async with self._counting if is_long(prompt) else nullcontext():
            return await tokenise(served.own_tokenizer(), prompt, served.context, COUNTED)

    def readable(
        self, specialist: str | None, prompt: Prompt, hints: RouteHints | None = None
    ) -> Prompt:
        """The prompt as `specialist` reads it, with the adapters that `hints` name."""
        self.encoders.refuse_generation(specialist)
        served, router = self._fleet.find(specialist), self._fleet.router
        named = () if hints is None else router.resolve(hints).adapters
        fixed = router.specialists[served.name].fixed
        return served.own_tokenizer().readable(prompt, with_adapters=bool(named or fixed))

    def tokenizer(self, specialist: str | None) -> Tokenizer:
        """Raises UnsupportedFeature for a specialist on another server."""
        self.encoders.refuse_generation(specialist)
        return self._fleet.find(specialist).own_tokenizer()

    def models(self, tenant: str | None = None) -> tuple[ModelCard, ...]:
        """The cards of all models, or of those that a tenant may use."""
        rights = self._may_use(tenant)
        return self._fleet.cards(rights) + self._encoder_cards(rights.allowed)

    def _encoder_cards(self, allowed: Sequence[str]) -> tuple[ModelCard, ...]:
        cards = {
            item.name: ModelCard(
                item.name,
                item.created,
                item.context,
                item.model,
                weight_bytes=item.weight_bytes,
            )
            for item in self.encoders.served.values()
            if not allowed or item.name in allowed
        }
        aliases = () if not cards else self._fleet.router.aliases.exact.items()
        named = (replace(cards[to], name=name, root=to) for name, to in aliases if to in cards)
        return (*cards.values(), *named)

    def model(self, name: str | None, tenant: str | None = None) -> ModelCard:
        """The card for any model name that a request may use, also `base:a@1.0+b`."""
        rights = self._may_use(tenant)
        wanted = self.encoder_name(name)
        for card in self._encoder_cards(rights.allowed):
            if card.name == wanted:
                return card if wanted == name else replace(card, name=str(name), root=card.name)
        return self._fleet.card(name, rights)

    def encoder_name(self, model: str | None) -> str | None:
        """`model`, or what it is an alias of. A name that an encoder has means that encoder."""
        if model is None or model in self.encoders.names():
            return model
        return self._fleet.router.named(RouteHints(model)).model

    def encode_caller(
        self, asked: EncodingAsked, deadline: float | None, on_receipt: OnReceipt | None = None
    ) -> EncodeCaller:
        """The tenant of a request to an encoder, with its rights, its quotas and its receipt."""
        config, tenant = self._fleet.snapshot.config, asked.tenant
        if config.rights_of(tenant) is None:
            raise Unauthenticated("this API key is not known here any more")
        receipt = EncodingReceipt(self.receipts, asked, on_receipt)
        return EncodeCaller(
            asked.request_id,
            tenant,
            receipt,
            config.tenant(tenant),
            config.may_use(tenant),
            deadline,
        )

    def writes_text(self, model: str) -> bool:
        """Whether a request for text may use this name."""
        try:
            self._fleet.router.resolve(RouteHints(model))
        except CoterieError:
            return False
        return True

    def _may_use(self, tenant: str | None) -> RouteHints:
        """Hints with nothing but what the tenant may use, encoders too."""
        snapshot = self._fleet.current_snapshot
        if tenant is None or snapshot is None:
            return RouteHints()
        config = snapshot.config
        return RouteHints(
            allowed=config.may_use(tenant), allowed_experts=config.may_use_experts(tenant)
        )

    def is_limited(self, tenant: str) -> bool:
        """Whether the tenant may use some specialists or experts alone."""
        rights = self._may_use(own_tenant(tenant))
        return bool(rights.allowed or rights.allowed_experts)

    def expected_wait_s(self, specialist: str | None = None) -> float:
        """Estimated time until a new request would get its first token."""
        return self._fleet.expected_wait_s(specialist)

    @property
    def num_open(self) -> int:
        """Number of requests that run or wait."""
        return self._open

    def health(self, tenant: str | None = None) -> ServiceHealth:
        """Of all specialists; `tenant`: with the details of those that it may use."""
        health = self._fleet.health(is_open=self._started and not self._draining)
        encoders = self.encoders.health()
        allowed = self._may_use(tenant).allowed
        found = (health.specialists | encoders).items()
        return replace(
            health,
            ready=health.ready and all(item["ready"] for item in encoders.values()),
            specialists={name: item for name, item in found if not allowed or name in allowed},
        )

    def metrics_text(self) -> str:
        registry = self._fleet.registry
        registry.value("coterie_gateway_cpu_seconds").set(time.process_time())
        registry.value("coterie_gateway_open_streams").set(self._open)
        registry.value("coterie_records_dropped").set(self.records.dropped)
        registry.value("coterie_responses_dropped").set(self.responses.dropped)
        if self.tracer is not None:
            counts = self.tracer.counts
            for result in ("sent", "dropped", "lost"):
                registry.value("coterie_trace_spans", result).set(getattr(counts, result))
        for status, count in self.jobs.counts().items():
            registry.value("coterie_jobs", status).set(count)
        self._measure_batches()
        for verdict, count in self.records.verdicts.items():
            registry.value("coterie_feedback", verdict).set(count)
        for check, count in self._validators.health.broken.items():
            registry.value("coterie_broken_checks", check).set(count)
        registry.value("coterie_recoveries", "gateway", "job_taken_up").set(self.jobs.taken_up)
        registry.value("coterie_recoveries", "gateway", "receipt").set(self.records.recovered)
        self._fleet.measure()
        self.encoders.measure()
        self.ensemble.measure()
        return registry.render()

    def _measure_batches(self) -> None:
        registry, batches = self._fleet.registry, self.batches
        for status in OPEN_STATUSES:
            registry.value("coterie_batches", status).set(batches.counts().get(status, 0))
        for state in ENDED_STATES:
            registry.value("coterie_batch_requests", state).set(batches.ended[state])
        for state, count in batches.work.counts().items():
            registry.value("coterie_batch_requests_open", state).set(count)
        registry.value("coterie_file_bytes").set(batches.files.num_bytes)
        registry.value("coterie_recoveries", "gateway", "batch_taken_up").set(batches.taken_up)


def _reads_alike(run: RequestRun, other: ServedSpecialist) -> bool:
    """Whether another specialist could answer what was prepared for the planned one: calls of tools
    are written for one tokenizer, and a format for one that thinks or does not."""
    mine, theirs, prompt = run.served.tokenizer, other.tokenizer, run.request.prompt
    if mine is theirs:
        return True
    if isinstance(prompt, Chat) and prompt.tools:
        return False
    thinks = any(item is not None and item.reasoning is not None for item in (mine, theirs))
    return run.request.response_format is None or not thinks


def _is_cut_before_start(events: Sequence[Event]) -> bool:
    """Whether the deadline passed on the way to the engine. `events`: the first ones."""
    first = events[0] if events else None
    return isinstance(first, Delta) and first.finish_reason == "timeout" and not first.token_ids


async def _traced(
    events: AsyncGenerator[Event, None], trace: InferenceTrace
) -> AsyncGenerator[Event, None]:
    """The events of an inference that is a trace of its own: it ends with them."""
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    finally:
        trace.root.end("" if trace.receipt is None else trace.receipt.request_id)


def _ignored(_: object) -> None:
    """The default of the callbacks: do nothing."""
