"""How connections are accepted: many in one iteration of the event loop, few of one address."""

from __future__ import annotations

import asyncio
import selectors
import socket
from contextlib import ExitStack

from coterie.api.transport import connections
from coterie.api.transport.acceptor import ConnectionAcceptor
from coterie.api.transport.connections import (
    MAX_BURST,
    ConnectionRates,
    OpenConnections,
    WatchedProtocol,
    address_of,
)
from coterie.core.config import ServerSettings
from coterie.obs.metrics import MetricRegistry
from coterie.obs.tables import PIPELINE_METRICS


class Accepted(WatchedProtocol):
    """Counts itself, and answers nothing."""

    def __init__(self, made: list[str]) -> None:
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made.append(self.address)

    def data_received(self, data: bytes) -> None:
        pass

    def connection_lost(self, exc: Exception | None) -> None:
        pass


def test_a_full_queue_is_taken_in_few_iterations_and_one_address_gets_its_rate() -> None:
    async def drill() -> None:
        registry = MetricRegistry(PIPELINE_METRICS)
        made: list[str] = []
        with ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=2048))
            opened = OpenConnections(ServerSettings(), registry, 2048)
            clients = []
            for i in range(MAX_BURST + 200):
                # the last one is somebody else's
                source = "127.0.0.3" if i == MAX_BURST + 199 else "127.0.0.2"
                client = socket.create_connection(listener.getsockname(), 10, (source, 0))
                clients.append(stack.enter_context(client))
            acceptor = ConnectionAcceptor(listener, opened, lambda: Accepted(made))
            for _ in range(20):
                await asyncio.sleep(0)
            # the last of the queue is among the first that are open
            assert "127.0.0.3" in made and len(made) < MAX_BURST // 2
            async with asyncio.timeout(20):
                while len(acceptor._waiting) + len(acceptor._opening):
                    await asyncio.sleep(0)
            await acceptor.close()
            refused = registry.value("coterie_connections_refused", "connection_rate").value
            # some come back meanwhile
            assert len(made) + refused == len(clients) and refused > 100
            is_readable = stack.enter_context(selectors.DefaultSelector())
            for client in clients:
                is_readable.register(client, selectors.EVENT_READ)
            # those that were accepted get no answer here
            answered = [key.fileobj for key, _ in is_readable.select(10)]
            assert len(answered) == refused
            for one in answered:
                assert isinstance(one, socket.socket)
                answer = one.recv(4096)
                assert b" 503 " in answer and b"retry-after: 1\r\n" in answer
                assert one.recv(4096) == b""

    asyncio.run(drill())


def test_connections_that_are_being_opened_count() -> None:
    """Those of many addresses at once, too, take no more files than there may be."""

    async def drill() -> None:
        registry = MetricRegistry(PIPELINE_METRICS)
        made: list[str] = []
        with ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for i in range(50):
                source = (f"127.0.1.{i + 1}", 0)
                stack.enter_context(socket.create_connection(listener.getsockname(), 10, source))
            opened = OpenConnections(ServerSettings(), registry, 20)
            acceptor = ConnectionAcceptor(listener, opened, lambda: Accepted(made))
            acceptor._accept()
            assert len(acceptor._waiting) == 20
            assert registry.value("coterie_connections_refused", "connections").value == 30
            # who waits when the server stops is told so by the end of the connection
            await acceptor.close()
            assert not made

    asyncio.run(drill())


def test_the_rate_of_an_address() -> None:
    rates = ConnectionRates(10)
    assert [rates.take("a", 100.0) for _ in range(12)] == [True] * 10 + [False] * 2
    assert rates.take("b", 100.0), "another address has its own"
    # half of them a second, and not more than all after a rest
    assert [rates.take("a", 101.0) for _ in range(7)] == [True] * 5 + [False] * 2
    assert sum(rates.take("a", 1000.0) for _ in range(30)) == 10
    for i in range(3 * connections.MAX_RATES):
        assert rates.take(f"c{i}", 2000.0 + i)
    assert len(rates._rested_at) <= connections.MAX_RATES
    assert address_of(("fe80::1%eth0", 1, 0, 0)) == address_of(("fe80::2", 1, 0, 0)) == "fe80::/64"
    assert address_of(("::ffff:10.0.0.1", 1)) == "10.0.0.1" and address_of("") == "local"
