"""BegunEvents does what a plain generator around another one does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from coterie.core.events import Delta, Event
from coterie.service.begun_events import BegunEvents


def _delta(number: int) -> Event:
    return Delta("r", 0, str(number), (number,))


async def _source(count: int, fails_at: int, seen: list[str]) -> AsyncGenerator[Event, None]:
    try:
        for number in range(count):
            await asyncio.sleep(0)
            if number == fails_at:
                raise ValueError("broken")
            yield _delta(number)
    finally:
        seen.append("closed")


async def _plain(source: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    async with aclosing(source):
        async for event in source:
            yield event


def _begun(source: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    async def begin() -> tuple[Event, AsyncGenerator[Event, None]]:
        return await anext(source), source

    return BegunEvents(begin)


async def _read(events: AsyncGenerator[Event, None], stops_at: int) -> list[str]:
    """What a reader sees that leaves after some events, and what comes afterwards."""
    seen: list[str] = []
    try:
        async with aclosing(events):
            async for event in events:
                assert isinstance(event, Delta)
                seen.append(event.text)
                if len(seen) > stops_at:
                    break
    except ValueError as error:
        seen.append(str(error))
    seen.append(str(await anext(events, "end")))
    return seen


def test_events_ends_and_faults_equal_those_of_a_plain_generator() -> None:
    rng = random.Random()
    for _ in range(200):
        count, fails_at, stops_at = rng.randrange(1, 5), rng.randrange(8), rng.randrange(6)
        closed: list[list[str]] = [[], []]
        found = asyncio.run(_read(_begun(_source(count, fails_at, closed[0])), stops_at))
        expected = asyncio.run(_read(_plain(_source(count, fails_at, closed[1])), stops_at))
        assert found == expected and closed[0] == closed[1] == ["closed"]


def test_closed_before_its_first_event_it_does_not_begin() -> None:
    async def main() -> None:
        seen: list[str] = []
        events = _begun(_source(3, 9, seen))
        await events.aclose()
        assert await anext(events, None) is None
        assert not seen

    asyncio.run(main())


def test_a_reader_that_is_cancelled_cancels_what_it_waits_for() -> None:
    async def waits(ended: list[str]) -> AsyncGenerator[Event, None]:
        try:
            yield _delta(0)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def main() -> None:
        ended: list[str] = []
        events = _begun(waits(ended))
        assert await anext(events) == _delta(0)
        reader = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.01)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert ended == ["cancelled"]
        with pytest.raises(KeyError):
            await _begun(waits(ended)).athrow(KeyError("x"))

    asyncio.run(main())
