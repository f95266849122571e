"""Connections to remote servers, read in small slices.

A server decides how much work a byte of its answer makes: an HTTP chunk of one byte, a comment, an
answer 100 before the answer. So all remote answers together get a bounded number of bytes in one
turn of the event loop, one after the other, and then rest as long as the turn took. A response may
not have more bytes than were allowed for it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import httpcore

from coterie.workers.remote.failure import RETRY_S, RemoteFailure

# of one read, and of all reads in one turn of the event loop
SLICE_BYTES, TURN_BYTES = 1 << 12, 1 << 13
# the longest rest behind a turn
MAX_REST_S = 0.05
# of a status line and its headers, with the answers 1xx before them
MAX_HEAD_BYTES = 1 << 17


class ReadTurns:
    """Gives out the bytes of a turn, in the order of asking. Of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left = TURN_BYTES
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._is_open = False
        self._began_at = 0.0

    async def take(self, size: int) -> None:
        """Returns when these bytes may be handled."""
        if self._left <= 0 or self._waiting:
            turn: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append((turn, size))
            await turn
            return
        self._left -= size
        if not self._is_open:
            self._open()

    def _open(self) -> None:
        self._is_open = True
        self._began_at = self._loop.time()
        # runs when those that took bytes have handled them
        self._loop.call_soon(self._end)

    def _end(self) -> None:
        if self._waiting:
            took_s = self._loop.time() - self._began_at
            self._loop.call_later(min(took_s, MAX_REST_S), self._grant)
            return
        self._is_open, self._left = False, TURN_BYTES

    def _grant(self) -> None:
        self._left = TURN_BYTES
        while self._waiting and self._left > 0:
            turn, size = self._waiting.popleft()
            if not turn.done():
                self._left -= size
                turn.set_result(None)
        self._open()


_TURNS: WeakKeyDictionary[asyncio.AbstractEventLoop, ReadTurns] = WeakKeyDictionary()


def _turns() -> ReadTurns:
    loop = asyncio.get_running_loop()
    turns = _TURNS.get(loop)
    if turns is None:
        turns = _TURNS[loop] = ReadTurns(loop)
    return turns


class SlicedStream(httpcore.AsyncNetworkStream):
    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream, self._turns = stream, _turns()
        self._left = MAX_HEAD_BYTES

    def allow(self, size: int) -> None:
        """From here on this many bytes may come, until the next request is sent."""
        self._left = size

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await self._stream.read(min(max_bytes, SLICE_BYTES), timeout)
        self._left -= len(data)
        if self._left < 0:
            text = "the remote server sent more bytes than an answer may have"
            raise RemoteFailure("unavailable", text, RETRY_S, kind="bad_answers")
        await self._turns.take(len(data))
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._left = MAX_HEAD_BYTES
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return SlicedStream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class SlicedBackend(httpcore.AsyncNetworkBackend):
    def __init__(self, backend: httpcore.AsyncNetworkBackend) -> None:
        self._backend = backend

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        connect = self._backend.connect_tcp
        return SlicedStream(await connect(host, port, timeout, local_address, socket_options))

    async def sleep(self, seconds: float) -> None:
        await self._backend.sleep(seconds)
