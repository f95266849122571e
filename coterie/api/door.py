"""The first code of every HTTP request: request id, key, dialect, headers, access log.

A plain ASGI middleware. The chunks of a stream after its start bypass it. The log has ids, counts,
times, paths and the reasons of refusals; never a prompt, a key, a header or a query string.
"""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass, field

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coterie.api import errors
from coterie.api.auth import OPEN_TENANT, AccessKeys, OriginCheck
from coterie.core.errors import CoterieError, InternalError
from coterie.core.plan import RoutePlan
from coterie.obs.log import log

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
CLIENT_CLOSED = 499
_SCOPE_KEY = "coterie.exchange"
SEED = "x-coterie-seed"
ADAPTER = "x-coterie-adapter"
_UNSAFE = re.compile(r"[^A-Za-z0-9._:\-]")
# all characters except those that may appear in a logged path
_UNSAFE_IN_PATH = re.compile(r"[^A-Za-z0-9._:@+~/\-]")
_QUOTED = re.compile(r"'([^']*)'|`([^`]*)`|\"([^\"]*)\"")
_NAME = re.compile(r"[\w.:@+/\-]{1,64}")
MAX_PATH, MAX_REASON = 128, 300
# errors about these fields quote parts of them, without quotation marks
_QUOTED_FIELDS = (
    "grammar", "regex", "response_format", "tools", "output", "chat_template", "guided_",
    "structured_outputs", "json_schema", "ebnf",
)  # fmt: skip
# routes whose errors are always in OpenAI's format, independent of the headers
_OPENAI_PATHS = ("/v1/chat", "/v1/completions", "/v1/infer", "/v1/jobs", "/v1/experts")


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
    # the send function of the server, for chunks after the first
    send: Send | None = None

    def elapsed_ms(self) -> float:
        return (time.monotonic() - self.arrived_at) * 1000


def exchange_of(scope: Scope) -> Exchange:
    exchange: Exchange = scope[_SCOPE_KEY]
    return exchange


def dialect_of(scope: Scope) -> str:
    """The dialect: by path if the path belongs to one vendor, otherwise by a header."""
    path = scope["path"]
    if _is_at(path, "/v1/messages"):
        return errors.ANTHROPIC
    if any(_is_at(path, known) for known in _OPENAI_PATHS):
        return errors.OPENAI
    anthropic = any(name == b"anthropic-version" for name, _ in scope["headers"])
    return errors.ANTHROPIC if anthropic else errors.OPENAI


def shown_path(scope: Scope) -> str:
    """A path for logs and messages. A path without route may be anything, so it is cut and unusual
    characters are removed."""
    return _UNSAFE_IN_PATH.sub("?", str(scope["path"])[:MAX_PATH])


def reason_of(error: CoterieError) -> str:
    """The error without text of the caller, for the log. Names are kept."""
    if (error.param or "").startswith(_QUOTED_FIELDS):
        return f"{error.code}: {error.param}"[:MAX_REASON]

    def kept(match: re.Match[str]) -> str:
        inner = next(group for group in match.groups() if group is not None)
        return match[0] if _NAME.fullmatch(inner) else "'...'"

    message = _QUOTED.sub(kept, error.message[: 2 * MAX_REASON])
    plain = "".join(char if char.isprintable() else " " for char in message)
    return f"{error.code}: {plain}"[:MAX_REASON]


def _is_at(path: str, route: str) -> bool:
    return path == route or path.startswith(route + "/")


def new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


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
    ) -> None:
        self.app = app
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

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_plan_headers(exchange)]
            await send(message)

        try:
            if scope["path"] not in OPEN_PATHS:
                if self.origins is not None:
                    self.origins.check(scope["headers"])
                exchange.tenant = self.keys.tenant(scope["path"], scope["headers"])
            await self.app(scope, receive, send_with_headers)
        except ClientGone:
            exchange.status = CLIENT_CLOSED
        except Exception as error:
            await _answer(error, exchange, scope, receive, send_with_headers)
        finally:
            log_exchange(exchange, scope, scope["method"])


async def _answer(
    error: Exception, exchange: Exchange, scope: Scope, receive: Receive, send: Send
) -> None:
    if not isinstance(error, CoterieError):
        log_fault(error, exchange.request_id)
        error = InternalError("the server failed to answer; the log has the request id")
    # if a stream has started, its status is sent, and the stream has written an error frame
    if exchange.status == 0:
        await error_response(error, exchange)(scope, receive, send)


def error_response(error: CoterieError, exchange: Exchange) -> Response:
    exchange.reason = reason_of(error)
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
    safe = "".join(char for char in name if " " < char < "\x7f")
    exchange.headers["x-coterie-specialist"] = safe[:128]


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


def _plan_headers(exchange: Exchange) -> list[tuple[bytes, bytes]]:
    request_id = exchange.request_id.encode("ascii")
    headers = [
        (b"x-request-id", request_id),
        (b"openai-processing-ms", b"%d" % round(exchange.elapsed_ms())),
    ]
    if exchange.dialect == errors.ANTHROPIC:
        headers[1] = (b"request-id", request_id)
    headers += [(name.encode(), value.encode()) for name, value in exchange.headers.items()]
    return headers


def log_exchange(exchange: Exchange, scope: Scope, method: str) -> None:
    is_refused = 400 <= exchange.status < 500 and exchange.status != CLIENT_CLOSED
    log(
        "request",
        # health probes come every second
        level="debug" if scope["path"] in OPEN_PATHS else "info",
        request_id=exchange.request_id,
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
