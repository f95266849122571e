"""The gRPC server, which runs beside the HTTP server: its port, its services, its end.

Imported only if `server.grpc_port` is set, because grpcio is an optional dependency.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
from grpc_reflection.v1alpha import reflection

from coterie.api.auth import AccessKeys
from coterie.api.native.infer_body import InferBodyReader
from coterie.api.transport.grpc_calls import (
    SERVICE,
    GrpcDoor,
    GrpcServices,
    InferenceCalls,
    methods,
)
from coterie.api.transport.grpc_open import HEALTH, HealthCalls, OpenCalls, ReflectionCalls
from coterie.api.transport.tls import ServerCertificate
from coterie.core.config import ServerSettings
from coterie.core.errors import ConfigError

if TYPE_CHECKING:
    from coterie.service.pipeline import Pipeline

# running calls of one connection, and of all; further calls wait, or are refused
MAX_STREAMS, MAX_CALLS = 1024, 4096
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
        certificate: ServerCertificate | None = None,
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
        names = (SERVICE, HEALTH, reflection.SERVICE_NAME)
        health = HealthCalls(lambda: pipeline.health().ready, names[:2])
        opened = OpenCalls()
        generic = grpc.method_handlers_generic_handler
        self._server.add_generic_rpc_handlers(
            (
                generic(SERVICE, methods(calls, GrpcDoor(keys, settings, pipeline.tracer))),
                generic(HEALTH, opened.handlers(health.methods())),
                generic(names[2], opened.handlers(ReflectionCalls(names).methods())),
            )
        )
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.port = _bound(self._server, host, settings.grpc_port, certificate)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Accept no new calls; running calls may end within `grace_s`."""
        await self._server.stop(grace_s)


def _bound(
    server: grpc.aio.Server, host: str, port: int, certificate: ServerCertificate | None
) -> int:
    address = f"{host}:{port}"
    try:
        if certificate is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, _credentials(certificate)))
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen for gRPC on {host}:{port}: choose another --grpc-port "
            "(0 = any free one)",
            param="server.grpc_port",
        ) from error


def _credentials(certificate: ServerCertificate) -> grpc.ServerCredentials:
    """Asks for the certificate at each new connection."""
    given = certificate.pem

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        if (now := certificate.pem) == given:
            return None
        given = now
        return grpc.ssl_server_certificate_configuration([now])

    first = grpc.ssl_server_certificate_configuration([given])
    return grpc.dynamic_ssl_server_credentials(first, renewed)
