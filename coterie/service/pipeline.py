"""The way of a request through the service: plan, fit, tokenise, admit, enqueue, events, validate,
record.

Refusals are raised before the first event; after it, everything is an event. Closing the iterator
aborts the request at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from coterie.core.errors import CoterieError, Unavailable, WeightsError, from_code
from coterie.core.events import Delta, Event, Failed, Finished, InferenceMetrics, Started
from coterie.core.plan import RoutePlan
from coterie.core.request import (
    EVERY_RIGHT,
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
from coterie.service.adapters.admin import AdapterAdmin
from coterie.service.adapters.catalog import AdapterLease
from coterie.service.adapters.conversation import ConversationPredictor
from coterie.service.finish import Finisher
from coterie.service.fleet import Fleet, ModelCard, ServiceHealth
from coterie.service.jobs.service import JobService
from coterie.service.jobs.store import JobStore
from coterie.service.meter import RequestMeter, RouteMeter
from coterie.service.plan import LeftOutAdapter, RequestPlanner, RequestRun, with_lowered_priority
from coterie.service.records.log import InferenceRecords
from coterie.service.submit.submitter import Submitter, assignment, tokenise
from coterie.service.validate.validators import AnswerValidators

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


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request with its plan. It keeps its adapters until it has run or is dropped."""

    run: RequestRun
    lease: AdapterLease
    # the dialect's defaults for values that the request leaves out
    vendor: Sampling

    @property
    def plan(self) -> RoutePlan:
        return self.run.plan

    @property
    def tokenizer(self) -> Tokenizer:
        return self.run.served.tokenizer

    def set_format(self, answer_format: ResponseFormat | None) -> None:
        """Constrain the answer to `answer_format`: the caller's format, written for the model that
        answers."""
        self.run.request = replace(self.run.request, response_format=answer_format)
        self.run.response_format = answer_format or self.plan.tuned.response_format


