"""The turns in which connections parse what they have received."""

from __future__ import annotations

import asyncio
from typing import cast

from coterie.api.transport.connections import MAX_TURNS, ParseTurns, WatchedProtocol


class FakeTransport:
    aborted = False

    def abort(self) -> None:
        self.aborted = True


class FakeProtocol:
    """Parses once, or fails."""

    waits_for_turn = False

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        fails: bool = False,
        address: str = "local",
        order: list[str] | None = None,
    ) -> None:
        self.loop, self._fails, self.address = loop, fails, address
        self._order = order
        self.transport, self.parsed = FakeTransport(), 0

    def parse(self) -> None:
        if self._fails:
            raise RuntimeError("a fault in a parser")
        self.parsed += 1
        if self._order is not None:
            self._order.append(self.address)


def test_a_connection_that_fails_ends_and_takes_no_turn_of_others() -> None:
    async def drill() -> list[FakeProtocol]:
        loop, turns = asyncio.get_running_loop(), ParseTurns()
        protocols = [FakeProtocol(loop, fails=i % 3 == 0) for i in range(3 * MAX_TURNS)]
        for protocol in protocols:
            turns.wait(cast(WatchedProtocol, protocol))
        for _ in range(20):
            await asyncio.sleep(0)
        return protocols

    for place, protocol in enumerate(asyncio.run(drill())):
        fails = place % 3 == 0
        assert protocol.parsed == (not fails) and protocol.transport.aborted is fails
        assert not protocol.waits_for_turn


def test_an_address_with_many_connections_delays_no_other() -> None:
    async def drill() -> list[str]:
        loop, turns, order = asyncio.get_running_loop(), ParseTurns(), list[str]()
        for address in ["flood"] * 100 + ["other", "other", "third"]:
            protocol = FakeProtocol(loop, address=address, order=order)
            turns.wait(cast(WatchedProtocol, protocol))
        for _ in range(50):
            await asyncio.sleep(0)
        return order

    order = asyncio.run(drill())
    assert order[:5] == ["flood", "other", "third", "flood", "other"]
    assert len(order) == 103
