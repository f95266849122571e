"""Limits of connections, before there is a request.

Adds limits to uvicorn's protocols: bytes of headers; seconds for headers, bodies, idle connections
and unread answers; the number of connections in all and per address. These limits apply before a
client has sent a key, so they bound what an unknown client can cost.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from coterie.api.errors import openai_body
from coterie.core.config import ServerSettings
from coterie.obs.log import log
from coterie.obs.metrics import MetricRegistry

# how often to check which connections have exceeded their time
SWEEP_S = 0.5
# refusals are logged at most once in this time, with their number
LOG_EVERY_S = 10.0
# after an answer to a body that was not read completely, so that the client can read the answer
LINGER_S = 5.0
# how much longer a body may take for each of its bytes: 64 kB a second
SECONDS_PER_BYTE = 1 / 64_000
# bytes on the wire for one byte of a body: a chunk of one byte has five more bytes around it
CHUNK_OVERHEAD = 8
RETRY_S = 1


@dataclass(slots=True, eq=False)
class WatchedConnection:
    """One connection. `deadline` is in the loop's time; None while it waits for nothing."""

    transport: asyncio.Transport
    address: str
    deadline: float | None
    # what the connection waits for; named in the log if it did not come
    phase: str
    stalled_at: float | None = None


class OpenConnections:
    """All connections of this server. Closes those that exceed their time."""

    def __init__(
        self, settings: ServerSettings, registry: MetricRegistry, max_connections: int
    ) -> None:
        self.settings = settings
        self.max_connections = max_connections
        self._registry = registry
        self._open: set[WatchedConnection] = set()
        self._by_address: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._logged_at: dict[str, float] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        # connections that are being upgraded: the WebSocket protocol takes them from here
        self.handed_over: dict[asyncio.Transport, WatchedConnection] = {}

    def enter(self, transport: asyncio.Transport) -> WatchedConnection | None:
        """Count a new connection. None if there are too many."""
        address = _address(transport)
        if len(self._open) >= self.max_connections:
            self._refuse("connections", "")
            return None
        if self._by_address[address] >= self.settings.max_connections_per_address:
            self._refuse("connections_of_address", address)
            return None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.header_timeout_s
        watched = WatchedConnection(transport, address, deadline, "first_byte")
        self._open.add(watched)
        self._by_address[address] += 1
        self._count()
        if self._sweeping is None:
            self._sweeping = loop.call_later(SWEEP_S, self._sweep, loop)
        return watched

    def leave(self, watched: WatchedConnection) -> None:
        if watched not in self._open:
            return
        self._open.remove(watched)
        self._by_address[watched.address] -= 1
        if not self._by_address[watched.address]:
            del self._by_address[watched.address]
        self._count()

    def ended(self, reason: str, address: str) -> None:
        """Log and count a connection that was closed early."""
        self._refuse(reason, address)

    def _count(self) -> None:
        self._registry.value("coterie_connections").set(len(self._open))

    def _refuse(self, reason: str, address: str) -> None:
        self._registry.value("coterie_connections_refused", reason).add()
        self._refused[reason] += 1
        now = time.monotonic()
        if now - self._logged_at.get(reason, -LOG_EVERY_S) < LOG_EVERY_S:
            return
        self._logged_at[reason] = now
        count, self._refused[reason] = self._refused[reason], 0
        log(
            "connections_refused",
            level="warning",
            reason=reason,
            address=address or None,
            pending=len(self._open),
            attempt=count,
        )

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for watched in list(self._open):
            stalled_at = watched.stalled_at
            if stalled_at is not None and now - stalled_at > self.settings.write_timeout_s:
                self._refuse("write_timeout", watched.address)
                watched.transport.abort()
            elif watched.deadline is not None and now > watched.deadline:
                # closing an idle connection is normal and not logged
                if watched.phase != "idle":
                    self._refuse(f"{watched.phase}_timeout", watched.address)
                _end(watched)
        self._sweeping = loop.call_later(SWEEP_S, self._sweep, loop) if self._open else None


def _end(watched: WatchedConnection) -> None:
    transport = watched.transport
    if watched.phase == "header" and not transport.is_closing():
        transport.write(plain_answer(408, "the headers did not arrive in time", "timeout"))
    # the second time: abort, because data that the peer does not read would keep it open
    if transport.is_closing():
        transport.abort()
        return
    transport.close()
    watched.deadline = asyncio.get_running_loop().time() + LINGER_S
    watched.phase = "idle"


