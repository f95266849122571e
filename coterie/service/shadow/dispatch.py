"""When shadows run: only while their engine has been without primaries for a moment, a few at once,
from a bounded queue.

A shadow that runs when a primary comes is aborted and starts again later. Only the sample of a
demoted specialist runs beside primaries, at the lowest priority, if it waited too long: without it
the specialist could never recover.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from coterie.core.errors import CoterieError
from coterie.core.request import InferenceRequest, Sampling
from coterie.obs.log import log
from coterie.service.shadow.policy import SAMPLE
from coterie.service.slo.evidence import JudgedAnswer

if TYPE_CHECKING:
    from coterie.service.plan import RequestRun

# shadows that may wait; a sample displaces the oldest other one
MAX_WAITING = 32
MAX_WAIT_S = 60.0
# after this time the sample of a demoted specialist runs beside primaries
SAMPLE_WAIT_S = 5.0
# how long an engine must be without primaries: under load the next one comes sooner
IDLE_S = 0.25
# how often a shadow starts again after a primary came
MAX_TRIES = 3

DONE, PREEMPTED, DROPPED, FAILED = "done", "preempted", "dropped", "failed"


@dataclass(slots=True, eq=False)
class ShadowTask:
    """A request that another specialist answers too."""

    request: InferenceRequest
    vendor: Sampling
    target: str
    why: str
    # called once with the outcome and what is known about the answer, if anything
    on_end: Callable[[str, JudgedAnswer | None], None]
    # time.monotonic()
    offered_at: float = field(default_factory=time.monotonic)
    tries: int = 0
    # the request that a caller got an answer to
    primary: RequestRun | None = None
    # one check found one of the two answers valid and the other not; known at its end
    one_check: bool = False

    @property
    def is_sample(self) -> bool:
        return self.why == SAMPLE

    def must_run(self, now: float) -> bool:
        """Whether it runs beside primaries."""
        late = now - self.offered_at >= SAMPLE_WAIT_S or self.tries >= MAX_TRIES
        return self.is_sample and late


class ShadowDispatcher:
    """Used from one event loop. `run` answers a shadow's request and judges the answer; `engines`
    are the replicas that a specialist uses."""

    def __init__(
        self,
        run: Callable[[ShadowTask], Coroutine[Any, Any, JudgedAnswer | None]],
        engines: Callable[[str], Collection[str]],
        max_running: int,
    ) -> None:
        self._run, self._engines = run, engines
        self.max_running = max_running
        self._waiting: deque[ShadowTask] = deque()
        self._running: dict[ShadowTask, asyncio.Future[JudgedAnswer | None]] = {}
        # number of primaries by replica; one without any may be missing
        self._primaries: dict[str, int] = {}
        # by replica: time.monotonic() when its last primary ended
        self._ended_at: dict[str, float] = {}
        # looks again at what waits
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def offer(self, task: ShadowTask) -> None:
        """Never waits."""
        if self._is_closed or not self.max_running:
            return
        if len(self._waiting) >= MAX_WAITING:
            victim = next((item for item in self._waiting if not item.is_sample), None)
            if victim is None or not task.is_sample:
                task.on_end(DROPPED, None)
                return
            self._waiting.remove(victim)
            victim.on_end(DROPPED, None)
        # the others that wait were looked at when an engine became idle
        if self._may_start(task, time.monotonic()):
            self._start(task)
        else:
            self._waiting.append(task)

    def primary_began(self, replicas: Collection[str]) -> None:
        """Shadows on these replicas make room."""
        primaries = self._primaries
        for name in replicas:
            primaries[name] = primaries.get(name, 0) + 1
        if not self._running:
            return
        now = time.monotonic()
        for task, running in list(self._running.items()):
            if not task.must_run(now) and self._is_used(task.target):
                running.cancel()

    def primary_ended(self, replicas: Collection[str]) -> None:
        primaries, now = self._primaries, time.monotonic()
        for name in replicas:
            primaries[name] -= 1
            self._ended_at[name] = now
        if self._waiting:
            self._look_later(now)

    def _look_later(self, now: float) -> None:
        """Look again when the next engine will have been idle for `IDLE_S`. One timer for all:
        under load a primary ends every few milliseconds."""
        if self._is_closed or self._timer is not None:
            return
        idle_at = [at + IDLE_S for at in self._ended_at.values() if at + IDLE_S > now]
        if idle_at:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(min(idle_at) - now, self._look)

    def _look(self) -> None:
        self._timer = None
        self.start_waiting()
        if self._waiting:
            self._look_later(time.monotonic())

    def start_waiting(self) -> None:
        """Start what can start now; to be called from time to time too."""
        if self._is_closed:
            return
        now = time.monotonic()
        for task in list(self._waiting):
            if now - task.offered_at >= MAX_WAIT_S and not task.is_sample:
                self._waiting.remove(task)
                task.on_end(DROPPED, None)
        # samples first
        for task in sorted(self._waiting, key=lambda item: not item.is_sample):
            if len(self._running) >= self.max_running:
                return
            if self._may_start(task, now):
                self._waiting.remove(task)
                self._start(task)

    def _may_start(self, task: ShadowTask, now: float) -> bool:
        has_room = len(self._running) < self.max_running
        return has_room and (self._is_idle(task.target) or task.must_run(now))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.clear()
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _is_idle(self, specialist: str) -> bool:
        """Whether its engines have been without primaries for `IDLE_S`."""
        engines, before = self._engines(specialist), time.monotonic() - IDLE_S
        return not any(
            self._primaries.get(name) or self._ended_at.get(name, 0.0) > before for name in engines
        )

    def _is_used(self, specialist: str) -> bool:
        return any(self._primaries.get(name) for name in self._engines(specialist))

    def _start(self, task: ShadowTask) -> None:
        task.tries += 1
        running = self._running[task] = asyncio.ensure_future(self._run(task))
        # a callback: a task that is cancelled before its first step runs none of its code
        running.add_done_callback(partial(self._ended, task))

    def _ended(self, task: ShadowTask, running: asyncio.Future[JudgedAnswer | None]) -> None:
        del self._running[task]
        result: str = FAILED
        answer: JudgedAnswer | None = None
        error = None if running.cancelled() else running.exception()
        if running.cancelled():
            result = PREEMPTED
        elif error is None:
            result, answer = DONE, running.result()
        elif isinstance(error, CoterieError):
            log("shadow_failed", level="debug", model=task.target, code=error.code)
        elif isinstance(error, Exception):
            # nobody waits for a shadow: its fault must not be lost
            log("unhandled error", level="error", error=error, request_id=task.request.id)
        if self._is_closed:
            return
        again = task.tries < MAX_TRIES or task.is_sample
        if result == PREEMPTED and again:
            self._waiting.appendleft(task)
        else:
            task.on_end(result, answer)
        self.start_waiting()


class PrimaryRun:
    """A request of a caller on some engines; for a `with` statement."""

    __slots__ = ("_engines", "_shadows")

    def __init__(self, shadows: ShadowDispatcher | None, engines: Collection[str]) -> None:
        self._shadows, self._engines = shadows, engines

    def __enter__(self) -> None:
        if self._shadows is not None:
            self._shadows.primary_began(self._engines)

    def __exit__(self, *_: object) -> None:
        if self._shadows is not None:
            self._shadows.primary_ended(self._engines)
