"""Limits of connections, before there is a request.

Adds limits to uvicorn's protocols: bytes of headers, and bytes that wait to be parsed; seconds for
headers, bodies, idle connections and unread answers; the number of connections in all and per
address, and how many an address opens in a second. These limits apply before a client has sent a
key, so they bound what an unknown client can cost.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import Counter, deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

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
RETRY_S = 1
# bytes that wait to be parsed; from then on nothing more is read from the connection
MAX_UNREAD_BYTES = 65_536
# the same of all connections together; beyond it the connection with most of them is closed. A read
# may bring 256 kB more than MAX_UNREAD_BYTES
MAX_ALL_UNREAD_BYTES = 64 * 1024 * 1024
# seconds of parsing in one turn of a connection, and turns in one iteration of the event loop
TURN_S, MAX_TURNS = 0.0005, 4
# new connections of an address: so many at once, and then so many a second; if more may be open
# (`max_connections_per_address`), as many at once as may be open, and half of that a second
MAX_BURST, RATE_SHARE = 512, 0.5
# addresses whose rates are known before the rested ones are forgotten
MAX_RATES = 1024


Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class WatchedConnection:
    """One connection. `deadline` is in the loop's time; None while it waits for nothing."""

    transport: asyncio.Transport
    address: str
    deadline: float | None
    # what the connection waits for; named in the log if it did not come
    phase: str
    stalled_at: float | None = None
    # bytes that wait to be parsed
    unread_bytes: int = 0


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
        # when the next sweep is due, in the loop's time
        self._due_at = 0.0
        self.turns = ParseTurns()
        self._unread_bytes = 0
        self._rates = ConnectionRates(max(MAX_BURST, settings.max_connections_per_address))
        # connections that are being upgraded: the WebSocket protocol takes them from here
        self.handed_over: dict[asyncio.Transport, WatchedConnection] = {}

    def may_connect(self, address: str, num_opening: int, num_handshakes: int = 0) -> bool:
        """Whether this address may open a connection now, while so many are being opened, and this
        address has so many TLS handshakes under way; if not, that is counted."""
        if len(self._open) + num_opening >= self.max_connections:
            self._refuse("connections", "")
            return False
        of_address = self._by_address[address] + num_handshakes
        if num_handshakes and of_address >= self.settings.max_connections_per_address:
            self._refuse("connections_of_address", address)
            return False
        if self._rates.take(address, time.monotonic()):
            return True
        self._refuse("connection_rate", address)
        return False

    def enter(self, transport: asyncio.Transport, address: str) -> WatchedConnection | None:
        """Count a new connection. None if there are too many."""
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
            self._sweep_later(loop)
        return watched

    def leave(self, watched: WatchedConnection) -> None:
        if watched not in self._open:
            return
        self._open.remove(watched)
        self._unread_bytes -= watched.unread_bytes
        self._by_address[watched.address] -= 1
        if not self._by_address[watched.address]:
            del self._by_address[watched.address]
        self._count()

    def note_unread(self, watched: WatchedConnection, num_bytes: int) -> None:
        """Count the bytes that wait to be parsed. If there are too many in all, the connection with
        most of them ends."""
        if watched not in self._open:
            return
        self._unread_bytes += num_bytes - watched.unread_bytes
        watched.unread_bytes = num_bytes
        if self._unread_bytes > MAX_ALL_UNREAD_BYTES:
            largest = max(self._open, key=lambda one: one.unread_bytes)
            # aborted, it gives them up before it reads again
            self._unread_bytes -= largest.unread_bytes
            largest.unread_bytes = 0
            self._refuse("unread_bytes", largest.address)
            largest.transport.abort()

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

    def _sweep_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due_at = loop.time() + SWEEP_S
        self._sweeping = loop.call_at(self._due_at, self._sweep, loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """A sweep that comes late finds a loop that has read nothing meanwhile: no client pays for
        that time."""
        now = loop.time()
        late_s = max(now - self._due_at, 0.0)
        for watched in list(self._open):
            if late_s and watched.deadline is not None:
                watched.deadline += late_s
            if late_s and watched.stalled_at is not None:
                watched.stalled_at += late_s
            stalled_at = watched.stalled_at
            if stalled_at is not None and now - stalled_at > self.settings.write_timeout_s:
                self._refuse("write_timeout", watched.address)
                watched.transport.abort()
            elif watched.deadline is not None and now > watched.deadline:
                # closing an idle connection is normal and not logged
                if watched.phase != "idle":
                    self._refuse(f"{watched.phase}_timeout", watched.address)
                _end(watched)
        self._sweeping = None
        if self._open:
            self._sweep_later(loop)


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


class ConnectionRates:
    """How many connections each address may open now: `burst` of them, which come back at
    `RATE_SHARE` of that a second."""

    def __init__(self, burst: int) -> None:
        self._burst = burst
        # address -> when it may open all of them again, in seconds
        self._rested_at: dict[str, float] = {}

    def take(self, address: str, now: float) -> bool:
        rate = self._burst * RATE_SHARE
        rested_at = max(self._rested_at.get(address, 0.0), now) + 1 / rate
        # a half: the sum of many shares is not exact
        if (rested_at - now) * rate > self._burst + 0.5:
            return False
        if len(self._rested_at) >= MAX_RATES and address not in self._rested_at:
            self._rested_at = {name: at for name, at in self._rested_at.items() if at > now}
        self._rested_at[address] = rested_at
        return True


def address_of(peer: Any) -> str:
    """The address of a peer to count by. An IPv6 network of 64 bits counts as one address, because
    one host can have all of it."""
    return _counted_as(str(peer[0])) if isinstance(peer, tuple) else "local"


@lru_cache(maxsize=1024)
def _counted_as(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
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


class AddressTurns(Generic[Item]):
    """Items that wait: addresses take turns, and those of an address keep their order."""

    def __init__(self) -> None:
        # the next address first
        self._waiting: dict[str, deque[Item]] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def append(self, address: str, item: Item) -> None:
        self._waiting.setdefault(address, deque()).append(item)
        self._num += 1

    def next(self) -> tuple[str, Item]:
        address, items = next(iter(self._waiting.items()))
        item = items.popleft()
        self._num -= 1
        # to the end
        del self._waiting[address]
        if items:
            self._waiting[address] = items
        return address, item


class ParseTurns:
    """Shares the event loop between the connections that have bytes to parse. What a turn begins, a
    request's task, runs in the next iteration, so this limits those too."""

    def __init__(self) -> None:
        self._waiting = AddressTurns[WatchedProtocol]()
        # turns in this iteration
        self._num_taken = 0
        self._next: asyncio.Handle | None = None

    def take_or_wait(self, protocol: WatchedProtocol) -> None:
        """At once, if nobody waits and this iteration has turns left."""
        if self._waiting or self._num_taken >= MAX_TURNS:
            self.wait(protocol)
            return
        self._num_taken += 1
        self._begin_next(protocol.loop)
        protocol.parse()

    def wait(self, protocol: WatchedProtocol) -> None:
        self._waiting.append(protocol.address, protocol)
        protocol.waits_for_turn = True
        self._begin_next(protocol.loop)

    def _begin_next(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._next is None:
            self._next = loop.call_soon(self._iterate, loop)

    def _iterate(self, loop: asyncio.AbstractEventLoop) -> None:
        self._next = None
        self._num_taken = 0
        while self._waiting and self._num_taken < MAX_TURNS:
            self._num_taken += 1
            _, protocol = self._waiting.next()
            protocol.waits_for_turn = False
            try:
                protocol.parse()
            except Exception as error:
                # as the loop does if reading fails; the others must have their turn
                log("connection_broke", level="error", error=error)
                protocol.transport.abort()
        if self._num_taken:
            self._begin_next(loop)


class WatchedProtocol(asyncio.Protocol):
    """Base of both protocols: gives the parser small pieces, and reports the end of a connection
    and writes that stall.

    What the parser may not take yet waits in `_unread`; reading pauses while that is full. A
    subclass says what the next piece is and when the parser may take it. `watching` is set on
    subclasses that are made per server: see `http_connection.protocols`.
    """

    watching: OpenConnections
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    # as `address_of` tells it; set before the connection is made
    address = "local"
    _watched: WatchedConnection | None = None
    waits_for_turn = False

    def connection_made(self, transport: Any) -> None:
        self._unread = bytearray()
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watched is not None:
            self.watching.leave(self._watched)
        self._unread.clear()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._watched is not None:
            self._watched.stalled_at = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._watched is not None:
            self._watched.stalled_at = None
        self.parse_soon()

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if not self.waits_for_turn:
            self.watching.turns.take_or_wait(self)
        self._limit_reading()

    def parse_soon(self) -> None:
        """Go on parsing when it is this connection's turn."""
        if self._unread and not self.waits_for_turn:
            self.watching.turns.wait(self)

    def parse(self) -> None:
        """Parse what may be parsed now. After `TURN_S` the other connections have their turn."""
        until = time.perf_counter() + TURN_S
        while self._unread and self._may_parse():
            size = self._piece_size()
            if not size:
                break
            piece = bytes(self._unread[:size])
            del self._unread[:size]
            self._feed(piece)
            if time.perf_counter() > until:
                self.parse_soon()
                break
        if self.transport.is_closing():
            self._unread.clear()
        self._limit_reading()

    def _limit_reading(self) -> None:
        if self._watched is not None:
            self.watching.note_unread(self._watched, len(self._unread))
        if len(self._unread) < MAX_UNREAD_BYTES:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def _may_parse(self) -> bool:
        raise NotImplementedError

    def _piece_size(self) -> int:
        """Bytes of the next piece; it may be longer than what has arrived. 0: wait for more."""
        raise NotImplementedError

    def _feed(self, piece: bytes) -> None:
        raise NotImplementedError

    def _wait(self, seconds: float, phase: str) -> None:
        if self._watched is not None:
            self._watched.deadline = self.loop.time() + seconds
            self._watched.phase = phase
