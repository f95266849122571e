"""The first code of every HTTP request: request id, key, dialect, headers, access log.

A plain ASGI middleware. The chunks of a stream after its start bypass it. The log has ids, counts,
times, paths and the reasons of refusals; never a prompt, a key, a header or a query string.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coterie.api import errors
from coterie.api.auth import AccessKeys, OriginCheck
from coterie.core.errors import CoterieError, InternalError
from coterie.core.plan import RoutePlan
from coterie.core.receipt import Receipt, reason_of
from coterie.core.request import MAX_PRIORITY, OPEN_TENANT
from coterie.obs.log import log
from coterie.obs.tracing.spans import RequestTrace
from coterie.obs.tracing.tracer import RequestTracer
from coterie.service.quotas import QuotaState

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
CLIENT_CLOSED = 499
_SCOPE_KEY = "coterie.exchange"
# an answer without a prompt of its own (a list, a count) has no receipt
INFERENCE_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/infer",
        "/api/chat",
        "/api/generate",
        "/completion",
        "/infill",
        "/v1/embeddings",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
        "/api/embed",
        "/api/embeddings",
    }
)
_OLLAMA = "/api"
# further headers are sent if a request has this one
DEBUG = b"x-coterie-debug"
SPECIALIST, SLO = "x-coterie-specialist", "x-coterie-slo"
SEED = "x-coterie-seed"
ADAPTER = "x-coterie-adapter"
_UNSAFE = re.compile(r"[^A-Za-z0-9._:\-]")
# all characters except those that may appear in a logged path
_UNSAFE_IN_PATH = re.compile(r"[^A-Za-z0-9._:@+~/\-]")
# characters of a path in the log, and of all reasons in a header
MAX_PATH, MAX_REASONS = 128, 1024
# routes whose errors are always in OpenAI's format, independent of the headers
_OPENAI_PATHS = (
    "/v1/chat/completions", "/v1/chat", "/v1/completions", "/v1/responses", "/v1/infer", "/v1/jobs",
    "/v1/experts", "/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score",
    "/v1/files", "/v1/batches",
)  # fmt: skip


class DirectRoute(Protocol):
    """The part of `openapi.RouteRow` that the door uses."""

    @property
    def path(self) -> str: ...
    @property
    def endpoint(self) -> Callable[[Request], Awaitable[Response]]: ...


class RefusalReceipts(Protocol):
    """The part of `service.receipts.stamp.ReceiptWriter` that the door uses."""

    def refusal(
        self, request_id: str, tenant: str, model: str, arrived_at: float, error: CoterieError
    ) -> Receipt: ...


AnswerHeaders = Sequence[tuple[bytes, bytes]]


class ClientGone(Exception):
    """The client closed its connection; there is no one to answer."""


@dataclass(slots=True)
class Exchange:
    """One request and its answer while they run."""

    request_id: str
    dialect: str
    # time.monotonic()
    arrived_at: float
    tenant: str = OPEN_TENANT
    # as the caller sent it
    model: str = ""
    # size of a lane's queue, for the headers of a 429
    max_queue: int | None = None
    status: int = 0
    # why it was refused, without text of the caller
    reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    # seeds by the ids of its inferences
    seeds: dict[str, int | None] = field(default_factory=dict)
    # the send function of the server, for chunks after the first and for whole answers
    send: Send | None = None
    # (status, headers) -> all headers; for an answer that is sent without the door
    headers_of: Callable[[int, AnswerHeaders], AnswerHeaders] | None = None
    # the receipt; None until the request is admitted or refused
    receipt: Receipt | None = None
    # a request of a batch may not be more urgent
    max_priority: int = MAX_PRIORITY
    # makes the receipt of a request that is refused before it is planned; None if none is due
    refusals: RefusalReceipts | None = None
    # None if it is not traced
    trace: RequestTrace | None = None

    def elapsed_ms(self) -> float:
        return (time.monotonic() - self.arrived_at) * 1000


def exchange_of(scope: Scope) -> Exchange:
    exchange: Exchange = scope[_SCOPE_KEY]
    return exchange


def dialect_of(scope: Scope) -> str:
    """The dialect: by path if the path belongs to one vendor, otherwise by a header."""
    path = scope["path"]
    if path in _OPENAI_PATHS:
        return errors.OPENAI
    if _is_at(path, "/v1/messages"):
        return errors.ANTHROPIC
    if any(_is_at(path, known) for known in _OPENAI_PATHS):
        return errors.OPENAI
    if _is_at(path, _OLLAMA):
        return errors.OLLAMA
    anthropic = any(name == b"anthropic-version" for name, _ in scope["headers"])
    return errors.ANTHROPIC if anthropic else errors.OPENAI


def reads_any_type(path: str) -> bool:
    """Whether a body is read as JSON whatever content type it declares: the documented commands of
    Ollama and llama.cpp declare none, so that curl says it is a form. `OriginCheck` refuses those
    that web pages post."""
    return path in INFERENCE_PATHS or _is_at(path, _OLLAMA)


def shown_path(scope: Scope) -> str:
    """A path for logs and messages. A path without route may be anything, so it is cut and unusual
    characters are removed."""
    return _UNSAFE_IN_PATH.sub("?", str(scope["path"])[:MAX_PATH])


def _is_at(path: str, route: str) -> bool:
    return path == route or path.startswith(route + "/")


class _RandomIds:
    """128 random bits each, drawn many at once: a system call for each takes longer."""

    def __init__(self) -> None:
        self._left: list[str] = []

    def take(self) -> str:
        if not self._left:
            text = os.urandom(16 * _IDS_AT_ONCE).hex()
            self._left = [text[at : at + 32] for at in range(0, len(text), 32)]
        return self._left.pop()


_IDS_AT_ONCE = 64
_ids = _RandomIds()


def new_id(prefix: str) -> str:
    """32 digits: the time in milliseconds, then random ones. Later ids are behind earlier ones in
    the indexes of databases, so that a row changes few pages of them."""
    return f"{prefix}{time.time_ns() // 1_000_000:011x}{_ids.take()[:21]}"


def short_id(prefix: str, digits: int) -> str:
    """Random digits alone, at most 32: for what is named inside one answer."""
    return prefix + _ids.take()[:digits]


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            safe = _UNSAFE.sub("", value.decode("latin-1"))[:128]
            if safe:
                return safe
    return new_id("req_")


class Door:
    """Checks the key, adds headers, turns errors into answers, logs.

    It is around every route; only CORS, which answers preflight requests, is outside of it.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: AccessKeys | None = None,
        max_queue: int | None = None,
        origins: OriginCheck | None = None,
        refusals: RefusalReceipts | None = None,
        direct: Mapping[str, DirectRoute] | None = None,
        quotas: Callable[[str], Sequence[QuotaState]] | None = None,
        slo: Callable[[str], str] | None = None,
        tracer: RequestTracer | None = None,
    ) -> None:
        """`direct`: the routes of `INFERENCE_PATHS`, called without the framework's routing, which
        takes longer than admission. `quotas`: what is left of a tenant's quotas. `slo`: what a
        specialist delivers. `tracer`: None without traces."""
        self.slo, self.tracer = slo, tracer
        self.app = app
        self.refusals = refusals
        self.direct = direct or {}
        self.quotas = quotas
        self.keys = keys or AccessKeys()
        self.origins = origins
        self.max_queue = max_queue

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = Exchange(_request_id(scope), dialect_of(scope), time.monotonic())
        exchange.send = send
        exchange.max_queue = self.max_queue
        scope[_SCOPE_KEY] = exchange

        def headers_of(status: int, headers: AnswerHeaders) -> AnswerHeaders:
            exchange.status = status
            self._note_slo(exchange)
            quotas = self.quotas(exchange.tenant) if self.quotas is not None else ()
            found = [*headers, *_plan_headers(exchange, scope)]
            return found + errors.quota_headers(quotas, exchange.dialect) if quotas else found

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = headers_of(message["status"], message.get("headers", ()))
            await send(message)

        exchange.headers_of = headers_of

        try:
            if scope["path"] not in OPEN_PATHS:
                if self.origins is not None:
                    self.origins.check(scope["headers"], scope["method"])
                exchange.tenant = self.keys.tenant(scope["path"], scope["headers"])
                if scope["path"] in INFERENCE_PATHS and scope["method"] == "POST":
                    exchange.refusals = self.refusals
                    if self.tracer is not None:
                        exchange.trace = self.tracer.begin(scope["headers"], exchange.arrived_at)
                    route = self.direct.get(scope["path"])
                    if route is not None:
                        scope["route"] = route
                        response = await route.endpoint(Request(scope, receive, send_with_headers))
                        await response(scope, receive, send_with_headers)
                        return
            await self.app(scope, receive, send_with_headers)
        except ClientGone:
            exchange.status = CLIENT_CLOSED
        except Exception as error:
            await _answer(error, exchange, scope, receive, send_with_headers)
        finally:
            log_exchange(exchange, scope, scope["method"])
            # the scope has the exchange: with these it would wait for the garbage collector
            exchange.send = exchange.headers_of = None

    def _note_slo(self, exchange: Exchange) -> None:
        specialist = exchange.headers.get(SPECIALIST)
        if self.slo is not None and specialist is not None and (text := self.slo(specialist)):
            exchange.headers[SLO] = text


