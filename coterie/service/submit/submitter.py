"""Brings a request into a worker: admission here, from what is known, then by the worker itself.

Counts the requests of each replica. A request whose worker died is moved to another replica that
has a place for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from coterie.core.errors import (
    CoterieError,
    InvalidRequest,
    MissingDependency,
    Unavailable,
    from_code,
)
from coterie.core.events import Finished
from coterie.core.plan import AdapterChoice, Admitted, Assignment, Rejected, RemoteAssignment
from coterie.core.request import Limits, Prompt, ResponseFormat, Sampling, Tokens, own_tenant
from coterie.core.sampling import check_tokens, prompt_too_long, resolve_limits, truncated
from coterie.models.text.tokenizer import is_long
from coterie.obs.log import log
from coterie.service.adapters.catalog import AdapterCatalog
from coterie.service.finish import WHOLE
from coterie.service.fleet import ServedSpecialist
from coterie.service.submit.admission import Admission, AdmissionResult
from coterie.service.submit.event_queue import EventQueue
from coterie.service.submit.load import ReplicaRequest, rest_of
from coterie.workers.contract import Replica
from coterie.workers.remote.body import check_request, estimated_tokens

if TYPE_CHECKING:
    from coterie.models.grammar.check import GrammarCheck
    from coterie.models.text.tokenizer import Tokenizer
    from coterie.service.plan import RequestRun

# called with the name of the replica that a request leaves, and of the one that gets it
OnMove = Callable[[str, str], None]
# tokens that a template may add to a prompt on another server
SPARE = 128


class Submitter:
    def __init__(self) -> None:
        self._admission = Admission()

    def preload(self, served: ServedSpecialist, adapters: Sequence[AdapterChoice]) -> None:
        """Start to load adapters before the prompt is tokenised, if the queue is not full."""
        replicas = served.replicas
        if replicas.ready():
            replica = replicas.pick(adapters=adapters)
            if not replicas.is_full(replica):
                replica.preload(adapters)

    def load_ahead(
        self, served: ServedSpecialist, adapters: Sequence[AdapterChoice], catalog: AdapterCatalog
    ) -> None:
        """Load installed adapters for a request that may come, if no request waits."""
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
        self,
        served: ServedSpecialist,
        assignment: Assignment,
        on_admit: Callable[[AdmissionResult], None] | None = None,
        on_move: OnMove | None = None,
        *,
        is_accepted: bool = False,
    ) -> SubmittedRequest:
        """Check admission, then let the worker decide. If the worker refuses, try another replica
        once. `on_admit` is called with the result of admission before the request is handed over,
        `on_move` with the names of the replica that lost it and of the one that continues it. A
        request that `is_accepted` already, as a job is, is not refused for its deadline."""
        replicas, refused, num_tries = served.replicas, set[str](), 0
        full: tuple[Replica, Rejected] | None = None
        while True:
            try:
                result = self._admission.admit(
                    replicas, assignment, refused, is_accepted=is_accepted
                )
            except Unavailable:
                if full is None:
                    raise
                # there is a replica, but it is full
                raise self._refusal(served, assignment, *full) from None
            replica, assignment, request = result.replica, result.assignment, result.request
            submitted = SubmittedRequest(
                self._admission, served, replica, assignment, request, on_move
            )
            if on_admit is not None:
                on_admit(result)
            verdict: Admitted | Rejected | None = None
            try:
                verdict = await replica.submit(
                    assignment, submitted.events.put, submitted.continue_elsewhere
                )
            finally:
                if not isinstance(verdict, Admitted):
                    await submitted.refused()
            if isinstance(verdict, Admitted):
                return submitted
            # the one that refused: it may have moved while it waited, and goes back to none
            replica, num_tries = submitted.replica, num_tries + 1
            refused |= {*submitted.left, replica.name}
            if verdict.code == "overloaded":
                full = replica, verdict
            if num_tries > 1 or len(refused) == len(replicas.members):
                raise self._refusal(served, assignment, replica, verdict)
            served.series.registry.value("coterie_recoveries", served.name, "replanned").add()

    def _refusal(
        self, served: ServedSpecialist, assignment: Assignment, replica: Replica, verdict: Rejected
    ) -> CoterieError:
        if verdict.code == "overloaded":
            return self._admission.overloaded(
                served.replicas, assignment, replica, verdict.retry_after_s
            )
        return from_code(verdict.code, verdict.reason, retry_after_s=verdict.retry_after_s)


class SubmittedRequest:
    """A request at a replica, or after a crash at another one: its events, and its place in the
    counts of that replica."""

    __slots__ = (
        "_admission", "_assignment", "_on_move", "_queue", "_request", "_served", "events", "left",
        "replica",
    )  # fmt: skip

    def __init__(
        self,
        admission: Admission,
        served: ServedSpecialist,
        replica: Replica,
        assignment: Assignment,
        request: ReplicaRequest,
        on_move: OnMove | None = None,
    ) -> None:
        self._admission, self._served, self._assignment = admission, served, assignment
        self._on_move = on_move
        self._request, self._queue = request, served.replicas.queue(replica)
        self.replica = replica
        # names of the replicas that it moved away from
        self.left: list[str] = []
        self._queue.add(request)
        # the place is free when the last event comes, even if the client reads slowly
        self.events = EventQueue(self._ended, self._started, self._produced)

    async def refused(self) -> None:
        """It did not run: the worker refused it, or its caller left."""
        if self.events.disarm():
            self._admission.ended(self._served.replicas, self._queue, self._request, is_whole=False)
        if self.left:
            await self.abort()

    async def abort(self) -> None:
        await self.replica.abort(self._assignment.request_id)

    def continue_elsewhere(self) -> None:
        """No worker runs it: move it to a replica that would run it at once."""
        replicas, left, rest = self._served.replicas, self.replica, rest_of(self._request)
        avoided = {left.name}
        while True:
            replica = replicas.with_place(rest, avoided, self._assignment.adapters)
            if replica is None:
                return
            if left.move(self._assignment.request_id, replica):
                break
            avoided.add(replica.name)
        self._queue.remove(self._request)
        self.replica, self._queue, self._request = replica, replicas.queue(replica), rest
        self._queue.add(rest)
        self.left.append(left.name)
        self._served.series.registry.value("coterie_recoveries", self._served.name, "moved").add()
        if self._on_move is not None:
            self._on_move(left.name, replica.name)

    def _started(self) -> None:
        self._queue.started(self._request)

    def _produced(self, num_tokens: int) -> None:
        self._queue.produced(self._request, num_tokens)

    def _ended(self, event: Finished | None) -> None:
        is_whole, served = event is not None and event.choices[0] in WHOLE, self._served
        is_met = self._admission.ended(
            served.replicas, self._queue, self._request, is_whole=is_whole, is_moved=bool(self.left)
        )
        outcome = "" if is_met is None else "met" if is_met else "missed"
        if is_met is None and self._is_cut(event):
            outcome = "cut"
        if outcome:
            served.series.registry.value("coterie_deadlines", served.name, outcome).add()

    def _is_cut(self, event: Finished | None) -> bool:
        """Whether its deadline ended it. Without an event the gateway did: the worker was silent
        at the deadline and for a while after."""
        if event is not None:
            return "timeout" in event.choices
        deadline = self._request.deadline
        return deadline is not None and time.monotonic() >= deadline


async def assignment(run: RequestRun, virtual_tokens: int, grammars: GrammarCheck) -> Assignment:
    """The assignment for a worker. Refuses a request that can never run. `virtual_tokens`: tokens
    that soft prompts put before the prompt."""
    request, plan, served = run.request, run.plan, run.served
    prompt = plan.tuned.prompt or request.prompt
    if served.tokenizer is None:
        return _remote_assignment(run, prompt)
    prompt = served.tokenizer.readable(prompt, with_adapters=bool(plan.adapters))
    # a prompt that will be truncated may be longer than the context
    room = None if request.limits.truncation is not None else served.context
    prompt_ids = await tokenise(served.tokenizer, prompt, room)
    prompt_ids = list(truncated(prompt_ids, request.limits, served.context, virtual_tokens))
    check_tokens(prompt_ids, plan.sampling, served.tokenizer.vocab_size)
    _check_choices(run)
    limits = _limits(run, len(prompt_ids), virtual_tokens)
    run.max_tokens, run.prompt_ids = limits.max_tokens, tuple(prompt_ids)
    if (plan.sampling.num_beams or 1) > 1 and request.response_format is None:
        # beam search does not support grammars; the package's format was not asked for, so drop it
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


def _remote_assignment(run: RequestRun, prompt: Prompt) -> RemoteAssignment:
    """The same for a server elsewhere: it gets the caller's text and counts the tokens itself."""
    request, plan, served = run.request, run.plan, run.served
    check_request(request, prompt, served.context)
    _check_choices(run)
    tokens = min(estimated_tokens(prompt), served.context - 1)
    asked, tuned = request.limits.max_tokens, plan.tuned.max_tokens
    # an estimate is no reason to refuse: it can have one token, and the server says what fits
    whole = resolve_limits(request.limits, 1, served.context, clamp=served.clamp_max_tokens)
    max_tokens = whole.max_tokens if asked is not None else None
    # a limit that nobody asked for must not be why the server refuses: told only if it fits
    if asked is None and tuned is not None and tuned + 2 * tokens + SPARE <= served.context:
        max_tokens = tuned
    # for quotas and admission, also if the server is told no limit
    run.max_tokens = max_tokens or served.context - tokens
    return RemoteAssignment(
        request_id=request.id,
        lane=served.name,
        prompt_ids=(),
        sampling=_constrained(plan.sampling, run.response_format),
        limits=replace(whole, max_tokens=run.max_tokens),
        adapters=(),
        session="",
        tenant=request.tenant,
        deadline=None if whole.timeout_s is None else request.arrived_at + whole.timeout_s,
        arrived_at=request.arrived_at,
        prompt=prompt,
        estimated_tokens=tokens,
        is_limited=max_tokens is not None,
    )


