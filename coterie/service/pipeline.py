"""The road of a request: plan, fit, tokenise, admit, enqueue, events, validate, write down.

Each step is one call away. Refusals are raised before the first event; after it, everything is an
event. Closing the iterator aborts the request at once.
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
from coterie.service.plan import LeftOutAdapter, RequestPlanner, RequestRun, lowered
from coterie.service.records.log import InferenceRecords
from coterie.service.submit.submitter import Submitter, assignment, tokenise
from coterie.service.validate.validators import AnswerValidators

if TYPE_CHECKING:
    from coterie.models.text.tokenizer import Tokenizer


# a text of so many times the context is still counted for who wants to know how much to cut
COUNTED = 4


@dataclass(frozen=True, slots=True)
class PipelineParts:
    """What a pipeline is put together from."""

    roster: Fleet
    adapters: AdapterAdmin
    records: InferenceRecords
    validators: AnswerValidators
    job_store: JobStore
    job_settings: JobSettings


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request whose answerer is decided. It holds its adapters until it has run or is dropped."""

    run: RequestRun
    lease: AdapterLease
    # the dialect's values for what was left open
    vendor: Sampling

    @property
    def plan(self) -> RoutePlan:
        return self.run.plan

    @property
    def tokenizer(self) -> Tokenizer:
        return self.run.served.tokenizer

    def hold_to(self, wanted: ResponseFormat | None) -> None:
        """The answer keeps to `wanted`: the caller's format, written for whoever answers."""
        self.run.request = replace(self.run.request, response_format=wanted)
        self.run.response_format = wanted or self.plan.tuned.response_format


