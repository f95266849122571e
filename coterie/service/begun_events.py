"""The events of a request whose first one decides which generator gives the others.

A generator around another one runs again for each event, and the event loop keeps a list of
generators: for a short answer that takes longer than its metrics.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from types import TracebackType
from typing import Any

from coterie.core.events import Event

Begin = Callable[[], Awaitable[tuple[Event, AsyncGenerator[Event, None]]]]


class BegunEvents(AsyncGenerator[Event, None]):
    """`begin` is called for the first event; the others are those of the generator it returns."""

    __slots__ = ("_begin", "_others")

    def __init__(self, begin: Begin) -> None:
        self._begin: Begin | None = begin
        self._others: AsyncGenerator[Event, None] | None = None

    def __anext__(self) -> Any:
        # no coroutine of its own: the caller awaits the other generator
        return self._first() if self._others is None else self._others.__anext__()

    async def _first(self) -> Event:
        begin, self._begin = self._begin, None
        if begin is None:
            # closed, or the first event failed
            raise StopAsyncIteration
        event, self._others = await begin()
        return event

    async def aclose(self) -> None:
        self._begin = None
        if self._others is not None:
            await self._others.aclose()

    async def asend(self, value: None) -> Event:
        event: Event = await self.__anext__()
        return event

    async def athrow(
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | object = None,
        traceback: TracebackType | None = None,
    ) -> Event:
        self._begin = None
        error = kind if isinstance(kind, BaseException) else kind()
        if self._others is None:
            raise error
        return await self._others.athrow(error)
