"""Accepts connections: several in each iteration of the event loop, and of each address only so
many a second.

uvloop's own server accepts one per iteration. Where an iteration takes a millisecond, a client that
connects faster fills the system's queue of new connections, and everybody waits behind it, unseen.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from coterie.api.transport.connections import (
    RETRY_S,
    AddressTurns,
    OpenConnections,
    WatchedProtocol,
    address_of,
    plain_answer,
)
from coterie.api.transport.tls import ServerCertificate
from coterie.obs.log import log

# connections that are taken from the system's queue in one iteration, or refused, which takes 2 ms;
# and those that are opened, which takes ten times as long for each
MAX_ACCEPTS, MAX_OPENED = 64, 8
# pause when the system has no file or memory for one more connection
PAUSE_S = 1.0
# for a client to end a TLS connection that we have ended
SHUTDOWN_S = 2.0
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ConnectionAcceptor:
    """`protocol` makes the protocol of a connection, after its TLS handshake if there is one."""

    def __init__(
        self,
        listener: socket.socket,
        connections: OpenConnections,
        protocol: Callable[[], WatchedProtocol],
        certificate: ServerCertificate | None = None,
    ) -> None:
        self._certificate = certificate
        # by address, with those that have not begun: clients decide how long a handshake takes
        self._handshakes = Counter[str]()
        self._listener, self._connections, self._protocol = listener, connections, protocol
        self._loop = asyncio.get_running_loop()
        self._waiting = AddressTurns[socket.socket]()
        self._opening: set[asyncio.Task[None]] = set()
        self._next: asyncio.Handle | None = None
        self._paused: asyncio.TimerHandle | None = None
        message = "too many connections are open, or this address opens them too fast"
        self._refusal = plain_answer(503, message, "too_many_connections", RETRY_S)
        listener.setblocking(False)
        self._begin()

    def _begin(self) -> None:
        self._paused = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    async def close(self) -> None:
        """Accept no more, and wait for those that are being opened. Leaves the listener open."""
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._listener.fileno())
        while self._waiting:
            _, sock = self._waiting.next()
            sock.close()
        await asyncio.gather(*self._opening)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS):
            try:
                sock, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    # a connection that was reset before it was accepted
                    continue
                self._loop.remove_reader(self._listener.fileno())
                self._paused = self._loop.call_later(PAUSE_S, self._begin)
                log("accept_failed", level="error", error=error)
                return
            sock.setblocking(False)
            self._take(sock, peer)

    def _take(self, sock: socket.socket, peer: Any) -> None:
        address = address_of(peer)
        num_opening = len(self._waiting) + len(self._opening)
        if not self._connections.may_connect(address, num_opening, self._handshakes[address]):
            if self._certificate is None:
                # it may have gone
                with suppress(OSError):
                    sock.send(self._refusal)
            sock.close()
            return
        if self._certificate is not None:
            self._handshakes[address] += 1
        self._waiting.append(address, sock)
        if self._next is None:
            self._next = self._loop.call_soon(self._open_next)

    def _open_next(self) -> None:
        """Open some, of each address in its turn: one that opened hundreds delays no other."""
        for _ in range(min(MAX_OPENED, len(self._waiting))):
            address, sock = self._waiting.next()
            task = self._loop.create_task(self._open(sock, address))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        self._next = self._loop.call_soon(self._open_next) if self._waiting else None

    async def _open(self, sock: socket.socket, address: str) -> None:
        protocol = partial(self._made, address)
        try:
            if self._certificate is None:
                await self._loop.connect_accepted_socket(protocol, sock)
            else:
                await self._loop.connect_accepted_socket(
                    protocol,
                    sock,
                    ssl=self._certificate.context,
                    ssl_handshake_timeout=self._connections.settings.header_timeout_s,
                    ssl_shutdown_timeout=SHUTDOWN_S,
                )
        except OSError:
            # it has gone, or does not speak TLS
            sock.close()
        except Exception as error:
            log("connection_broke", level="error", error=error)
            sock.close()
        finally:
            self._handshakes[address] -= 1
            if self._handshakes[address] <= 0:
                del self._handshakes[address]

    def _made(self, address: str) -> WatchedProtocol:
        protocol = self._protocol()
        protocol.address = address
        return protocol
