"""The HTTP application: routes, error handlers, keys; starts and closes the pipeline."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from coterie import __version__
from coterie.api import errors
from coterie.api.admin.config import ConfigEndpoints, SettingsReloader
from coterie.api.admin.ensemble import EnsembleEndpoints
from coterie.api.admin.experts import ExpertEndpoints
from coterie.api.anthropic.endpoints import AnthropicDialect
from coterie.api.auth import (
    OriginCheck,
    check_exposure,
    exposed_key_files,
    load_keys,
    normal_origin,
)
from coterie.api.batches.anthropic import MessageBatchEndpoints
from coterie.api.batches.calls import EndpointCalls
from coterie.api.batches.files import FileEndpoints
from coterie.api.batches.openai import BatchEndpoints
from coterie.api.door import (
    INFERENCE_PATHS,
    MAX_PATH,
    Door,
    error_response,
    exchange_of,
    shown_path,
)
from coterie.api.embeddings.endpoints import EmbeddingEndpoints
from coterie.api.llamacpp.endpoints import LlamaDialect
from coterie.api.native.dashboard import DashboardEndpoints
from coterie.api.native.feedback import FeedbackEndpoints
from coterie.api.native.infer import InferEndpoints
from coterie.api.native.infer_body import InferBodyReader
from coterie.api.native.jobs import JobEndpoints
from coterie.api.native.page_files import CHAT_PAGE, DASHBOARD, ChatPageEndpoints, PageFiles
from coterie.api.native.receipts import ReceiptEndpoints
from coterie.api.native.server import NativeEndpoints
from coterie.api.ollama.endpoints import OllamaDialect
from coterie.api.openai.endpoints import OpenAIDialect
from coterie.api.openapi import RouteRow, document
from coterie.api.responses.endpoints import ResponsesDialect
from coterie.api.routes import EndpointSet, add_routes, routes
from coterie.api.transport import ws
from coterie.api.transport.ws import InferSocket
from coterie.core.config import Config, ServerSettings
from coterie.core.errors import CoterieError
from coterie.obs.log import log
from coterie.service.reload import ConfigReloader, ConfigSources
from coterie.service.request_limits import UserRate

if TYPE_CHECKING:
    from coterie.service.pipeline import Pipeline

MAX_METHOD = 16
# called once: with None when the pipeline can serve, with the error if it cannot start
OnStart = Callable[[BaseException | None], None]


class CoterieApp(FastAPI):
    """HTTP requests come to the door at once: the framework's layers around it have nothing to do,
    because the door answers every error."""

    _first_layer: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        if self._first_layer is None:
            self._first_layer = self._without_outer_layers()
        scope["app"] = self
        await self._first_layer(scope, receive, send)

    def _without_outer_layers(self) -> ASGIApp:
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        layer: Any = self.middleware_stack
        while not isinstance(layer, Door | CORSMiddleware):
            layer = layer.app
        found: ASGIApp = layer
        return found


def create_app(
    pipeline: Pipeline,
    config: Config,
    on_start: OnStart | None = None,
    starting: asyncio.Task[None] | None = None,
    read: Callable[[], Config] | None = None,
) -> FastAPI:
    """The application answers at once: 503 with a retry hint until the models are loaded.

    `starting` is the task that starts the pipeline, if it already runs. `read` reads the settings
    again for a reload; by default only the key files are read again.
    """
    server = config.server
    keys = load_keys(server)
    check_exposure(server.host, keys.callers is not None, server.insecure)
    keys.check_tenants([item.name for item in config.tenants])
    pipeline.set_rights(keys.rights())
    sources = ConfigSources(read or (lambda: config), load_keys, keys.adopt)
    reloader = ConfigReloader(pipeline.fleet, sources)
    for file in exposed_key_files(server):
        reason = f"every user of this machine can read it: chmod 600 {file}"
        log("key_file_exposed", level="warning", path=str(file), reason=reason)
    app = CoterieApp(
        title="Coterie",
        version=__version__,
        openapi_url="/openapi.json",
        # FastAPI's documentation pages would load scripts from other servers
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan(pipeline, on_start, starting),
    )
    seconds = pipeline.registry.histogram("coterie_reception_seconds")
    body_reader = InferBodyReader(UserRate(server.user_rate), seconds)
    dashboard = DashboardEndpoints(pipeline.dashboard, keys, PageFiles(DASHBOARD))
    origins = OriginCheck(server, keys.callers is not None)
    native = NativeEndpoints(pipeline, server.max_body_bytes, keys, origins)
    ends = _endpoints(pipeline, body_reader, server, reloader, native, dashboard)
    rows = routes(ends)
    add_routes(app, rows)
    pipeline.responses.connect(ends.responses.kept.settle)
    # the requests of batches are answered by the same endpoints
    pipeline.batches.connect(EndpointCalls(app, rows, server.max_body_bytes))
    # the gRPC server uses the same ones
    app.state.body_reader, app.state.keys = body_reader, keys
    # SIGHUP uses it
    app.state.reloader = reloader
    app.state.body_timeout_s = server.body_timeout_s
    socket = InferSocket(
        pipeline,
        body_reader,
        keys,
        origins,
        server.idle_timeout_s,
        pipeline.receipts,
        pipeline.tracer,
    )
    app.add_api_websocket_route(ws.PATH, socket.connect)
    app.add_exception_handler(CoterieError, _refused)
    app.add_exception_handler(HTTPException, _unrouted)
    app.add_middleware(
        Door,
        keys=keys,
        max_queue=config.engine.max_queue,
        origins=origins,
        refusals=pipeline.receipts,
        direct={row.path: row for row in rows if row.path in INFERENCE_PATHS},
        quotas=pipeline.quota_states,
        slo=pipeline.ensemble.slo_header,
        tracer=pipeline.tracer,
    )
    if server.cors_origins:
        # outside of the door, because a preflight request has no key
        app.add_middleware(
            CORSMiddleware,
            # as browsers write them: exactly these texts are compared
            allow_origins=[normal_origin(origin) for origin in server.cors_origins],
            allow_methods=["GET", "HEAD", "POST", "PATCH", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    _document_once(app, rows)
    return app


def _endpoints(
    pipeline: Pipeline,
    body_reader: InferBodyReader,
    server: ServerSettings,
    reloader: SettingsReloader,
    native: NativeEndpoints,
    dashboard: DashboardEndpoints,
) -> EndpointSet:
    limit = server.max_body_bytes
    return EndpointSet(
        OpenAIDialect(pipeline, limit),
        AnthropicDialect(pipeline, limit),
        native,
        ExpertEndpoints(pipeline.adapters, pipeline.ensemble, limit, server.max_upload_bytes),
        ConfigEndpoints(pipeline, reloader),
        InferEndpoints(pipeline, pipeline.jobs, body_reader, limit),
        JobEndpoints(pipeline.jobs),
        FeedbackEndpoints(pipeline.records, limit),
        ReceiptEndpoints(pipeline.records),
        EnsembleEndpoints(pipeline.ensemble, limit),
        ResponsesDialect(pipeline, pipeline.responses, pipeline.jobs, limit),
        EmbeddingEndpoints(pipeline, limit),
        OllamaDialect(pipeline, limit),
        LlamaDialect(pipeline, limit),
        FileEndpoints(pipeline.batches.files),
        BatchEndpoints(pipeline.batches, limit),
        MessageBatchEndpoints(pipeline.batches, limit),
        dashboard,
        ChatPageEndpoints(PageFiles(CHAT_PAGE), native.about),
    )


def _document_once(app: FastAPI, rows: Sequence[RouteRow]) -> None:
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = document(rows)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _lifespan(
    pipeline: Pipeline, on_start: OnStart | None, starting: asyncio.Task[None] | None
) -> Any:
    def report(task: asyncio.Task[None]) -> None:
        if on_start is not None and not task.cancelled():
            on_start(task.exception())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = starting or asyncio.ensure_future(pipeline.start())
        task.add_done_callback(report)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await pipeline.drain()
            await pipeline.close()

    return lifespan


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, CoterieError)
    return error_response(error, exchange_of(request.scope))


async def _unrouted(request: Request, error: Exception) -> Response:
    """The answer for unknown routes and methods."""
    assert isinstance(error, HTTPException)
    exchange = exchange_of(request.scope)
    route = f"{request.method[:MAX_METHOD]} {shown_path(request.scope)}"
    if error.status_code == 405:
        allowed = _allowed(request)
        exchange.reason = f"{route} is not allowed: this route takes {allowed}"
        code, headers = "method_not_supported", {"allow": allowed}
        kind = "invalid_request_error"
    else:
        near = _nearest(request)
        hint = f"; did you mean {near}?" if near else "; GET /openapi.json lists them"
        exchange.reason = f"this server has no route {route}{hint}"
        code, headers, kind = None, dict(error.headers or {}), "not_found_error"
    body = errors.plain(kind, exchange.reason, exchange.request_id, exchange.dialect, code)
    return Response(body, error.status_code, headers, "application/json")


def _nearest(request: Request) -> str | None:
    """The route whose path is most similar to the requested one."""
    paths = {
        path
        for route in request.app.routes
        if isinstance(path := getattr(route, "path", None), str) and "{" not in path
    }
    path = str(request.scope["path"])[:MAX_PATH].rstrip("/")
    matches = difflib.get_close_matches(path.replace("/v1/v1/", "/v1/"), paths, 1, 0.75)
    return matches[0] if matches else None


def _allowed(request: Request) -> str:
    """All methods of the path. Each method is a separate route; starlette names only the first
    route's methods."""
    path = request.scope["path"]
    methods = {
        method
        for route in request.app.routes
        if isinstance(route, Route) and route.path_regex.match(path)
        for method in route.methods or ()
    }
    return ", ".join(sorted(methods))
