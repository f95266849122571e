"""The gRPC server, which runs beside the HTTP server: its port, its services, its end.

Imported only if `server.grpc_port` is set, because grpcio is an optional dependency.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_reflection.v1alpha import reflection, reflection_pb2

from coterie.api.auth import AccessKeys
from coterie.api.native.infer_body import InferBodyReader
from coterie.api.transport.grpc_calls import (
    SERVICE,
    GrpcDoor,
    GrpcServices,
    InferenceCalls,
    handler,
    methods,
)
from coterie.api.transport.grpc_messages import MessageReader, decoded
from coterie.core.config import ServerSettings
from coterie.core.errors import ConfigError, InvalidRequest
from coterie.core.request import OPEN_TENANT

if TYPE_CHECKING:
    from coterie.service.pipeline import Pipeline

# running calls of one connection, and of all; further calls wait, or are refused
MAX_STREAMS, MAX_CALLS = 1024, 4096
# time for a message of a call that needs no key
OPEN_READ_S = 5.0
# time between two keepalive pings, and time to answer one
PING_MS = 20_000


class GrpcServer:
    """`port` is the port that the system assigned."""

    def __init__(
        self,
        settings: ServerSettings,
        pipeline: Pipeline,
        body_reader: InferBodyReader,
        keys: AccessKeys,
    ) -> None:
        self._server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", settings.max_body_bytes),
                ("grpc.max_concurrent_streams", MAX_STREAMS),
                # otherwise 16 MB of a call may arrive that nobody reads
                ("grpc.http2.bdp_probe", 0),
                ("grpc.max_metadata_size", settings.max_header_bytes),
                ("grpc.absolute_max_metadata_size", settings.max_header_bytes),
                ("grpc.max_allowed_incoming_connections", settings.max_connections),
                ("grpc.server_handshake_timeout_ms", round(settings.header_timeout_s * 1000)),
                ("grpc.max_connection_idle_ms", round(settings.idle_timeout_s * 1000)),
                # detect a peer that is gone or reads nothing
                ("grpc.keepalive_time_ms", PING_MS),
                ("grpc.keepalive_timeout_ms", PING_MS),
                ("grpc.keepalive_permit_without_calls", 1),
                # without this two servers on one port would share its calls without an error
                ("grpc.so_reuseport", 0),
            ),
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        services = GrpcServices(
            pipeline, pipeline.jobs, pipeline.records, body_reader, pipeline.receipts
        )
        calls = InferenceCalls(services)
        health = HealthCalls(lambda: pipeline.health().ready)
        generic = grpc.method_handlers_generic_handler
        self._server.add_generic_rpc_handlers(
            (
                generic(SERVICE, methods(calls, GrpcDoor(keys, settings, pipeline.tracer))),
                generic(NAME, health.methods()),
                generic(reflection.SERVICE_NAME, ReflectionCalls().methods()),
            )
        )
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.port = _bound(self._server, host, settings.grpc_port)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Accept no new calls; running calls may end within `grace_s`."""
        await self._server.stop(grace_s)


def _bound(server: grpc.aio.Server, host: str, port: int) -> int:
    try:
        return int(server.add_insecure_port(f"{host}:{port}"))
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen for gRPC on {host}:{port}: choose another --grpc-port "
            "(0 = any free one)",
            param="server.grpc_port",
        ) from error


NAME = "grpc.health.v1.Health"
POLL_S = 0.5
_Status = pb.HealthCheckResponse


class HealthCalls:
    """`is_ready` says whether requests can be served now."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready

    async def check(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        service = await _service(messages, context)
        if not _is_known(service):
            await context.abort(grpc.StatusCode.NOT_FOUND, "this server has no such service")
        yield _Status(status=self._status(service))

    async def watch(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        """Send the status now, and each time it changes."""
        service = await _service(messages, context)
        sent = None
        while True:
            status = self._status(service)
            if status != sent:
                sent = status
                yield _Status(status=status)
            await asyncio.sleep(POLL_S)

    def _status(self, service: str) -> Any:
        if not _is_known(service):
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._is_ready() else _Status.NOT_SERVING

    def methods(self) -> dict[str, Any]:
        return {"Check": handler(self.check), "Watch": handler(self.watch)}


class ReflectionCalls:
    """Says which services and messages there are; that is public."""

    def __init__(self) -> None:
        names = (SERVICE, NAME, reflection.SERVICE_NAME)
        self._servicer = reflection.aio.ReflectionServicer(names)

    async def info(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        async def requests() -> AsyncIterator[Any]:
            while (raw := await _open_reader.next(messages, OPEN_TENANT)) is not None:
                yield decoded(reflection_pb2.ServerReflectionRequest, raw)

        try:
            async for answer in self._servicer.ServerReflectionInfo(requests(), context):
                yield answer
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)

    def methods(self) -> dict[str, Any]:
        return {"ServerReflectionInfo": handler(self.info)}


# of calls that need no key
_open_reader = MessageReader(OPEN_READ_S)


async def _service(messages: AsyncIterator[bytes], context: Any) -> str:
    """The service whose health is asked for."""
    try:
        request = await _open_reader.read(messages, pb.HealthCheckRequest, OPEN_TENANT)
    except InvalidRequest as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        raise
    return str(request.service)


def _is_known(service: str) -> bool:
    return service in ("", SERVICE, NAME)
