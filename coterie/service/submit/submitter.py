"""A request's way into a worker: admitted by what is known, then by the worker itself.

Counts what each replica was given.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from coterie.core.errors import (
    CoterieError,
    InvalidRequest,
    MissingDependency,
    Unavailable,
    from_code,
)
from coterie.core.events import Delta, Event, Failed, Finished
from coterie.core.plan import AdapterChoice, Admitted, Assignment, Rejected
from coterie.core.request import Limits, Prompt, ResponseFormat, Sampling, Tokens
from coterie.core.sampling import check_tokens, prompt_too_long, resolve_limits, truncated
from coterie.models.text.tokenizer import is_long
from coterie.obs.log import log
from coterie.service.adapters.catalog import AdapterCatalog
from coterie.service.finish import WHOLE
from coterie.service.fleet import ServedSpecialist
from coterie.service.submit.admission import (
    Admission,
    ReplicaQueue,
    ReplicaRequest,
    replica_request,
)
from coterie.workers.contract import Replica

if TYPE_CHECKING:
    from coterie.models.grammar.check import GrammarCheck
    from coterie.models.text.tokenizer import Tokenizer
    from coterie.service.plan import RequestRun


class Submitter:
    def __init__(self) -> None:
        self._admission = Admission()

    def preload(self, served: ServedSpecialist, adapters: Sequence[AdapterChoice]) -> None:
        """Loading begins before the prompt is tokenised, where the queue has a place at all."""
        replicas = served.replicas
        if replicas.ready():
            replica = replicas.pick(adapters=adapters)
            if not replicas.is_full(replica):
                replica.preload(adapters)

    def load_ahead(
        self, served: ServedSpecialist, adapters: Sequence[AdapterChoice], catalog: AdapterCatalog
    ) -> None:
        """For a request that may come: only what is installed, and while nobody has to wait."""
        replicas = served.replicas
        if not replicas.ready() or any(catalog.by_digest(a.digest) is None for a in adapters):
            return
        replica = replicas.pick(adapters=adapters)
        state = replicas.state(replica)
        if state is None or state.queued:
            return
        if not {adapter.digest for adapter in adapters}.issubset(state.resident_adapters):
            replica.preload(adapters)
            served.series.registry.value("coterie_conversation_preloads").add()

    async def enqueue(
        self, served: ServedSpecialist, assignment: Assignment, *, is_accepted: bool = False
    ) -> tuple[Replica, EventQueue]:
        """Admit by what is known, then let the worker decide; its refusal is re-planned once.
        What `is_accepted` already, as a job is, is not asked whether its time can be enough."""
        replicas, refused = served.replicas, set[str]()
        full: tuple[Replica, Rejected] | None = None
        while True:
            try:
                replica = replicas.pick(refused, assignment.adapters)
            except Unavailable:
                if full is None:
                    raise
                # somebody is there, only busy
                raise self._refusal(served, assignment, *full) from None
            state, line = replicas.state(replica), replicas.line(replica)
            if state is not None:
                if not is_accepted:
                    self._admission.check_deadline(served.name, assignment, line, state)
                assignment = self._admission.check(served.name, assignment, line, state)
            ticket = replica_request(assignment)
            line.took(ticket)
            # a slow reader holds no place: it is free when the last event comes
            mailbox = EventQueue(
                partial(self._ended, served, line, ticket), partial(line.started, ticket)
            )
            verdict: Admitted | Rejected | None = None
            try:
                verdict = await replica.submit(assignment, mailbox.put)
            finally:
                if not isinstance(verdict, Admitted) and mailbox.disarm():
                    line.gave_back(ticket)
            if isinstance(verdict, Admitted):
                return replica, mailbox
            refused.add(replica.name)
            if verdict.code == "overloaded":
                full = replica, verdict
            if len(refused) > 1 or len(refused) == len(replicas.members):
                raise self._refusal(served, assignment, replica, verdict)
            served.series.registry.value("coterie_recoveries", served.name, "replanned").add()

    def _ended(
        self,
        served: ServedSpecialist,
        line: ReplicaQueue,
        ticket: ReplicaRequest,
        event: Finished | None,
    ) -> None:
        line.gave_back(ticket)
        if event is not None and event.choices[0] in WHOLE:
            num_tokens = event.usage.completion_tokens // len(event.choices)
            self._admission.ended(served.name, ticket, num_tokens)

    def _refusal(
        self, served: ServedSpecialist, assignment: Assignment, replica: Replica, verdict: Rejected
    ) -> CoterieError:
        if verdict.code == "overloaded":
            replicas = served.replicas
            return self._admission.overloaded(
                served.name,
                assignment,
                replicas.line(replica),
                replicas.state(replica),
                verdict.retry_after_s,
            )
        return from_code(verdict.code, verdict.reason, retry_after_s=verdict.retry_after_s)


MAX_WAITING = 64


class EventQueue:
    __slots__ = ("_events", "_loop", "_on_end", "_on_start", "_waiter")

    def __init__(
        self,
        on_end: Callable[[Finished | None], None] | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> None:
        """`on_end` is called once: when the last event comes, read or not, or by end()."""
        self._events: list[Event] = []
        self._on_end, self._on_start = on_end, on_start
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        """The sink a replica calls; never blocks."""
        if not isinstance(event, Delta):
            if isinstance(event, (Finished, Failed)):
                self.end(event if isinstance(event, Finished) else None)
            elif self._on_start is not None:
                self._on_start()
        if len(self._events) < MAX_WAITING or not self._fold(event):
            self._events.append(event)
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def end(self, event: Finished | None = None) -> None:
        """`event` was the last, or nobody waits for one any more."""
        call, self._on_end = self._on_end, None
        if call is not None:
            call(event)

    def disarm(self) -> bool:
        """There will be no end; says whether there was none yet."""
        call, self._on_end = self._on_end, None
        return call is not None

    async def take(self) -> list[Event]:
        """Everything that came since the last call; waits for at least one event."""
        if not self._events:
            self._waiter = self._loop.create_future()
            await self._waiter
        events, self._events = self._events, []
        return events

    def _fold(self, event: Event) -> bool:
        if not isinstance(event, Delta):
            return False
        for index in range(len(self._events) - 1, -1, -1):
            earlier = self._events[index]
            if isinstance(earlier, Delta) and earlier.choice == event.choice:
                self._events[index] = merge(earlier, event)
                return True
        return False


def merge(earlier: Delta, later: Delta) -> Delta:
    """Two deltas of one choice as one."""
    logprobs = None
    if earlier.logprobs is not None or later.logprobs is not None:
        logprobs = (earlier.logprobs or ()) + (later.logprobs or ())
    return Delta(
        request_id=later.request_id,
        choice=later.choice,
        text=earlier.text + later.text,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=logprobs,
        finish_reason=later.finish_reason,
        stop_match=later.stop_match,
    )


async def assignment(run: RequestRun, virtual_tokens: int, grammars: GrammarCheck) -> Assignment:
    """Refuses what can never run. `virtual_tokens` are put in front by soft prompts."""
    request, plan, served = run.request, run.plan, run.served
    prompt = plan.tuned.prompt or request.prompt
    # what is to be shortened may be longer than what fits
    room = None if request.limits.truncation is not None else served.context
    prompt_ids = await tokenise(served.tokenizer, prompt, room)
    prompt_ids = list(truncated(prompt_ids, request.limits, served.context, virtual_tokens))
    check_tokens(prompt_ids, plan.sampling, served.tokenizer.vocab_size)
    _check_choices(run)
    limits = _limits(run, len(prompt_ids), virtual_tokens)
    run.max_tokens, run.prompt_ids = limits.max_tokens, tuple(prompt_ids)
    if (plan.sampling.num_beams or 1) > 1 and request.response_format is None:
        # a search keeps to no grammar; nobody asked for the package's own
        run.response_format = None
    if run.response_format is not None:
        await _check_format(run, run.response_format, grammars)
    return Assignment(
        request_id=request.id,
        lane=served.name,
        prompt_ids=run.prompt_ids,
        sampling=_constrained(plan.sampling, run.response_format),
        limits=limits,
        adapters=plan.adapters,
        session=request.session or "",
        tenant=request.tenant,
        deadline=None if limits.timeout_s is None else request.arrived_at + limits.timeout_s,
        arrived_at=request.arrived_at,
    )


async def tokenise(
    tokenizer: Tokenizer, prompt: Prompt, context: int | None = None, times: int = 1
) -> list[int]:
    """Refuses a prompt that is longer than `times` the `context` before reading it, where its
    length tells."""
    if is_long(prompt):
        return await asyncio.to_thread(_encode, tokenizer, prompt, context, times)
    return _encode(tokenizer, prompt, context, times)


def _encode(tokenizer: Tokenizer, prompt: Prompt, context: int | None, times: int) -> list[int]:
    if isinstance(prompt, Tokens):
        if context is not None and len(prompt.ids) >= context:
            raise prompt_too_long(len(prompt.ids), context)
        return tokenizer.encode_prompt(prompt)
    text = tokenizer.text_of(prompt)
    if context is not None and len(text) >= times * context:
        least = tokenizer.least_tokens(text)
        if least >= times * context:
            raise prompt_too_long(least, context, "at least ")
    return tokenizer.encode_text(prompt, text)


def _constrained(sampling: Sampling, wanted: ResponseFormat | None) -> Sampling:
    return sampling if wanted is None else replace(sampling, constraint=wanted)


def _check_choices(run: RequestRun) -> None:
    for name in ("n", "num_beams"):
        asked = getattr(run.plan.sampling, name) or 1
        most = min(
            run.served.max_sequences, run.request.limits.max_running or run.served.max_sequences
        )
        if asked > most:
            whose = " of this key" if most < run.served.max_sequences else ""
            raise InvalidRequest(
                f"{name} is {asked}; at most {most} sequences{whose} run together",
                param=name,
            )


def _limits(run: RequestRun, prompt_tokens: int, virtual_tokens: int) -> Limits:
    """A number of ours is cut to the room that is left; a caller's own is kept or refused."""
    limits = resolve_limits(
        run.request.limits,
        prompt_tokens,
        run.served.context,
        virtual_tokens,
        clamp=run.served.clamp_max_tokens,
    )
    tuned = run.plan.tuned.max_tokens
    if run.request.limits.max_tokens is not None or tuned is None:
        return limits
    assert limits.max_tokens is not None
    return replace(limits, max_tokens=max(limits.min_tokens, min(tuned, limits.max_tokens)))


async def _check_format(run: RequestRun, wanted: ResponseFormat, grammars: GrammarCheck) -> None:
    """Before anything is reserved. A caller's own is refused; a package's is left out, as nobody
    asked for it."""
    begun = time.monotonic()
    try:
        await grammars.check(wanted, run.served.tokenizer)
    except (InvalidRequest, MissingDependency) as error:
        if run.request.response_format is not None:
            raise
        run.response_format = None
        names = ", ".join(adapter.name for adapter in run.plan.adapters)
        run.served.series.registry.value(
            "coterie_recoveries", run.served.name, "format_left_out"
        ).add()
        log("format_unusable", level="warning", model=names, reason=error.message)
    finally:
        run.grammar_s += time.monotonic() - begun
