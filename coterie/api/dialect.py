"""What the dialects share on the way in: headers that steer a request, and what is asked.

Turns checked bodies into `core.request` values. Writes no wire format.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, Any, Protocol

from starlette.datastructures import Headers
from starlette.requests import Request

from coterie.api.door import Exchange, exchange_of, note_specialist, receipt
from coterie.api.response_format import FORMAT
from coterie.api.tools.base import ToolSet
from coterie.api.transport.sse import Events, refuse
from coterie.core.errors import InternalError, InvalidRequest, from_code
from coterie.core.events import (
    Delta,
    Event,
    Failed,
    Finished,
    Started,
    TokenLogprob,
    Usage,
    metadata,
)
from coterie.core.plan import RoutePlan
from coterie.core.request import (
    AUTO,
    DEFAULT_PRIORITY,
    MAX_PRIORITY,
    InferenceRequest,
    Limits,
    Prompt,
    ResponseFormat,
    RouteHints,
    Sampling,
)

if TYPE_CHECKING:
    from coterie.models.text.tokenizer import Tokenizer

MAX_DEADLINE_MS = 24 * 3600 * 1000
# top_p 0 means "only the likeliest token"; samplers want it positive
_SMALLEST_TOP_P = 1e-9


class ModelCard(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def created(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def root(self) -> str: ...
    @property
    def parent(self) -> str | None: ...


class DialectPipeline(Protocol):
    """The part of `service.pipeline.Pipeline` that the dialects use."""

    def models(self) -> Sequence[ModelCard]: ...
    def resolve(self, hints: RouteHints, prompt: Prompt | None = None) -> str: ...
    def tokenizer(self, specialist: str | None) -> Tokenizer: ...
    async def tokenise(self, specialist: str | None, prompt: Prompt) -> list[int]: ...
    def handle(
        self,
        request: InferenceRequest,
        *,
        tell: Callable[[RoutePlan], None] | None = None,
    ) -> AsyncIterator[Event]: ...


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    """What the headers of one request say."""

    exchange: Exchange
    session: str | None
    # vLLM's number, lower is sooner
    urgency: int | None
    timeout_s: float | None

    def priority(self, urgency: int | None) -> int:
        """Of a body that says `urgency`, which counts for more than the header. Higher is sooner
        here, with 5 in the middle; what the caller's key may have is the planner's business."""
        given = self.urgency if urgency is None else urgency
        return (
            DEFAULT_PRIORITY
            if given is None
            else min(max(DEFAULT_PRIORITY - given, 0), MAX_PRIORITY)
        )


def request_headers(request: Request) -> RequestHeaders:
    headers = request.headers
    timeout_ms = _number(headers, "x-deadline-ms", 1, MAX_DEADLINE_MS)
    urgency = _number(headers, "x-vllm-priority", -(2**31), 2**31)
    return RequestHeaders(
        exchange=exchange_of(request.scope),
        session=headers.get("x-session-id"),
        urgency=None if urgency is None else int(urgency),
        timeout_s=None if timeout_ms is None else timeout_ms / 1000,
    )


def _number(headers: Headers, name: str, low: float, high: float) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        raise InvalidRequest(f"header {name} must be a number", param=name) from None
    if not low <= value <= high:
        raise InvalidRequest(f"header {name} must be from {low:.0f} to {high:.0f}", param=name)
    return value


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A body, translated."""

    hints: RouteHints
    prompt: Prompt
    sampling: Sampling
    limits: Limits
    # candidates in order of precedence; the first that is given wins
    sessions: tuple[str | None, ...]
    # isolates prefix blocks inside a tenant
    salt: str | None = None
    response_format: ResponseFormat | None = None
    # what the caller calls it
    format_field: str = FORMAT
    # None = none may be called
    tools: ToolSet | None = None


def inference_request(
    ask: ParsedRequest, steering: RequestHeaders, request_id: str
) -> InferenceRequest:
    body_key, *others = ask.sessions
    candidates = (body_key, steering.session, *others)
    tenant = steering.exchange.tenant
    if ask.salt:
        tenant = f"{tenant}+{hashlib.sha256(ask.salt.encode()).hexdigest()[:16]}"
    return InferenceRequest(
        id=request_id,
        prompt=ask.prompt,
        sampling=ask.sampling,
        limits=ask.limits,
        hints=ask.hints,
        response_format=ask.response_format,
        session=next((key[:512] for key in candidates if key), None),
        tenant=tenant,
        arrived_at=steering.exchange.arrived_at,
        # what a dialect has beside its cache keys names a user
        user_id=next((key[:512] for key in others if key), ""),
    )


def positive_top_p(top_p: float | None) -> float | None:
    return None if top_p is None else max(top_p, _SMALLEST_TOP_P)


def seed_of(seed: int | None) -> int | None:
    return None if seed is None else seed % 2**63


@dataclass(frozen=True, slots=True)
class AnsweringModel:
    """Who will answer: the name that the answer carries, the specialist behind it."""

    # what was asked for; `auto` shows whom it stood for
    name: str
    specialist: str
    tokenizer: Tokenizer


