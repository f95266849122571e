"""One gRPC call from door to log line: key, deadline, errors as statuses, access log.

The twin of `exchange.py`'s door. The log holds ids, counts and times; never a prompt or a key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from coterie.api.auth import Keys
from coterie.api.errors import OPENAI, status_of, told
from coterie.api.exchange import CLIENT_CLOSED, Exchange, log_fault, new_id, reason_of
from coterie.api.grpc_errors import details_of
from coterie.api.grpc_errors import status_of as grpc_status_of
from coterie.api.infer_parse import Caller
from coterie.core.errors import CoterieError, InternalError
from coterie.obs.trace import log

SERVICE = "coterie.v1.Inference"
# of what is left of a deadline, kept for the way back
_WAY_BACK, MAX_WAY_BACK_S = 0.1, 0.5

Unary = Callable[[Any, "Call"], Awaitable[Any]]
Stream = Callable[[Any, "Call"], AsyncGenerator[Any, None]]


class Call:
    """What is known about one call while it runs."""

    def __init__(self, exchange: Exchange, deadline_s: float | None, session: str) -> None:
        self.exchange, self.deadline_s, self.session = exchange, deadline_s, session

    @property
    def tenant(self) -> str:
        return self.exchange.tenant

    def caller(self) -> Caller:
        return Caller(self.exchange.tenant, self.exchange.arrived_at, self.session)


class GrpcDoor:
    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def unary(self, name: str, handle: Unary) -> Any:
        async def called(request: Any, context: Any) -> Any:
            visit = _Visit(name, context)
            try:
                return await handle(request, visit.enter(self._keys))
            except BaseException as error:
                await visit.failed(error)
                raise
            finally:
                visit.log()

        return called

    def stream(self, name: str, handle: Stream) -> Any:
        async def called(request: Any, context: Any) -> AsyncIterator[Any]:
            visit = _Visit(name, context)
            try:
                async with aclosing(handle(request, visit.enter(self._keys))) as messages:
                    async for message in messages:
                        yield message
            except BaseException as error:
                await visit.failed(error)
                raise
            finally:
                visit.log()

        return called


class _Visit:
    def __init__(self, name: str, context: Any) -> None:
        self._name, self._context = name, context
        self.exchange = Exchange(new_id("req_"), OPENAI, time.monotonic())
        self.exchange.status = 200

    def enter(self, keys: Keys) -> Call:
        """Raises where the key does not fit."""
        metadata = [_header(*item[:2]) for item in self._context.invocation_metadata() or ()]
        self.exchange.tenant = keys.tenant(f"/{SERVICE}", metadata)
        session = next((value for name, value in metadata if name == b"x-session-id"), b"")
        left_s = self._context.time_remaining()
        if left_s is not None:
            left_s = max(left_s - min(left_s * _WAY_BACK, MAX_WAY_BACK_S), 0.001)
        return Call(self.exchange, left_s, session.decode("latin-1")[:512])

    async def failed(self, error: BaseException) -> None:
        """Ends the call with what `error` stands for; returns where it ends by itself."""
        if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            self.exchange.status = CLIENT_CLOSED
            return
        if not isinstance(error, Exception):
            return
        if not isinstance(error, CoterieError):
            log_fault(error, self.exchange.request_id)
            error = InternalError("the server failed to answer; the log has the request id")
        self.exchange.status, self.exchange.reason = status_of(error, OPENAI), reason_of(error)
        details = details_of(error, self.exchange.request_id)
        await self._context.abort(grpc_status_of(error), told(error), details)

    def log(self) -> None:
        exchange = self.exchange
        log(
            "request",
            request_id=exchange.request_id,
            tenant_digest=exchange.tenant,
            method="GRPC",
            route=f"/{SERVICE}/{self._name}",
            status=exchange.status,
            reason=exchange.reason,
            prompt_tokens=exchange.prompt_tokens,
            completion_tokens=exchange.completion_tokens,
            duration_ms=round(exchange.elapsed_ms(), 1),
        )


def _header(name: str, value: str | bytes) -> tuple[bytes, bytes]:
    return name.encode(), value if isinstance(value, bytes) else value.encode()


def handler(kind: str, called: Any, takes: Any) -> Any:
    """gRPC's own record of a method; `kind` is unary or stream."""
    make = {
        "unary": grpc.unary_unary_rpc_method_handler,
        "stream": grpc.unary_stream_rpc_method_handler,
    }[kind]
    return make(
        called,
        request_deserializer=takes.FromString,
        response_serializer=lambda message: message.SerializeToString(),
    )
