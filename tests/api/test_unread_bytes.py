"""Bytes that wait to be parsed have a limit for all connections together."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from coterie.api.transport import connections
from coterie.api.transport.acceptor import ConnectionAcceptor
from coterie.api.transport.connections import OpenConnections, WatchedProtocol
from coterie.core.config import ServerSettings
from coterie.obs.metrics import MetricRegistry
from coterie.obs.tables import PIPELINE_METRICS

WAIT_S = 20.0


class Unparsed(WatchedProtocol):
    """Parses nothing, as while an answer is awaited."""

    def connection_made(self, transport: Any) -> None:
        self.loop, self.transport = asyncio.get_running_loop(), transport
        super().connection_made(transport)
        self._watched = self.watching.enter(transport, self.address)

    def _may_parse(self) -> bool:
        return False


def test_the_connection_with_most_of_them_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_ALL_UNREAD_BYTES", 100_000)

    async def drill() -> None:
        registry = MetricRegistry(PIPELINE_METRICS)
        opened = OpenConnections(ServerSettings(), registry, 100)
        made: list[Unparsed] = []

        def protocol() -> Unparsed:
            made.append(type("One", (Unparsed,), {"watching": opened})())
            return made[-1]

        def unread() -> list[int]:
            return sorted(len(one._unread) for one in made)

        async def until(sizes: list[int]) -> None:
            async with asyncio.timeout(WAIT_S):
                while unread() != sizes:
                    await asyncio.sleep(0.01)

        with ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            acceptor = ConnectionAcceptor(listener, opened, protocol)
            clients = [socket.create_connection(listener.getsockname(), WAIT_S) for _ in range(5)]
            for client in clients:
                stack.enter_context(client)
            for client, size in zip(clients, (10_000, 50_000, 20_000, 15_000), strict=False):
                client.sendall(b"a" * size)
            await until([0, 10_000, 15_000, 20_000, 50_000])
            refused = registry.value("coterie_connections_refused", "unread_bytes")
            assert refused.value == 0
            clients[4].sendall(b"a" * 10_000)
            await until([0, 10_000, 10_000, 15_000, 20_000])
            assert refused.value == 1 and opened._unread_bytes == 55_000
            with suppress(ConnectionError):
                assert clients[1].recv(1) == b""
            # what ends otherwise is counted no more
            clients[2].close()
            await until([0, 0, 10_000, 10_000, 15_000])
            assert opened._unread_bytes == 35_000
            await acceptor.close()
            for one in made:
                one.transport.abort()
            await until([0] * 5)
            assert opened._unread_bytes == 0

    asyncio.run(drill())