async def _answer(
    error: Exception, exchange: Exchange, scope: Scope, receive: Receive, send: Send
) -> None:
    if not isinstance(error, CoterieError):
        log_fault(error, exchange.request_id)
        error = InternalError("the server failed to answer; the log has the request id")
    # if a stream has started, its status is sent, and the stream has written an error frame
    if exchange.status == 0:
        await error_response(error, exchange)(scope, receive, send)


def refusal_receipt(error: CoterieError, exchange: Exchange) -> Receipt | None:
    """The receipt of a refused request; None if none is due."""
    if exchange.receipt is None and exchange.refusals is not None:
        # a caller may choose the request id, so the receipt has its own
        exchange.receipt = exchange.refusals.refusal(
            new_id("rcpt_"), exchange.tenant, exchange.model, exchange.arrived_at, error
        )
    return exchange.receipt


def error_response(error: CoterieError, exchange: Exchange) -> Response:
    exchange.reason = reason_of(error)
    refusal_receipt(error, exchange)
    return Response(
        errors.body_of(error, exchange.dialect, exchange.request_id),
        errors.status_of(error, exchange.dialect),
        errors.headers_of(error, exchange.dialect, exchange.max_queue),
        "application/json",
    )


def log_fault(error: Exception, request_id: str) -> None:
    """Log an error of our own code; `obs.log` keeps the text of the error out of the log."""
    log("unhandled error", level="error", error=error, request_id=request_id)


