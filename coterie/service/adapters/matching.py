"""Builds the matcher for the installed adapters: trained once, in a separate process, then replaced
as a whole.

Requests use the old matcher until the new one is ready. If the catalog changes during a build,
another build follows.
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
    """Call it on a thread: it reads a stored matcher, or waits for the process that trains one."""
    from coterie.routing.match.learn import cached_matcher

    return cached_matcher(profiles, _folder())


def is_learnt(profiles: Sequence[AdapterProfile]) -> bool:
    """Whether a trained matcher for these profiles is stored."""
    from coterie.routing.match.learn import probes_path

    return probes_path(profiles, _folder()).is_file()


def _folder() -> Path:
    from coterie.weights.home import home

    return home() / "routing"


class MatcherBuilder:
    def __init__(self, build: Build = build_matcher) -> None:
        self._build = build
        self._profiles_wanted: tuple[AdapterProfile, ...] = ()
        # None while the first one is being built, and if nothing is installed
        self.matcher: Matcher | None = None
        self._task: asyncio.Task[None] | None = None
        # why the last build failed
        self._error: Exception | None = None

    def update_profiles(self, profiles: Sequence[AdapterProfile]) -> None:
        """Build a matcher for these profiles if they have changed. Call it on the event loop; it
        returns at once."""
        profiles_wanted = tuple(profiles)
        if profiles_wanted == self._profiles_wanted:
            return
        self._profiles_wanted = profiles_wanted
        if not profiles_wanted:
            self.matcher = None
        elif self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._rebuild())

    async def settled(self) -> None:
        """Returns when the matcher for the last profiles is ready; raises if its build failed."""
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
        while self._profiles_wanted and built != self._profiles_wanted:
            built, started_at = self._profiles_wanted, perf_counter()
            self._error = None
            try:
                matcher = await _on_daemon_thread(partial(self._build, built))
            except Exception as error:
                # requests continue with the old matcher, or with the base model alone
                self._error = error
                log("matcher_failed", level="error", error=error)
                continue
            self.matcher = matcher if self._profiles_wanted else None
            took_ms = round((perf_counter() - started_at) * 1e3, 3)
            log("matcher_ready", state=f"{len(built)} experts", duration_ms=took_ms)


async def _on_daemon_thread(work: Callable[[], Matcher]) -> Matcher:
    """Run `work` on a daemon thread: a process that exits waits for the threads of an executor, but
    not for this one."""
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
        # the loop may have been closed in the meantime: then no one waits for the result
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, matcher, error)

    Thread(target=run, name="matcher", daemon=True).start()
    return await done