def answering_model(
    service: DialectPipeline, hints: RouteHints, prompt: Prompt, steering: RequestHeaders
) -> AnsweringModel:
    """Who will answer to these names, noted for the receipt header."""
    specialist = service.resolve(hints, prompt)
    note_specialist(steering.exchange, specialist)
    name = hints.model if hints.model and hints.model != AUTO else specialist
    return AnsweringModel(name, specialist, service.tokenizer(specialist))


def events_of(service: DialectPipeline, request: InferenceRequest, exchange: Exchange) -> Events:
    """The pipeline's events as something that can be closed, which aborts the request."""
    events = service.handle(request, tell=partial(receipt, exchange))
    assert isinstance(events, AsyncGenerator)
    return events


def note_usage(exchange: Exchange, finished: Finished) -> None:
    """Notes what the log line and the receipt headers say."""
    exchange.prompt_tokens = finished.usage.prompt_tokens
    exchange.completion_tokens = finished.usage.completion_tokens
    exchange.headers["x-coterie-queue-ms"] = f"{finished.timings.queue_s * 1000:.0f}"


# events of all sources that wait for a slow reader; past it each source's own mailbox folds them
MAX_WAITING = 64


@dataclass(slots=True)
class CollectedChoice:
    """One finished choice, as the dialects render it."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    # number of token ids behind each text
    sizes: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = "stop"
    stop_match: str | int | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.sizes.append(len(delta.token_ids))
        self.logprobs.extend(delta.logprobs or ())
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_match = delta.stop_match


@dataclass(frozen=True, slots=True)
class CollectedAnswer:
    choices: list[CollectedChoice]
    # one per prompt of the request
    started: list[Started]
    finished: Finished

    @property
    def usage(self) -> Usage:
        return self.finished.usage

    @property
    def metadata(self) -> dict[str, Any]:
        return metadata(self.finished)


async def collect(events: Events, num_choices: int) -> CollectedAnswer:
    """Every event up to the last one. A failure is raised as the error it stands for."""
    choices = [CollectedChoice() for _ in range(num_choices)]
    started: list[Started] = []
    is_first = True
    async with aclosing(events):
        async for event in events:
            if is_first:
                refuse(event)
                is_first = False
            match event:
                case Delta():
                    choices[event.choice].add(event)
                case Started():
                    started.append(event)
                case Finished():
                    return CollectedAnswer(choices, started, event)
                case Failed():
                    raise from_code(event.code, event.message, retry_after_s=event.retry_after_s)
    raise InternalError("the answer ended without a result")


async def merged(sources: Sequence[Events], num_choices: int) -> Events:
    """The events of several requests as if they were one with `len(sources) * num_choices` choices.

    Closing it closes every source. The first failure ends all.
    """
    inbox: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue(MAX_WAITING)
    pumps = [asyncio.ensure_future(_pump(inbox, i, source)) for i, source in enumerate(sources)]
    ends: dict[int, Finished] = {}
    try:
        while len(ends) < len(sources):
            index, item = await inbox.get()
            if isinstance(item, Exception):
                raise item
            if isinstance(item, Finished):
                ends[index] = item
            elif isinstance(item, Delta):
                yield replace(item, choice=index * num_choices + item.choice)
            else:
                yield item
        yield _sum([ends[index] for index in range(len(sources))])
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    inbox: asyncio.Queue[tuple[int, Event | Exception]], index: int, source: Events
) -> None:
    async with aclosing(source):
        event: Event | None = None
        try:
            async for event in source:
                await inbox.put((index, event))
            if not isinstance(event, (Finished, Failed)):
                raise InternalError("the answer ended without a result")
        except Exception as error:
            await inbox.put((index, error))


def _sum(ends: Sequence[Finished]) -> Finished:
    usages, timings = [end.usage for end in ends], [end.timings for end in ends]
    moe = [end.moe for end in ends if end.moe is not None]
    return Finished(
        request_id=ends[0].request_id,
        choices=tuple(reason for end in ends for reason in end.choices),
        unfinished=tuple(
            place * len(end.choices) + choice
            for place, end in enumerate(ends)
            for choice in end.unfinished
        ),
        usage=Usage(
            prompt_tokens=sum(u.prompt_tokens for u in usages),
            completion_tokens=sum(u.completion_tokens for u in usages),
            cached_tokens=sum(u.cached_tokens for u in usages),
            reasoning_tokens=sum(u.reasoning_tokens for u in usages),
            stored_tokens=sum(u.stored_tokens for u in usages),
        ),
        # of the one that took longest: parts of several would not add up to its time
        timings=replace(
            max(timings, key=lambda t: t.total_s),
            first_token_s=min(t.first_token_s for t in timings),
            num_preemptions=sum(t.num_preemptions for t in timings),
        ),
        moe=reduce(add, moe) if moe else None,
        adapter_bytes=max(end.adapter_bytes for end in ends),
        # all parts of one request were planned together
        adapters=ends[0].adapters,
    )
