"""gRPC calls that need no key: health and reflection.

Anybody may make them, so all together have few places. A call that finds none takes the place of
the oldest one of the address that holds most: a flood ends its own calls, not those of a probe.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_reflection.v1alpha import reflection, reflection_pb2

from coterie.api.body import aside
from coterie.api.transport.grpc_calls import handler
from coterie.api.transport.grpc_messages import caller_address, decoded
from coterie.core.errors import InvalidRequest

# calls that run, and messages that are being received, each as large as a body may be
MAX_CALLS, MAX_READS = 256, 16
# time for a message
READ_S = 5.0
# how often a watched status is looked up
POLL_S = 0.5
HEALTH = "grpc.health.v1.Health"
_Status = pb.HealthCheckResponse

# from the messages of a call, as bytes, to its answers
OpenMethod = Callable[[AsyncIterator[bytes], Any], AsyncGenerator[Any, None]]


class PlacesByAddress:
    """So many places. Who finds none ends the oldest holder of the address that has most."""

    def __init__(self, size: int) -> None:
        self._size = size
        # address -> its holders, the oldest first
        self._held: dict[str, dict[asyncio.Timeout, None]] = {}

    @asynccontextmanager
    async def held(self, address: str, seconds: float | None = None) -> AsyncIterator[None]:
        """Raises TimeoutError when the place is lost, or after `seconds`."""
        async with asyncio.timeout(seconds) as limit:
            if sum(map(len, self._held.values())) >= self._size:
                self._end_one()
            self._held.setdefault(address, {})[limit] = None
            try:
                yield
            finally:
                self._remove(address, limit)

    def _end_one(self) -> None:
        address = max(self._held, key=lambda one: len(self._held[one]))
        oldest = next(iter(self._held[address]))
        self._remove(address, oldest)
        if not oldest.expired():
            oldest.reschedule(asyncio.get_running_loop().time())

    def _remove(self, address: str, limit: asyncio.Timeout) -> None:
        holders = self._held.get(address, {})
        holders.pop(limit, None)
        if not holders:
            self._held.pop(address, None)


class OpenCalls:
    """The places of calls that need no key, and of their messages."""

    def __init__(self) -> None:
        self._calls, self._reads = PlacesByAddress(MAX_CALLS), PlacesByAddress(MAX_READS)

    def handlers(self, methods: Mapping[str, OpenMethod]) -> dict[str, Any]:
        return {name: handler(self._wrapped(method)) for name, method in methods.items()}

    def _wrapped(self, method: OpenMethod) -> Any:
        async def wrapped(messages: AsyncIterator[bytes], context: Any) -> None:
            address = caller_address(context)
            try:
                async with self._calls.held(address):
                    received = self._received(messages, address)
                    async with aclosing(method(received, context)) as answers:
                        async for answer in answers:
                            await context.write(answer)
            except InvalidRequest as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
            except (TimeoutError, grpc.aio.InternalError):
                # gRPC can send no status to a client that takes nothing, or that has gone
                raise asyncio.CancelledError from None

        return wrapped

    async def _received(
        self, messages: AsyncIterator[bytes], address: str
    ) -> AsyncGenerator[bytes, None]:
        while True:
            try:
                async with self._reads.held(address, READ_S):
                    raw = await anext(messages, None)
            except TimeoutError:
                raise InvalidRequest("the message did not arrive in time") from None
            if raw is None:
                return
            yield raw


class HealthCalls:
    """`is_ready` says whether requests can be served now."""

    def __init__(self, is_ready: Callable[[], bool], services: Sequence[str]) -> None:
        self._is_ready = is_ready
        # an empty name is the whole server
        self._known = ("", *services)

    async def check(
        self, messages: AsyncIterator[bytes], context: Any
    ) -> AsyncGenerator[Any, None]:
        service = await _service(messages)
        if service not in self._known:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this server has no such service")
        yield _Status(status=self._status(service))

    async def watch(self, messages: AsyncIterator[bytes], _: Any) -> AsyncGenerator[Any, None]:
        """Send the status now, and each time it changes."""
        service = await _service(messages)
        sent = None
        while True:
            status = self._status(service)
            if status != sent:
                sent = status
                yield _Status(status=status)
            await asyncio.sleep(POLL_S)

    def _status(self, service: str) -> Any:
        if service not in self._known:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._is_ready() else _Status.NOT_SERVING

    def methods(self) -> dict[str, OpenMethod]:
        return {"Check": self.check, "Watch": self.watch}


async def _service(messages: AsyncIterator[bytes]) -> str:
    """The service whose health is asked for."""
    raw = await anext(messages, None)
    if raw is None:
        raise InvalidRequest("the call has no message")
    request = await aside(len(raw), decoded, pb.HealthCheckRequest, raw)
    return str(request.service)


class ReflectionCalls:
    """Says which services and messages there are; that is public."""

    def __init__(self, services: Sequence[str]) -> None:
        self._servicer = reflection.aio.ReflectionServicer(services)

    async def info(self, messages: AsyncIterator[bytes], context: Any) -> AsyncGenerator[Any, None]:
        async def requests() -> AsyncIterator[Any]:
            async for raw in messages:
                yield decoded(reflection_pb2.ServerReflectionRequest, raw)

        async for answer in self._servicer.ServerReflectionInfo(requests(), context):
            yield answer

    def methods(self) -> dict[str, OpenMethod]:
        return {"ServerReflectionInfo": self.info}
