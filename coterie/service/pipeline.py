"""The road of a request: plan, tokenise, admit, enqueue, events. Each step is one call away.

Refusals are raised before the first event; after it, everything is an event. Closing the iterator
aborts the request at once. Knows no HTTP, no dialect and no torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from coterie.core.errors import CoterieError, InvalidRequest, Unavailable, from_code
from coterie.core.events import Event, Failed, Finished, Started
from coterie.core.plan import Admitted, Assignment, Rejected, RoutePlan
from coterie.core.request import Chat, InferenceRequest, Prompt, RouteHints, Sampling, Text
from coterie.core.resolve import VENDOR_DEFAULTS, check_tokens, resolve_limits
from coterie.service.adapter_admin import AdapterAdmin
from coterie.service.admission import Admission
from coterie.service.leases import Lease
from coterie.service.mailbox import Mailbox
from coterie.service.meter import Meter
from coterie.service.roster import Health, ModelCard, Roster, Served
from coterie.workers.base import Replica

if TYPE_CHECKING:
    from coterie.models.tokenizer import Tokenizer

# above this many characters a prompt is tokenised on a thread: about 5 ms of the event loop
MAX_INLINE_CHARACTERS = 8_000


class Pipeline:
    def __init__(self, roster: Roster, adapters: AdapterAdmin) -> None:
        self._roster = roster
        self.adapters = adapters
        self._admission = Admission()
        self._draining = False
        self._open = 0

    async def start(self) -> None:
        await self._roster.start()

    async def drain(self) -> None:
        """Refuse new requests and let the running ones end."""
        self._draining = True
        await self._roster.drain()

    async def close(self) -> None:
        self._draining = True
        await self._roster.close()

    def handle(
        self,
        request: InferenceRequest,
        vendor: Sampling = VENDOR_DEFAULTS,
        tell: Callable[[RoutePlan], None] | None = None,
    ) -> AsyncGenerator[Event, None]:
        """`request`'s events. `vendor` holds the dialect's values for what was left open.

        The plan is made, told and held to before this returns: from here on the request runs on
        the digests that its names stand for at this moment.
        """
        served, plan = self._plan(request, vendor)
        lease = self._roster.catalog.hold(plan.adapters)
        if tell is not None:
            tell(plan)
        return self._events(request, served, plan, lease)

    async def _events(
        self, request: InferenceRequest, served: Served, plan: RoutePlan, lease: Lease
    ) -> AsyncGenerator[Event, None]:
        with lease:
            replica, mailbox = await self._begin(request, served, plan, lease.virtual_tokens)
            meter = Meter(served.series, request.arrived_at, plan.sampling.n or 1)
            ended = False
            self._open += 1
            try:
                while not ended:
                    events = await mailbox.take()
                    meter.observe(events)
                    for event in events:
                        if isinstance(event, Started):
                            lease.start()
                        elif isinstance(event, (Finished, Failed)):
                            ended = True
                        yield event if not ended else _with_adapters(event, plan)
            finally:
                self._open -= 1
                mailbox.end()
                if not ended:
                    await replica.abort(request.id)

    async def _begin(
        self, request: InferenceRequest, served: Served, plan: RoutePlan, virtual_tokens: int
    ) -> tuple[Replica, Mailbox]:
        try:
            if plan.adapters:
                self._preload(served, plan)
            prompt_ids = await tokenise(served.tokenizer, request.prompt)
            assignment = _assignment(request, plan, served, prompt_ids, virtual_tokens)
            return await self._enqueue(served, assignment)
        except CoterieError as error:
            self._roster.registry.value("coterie_rejections", served.name, error.code).add()
            raise

    def _preload(self, served: Served, plan: RoutePlan) -> None:
        """Loading begins before the prompt is tokenised, where the queue has a place at all."""
        replicas = served.replicas
        if replicas.ready():
            replica = replicas.pick(adapters=plan.adapters)
            if not replicas.is_full(replica):
                replica.preload(plan.adapters)

    def resolve(self, hints: RouteHints) -> str:
        """The specialist that would answer now."""
        return self._roster.router.resolve(hints).specialist

    async def tokenise(self, specialist: str | None, prompt: Prompt) -> list[int]:
        """A prompt's tokens as `specialist` would read them."""
        return await tokenise(self.tokenizer(specialist), prompt)

    def tokenizer(self, specialist: str | None) -> Tokenizer:
        return self._roster.find(specialist).tokenizer

    def models(self) -> tuple[ModelCard, ...]:
        return self._roster.cards()

    def model(self, name: str | None) -> ModelCard:
        """Whatever a request may name, `base:a@1.0+b` too."""
        return self._roster.card(name)

    def health(self) -> Health:
        return self._roster.health(draining=self._draining)

    def metrics_text(self) -> str:
        registry = self._roster.registry
        registry.value("coterie_gateway_cpu_seconds").set(time.process_time())
        registry.value("coterie_gateway_open_streams").set(self._open)
        self._roster.measure()
        return registry.render()

    def _plan(self, request: InferenceRequest, vendor: Sampling) -> tuple[Served, RoutePlan]:
        if self._draining:
            raise Unavailable("the server is shutting down")
        plan = self._roster.router.plan(request, vendor)
        return self._roster.find(plan.specialist), plan

    async def _enqueue(self, served: Served, assignment: Assignment) -> tuple[Replica, Mailbox]:
        """Admit by what is known, then let the worker decide; its refusal is re-planned once."""
        replicas, refused = served.replicas, set[str]()
        full: tuple[Replica, Rejected] | None = None
        while True:
            try:
                replica = replicas.pick(refused, assignment.adapters)
            except Unavailable:
                if full is None:
                    raise
                # somebody is there, only busy
                raise self._refusal(served, *full) from None
            state = replicas.state(replica)
            self._admission.check(served.name, state, replicas.unreported(replica))
            replicas.took(replica)
            # a slow reader holds no place: the count falls when the last event comes
            mailbox = Mailbox(partial(self._ended, served, replica))
            verdict: Admitted | Rejected | None = None
            try:
                verdict = await replica.submit(assignment, mailbox.put)
            finally:
                if not isinstance(verdict, Admitted) and mailbox.disarm():
                    replicas.gave_back(replica)
            if isinstance(verdict, Admitted):
                return replica, mailbox
            refused.add(replica.name)
            if verdict.code == "overloaded":
                full = replica, verdict
            if len(refused) > 1 or len(refused) == len(replicas.members):
                raise self._refusal(served, replica, verdict)

    def _ended(self, served: Served, replica: Replica) -> None:
        served.replicas.gave_back(replica)
        self._admission.ended(served.name, served.replicas.queued())

    def _refusal(self, served: Served, replica: Replica, verdict: Rejected) -> CoterieError:
        if verdict.code == "overloaded":
            state = served.replicas.state(replica)
            return self._admission.overloaded(served.name, state, verdict.retry_after_s)
        return from_code(verdict.code, verdict.reason, retry_after_s=verdict.retry_after_s)