async def tokenise(
    tokenizer: Tokenizer, prompt: Prompt, context: int | None = None, times: int = 1
) -> list[int]:
    """The tokens of the prompt. A prompt that is certainly longer than `times` the `context` is
    refused before it is tokenised."""
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


def _constrained(sampling: Sampling, answer_format: ResponseFormat | None) -> Sampling:
    return sampling if answer_format is None else replace(sampling, constraint=answer_format)


def _check_choices(run: RequestRun) -> None:
    for name in ("n", "num_beams"):
        count = getattr(run.plan.sampling, name) or 1
        most = min(
            run.served.max_sequences, run.request.limits.max_running or run.served.max_sequences
        )
        if count > most:
            whose = " of this key" if most < run.served.max_sequences else ""
            raise InvalidRequest(
                f"{name} is {count}; at most {most} sequences{whose} run together",
                param=name,
            )


def _limits(run: RequestRun, prompt_tokens: int, virtual_tokens: int) -> Limits:
    """A default max_tokens is reduced to the remaining context; the caller's is kept or refused."""
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


async def _check_format(
    run: RequestRun, answer_format: ResponseFormat, grammars: GrammarCheck
) -> None:
    """Check the format before anything is reserved. An invalid format of the caller is refused; an
    invalid format of a package is dropped, because the caller did not ask for it."""
    started_at = time.monotonic()
    try:
        tenant = own_tenant(run.request.tenant)
        await grammars.check(answer_format, run.served.own_tokenizer(), tenant)
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
        run.grammar_s += time.monotonic() - started_at
