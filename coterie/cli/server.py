"""Runs the HTTP application: signals, banner, exit.

Imported only by `serve`, because it needs the web framework.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn

from coterie import __version__
from coterie.api.admin.config import SettingsReloader
from coterie.api.app import create_app
from coterie.api.transport.acceptor import ConnectionAcceptor
from coterie.api.transport.connections import OpenConnections
from coterie.api.transport.http_connection import HttpConnection, protocols
from coterie.api.transport.tls import ServerCertificate, certificate_of
from coterie.cli.terminal import facts, nbytes, note
from coterie.core.config import Config, ServerSettings
from coterie.core.errors import CoterieError, InternalError
from coterie.service.pipeline import Pipeline

if TYPE_CHECKING:
    from fastapi import FastAPI

    from coterie.service.pipeline import Pipeline

# time after the drain to stop the workers and to write the last frames
CLOSE_S = 5.0
# new objects after which the garbage collector looks at them; Python's 700 are 20 requests
GC_THRESHOLD = 10_000
# time to stop the workers after a second Ctrl-C
FORCED_CLOSE_S = 5.0
# open files other than connections: databases, sockets to workers, model files
OTHER_FILES = 256
# most installed experts that the banner names
MAX_NAMED = 8


class _Server(uvicorn.Server):
    """Drains on the first signal and stops on the second, without raising the signal again."""

    def __init__(
        self,
        config: uvicorn.Config,
        pipeline: Pipeline,
        starting: asyncio.Task[None],
        reloader: SettingsReloader,
        http_connection: type[HttpConnection],
        certificate: ServerCertificate | None,
    ) -> None:
        super().__init__(config)
        self.http_connection = http_connection
        self.certificate = certificate
        self.acceptors: list[ConnectionAcceptor] = []
        self.reloader = reloader
        # a terminal that it was started on
        self.terminal = next((number for number in range(3) if os.isatty(number)), None)
        # tasks are kept here: the loop itself keeps no task alive
        self.reloads: set[asyncio.Task[None]] = set()
        self.pipeline = pipeline
        self.starting = starting

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)
            # everything has ended: a second one would only change the exit status
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _stop(self) -> None:
        if self.should_exit:
            self.force_exit = True
            note("coterie: stopping now")
            return
        self.should_exit = True
        note("coterie: letting running requests end; Ctrl-C again stops at once")

    def _reload(self) -> None:
        if self.terminal is not None and not os.isatty(self.terminal):
            # no one asks for a reload: the terminal was closed
            self.should_exit = True
            return
        # one more if one is running: it may have read the file before its last change
        task = asyncio.ensure_future(self._read_again())
        self.reloads.add(task)
        task.add_done_callback(self.reloads.discard)

    async def _read_again(self) -> None:
        try:
            result = await self.reloader.reload()
        except CoterieError as error:
            note(f"coterie: settings not changed: {error.message}")
        else:
            changed = ", ".join(result.changed) or "nothing"
            note(f"coterie: settings {result.digest}; changed: {changed}")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # it would accept one connection per iteration of the loop
        await super().startup([])
        self.acceptors = [
            ConnectionAcceptor(
                listener, self.http_connection.watching, self._protocol, self.certificate
            )
            for listener in sockets or ()
        ]

    def _protocol(self) -> HttpConnection:
        return self.http_connection(self.config, self.server_state, self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self.acceptors:
            await acceptor.close()
        ending = asyncio.ensure_future(self._end_requests())
        await super().shutdown(sockets)
        if not self.force_exit:
            await ending
        else:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)
            # in this case the base class does not run the application's shutdown
            await asyncio.wait_for(self.pipeline.close(), FORCED_CLOSE_S)
            await self.lifespan.shutdown()

    async def _end_requests(self) -> None:
        """Runs while the base class waits for connections: closing the pipeline ends streams that
        last longer than the drain, with an error frame."""
        if self.starting.done():
            await self.pipeline.drain()
            await self.pipeline.close()


async def run(
    config: Config,
    pipeline: Pipeline,
    starting: asyncio.Task[None],
    listener: socket.socket,
    read: Callable[[], Config],
) -> None:
    """Serves until a signal. `starting` is the pipeline's start, which is already running; `read`
    reads the settings again, for SIGHUP and the admin endpoint."""
    certificate = certificate_of(config.server)
    url = _url(config.server, listener)
    failures: list[BaseException] = []

    def on_start(error: BaseException | None) -> None:
        if error is None:
            # permanent objects are not examined by the garbage collector while requests run
            gc.collect()
            gc.freeze()
            # few objects of a request are part of a cycle
            gc.set_threshold(GC_THRESHOLD)
            print(banner(url, pipeline, asks_key=bool(config.server.api_key_file)), flush=True)
        else:
            failures.append(error)
            server.should_exit = True

    app = create_app(pipeline, config, on_start, starting, read)
    most = _max_connections(config.server.max_connections)
    protocol_classes = protocols(OpenConnections(config.server, pipeline.registry, most))
    server = _Server(
        uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            # nothing here reads the address or the scheme of a client
            proxy_headers=False,
            timeout_graceful_shutdown=math.ceil(config.server.drain_s + CLOSE_S),
            lifespan="on",
            http=protocol_classes.http,
            ws=protocol_classes.websocket,
            timeout_keep_alive=math.ceil(config.server.idle_timeout_s),
            # a message is one request body
            ws_max_size=config.server.max_body_bytes,
            # a few bytes would expand to the largest message
            ws_per_message_deflate=False,
        ),
        pipeline,
        starting,
        app.state.reloader,
        protocol_classes.http,
        certificate,
    )
    note(f"coterie: listening on {url}, loading models")
    async with grpc_server_if_enabled(config.server, pipeline, app, certificate):
        await server.serve(sockets=[listener])
    if failures:
        raise _startup_error(failures[0])


def _max_connections(requested: int) -> int:
    """As many as the limit of open files allows; the system's default limit is often 1,024."""
    try:
        import resource
    except ImportError:
        return requested
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = requested + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return requested
    allowed = max(soft - OTHER_FILES, 1)
    note(
        f"coterie: {allowed} connections instead of {requested}: the limit of open files is {soft}"
    )
    return allowed


