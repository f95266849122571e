"""Accepts connections: several in each iteration of the event loop, and of each address only so
many a second.

uvloop's own server accepts one per iteration. Where an iteration takes a millisecond, a client that
connects faster fills the system's queue of new connections, and everybody waits behind it, unseen.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from coterie.api.transport.connections import (
    RETRY_S,
    OpenConnections,
    WatchedProtocol,
    address_of,
    plain_answer,
)
from coterie.obs.log import log

# connections that are taken from the system's queue in one iteration; refusing that many takes 2 ms
MAX_ACCEPTS = 64
# pause when the system has no file or memory for one more connection
PAUSE_S = 1.0
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ConnectionAcceptor:
    """`protocol` makes the protocol of a connection."""

    def __init__(
        self,
        listener: socket.socket,
        connections: OpenConnections,
        protocol: Callable[[], WatchedProtocol],
    ) -> None:
        self._listener, self._connections, self._protocol = listener, connections, protocol
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._paused: asyncio.TimerHandle | None = None
        message = "this address opens connections too fast; keep them open, or try again later"
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
        if not self._connections.may_connect(address):
            # it may have gone
            with suppress(OSError):
                sock.send(self._refusal)
            sock.close()
            return
        task = self._loop.create_task(self._open(sock, address))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, sock: socket.socket, address: str) -> None:
        try:
            await self._loop.connect_accepted_socket(partial(self._made, address), sock)
        except OSError:
            # it has gone
            sock.close()
        except Exception as error:
            log("connection_broke", level="error", error=error)
            sock.close()

    def _made(self, address: str) -> WatchedProtocol:
        protocol = self._protocol()
        protocol.address = address
        return protocol