async def tokenise(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """On a thread when it is long: the event loop serves everybody."""
    if _characters(prompt) > MAX_INLINE_CHARACTERS:
        return await asyncio.to_thread(tokenizer.encode_prompt, prompt)
    return tokenizer.encode_prompt(prompt)


def _characters(prompt: Prompt) -> int:
    if isinstance(prompt, Chat):
        return sum(len(message.content) for message in prompt.messages)
    return len(prompt.text) if isinstance(prompt, Text) else 0


def _with_adapters(event: Event, plan: RoutePlan) -> Event:
    if plan.adapters and isinstance(event, Finished):
        return replace(event, adapters=plan.adapters)
    return event


def _assignment(
    request: InferenceRequest,
    plan: RoutePlan,
    served: Served,
    prompt_ids: list[int],
    virtual_tokens: int,
) -> Assignment:
    check_tokens(prompt_ids, plan.sampling, served.tokenizer.vocab_size)
    for name in ("n", "num_beams"):
        asked = getattr(plan.sampling, name) or 1
        if asked > served.max_sequences:
            raise InvalidRequest(
                f"{name} is {asked}; at most {served.max_sequences} sequences run together",
                param=name,
            )
    limits = resolve_limits(request.limits, len(prompt_ids), served.context, virtual_tokens)
    timeout_s = limits.timeout_s
    return Assignment(
        request_id=request.id,
        lane=served.name,
        prompt_ids=tuple(prompt_ids),
        sampling=replace(
            plan.sampling, constraint=plan.tuned.response_format or request.response_format
        ),
        limits=limits,
        adapters=plan.adapters,
        session=request.session or "",
        tenant=request.tenant,
        deadline=None if timeout_s is None else request.arrived_at + timeout_s,
        arrived_at=request.arrived_at,
    )