def note_specialist(exchange: Exchange, name: str) -> None:
    exchange.headers[SPECIALIST] = _header_text(name)


def note_plan(exchange: Exchange, plan: RoutePlan) -> None:
    """Note the plan for the response headers, before the first byte is sent."""
    note_specialist(exchange, plan.specialist)
    exchange.headers["x-coterie-confidence"] = f"{plan.confidence:.4f}"
    # one for each prompt of the request; a plan may be replaced before its first event
    exchange.seeds[plan.request_id] = plan.sampling.seed
    exchange.headers[SEED] = ",".join(map(str, exchange.seeds.values()))
    exchange.headers.pop(ADAPTER, None)
    if plan.lowered_priority is not None:
        exchange.headers["x-coterie-priority"] = str(plan.lowered_priority)
    if plan.adapters:
        stack = (f"{item.name}#{item.digest[:8]}" for item in plan.adapters)
        exchange.headers[ADAPTER] = ",".join(stack)


def note_receipt(exchange: Exchange, receipt: Receipt) -> None:
    """Note the receipt for the response headers. Of a request with several prompts, the first
    prompt's: the others differ from it in the number at the end of the id."""
    if exchange.receipt is None or exchange.receipt.request_id == receipt.request_id:
        exchange.receipt = receipt


def _receipt_headers(receipt: Receipt, with_details: bool) -> dict[str, str]:
    """The result of admission and the states that decided; more if the request asks for it."""
    plan = receipt.plan
    headers = {
        "x-coterie-receipt": receipt.request_id,
        "x-coterie-admission": receipt.admission,
        "x-coterie-breaker": plan.breaker,
        "x-coterie-shadow": plan.shadow or "none",
    }
    if with_details:
        headers |= {
            "x-coterie-model": _header_text(plan.model),
            "x-coterie-replica": plan.replica,
            "x-coterie-intent": _header_text(plan.intent),
            "x-coterie-router": plan.router_version,
            "x-coterie-config": plan.config_digest,
            "x-coterie-reasons": _header_text("; ".join(plan.reasons), MAX_REASONS),
        }
    return headers


