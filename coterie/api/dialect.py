"""What the dialects share: the caller, the parsed request, and the collected answer."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, Any, Protocol

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coterie.api.door import Exchange, exchange_of, note_plan, note_receipt
from coterie.api.response_format import FORMAT
from coterie.api.tools.base import ToolSet
from coterie.api.transport.sse import Events, WhileConnected, refuse
from coterie.api.transport.whole import send_whole
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
from coterie.core.quick_init import quick_init
from coterie.core.receipt import Receipt
from coterie.core.request import (
    AUTO,
    DEFAULT_PRIORITY,
    MAX_PRIORITY,
    InferenceRequest,
    Prompt,
    ResponseFormat,
    RouteHints,
)
from coterie.core.sampling import SampledWith

if TYPE_CHECKING:
    from coterie.models.text.tokenizer import Tokenizer

MAX_DEADLINE_MS = 24 * 3600 * 1000
MAX_SESSION = 512
INTENT_HEADER = "x-coterie-intent"
_INTENT = re.compile(r"[\w.-]{1,64}")


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
    @property
    def sampling(self) -> Mapping[str, SampledWith]: ...
    @property
    def system_prompt(self) -> str: ...
    @property
    def weight_bytes(self) -> int: ...


class PlannedAnswer(Protocol):
    """The part of `service.pipeline.PlannedRequest` that the dialects use."""

    @property
    def plan(self) -> RoutePlan: ...
    @property
    def hints(self) -> RouteHints: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    def set_format(self, answer_format: ResponseFormat | None) -> None: ...


class DialectPipeline(Protocol):
    """The part of `service.pipeline.Pipeline` that the dialects use."""

    def models(self) -> Sequence[ModelCard]: ...
    def model(self, name: str | None, tenant: str | None = None) -> ModelCard: ...
    def named(self, hints: RouteHints) -> RouteHints: ...
    def resolve(
        self, hints: RouteHints, prompt: Prompt | None = None, tenant: str | None = None
    ) -> str: ...
    def tokenizer(self, specialist: str | None) -> Tokenizer: ...
    async def tokenise(
        self, specialist: str | None, prompt: Prompt, hints: RouteHints | None = None
    ) -> list[int]: ...
    def plan(
        self,
        request: InferenceRequest,
        *,
        on_receipt: Callable[[Receipt], None] | None = None,
    ) -> PlannedAnswer: ...
    def run(
        self, planned: Any, on_plan: Callable[[RoutePlan], None] | None = None
    ) -> AsyncGenerator[Event, None]: ...


@quick_init
@dataclass(frozen=True, slots=True)
class CallerInfo:
    """The tenant that sent a body, when it came, and the values from headers or metadata."""

    tenant: str
    # time.monotonic()
    arrived_at: float
    session: str = ""
    # vLLM's priority: lower is sooner
    urgency: int | None = None
    timeout_s: float | None = None
    intent: str = ""
    max_priority: int = MAX_PRIORITY

    def priority(self, urgency: int | None) -> int:
        """The priority from `urgency` of the body, which overrides the header. Here higher is
        sooner and 5 is the default. The pipeline limits it to the rights of the key."""
        given = self.urgency if urgency is None else urgency
        wanted = DEFAULT_PRIORITY if given is None else max(DEFAULT_PRIORITY - given, 0)
        return min(wanted, self.max_priority)

    def session_key(self, own: str | None, *users: str | None) -> str | None:
        """The first value that is given: the key in the body, the header, the user."""
        return next((key[:MAX_SESSION] for key in (own, self.session, *users) if key), None)

    def salted_tenant(self, salt: str | None) -> str:
        """The tenant with a salt, which separates prefix blocks inside a tenant."""
        if not salt:
            return self.tenant
        return f"{self.tenant}+{hashlib.sha256(salt.encode()).hexdigest()[:16]}"


def user_id_of(*users: str | None) -> str:
    return next((user[:MAX_SESSION] for user in users if user), "")


_CALLER_HEADERS = frozenset(
    (b"x-deadline-ms", b"x-vllm-priority", b"x-session-id", INTENT_HEADER.encode())
)


def caller_of(request: Request) -> CallerInfo:
    exchange = exchange_of(request.scope)
    if _CALLER_HEADERS.isdisjoint([name for name, _ in request.scope["headers"]]):
        most = exchange.max_priority
        return CallerInfo(exchange.tenant, exchange.arrived_at, max_priority=most)
    headers = request.headers
    timeout_ms = _number(headers, "x-deadline-ms", 1, MAX_DEADLINE_MS)
    urgency = _number(headers, "x-vllm-priority", -(2**31), 2**31)
    return CallerInfo(
        exchange.tenant,
        exchange.arrived_at,
        session=headers.get("x-session-id", "")[:MAX_SESSION],
        urgency=None if urgency is None else int(urgency),
        timeout_s=None if timeout_ms is None else timeout_ms / 1000,
        intent=_intent(headers),
        max_priority=exchange.max_priority,
    )


def _intent(headers: Headers) -> str:
    text = headers.get(INTENT_HEADER)
    if text is None:
        return ""
    if not _INTENT.fullmatch(text):
        raise InvalidRequest(
            f"header {INTENT_HEADER} must be a name of letters, digits and . _ -, at most 64",
            param=INTENT_HEADER,
        )
    return text


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


@quick_init
@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A body, translated to core values."""

    request: InferenceRequest
    stream: bool
    # None = no tool may be called
    tools: ToolSet | None = None
    # the field of the body that held the answer format
    format_field: str = FORMAT
    # include the plan in the answer
    explain: bool = False


