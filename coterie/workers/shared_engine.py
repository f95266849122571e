"""Lets several threads use one engine, which is not thread-safe.

A thread of its own runs the engine while others wait for it: between two steps it does what they
asked for, then runs a step and hands out its events. It is always the same one, because libraries
keep plans and workspaces for each thread (cuDNN plans a length for 100 ms). Nobody waits for a lock
that is held during a step, so that a new request joins the next step.
"""

from __future__ import annotations

import atexit
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from coterie.core.errors import InternalError, Unavailable, from_code
from coterie.core.events import Event, Failed, Finished, Started
from coterie.core.plan import Assignment, Rejected
from coterie.obs.log import log
from coterie.weights.shortage import started

if TYPE_CHECKING:
    from coterie.core.plan import Admitted
    from coterie.engine.engine import Engine

_T = TypeVar("_T")
# the most that is waited for a step to end
END_S = 30.0
_CLOSED = "this engine was closed"


@dataclass(slots=True, eq=False)
class RequestInbox:
    """The events of one request that its thread has not read yet."""

    events: deque[Event] = field(default_factory=deque)
    # whether the engine has taken the request
    is_queued: bool = False
    # whether there is more to read than the start
    has_news: bool = False
    has_ended: bool = False

    def put(self, event: Event) -> None:
        self.events.append(event)
        self.has_ended = self.has_ended or isinstance(event, (Finished, Failed))
        self.has_news = self.has_news or not isinstance(event, Started)

    def take(self) -> list[Event]:
        # another thread may put an event now: it sets the marks after that
        self.has_news = False
        return [self.events.popleft() for _ in range(len(self.events))]


@dataclass(slots=True, eq=False)
class RequestEntry:
    """A request on its way into the engine's queue."""

    assignment: Assignment
    verdict: Admitted | Rejected | None = None
    inbox: RequestInbox = field(default_factory=RequestInbox)


@dataclass(slots=True, eq=False)
class _Waiter:
    """A thread that sleeps until `ready`, or until a step has failed."""

    ready: Callable[[], bool]
    problem: Exception | None = None
    woken: threading.Lock = field(default_factory=threading.Lock)