def _header_text(text: str, most: int = 128) -> str:
    if text.isascii() and text.isprintable():
        return text[:most].strip()
    return "".join(char for char in text if " " <= char < "\x7f")[:most].strip()


def _plan_headers(exchange: Exchange, scope: Scope) -> list[tuple[bytes, bytes]]:
    request_id = exchange.request_id.encode("ascii")
    headers = [
        (b"x-request-id", request_id),
        (b"openai-processing-ms", b"%d" % round(exchange.elapsed_ms())),
    ]
    if exchange.dialect == errors.ANTHROPIC:
        headers[1] = (b"request-id", request_id)
    if exchange.trace is not None:
        headers.append((b"traceparent", exchange.trace.context.traceparent.encode("ascii")))
    values = exchange.headers
    if exchange.receipt is not None:
        with_details = [
            value
            for name, value in scope["headers"]
            if name == DEBUG and value.strip().lower() == b"true"
        ]
        values = values | _receipt_headers(exchange.receipt, bool(with_details))
    headers += [(name.encode(), value.encode()) for name, value in values.items()]
    return headers


# what a caller gets whose key or origin is refused
_UNKNOWN_CALLER = frozenset({401, 403, 421})
# lines about such callers in this time; the others are counted in one line
MAX_UNKNOWN_LINES, UNKNOWN_LINES_S = 20, 10.0


class _UnknownCallerLines:
    """Keeps callers without a key from filling the log."""

    def __init__(self) -> None:
        self._begun_at = -UNKNOWN_LINES_S
        self._num_lines = self._left_out = 0

    def may_write(self) -> bool:
        now = time.monotonic()
        if now - self._begun_at >= UNKNOWN_LINES_S:
            self._tell()
            self._begun_at, self._num_lines = now, 0
        if self._num_lines < MAX_UNKNOWN_LINES:
            self._num_lines += 1
            return True
        if not self._left_out:
            asyncio.get_running_loop().call_later(UNKNOWN_LINES_S, self._tell)
        self._left_out += 1
        return False

    def _tell(self) -> None:
        if self._left_out:
            log("unknown_callers_refused", level="warning", attempt=self._left_out)
            self._left_out = 0


_unknown_callers = _UnknownCallerLines()


def is_logged(exchange: Exchange) -> bool:
    """Whether this request has a line of its own; of callers without a key only the first have."""
    is_unknown = exchange.status in _UNKNOWN_CALLER and exchange.tenant == OPEN_TENANT
    return not is_unknown or _unknown_callers.may_write()


def log_exchange(exchange: Exchange, scope: Scope, method: str) -> None:
    is_refused = 400 <= exchange.status < 500 and exchange.status != CLIENT_CLOSED
    end_trace(exchange, method, getattr(scope.get("route"), "path", ""))
    if not is_logged(exchange):
        return
    log(
        "request",
        # health probes come every second
        level="debug" if scope["path"] in OPEN_PATHS else "info",
        request_id=exchange.request_id,
        trace_id=trace_id_of(exchange),
        tenant_digest=exchange.tenant,
        method=method,
        route=getattr(scope.get("route"), "path", "unknown"),
        path=shown_path(scope) if is_refused else None,
        status=exchange.status,
        reason=exchange.reason,
        prompt_tokens=exchange.prompt_tokens,
        completion_tokens=exchange.completion_tokens,
        duration_ms=round(exchange.elapsed_ms(), 1),
    )


def end_trace(exchange: Exchange, method: str, route: str) -> None:
    """The request has ended: its spans can be sent."""
    if exchange.trace is not None:
        # a reason begins with the code of the refusal
        code = (exchange.reason or "").partition(":")[0]
        exchange.trace.end(
            exchange.request_id, method=method, route=route, status=exchange.status, error=code
        )


def trace_id_of(exchange: Exchange) -> str | None:
    """For the log; None if nothing of the request is sent to a receiver."""
    trace = exchange.trace
    return trace.context.trace_id if trace is not None and trace.context.is_sampled else None
