"""The matcher of what is installed: learnt once, by a process of its own, and swapped in whole.

Requests use the one before until the next is ready; a catalog that changes while one is being built
gets another one behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from time import perf_counter

from coterie.core.adapters import AdapterProfile
from coterie.core.errors import InternalError
from coterie.obs.log import log
from coterie.routing.protocols import Matcher

Build = Callable[[Sequence[AdapterProfile]], Matcher]


def build_matcher(profiles: Sequence[AdapterProfile]) -> Matcher:
    """On a thread: it reads what is kept, or waits for the process that learns."""
    from coterie.routing.match.learn import kept_matcher

    return kept_matcher(profiles, _folder())


def is_learnt(profiles: Sequence[AdapterProfile]) -> bool:
    """Whether a matcher of these is built without learning."""
    from coterie.routing.match.learn import kept_at

    return kept_at(profiles, _folder()).is_file()


def _folder() -> Path:
    from coterie.weights.home import home

    return home() / "routing"


class MatcherBuilder:
    def __init__(self, build: Build = build_matcher) -> None:
        self._build = build
        self._wanted: tuple[AdapterProfile, ...] = ()
        # None while the first is being built, and where nothing is installed
        self.matcher: Matcher | None = None
        self._task: asyncio.Task[None] | None = None
        # why the last one could not be built
        self._error: Exception | None = None

    def follow(self, profiles: Sequence[AdapterProfile]) -> None:
        """To be called on the event loop with whatever is installed now; returns at once."""
        wanted = tuple(profiles)
        if wanted == self._wanted:
            return
        self._wanted = wanted
        if not wanted:
            self.matcher = None
        elif self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._rebuild())

    async def settled(self) -> None:
        """Returns when what was last followed can be matched; raises where it cannot be."""
        if self._task is not None:
            await asyncio.shield(self._task)
        if self._error is not None:
            raise InternalError("the index of experts cannot be built") from self._error

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _rebuild(self) -> None:
        built: tuple[AdapterProfile, ...] = ()
        while self._wanted and built != self._wanted:
            built, begun = self._wanted, perf_counter()
            self._error = None
            try:
                matcher = await _beside(partial(self._build, built))
            except Exception as error:
                # requests go on with the one before, or with the base model alone
                self._error = error
                log("matcher_failed", level="error", error=error)
                continue
            self.matcher = matcher if self._wanted else None
            took_ms = round((perf_counter() - begun) * 1e3, 3)
            log("matcher_ready", state=f"{len(built)} experts", duration_ms=took_ms)


async def _beside(work: Callable[[], Matcher]) -> Matcher:
    """On a thread that a process which ends does not wait for, as it does for an executor's."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Matcher] = loop.create_future()

    def settle(matcher: Matcher | None, error: Exception | None) -> None:
        if done.cancelled():
            return
        if matcher is not None:
            done.set_result(matcher)
        else:
            done.set_exception(error or InternalError("no matcher was built"))

    def run() -> None:
        matcher, error = None, None
        try:
            matcher = work()
        except Exception as raised:
            error = raised
        # the loop may have been closed meanwhile: then nobody asks any more
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, matcher, error)

    Thread(target=run, name="matcher", daemon=True).start()
    return await done
