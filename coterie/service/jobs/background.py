"""Work that runs beside the jobs in places of its own, while there is room for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from coterie.core.errors import Overloaded, Unavailable
from coterie.obs.log import log

# after a refusal that gives no time
RETRY_S = 1.0
MAX_PAUSE_S = 30.0


class BackgroundWork(Protocol):
    """Work that runs while no job waits: the requests of batches."""

    def take(self) -> Coroutine[Any, Any, None] | None:
        """The next piece of work. It raises Overloaded if there is no room for so much at once, and
        is not to be given again at once then; Unavailable if nothing can run now."""
        ...

    def next_start_s(self) -> float | None:
        """Seconds until there may be work again, if that is known."""
        ...


# places that are tried again with each piece of work that ends
PLACES_BACK = 0.1


class BackgroundPlaces:
    """Runs background work in as many places as there is room for. Work that is refused takes a
    place away; with each that ends, a tenth of a place is tried again."""

    def __init__(self, work: BackgroundWork, places: int) -> None:
        self._work, self._places = work, places
        self._limit = float(places)
        # nothing starts before this time.monotonic()
        self._not_before = 0.0
        self.running: set[asyncio.Task[None]] = set()

    def start(self, on_end: Callable[[], None]) -> bool:
        """Start the next piece, if there is one and a place."""
        if len(self.running) >= int(self._limit) or time.monotonic() < self._not_before:
            return False
        work = self._work.take()
        if work is None:
            return False
        task = asyncio.create_task(self._run(work))
        self.running.add(task)

        def ended(_: asyncio.Task[None]) -> None:
            # work that was cancelled before it began is closed too
            work.close()
            self.running.discard(task)
            on_end()

        task.add_done_callback(ended)
        return True

    def pause_s(self) -> float | None:
        """Seconds until something may start without a wake-up."""
        if len(self.running) >= int(self._limit):
            return None
        paused_s = self._not_before - time.monotonic()
        return paused_s if paused_s > 0 else self._work.next_start_s()

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
            self._limit = min(self._limit + PLACES_BACK, float(self._places))
        except Overloaded:
            self._shrink()
        except Unavailable as error:
            self._refused(error.retry_after_s)
        except Exception as error:
            log("background_fault", level="error", error=error)
            self._refused(None)

    def _shrink(self) -> None:
        self._limit = max(float(len(self.running) - 1), 1.0)

    def _refused(self, retry_after_s: float | None) -> None:
        self._shrink()
        wait_s = min(retry_after_s or RETRY_S, MAX_PAUSE_S)
        self._not_before = time.monotonic() + wait_s
