"""grpc.health.v1 over the pipeline's own health. Asks for no key, as /health does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2 as pb

from coterie.api.transport.grpc_door import SERVICE, handler

NAME = "grpc.health.v1.Health"
POLL_S = 0.5
_Status = pb.HealthCheckResponse


class HealthCalls:
    """`is_ready` says whether requests can be served now."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready

    async def check(self, request: Any, context: Any) -> Any:
        if not _is_known(request.service):
            await context.abort(grpc.StatusCode.NOT_FOUND, "this server has no such service")
        return _Status(status=self._status(request.service))

    async def watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """The status now, and each time it changes."""
        told = None
        while True:
            status = self._status(request.service)
            if status != told:
                told = status
                yield _Status(status=status)
            await asyncio.sleep(POLL_S)

    def _status(self, service: str) -> Any:
        if not _is_known(service):
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._is_ready() else _Status.NOT_SERVING

    def methods(self) -> dict[str, Any]:
        takes = pb.HealthCheckRequest
        return {
            "Check": handler("unary", self.check, takes),
            "Watch": handler("stream", self.watch, takes),
        }


def _is_known(service: str) -> bool:
    return service in ("", SERVICE, NAME)