def _startup_error(error: BaseException) -> CoterieError:
    if isinstance(error, CoterieError):
        return error
    return InternalError(f"the models could not be loaded: {type(error).__name__}: {error}")


def _url(server: ServerSettings, listener: socket.socket) -> str:
    bound = listener.getsockname()[1]
    host = "127.0.0.1" if server.host in ("", "0.0.0.0") else server.host
    scheme = "https" if server.tls_cert else "http"
    return f"{scheme}://[{host}]:{bound}" if ":" in host else f"{scheme}://{host}:{bound}"


def banner(url: str, pipeline: Pipeline, asks_key: bool) -> str:
    pairs = [("Coterie", f"{__version__}, Python {sys.version.split()[0]}"), ("url", url)]
    pairs += [("chat", f"{url}/"), ("dashboard", f"{url}/dashboard")]
    for engine in _engines(pipeline):
        pairs += _engine_rows(engine, pipeline)
    if installed := _installed(pipeline):
        pairs.append(("installed", installed))
    key = " -H 'authorization: Bearer KEY'" if asks_key else ""
    headers = f"-H 'content-type: application/json'{key}"
    command = f"""curl {url}/v1/infer {headers} -d '{{"prompt":"Hello"}}'"""
    return f"{facts(pairs)}\n\ntry it:\n  {command}\n"


def _engines(pipeline: Pipeline) -> list[dict[str, dict[str, Any]]]:
    """The specialists of each engine: they share its weights and its KV."""
    engines: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for name, info in pipeline.health().specialists.items():
        engines.setdefault(tuple(info["replicas"]), {})[name] = info
    return list(engines.values())


def _engine_rows(engine: dict[str, dict[str, Any]], pipeline: Pipeline) -> list[tuple[str, str]]:
    info = next(iter(engine.values()))
    sizes = [
        f"{nbytes(info[key])} {label}"
        for key, label in (
            ("weight_bytes", "weights"),
            ("kv_bytes", "KV"),
            ("graph_bytes", "for graphs"),
        )
        if info.get(key)
    ]
    shared = [info["dtype"], info["device"]]
    rows: list[tuple[str, str]] = []
    if len(engine) > 1:
        about = ", ".join([*shared, *sizes])
        rows.append(("engine", f"{about}, shared by {len(engine)} specialists"))
        shared, sizes = [], []
    fixed = pipeline.snapshot.config.adapters
    for name, item in engine.items():
        always = [f"with {choice.name}" for choice in fixed.get(name, ())]
        about = ", ".join([*shared, f"context {item['max_model_len']}", *sizes, *always])
        rows.append(("model", f"{name} ({about})"))
    experts = info.get("experts")
    if experts:
        memory = f"{nbytes(experts['held_bytes'])} of {nbytes(experts['expert_bytes'])} in memory"
        slots = f"{experts['device_slots']} device and {experts['host_slots']} host slots"
        rows.append(("experts", f"{experts['count']} by {experts['strategy']}: {slots}, {memory}"))
        rows += [("fallback", experts["fallback"])] if experts["fallback"] else []
    return rows


def _installed(pipeline: Pipeline) -> str:
    router = pipeline.snapshot.router
    fitting = [name for name, card in pipeline.adapters.current().items() if router.fits(card)]
    if not fitting:
        unfit = len(pipeline.adapters.current())
        return f"experts for other models ({unfit}), none for this one" if unfit else ""
    more = f" and {len(fitting) - MAX_NAMED} more" if len(fitting) > MAX_NAMED else ""
    return f"{', '.join(fitting[:MAX_NAMED])}{more}"


# by then all requests have ended with the pipeline
GRACE_S = 1.0


@asynccontextmanager
async def grpc_server_if_enabled(
    settings: ServerSettings,
    pipeline: Pipeline,
    app: FastAPI,
    certificate: ServerCertificate | None,
) -> AsyncIterator[None]:
    """Runs around `serve`, which drains and closes the pipeline at its end."""
    if settings.grpc_port < 0:
        yield
        return
    # errors are raised here; gRPC's core would write its own lines between ours
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from coterie.api.transport.grpc_server import GrpcServer

    try:
        server = GrpcServer(settings, pipeline, app.state.body_reader, app.state.keys, certificate)
        await server.start()
    except BaseException:
        await pipeline.close()
        raise
    note(f"coterie: gRPC on {settings.host}:{server.port}")
    try:
        yield
    finally:
        await server.stop(GRACE_S)
