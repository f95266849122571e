"""The gRPC server's life around the HTTP server's, where the settings ask for one."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from coterie.cli.terminal import note
from coterie.core.sections import Server

if TYPE_CHECKING:
    from fastapi import FastAPI

    from coterie.service.pipeline import Pipeline

# the requests have ended with the pipeline by then
GRACE_S = 1.0


@asynccontextmanager
async def grpc_beside(settings: Server, pipeline: Pipeline, app: FastAPI) -> AsyncIterator[None]:
    """Around `serve`, which drains and closes the pipeline at its end."""
    if settings.grpc_port < 0:
        yield
        return
    # what goes wrong is raised here; its core would write lines of its own between ours
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from coterie.api.transport.grpc_server import GrpcServer

    try:
        server = GrpcServer(settings, pipeline, app.state.reception, app.state.keys)
        await server.start()
    except BaseException:
        await pipeline.close()
        raise
    note(f"coterie: gRPC on {settings.host}:{server.port}")
    try:
        yield
    finally:
        await server.stop(GRACE_S)