def planned_answer(
    service: DialectPipeline, request: InferenceRequest, exchange: Exchange
) -> PlannedAnswer:
    """Plan the request; note the plan and the receipt for the response headers."""
    exchange.model = request.hints.model or ""
    planned = service.plan(request, on_receipt=partial(note_receipt, exchange))
    note_plan(exchange, planned.plan)
    return planned


def answering_name(hints: RouteHints, plan: RoutePlan) -> str:
    """The model name in the answer: the requested name; for `auto` the one that was chosen.
    `hints`: of the plan, in which the name that an alias means stands for it."""
    return hints.model if hints.model and hints.model != AUTO else plan.specialist


class NamedAnswer(Protocol):
    """An answer that tells the name of the model."""

    model: str


def events_of(
    service: DialectPipeline,
    planned: PlannedAnswer,
    exchange: Exchange,
    answer: NamedAnswer | None = None,
) -> Events:
    """The events of the request. Closing them aborts it. If another specialist answers than was
    planned first, `answer` gets its name before the first event."""

    def planned_again(plan: RoutePlan) -> None:
        note_plan(exchange, plan)
        if answer is not None:
            answer.model = answering_name(planned.hints, plan)

    return service.run(planned, on_plan=planned_again)


def note_usage(exchange: Exchange, finished: Finished) -> None:
    """Note the token counts for the log and the response headers."""
    exchange.prompt_tokens = finished.usage.prompt_tokens
    exchange.completion_tokens = finished.usage.completion_tokens
    exchange.headers["x-coterie-queue-ms"] = f"{finished.timings.queue_s * 1000:.0f}"


# events of all sources that may wait for a slow reader; then the queue of each source merges deltas
MAX_WAITING = 64


@dataclass(slots=True)
class CollectedChoice:
    """One finished choice, for the dialects to render."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    # number of token ids of each text
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


class CollectedAnswer:
    """Collects all events of a request; `finished` is available after the last one."""

    def __init__(self, num_choices: int) -> None:
        self.choices = [CollectedChoice() for _ in range(num_choices)]
        # one per prompt of the request
        self.started: list[Started] = []
        self._finished: Finished | None = None
        self._is_first = True

    def take(self, event: Event) -> None:
        """Add an event. Raises the error if it is a failure."""
        if self._is_first:
            refuse(event)
            self._is_first = False
        match event:
            case Delta():
                self.choices[event.choice].add(event)
            case Started():
                self.started.append(event)
            case Finished():
                self._finished = event
            case Failed():
                raise from_code(event.code, event.message, retry_after_s=event.retry_after_s)

    @property
    def finished(self) -> Finished:
        if self._finished is None:
            raise InternalError("the answer ended without a result")
        return self._finished

    @property
    def usage(self) -> Usage:
        return self.finished.usage

    @property
    def metadata(self) -> dict[str, Any]:
        return metadata(self.finished)


_JSON = ((b"content-type", b"application/json"),)


class WholeAnswer(Response):
    """A response that is sent when the answer is complete. If the client disconnects, the request
    is aborted."""

    media_type = "application/json"

    def __init__(
        self,
        events: Events,
        num_choices: int,
        write: Callable[[CollectedAnswer], bytes | Awaitable[bytes]],
        exchange: Exchange,
    ) -> None:
        # not the constructor of the base, which makes headers for an empty body
        self.status_code, self.background = 200, None
        self.raw_headers, self.body = [], b""
        self.events = events
        self.answer = CollectedAnswer(num_choices)
        self.write = write
        self.exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with WhileConnected(receive), aclosing(self.events):
            async for event in self.events:
                self.answer.take(event)
        note_usage(self.exchange, self.answer.finished)
        body, exchange = self.write(self.answer), self.exchange
        if not isinstance(body, bytes):
            body = await body
        if exchange.send is None or exchange.headers_of is None:
            await send_whole(send, 200, _JSON, body)
        else:
            await send_whole(exchange.send, 200, exchange.headers_of(200, _JSON), body)


async def merged(sources: Sequence[Events], num_choices: int) -> Events:
    """The events of several requests as one request with `len(sources) * num_choices` choices.

    Closing it closes all sources. The first failure ends all.
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
        # the times of the slowest part: times of several parts would not add up
        timings=replace(
            max(timings, key=lambda t: t.total_s),
            first_token_s=min(t.first_token_s for t in timings),
            num_preemptions=sum(t.num_preemptions for t in timings),
        ),
        moe=reduce(add, moe) if moe else None,
        adapter_bytes=max(end.adapter_bytes for end in ends),
        # all parts of one request were planned together
        adapters=ends[0].adapters,
        receipt=ends[0].receipt,
    )