class SharedEngine:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.inboxes: dict[str, RequestInbox] = {}
        # Guards the fields below, never held during a step. The collector may close a stream
        # inside any line of the thread that holds it: that thread may take it again.
        self._guard = threading.RLock()
        self._is_running = False
        self._waiting: list[_Waiter] = []
        self._asked: deque[Callable[[], None]] = deque()
        # requests that found the queue full, in the order in which they came
        self._entering: list[RequestEntry] = []
        self._thread = _EngineThread(self)
        # nobody has this object any more
        weakref.finalize(self, self._thread.end).atexit = False

    def close(self) -> None:
        """End the thread. Who waits for a step, now or later, gets an Unavailable."""
        self._thread.end()
        self._fail(Unavailable(_CLOSED))

    def enter(self, assignment: Assignment) -> RequestEntry:
        """Let a request in with the next step. To be followed by `remove`."""
        entry = RequestEntry(assignment)
        self.inboxes[assignment.request_id] = entry.inbox
        self._ask(lambda: self._entering.append(entry))
        return entry

    def admit(self, entry: RequestEntry) -> None:
        """Wait until a request is in the engine's queue. While that is full, steps are run for the
        others. Raises the error of one that is refused."""
        self._run_until(lambda: entry.verdict is not None)
        if isinstance(entry.verdict, Rejected):
            raise from_code(entry.verdict.code, entry.verdict.reason)

    def events(self, inbox: RequestInbox) -> Generator[Event, None, None]:
        """The events of a request as they come, up to its end."""
        ended = False
        while not ended:
            self._run_until(lambda: inbox.has_news)
            for event in inbox.take():
                ended = isinstance(event, (Finished, Failed))
                yield event

    def wait(self, inbox: RequestInbox) -> None:
        """Wait for the end of a request, so that its thread is not woken for every token."""
        self._run_until(lambda: inbox.has_ended)

    def remove(self, request_id: str) -> None:
        """Forget a request; one that has not ended is aborted after the running step at the
        latest."""
        inbox = self.inboxes.pop(request_id, None)
        if inbox is not None and not inbox.has_ended:
            self._ask(lambda: self._abort(request_id))

    def call(self, work: Callable[[], _T]) -> _T:
        """Run `work` between two steps and return what it returns."""
        done: list[_T] = []
        failed: list[Exception] = []

        def run() -> None:
            try:
                done.append(work())
            except Exception as error:
                failed.append(error)

        self._ask(run)
        self._run_until(lambda: bool(done or failed))
        if failed:
            raise failed[0]
        return done[0]

    def abort_all(self) -> None:
        """Only in `call`."""
        for request_id in list(self.inboxes):
            self.engine.abort(request_id)

    def _ask(self, work: Callable[[], None]) -> None:
        """Have `work` done between two steps, or here where no step runs."""
        with self._guard:
            self._asked.append(work)
            if not self._is_running:
                self._do_asked()

    def _run_until(self, ready: Callable[[], bool]) -> None:
        """Wait for steps until `ready`. Raises the problem of a step that failed."""
        waiter = _Waiter(ready)
        waiter.woken.acquire()
        with self._guard:
            if ready():
                return
            if self._thread.has_ended:
                raise Unavailable(_CLOSED)
            self._waiting.append(waiter)
            if not self._is_running:
                self._is_running = True
                self._thread.wake()
        try:
            # released by the engine's thread
            waiter.woken.acquire()
        except BaseException:
            with self._guard:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
            raise
        if waiter.problem is not None:
            raise waiter.problem

    def run(self) -> None:
        """Steps while somebody waits. Called by the engine's thread."""
        while not self._thread.has_ended:
            try:
                self._do_asked()
                self._enter()
                if not self._wake():
                    return
                if not self._waiting:
                    # something was asked for meanwhile
                    continue
                for event in self.engine.step():
                    inbox = self.inboxes.get(event.request_id)
                    if inbox is not None:
                        inbox.put(event)
                if not self.engine.has_work():
                    self._end_lost()
            except Exception as problem:
                self._fail(problem)

    def _end_lost(self) -> None:
        """A request that the engine does not know any more ends, instead of waiting for ever."""
        entering = {entry.assignment.request_id for entry in self._entering}
        for request_id, inbox in list(self.inboxes.items()):
            if inbox.is_queued and not inbox.has_ended and request_id not in entering:
                log("request_lost", level="error", request_id=request_id)
                inbox.put(Failed(request_id, InternalError.code, "the engine lost this request"))

    def _fail(self, problem: Exception) -> None:
        """Everybody who waits gets the problem of a step; their requests are aborted then."""
        with self._guard:
            for waiter in self._waiting:
                waiter.problem = problem
                waiter.woken.release()
            self._waiting.clear()

    def _do_asked(self) -> None:
        while self._asked:
            self._asked.popleft()()

    def _enter(self) -> None:
        """Queue the requests for which there is room now, in their order."""
        full = -math.inf
        for entry in list(self._entering):
            priority = entry.assignment.limits.priority
            # a queue that is full for one is full for those that come behind it
            if priority <= full:
                continue
            verdict = self.engine.add(entry.assignment)
            waits = isinstance(verdict, Rejected) and verdict.retry_after_s is not None
            if waits and self.engine.has_work():
                full = priority
                continue
            entry.verdict = verdict
            entry.inbox.is_queued = not isinstance(verdict, Rejected)
            self._entering.remove(entry)

    def _abort(self, request_id: str) -> None:
        for entry in self._entering:
            if entry.assignment.request_id == request_id:
                self._entering.remove(entry)
                return
        self.engine.abort(request_id)

    def _wake(self) -> bool:
        """Wake the threads that have what they wait for. Returns whether others wait."""
        with self._guard:
            woken = [waiter for waiter in self._waiting if waiter.ready()]
            if woken:
                ready = set(woken)
                self._waiting = [waiter for waiter in self._waiting if waiter not in ready]
            self._is_running = bool(self._waiting or self._asked)
            goes_on = self._is_running
        # they need the guard at once
        for waiter in woken:
            waiter.woken.release()
        return goes_on


class _EngineThread:
    """Runs an engine's steps until `end`, which the interpreter waits for before it ends: a thread
    that is inside of torch then would end the process with it (SIGABRT)."""

    def __init__(self, shared: SharedEngine) -> None:
        self.has_ended = False
        # released when there is work
        self._work = threading.Semaphore(0)
        (self._thread,) = started(partial(self._serve, weakref.ref(shared)), "engine", 1)
        _threads.add(self)

    def wake(self) -> None:
        self._work.release()

    def end(self) -> None:
        """After the running step."""
        self.has_ended = True
        self._work.release()
        # the collector may call this on any thread
        if threading.current_thread() is not self._thread:
            self._thread.join(END_S)

    def _serve(self, shared: weakref.ref[SharedEngine]) -> None:
        while True:
            self._work.acquire()
            found = shared()
            if self.has_ended or found is None:
                return
            found.run()
            del found


_threads: weakref.WeakSet[_EngineThread] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    for thread in list(_threads):
        thread.end()