class Pipeline:
    def __init__(self, parts: PipelineParts) -> None:
        self._roster = parts.roster
        self.registry = parts.roster.registry
        self.adapters, self.records = parts.adapters, parts.records
        self.jobs = JobService(self, parts.job_store, parts.job_settings)
        self._validators = parts.validators
        self._routes = RouteMeter(self.registry)
        self._planner = RequestPlanner(parts.roster, self._routes)
        self._grammars = GrammarCheck()
        self._handover = Submitter()
        self._conversations = ConversationPredictor(self.registry)
        self._ending = Finisher(parts.validators, parts.records)
        self._counting = asyncio.Lock()
        self._draining = False
        self._open = 0
        # by tenant; whoever is not in it has every right
        self.rights: Mapping[str, KeyRights] = {}

    async def start(self) -> None:
        await self.records.start()
        try:
            await self._roster.start()
        except BaseException:
            await self.records.close()
            raise
        await self.jobs.start()

    async def drain(self) -> None:
        """Refuse new requests and let the running ones end."""
        self.jobs.pause()
        self._draining = True
        await self._roster.drain()

    async def close(self) -> None:
        await self.jobs.close()
        self._draining = True
        await self._roster.close()
        await self._ending.settled()
        await self.records.close()
        await self._validators.close()
        await self._grammars.close()

    def handle(
        self,
        request: InferenceRequest,
        vendor: Sampling = VENDOR_DEFAULTS,
        tell: Callable[[RoutePlan], None] | None = None,
        left: Callable[[InferenceMetrics], None] | None = None,
    ) -> AsyncGenerator[Event, None]:
        """`request`'s events, as `plan` and `run` make them; every plan is told to `tell`."""
        planned = self.plan(request, vendor)
        if tell is not None:
            tell(planned.plan)
        return self.run(planned, tell, left)

    def plan(self, request: InferenceRequest, vendor: Sampling = VENDOR_DEFAULTS) -> PlannedRequest:
        """Who answers. `vendor` holds the dialect's values for what was left open.

        From here on the request runs on the digests that its names stand for at this moment.
        """
        if self._draining:
            raise Unavailable("the server is shutting down")
        asked = request.limits.priority
        request = self.within_rights(request)
        run = self._planner.plan(request, vendor)
        if request.limits.priority < asked:
            run.plan = lowered(run.plan, asked, request.limits.priority)
        return PlannedRequest(run, self._roster.catalog.hold(run.plan.adapters), vendor)

    def run(
        self,
        planned: PlannedRequest,
        tell: Callable[[RoutePlan], None] | None = None,
        left: Callable[[InferenceMetrics], None] | None = None,
    ) -> AsyncGenerator[Event, None]:
        """The request's events. `tell` is told of a plan that takes the place of the first, `left`
        the figures of a request that was closed before its end."""
        if planned.plan.adapters:
            return self._whole_or_without(planned, tell or _ignored, left or _ignored)
        return self._events(planned.run, planned.lease, left or _ignored)

    async def _whole_or_without(
        self,
        planned: PlannedRequest,
        tell: Callable[[RoutePlan], None],
        left: Callable[[InferenceMetrics], None],
    ) -> AsyncGenerator[Event, None]:
        """Its events; where its adapters cannot be loaded, those of a plan without them, unless
        the caller named them. Nothing of it was said until then but its plan."""
        began = False
        events = self._events(planned.run, planned.lease, left)
        try:
            async with aclosing(events):
                async for event in events:
                    if not began and isinstance(event, Failed):
                        raise from_code(event.code, event.message)
                    began = True
                    yield event
            return
        except WeightsError:
            if began:
                raise
        other = await self._without_damaged(planned)
        tell(other.plan)
        again = self._events(other, self._roster.catalog.hold(other.plan.adapters), left)
        async with aclosing(again):
            async for event in again:
                yield event

    async def _without_damaged(self, planned: PlannedRequest) -> RequestRun:
        catalog, run, plan = self._roster.catalog, planned.run, planned.plan
        damaged = await catalog.look_over(plan.adapters)
        gone = damaged or list(plan.adapters)
        names = ", ".join(item.name for item in gone)
        why = "its files are damaged" if damaged else "it could not be loaded"
        if plan.trace is None or self._roster.router.resolve(run.request.hints).adapters:
            raise Unavailable(f"{names}: {why} on this server; it has to be installed again")
        self.registry.value("coterie_recoveries", run.served.name, "expert_left_out").add()
        left = [LeftOutAdapter(item, why) for item in gone]
        return self._planner.again(run, planned.vendor, left)

    def within_rights(self, request: InferenceRequest) -> InferenceRequest:
        """`request` as its key has a right to it."""
        rights = self.rights.get(own_tenant(request.tenant), EVERY_RIGHT)
        limits = replace(
            request.limits,
            priority=min(request.limits.priority, rights.priority),
            max_running=rights.max_running,
        )
        return request if limits == request.limits else replace(request, limits=limits)

    async def _events(
        self, run: RequestRun, lease: AdapterLease, left: Callable[[InferenceMetrics], None]
    ) -> AsyncGenerator[Event, None]:
        with lease:
            meter = RequestMeter(
                run.served.series, run.request.arrived_at, run.plan.sampling.n or 1
            )
            try:
                if run.plan.adapters:
                    self._handover.preload(run.served, run.plan.adapters)
                work = await assignment(run, lease.virtual_tokens, self._grammars)
                is_job = run.request.submitted_at is not None
                replica, mailbox = await self._handover.enqueue(
                    run.served, work, is_accepted=is_job
                )
                self._conversations.turn(run.request, run.plan.adapters)
            except CoterieError as error:
                self.registry.value("coterie_rejections", run.served.name, error.code).add()
                raise
            except asyncio.CancelledError:
                left(self._ending.so_far(run, meter))
                raise
            meter.max_tokens = run.max_tokens
            ended, is_judged = False, run.may_be_judged
            self._open += 1
            try:
                while not ended:
                    events = await mailbox.take()
                    meter.observe(events)
                    for event in events:
                        if isinstance(event, Delta):
                            if is_judged and event.choice == 0:
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
                mailbox.end()
                if not ended:
                    left(self._ending.left(run, meter))
                    await replica.abort(run.request.id)

    async def _ended(
        self, run: RequestRun, event: Finished | Failed, meter: RequestMeter
    ) -> Finished | Failed:
        if isinstance(event, Failed):
            self._ending.failed(run, event, meter)
            return event
        finished = await self._ending.finished(run, event)
        self._routes.finished(finished)
        for adapters in self._conversations.ahead(run.request):
            self._handover.load_ahead(run.served, adapters, self._roster.catalog)
        return finished

    def resolve(self, hints: RouteHints, prompt: Prompt | None = None) -> str:
        """The specialist that would answer now: by names alone, or by what `prompt` is about."""
        router = self._roster.router
        if prompt is None:
            return router.resolve(hints).specialist
        return router.specialist(hints, prompt)

    async def check_format(self, request: InferenceRequest) -> None:
        """Raises InvalidRequest where no answer can be held to the form that was asked for."""
        if request.response_format is not None:
            served = self._roster.find(self.resolve(request.hints))
            await self._grammars.check(request.response_format, served.tokenizer)

    async def tokenise(self, specialist: str | None, prompt: Prompt) -> list[int]:
        """A prompt's tokens as `specialist` would read them. One that does not fit is counted too,
        up to `COUNTED` times the context; of long ones one at a time."""
        served = self._roster.find(specialist)
        async with self._counting if is_long(prompt) else nullcontext():
            return await tokenise(served.tokenizer, prompt, served.context, COUNTED)

    def tokenizer(self, specialist: str | None) -> Tokenizer:
        return self._roster.find(specialist).tokenizer

    def models(self) -> tuple[ModelCard, ...]:
        return self._roster.cards()

    def model(self, name: str | None) -> ModelCard:
        """Whatever a request may name, `base:a@1.0+b` too."""
        return self._roster.card(name)

    def expected_wait_s(self, specialist: str | None = None) -> float:
        """Until a request that came now would get its first token."""
        return self._roster.expected_wait_s(specialist)

    @property
    def num_open(self) -> int:
        """Requests that are being answered or wait for it."""
        return self._open

    def health(self) -> ServiceHealth:
        return self._roster.health(draining=self._draining)

    def metrics_text(self) -> str:
        registry = self._roster.registry
        registry.value("coterie_gateway_cpu_seconds").set(time.process_time())
        registry.value("coterie_gateway_open_streams").set(self._open)
        registry.value("coterie_records_dropped").set(self.records.dropped)
        for status, count in self.jobs.counts().items():
            registry.value("coterie_jobs", status).set(count)
        for verdict, count in self.records.verdicts.items():
            registry.value("coterie_feedback", verdict).set(count)
        registry.value("coterie_recoveries", "gateway", "job_taken_up").set(self.jobs.taken_up)
        self._roster.measure()
        return registry.render()


def _ignored(_: object) -> None:
    """Nobody asked."""