def _address(transport: asyncio.Transport) -> str:
    """The address to count by. An IPv6 network of 64 bits counts as one address, because one host
    can have all of it."""
    peer = transport.get_extra_info("peername")
    if not isinstance(peer, tuple):
        return "local"
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return str(peer[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


def plain_answer(status: int, message: str, code: str, retry_after_s: int | None = None) -> bytes:
    """A complete response, for use before a request has been read."""
    body = openai_body(message, "invalid_request_error", code=code)
    wait = b"" if retry_after_s is None else b"retry-after: %d\r\n" % retry_after_s
    return (
        STATUS_LINE[status]
        + b"content-type: application/json\r\nconnection: close\r\n"
        + wait
        + b"content-length: %d\r\n\r\n" % len(body)
        + body
    )


class _WatchedProtocol(asyncio.Protocol):
    """Base of both protocols: reports the end of a connection and writes that stall. `watching` is
    set on subclasses that are made per server: see `protocols`."""

    watching: OpenConnections
    loop: asyncio.AbstractEventLoop
    _watched: WatchedConnection | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watched is not None:
            self.watching.leave(self._watched)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._watched is not None:
            self._watched.stalled_at = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._watched is not None:
            self._watched.stalled_at = None


class HttpConnection(_WatchedProtocol, HttpToolsProtocol):
    # bytes since the headers or the body began, in whole chunks of the stream; bytes of the body
    _received = 0
    _chunk_bytes = 0
    _body_bytes = 0
    _header_bytes = 0
    _in_headers = True
    _is_too_large = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watched = self.watching.enter(transport)
        if self._watched is None:
            message = "too many connections are open; try again later"
            transport.write(plain_answer(503, message, "too_many_connections", RETRY_S))
            transport.close()

    def data_received(self, data: bytes) -> None:
        watched = self._watched
        if watched is None or self._is_too_large:
            return
        if self._in_headers and watched.phase in ("idle", "first_byte"):
            self._wait(self.watching.settings.header_timeout_s, "header")
        self._chunk_bytes = len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        self._received += len(data)
        limit = self.watching.settings.max_header_bytes
        if self._in_headers:
            if self._received > limit:
                self._refuse_headers()
        elif self._received - CHUNK_OVERHEAD * self._body_bytes > 2 * limit:
            # trailers after a chunked body, or extensions of its chunks
            self._refuse_headers()

    def _refuse_headers(self) -> None:
        if self._is_too_large or self.transport.is_closing():
            return
        self._is_too_large = True
        limit = self.watching.settings.max_header_bytes
        assert self._watched is not None
        self.watching.ended("header_size", self._watched.address)
        if self.cycle is None or not self.cycle.response_started:
            message = f"request line and headers are larger than {limit} bytes"
            self.transport.write(plain_answer(431, message, "headers_too_large"))
        self.transport.close()
        self._wait(LINGER_S, "idle")

    def send_400_response(self, msg: str) -> None:
        # _TooLarge, raised in a callback, arrives here as an error of the parser
        if self._is_too_large_now():
            self._refuse_headers()
            return
        self.transport.write(plain_answer(400, "this is not a valid HTTP/1.1 request", "bad_http"))
        self.transport.close()

    def _is_too_large_now(self) -> bool:
        return self._header_bytes > self.watching.settings.max_header_bytes

    def on_message_begin(self) -> None:
        self._header_bytes = 0
        self._in_headers = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._add(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # as `_add`, without a call: there are many headers
        self._header_bytes += len(name) + len(value) + 4
        if self._header_bytes > self.watching.settings.max_header_bytes:
            raise _TooLarge
        super().on_header(name, value)

    def _add(self, count: int) -> None:
        self._header_bytes += count
        if self._is_too_large_now():
            raise _TooLarge

    def on_headers_complete(self) -> None:
        self._in_headers = False
        # bytes that came in the same chunk as the end of the headers are not counted
        self._received, self._body_bytes = -self._chunk_bytes, 0
        if self.parser.should_upgrade() and self._should_upgrade():
            self._wait(self.watching.settings.header_timeout_s, "handshake")
        else:
            # later than the timeout of the endpoint that reads the body, which answers first
            self._wait(self.watching.settings.body_timeout_s + LINGER_S, "body")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        watched = self._watched
        if watched is not None and watched.deadline is not None and watched.phase == "body":
            watched.deadline += len(body) * SECONDS_PER_BYTE
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_headers = True
        self._received, self._body_bytes = -self._chunk_bytes, 0
        if self._watched is not None and self._watched.phase == "body":
            self._watched.deadline = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # the next request may have started
        if self.cycle is None or not self.cycle.response_complete:
            return
        if self.cycle.more_body:
            # the rest of this body is not read
            self._wait(LINGER_S, "idle")
            return
        self._wait(self.watching.settings.idle_timeout_s, "idle")

    def handle_websocket_upgrade(self) -> None:
        """Pass the state of this connection to the new protocol."""
        socket_class = self.ws_protocol_class
        assert socket_class is not None and issubclass(socket_class, SocketConnection)
        transport, watched = self.transport, self._watched
        assert watched is not None
        self.watching.handed_over[transport] = watched
        try:
            super().handle_websocket_upgrade()
        except Exception:
            self._refuse_handshake(transport)
            return
        finally:
            self.watching.handed_over.pop(transport, None)
        protocol = transport.get_protocol()
        if isinstance(protocol, SocketConnection) and not protocol.handshake_initiated:
            self._refuse_handshake(transport)

    def _refuse_handshake(self, transport: asyncio.Transport) -> None:
        """Close the connection: the parser would wait forever for the rest."""
        if not transport.is_closing():
            message = "this is not a valid WebSocket handshake"
            transport.write(plain_answer(400, message, "bad_http"))
            transport.close()
        current = transport.get_protocol()
        for other in list(self.connections):
            # the current protocol removes itself when the connection is lost
            is_half = isinstance(other, SocketConnection) and other is not current
            if is_half and other.transport is transport:
                self.connections.discard(other)

    def _wait(self, seconds: float, phase: str) -> None:
        if self._watched is not None:
            self._watched.deadline = self.loop.time() + seconds
            self._watched.phase = phase


class _TooLarge(Exception):
    """The headers are larger than the limit."""


class SocketConnection(_WatchedProtocol, WebSocketsSansIOProtocol):
    """A WebSocket. It has a deadline until it is accepted; then pings detect a lost peer."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watched = self.watching.handed_over.pop(transport, None)

    def start_keepalive(self) -> None:
        """uvicorn calls it when the handshake has ended."""
        if self._watched is not None:
            self._watched.deadline = None
        super().start_keepalive()


@dataclass(frozen=True, slots=True)
class ServerProtocols:
    """The protocol classes of one server."""

    http: type[HttpConnection]
    websocket: type[SocketConnection]


def protocols(connections: OpenConnections) -> ServerProtocols:
    known = {"watching": connections}
    return ServerProtocols(
        type("HttpConnection", (HttpConnection,), known),
        type("SocketConnection", (SocketConnection,), known),
    )