class Pipeline:
    def __init__(self, parts: PipelineParts) -> None:
        self._fleet = parts.fleet
        self.registry = parts.fleet.registry
        self.adapters, self.records = parts.adapters, parts.records
        self.jobs = JobService(self, parts.job_store, parts.job_settings)
        self._validators = parts.validators
        self._routes = RouteMeter(self.registry)
        self._planner = RequestPlanner(parts.fleet, self._routes)
        self._grammars = GrammarCheck()
        self._submitter = Submitter()
        self._conversations = ConversationPredictor(self.registry)
        self._finisher = Finisher(parts.validators, parts.records)
        self._counting = asyncio.Lock()
        self._draining = False
        self._open = 0
        # by tenant; a tenant that is not in it has all rights
        self.rights: Mapping[str, KeyRights] = {}

    async def start(self) -> None:
        await self.records.start()
        try:
            await self._fleet.start()
        except BaseException:
            await self.records.close()
            raise
        await self.jobs.start()

    async def drain(self) -> None:
        """Refuse new requests and let the running ones end."""
        self.jobs.pause()
        self._draining = True
        await self._fleet.drain()

    async def close(self) -> None:
        await self.jobs.close()
        self._draining = True
        await self._fleet.close()
        await self._finisher.settled()
        await self.records.close()
        await self._validators.close()
        await self._grammars.close()

    def handle(
        self,
        request: InferenceRequest,
        vendor: Sampling = VENDOR_DEFAULTS,
        on_plan: Callable[[RoutePlan], None] | None = None,
        on_abort: Callable[[InferenceMetrics], None] | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Plan and run: the events of `request`. `on_plan` is called with every plan."""
        planned = self.plan(request, vendor)
        if on_plan is not None:
            on_plan(planned.plan)
        return self.run(planned, on_plan, on_abort)

    def plan(self, request: InferenceRequest, vendor: Sampling = VENDOR_DEFAULTS) -> PlannedRequest:
        """Decide who answers. `vendor`: the dialect's defaults for values that were left out.

        The request then uses the digests that its names mean at this moment.
        """
        if self._draining:
            raise Unavailable("the server is shutting down")
        requested = request.limits.priority
        request = self.within_rights(request)
        run = self._planner.plan(request, vendor)
        if request.limits.priority < requested:
            run.plan = with_lowered_priority(run.plan, requested, request.limits.priority)
        return PlannedRequest(run, self._fleet.catalog.hold(run.plan.adapters), vendor)

    def run(
        self,
        planned: PlannedRequest,
        on_plan: Callable[[RoutePlan], None] | None = None,
        on_abort: Callable[[InferenceMetrics], None] | None = None,
    ) -> AsyncGenerator[Event, None]:
        """The events of the request. `on_plan` is called with a plan that replaces the first one,
        `on_abort` with the metrics of a request that was closed before its end."""
        if planned.plan.adapters:
            return self._with_fallback(planned, on_plan or _ignored, on_abort or _ignored)
        return self._events(planned.run, planned.lease, on_abort or _ignored)

    async def _with_fallback(
        self,
        planned: PlannedRequest,
        on_plan: Callable[[RoutePlan], None],
        on_abort: Callable[[InferenceMetrics], None],
    ) -> AsyncGenerator[Event, None]:
        """The events. If the adapters cannot be loaded and the caller did not name them, the events
        of a plan without them. Until then only the plan was reported."""
        has_started = False
        events = self._events(planned.run, planned.lease, on_abort)
        try:
            async with aclosing(events):
                async for event in events:
                    if not has_started and isinstance(event, Failed):
                        raise from_code(event.code, event.message)
                    has_started = True
                    yield event
            return
        except WeightsError:
            if has_started:
                raise
        other = await self._without_damaged(planned)
        on_plan(other.plan)
        retried = self._events(other, self._fleet.catalog.hold(other.plan.adapters), on_abort)
        async with aclosing(retried):
            async for event in retried:
                yield event

    async def _without_damaged(self, planned: PlannedRequest) -> RequestRun:
        catalog, run, plan = self._fleet.catalog, planned.run, planned.plan
        damaged = await catalog.find_damaged(plan.adapters)
        gone = damaged or list(plan.adapters)
        names = ", ".join(item.name for item in gone)
        why = "its files are damaged" if damaged else "it could not be loaded"
        if plan.trace is None or self._fleet.router.resolve(run.request.hints).adapters:
            raise Unavailable(f"{names}: {why} on this server; it has to be installed again")
        self.registry.value("coterie_recoveries", run.served.name, "expert_left_out").add()
        left_out = [LeftOutAdapter(item, why) for item in gone]
        return self._planner.plan_without(run, planned.vendor, left_out)

    def within_rights(self, request: InferenceRequest) -> InferenceRequest:
        """`request` limited to the rights of its key."""
        rights = self.rights.get(own_tenant(request.tenant), EVERY_RIGHT)
        limits = replace(
            request.limits,
            priority=min(request.limits.priority, rights.priority),
            max_running=rights.max_running,
        )
        return request if limits == request.limits else replace(request, limits=limits)

    async def _events(
        self, run: RequestRun, lease: AdapterLease, on_abort: Callable[[InferenceMetrics], None]
    ) -> AsyncGenerator[Event, None]:
        with lease:
            meter = RequestMeter(
                run.served.series, run.request.arrived_at, run.plan.sampling.n or 1
            )
            try:
                if run.plan.adapters:
                    self._submitter.preload(run.served, run.plan.adapters)
                work = await assignment(run, lease.virtual_tokens, self._grammars)
                is_job = run.request.submitted_at is not None
                replica, event_queue = await self._submitter.enqueue(
                    run.served, work, is_accepted=is_job
                )
                self._conversations.turn(run.request, run.plan.adapters)
            except CoterieError as error:
                self.registry.value("coterie_rejections", run.served.name, error.code).add()
                raise
            except asyncio.CancelledError:
                on_abort(self._finisher.so_far(run, meter))
                raise
            meter.max_tokens = run.max_tokens
            ended, keeps_text = False, run.may_be_validated
            self._open += 1
            try:
                while not ended:
                    events = await event_queue.take()
                    meter.observe(events)
                    for event in events:
                        if isinstance(event, Delta):
                            if keeps_text and event.choice == 0:
                                run.texts.append(event.text)
                        elif isinstance(event, Started):
                            lease.start()
                            event = replace(
                                event, max_tokens=run.max_tokens, prompt_ids=run.prompt_ids
                            )
                        else:
                            event = await self._ended(run, event, meter)
                            ended = True
                        yield event
            finally:
                self._open -= 1
                event_queue.end()
                if not ended:
                    on_abort(self._finisher.abandoned(run, meter))
                    await replica.abort(run.request.id)

    async def _ended(
        self, run: RequestRun, event: Finished | Failed, meter: RequestMeter
    ) -> Finished | Failed:
        if isinstance(event, Failed):
            self._finisher.failed(run, event, meter)
            return event
        finished = await self._finisher.finished(run, event)
        self._routes.finished(finished)
        for adapters in self._conversations.ahead(run.request):
            self._submitter.load_ahead(run.served, adapters, self._fleet.catalog)
        return finished

    def resolve(self, hints: RouteHints, prompt: Prompt | None = None) -> str:
        """The specialist that would answer now: by name only, or by the content of `prompt`."""
        router = self._fleet.router
        if prompt is None:
            return router.resolve(hints).specialist
        return router.specialist(hints, prompt)

    async def check_format(self, request: InferenceRequest) -> None:
        """Raises InvalidRequest if the requested answer format cannot be enforced."""
        if request.response_format is not None:
            served = self._fleet.find(self.resolve(request.hints))
            await self._grammars.check(request.response_format, served.tokenizer)

    async def tokenise(self, specialist: str | None, prompt: Prompt) -> list[int]:
        """The tokens of a prompt for `specialist`. A prompt that does not fit is tokenised too, up
        to `COUNTED` times the context; long prompts one at a time."""
        served = self._fleet.find(specialist)
        async with self._counting if is_long(prompt) else nullcontext():
            return await tokenise(served.tokenizer, prompt, served.context, COUNTED)

    def tokenizer(self, specialist: str | None) -> Tokenizer:
        return self._fleet.find(specialist).tokenizer

    def models(self) -> tuple[ModelCard, ...]:
        return self._fleet.cards()

    def model(self, name: str | None) -> ModelCard:
        """The card for any model name that a request may use, also `base:a@1.0+b`."""
        return self._fleet.card(name)

    def expected_wait_s(self, specialist: str | None = None) -> float:
        """Estimated time until a new request would get its first token."""
        return self._fleet.expected_wait_s(specialist)

    @property
    def num_open(self) -> int:
        """Number of requests that run or wait."""
        return self._open

    def health(self) -> ServiceHealth:
        return self._fleet.health(draining=self._draining)

    def metrics_text(self) -> str:
        registry = self._fleet.registry
        registry.value("coterie_gateway_cpu_seconds").set(time.process_time())
        registry.value("coterie_gateway_open_streams").set(self._open)
        registry.value("coterie_records_dropped").set(self.records.dropped)
        for status, count in self.jobs.counts().items():
            registry.value("coterie_jobs", status).set(count)
        for verdict, count in self.records.verdicts.items():
            registry.value("coterie_feedback", verdict).set(count)
        registry.value("coterie_recoveries", "gateway", "job_taken_up").set(self.jobs.taken_up)
        self._fleet.measure()
        return registry.render()


def _ignored(_: object) -> None:
    """The default of the callbacks: do nothing."""
