"""An HTTP/1.1 connection: sizes and times of headers and bodies, and requests one after another.

A client may send further requests before it has its answer (pipelining). They wait as bytes, not as
requests: the next one is parsed when the one before it has been answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from coterie.api.transport.connections import (
    LINGER_S,
    RETRY_S,
    SECONDS_PER_BYTE,
    OpenConnections,
    WatchedProtocol,
    plain_answer,
)
from coterie.api.transport.ws_connection import SocketConnection

# bytes on the wire for one byte of a body: a chunk of one byte has five more bytes around it
CHUNK_OVERHEAD = 8
# bytes that the parser gets at once: of headers, and of a body of known length
HEAD_PIECE, BODY_PIECE = 4096, 65_536
# least piece of a chunked body, which may have many ends of lines; its last one may have some of
# the next requests in it, fifteen at most
CHUNKED_PIECE = 256
_END = b"\r\n\r\n"


class _BodyReading(asyncio.ReadTransport):
    """What `FlowControl` pauses while a body may not grow. The connection is read on: what the
    parser may not take waits in `_unread` until that is full, so that it is seen that a client has
    gone."""

    def __init__(self, resumed: Callable[[], None]) -> None:
        super().__init__()
        self._resumed = resumed

    def pause_reading(self) -> None:
        """The parser stops by itself: see `_may_parse`."""

    def resume_reading(self) -> None:
        self._resumed()


class HttpConnection(WatchedProtocol, HttpToolsProtocol):
    flow: FlowControl
    # bytes of the body that are still to be parsed; 0 if it has no length
    _body_left = 0
    # bytes since the headers or the body began, in whole pieces; bytes of the body
    _received = 0
    _piece_bytes = 0
    _body_bytes = 0
    _header_bytes = 0
    _in_headers = True
    _is_too_large = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = FlowControl(_BodyReading(self.parse_soon))  # type: ignore[arg-type]
        self._watched = self.watching.enter(transport, self.address)
        if self._watched is None:
            message = "too many connections are open; try again later"
            transport.write(plain_answer(503, message, "too_many_connections", RETRY_S))
            transport.close()

    def _may_parse(self) -> bool:
        cycle = self.cycle
        if self._watched is None or self._is_too_large or self.transport.is_closing():
            return False
        if self.pipeline or self.flow.read_paused:
            return False
        return cycle is None or cycle.response_complete or cycle.more_body

    def _piece_size(self) -> int:
        if self._body_left:
            return min(self._body_left, BODY_PIECE)
        # up to the end of the headers: what follows may be the next request
        begin = 0 if self._in_headers else CHUNKED_PIECE
        end = self._unread.find(_END, begin, HEAD_PIECE)
        return HEAD_PIECE if end < 0 else end + len(_END)

    def _feed(self, piece: bytes) -> None:
        watched = self._watched
        assert watched is not None
        if self._in_headers and watched.phase in ("idle", "first_byte"):
            self._wait(self.watching.settings.header_timeout_s, "header")
        self._piece_bytes = len(piece)
        if self._body_left:
            self._body_left -= len(piece)
        HttpToolsProtocol.data_received(self, piece)
        if self.transport.is_closing():
            return
        self._received += len(piece)
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
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
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
        # bytes that came in the same piece as the end of the headers are not counted
        self._received, self._body_bytes = -self._piece_bytes, 0
        if self.parser.should_upgrade() and self._should_upgrade():
            self._wait(self.watching.settings.header_timeout_s, "handshake")
        else:
            # later than the timeout of the endpoint that reads the body, which answers first
            self._wait(self.watching.settings.body_timeout_s + LINGER_S, "body")
            self._body_left = self._declared_length()
        super().on_headers_complete()

    def _declared_length(self) -> int:
        # the parser has checked it
        return next((int(value) for name, value in self.headers if name == b"content-length"), 0)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        watched = self._watched
        if watched is not None and watched.deadline is not None and watched.phase == "body":
            watched.deadline += len(body) * SECONDS_PER_BYTE
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_headers = True
        self._received, self._body_bytes = -self._piece_bytes, 0
        if self._watched is not None and self._watched.phase == "body":
            self._watched.deadline = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = partial(_without_chunks, app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.parse_soon()
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
        self._unread.clear()
        self._limit_reading()
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


async def _without_chunks(
    app: ASGIApp, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run `app` for a client of HTTP/1.0, which knows no chunks: an answer without a length ends
    with its connection."""

    has_length = True

    async def send_plain(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            has_length = b"content-length" in names
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            # the server compares the length of each part with it
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_plain)


class _TooLarge(Exception):
    """The headers are larger than the limit."""


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
