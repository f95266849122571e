"""Threads on which grammars are worked out, beside the engine's own, and how long a step waits.

Callers take turns by tenant, one piece of work at a time: nobody's grammars hold up another's, and
none of them the engine. When a piece is done changes nothing in what it finds.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from coterie.core.errors import InternalError

# of one step; what is not done by then is passed over in it
STEP_BUDGET_S = 0.03
MAX_THREADS = 8
# at the end of the process, for the piece that a thread is at
MAX_END_S = 10.0


class GrammarTask:
    """One piece of work. `done` is set last."""

    __slots__ = ("done", "error", "run", "tenant", "value", "waiter")

    def __init__(self, tenant: str, run: Callable[[], int]) -> None:
        self.tenant, self.run = tenant, run
        self.value = 0
        self.error: Exception | None = None
        self.done = False
        self.waiter: _Waiter | None = None

    def result(self) -> int:
        if self.error is not None:
            raise self.error
        return self.value

    def drop(self) -> None:
        """Nobody wants it any more: it is not begun, unless it is already."""
        _THREADS.drop(self)


class _Waiter:
    """Set when the last of some jobs is done."""

    __slots__ = ("event", "left")

    def __init__(self, left: int) -> None:
        self.left = left
        self.event = threading.Event()


class _Threads:
    """Of this process, whatever the number of engines in it. Started by the first job."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        # by tenant, whose turn it is first
        self._queues: OrderedDict[str, deque[GrammarTask]] = OrderedDict()
        self._threads: list[threading.Thread] = []
        self._is_over = False
        # set with every job that ends
        self.ended = threading.Event()

    def submit(self, jobs: Sequence[GrammarTask]) -> _Waiter:
        waiter = _Waiter(len(jobs))
        with self._lock:
            if not self._threads:
                self._start()
            for job in jobs:
                job.waiter = waiter
                self._queues.setdefault(job.tenant, deque()).append(job)
            self._lock.notify(len(jobs))
        return waiter

    def drop(self, job: GrammarTask) -> None:
        with self._lock:
            queue = self._queues.get(job.tenant)
            if queue is None or job not in queue:
                return
            queue.remove(job)
            if not queue:
                del self._queues[job.tenant]

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return sum(map(len, self._queues.values()))

    def end(self) -> None:
        """A thread that is inside the grammar engine when the interpreter goes away takes the
        process with it."""
        with self._lock:
            self._is_over = True
            self._queues.clear()
            self._lock.notify_all()
        until = time.monotonic() + MAX_END_S
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))

    def _start(self) -> None:
        # a step computes on all cores: half of them keep up with it
        count = min(max((os.cpu_count() or 1) // 2, 1), MAX_THREADS)
        for number in range(count):
            name = f"grammar-{number}"
            self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
        for thread in self._threads:
            thread.start()
        atexit.register(self.end)

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.value = job.run()
            except Exception as error:
                job.error = error
            except BaseException as error:
                # native code that panics raises no Exception; the thread goes on all the same
                job.error = InternalError(f"{type(error).__name__} in a grammar")
            with self._lock:
                job.done = True
                waiter = job.waiter
                if waiter is not None:
                    waiter.left -= 1
                    if not waiter.left:
                        waiter.event.set()
            self.ended.set()

    def _next(self) -> GrammarTask | None:
        with self._lock:
            while not self._queues:
                if self._is_over:
                    return None
                self._lock.wait()
            tenant, queue = self._queues.popitem(last=False)
            job = queue.popleft()
            if queue:
                self._queues[tenant] = queue
            return job


_THREADS = _Threads()


class GrammarWork:
    """One engine's: what it has under way, and what its step may still wait."""

    def __init__(self) -> None:
        self._left_s = STEP_BUDGET_S
        # since start: seconds that the engine's thread waited, and work it did not wait for
        self.waited_s = 0.0
        self.num_late = 0

    def begin_step(self) -> None:
        self._left_s = STEP_BUDGET_S

    def do(self, jobs: Sequence[GrammarTask]) -> None:
        """Have them done; comes back when they are, or when the step has waited long enough."""
        if not jobs:
            return
        waiter = _THREADS.submit(jobs)
        started = time.perf_counter()
        waiter.event.wait(max(self._left_s, 0.0))
        spent = time.perf_counter() - started
        self._left_s -= spent
        self.waited_s += spent
        self.num_late += sum(not job.done for job in jobs)

    def nap(self, jobs: Sequence[GrammarTask]) -> None:
        """Nothing else can run: wait for some job to end."""
        _THREADS.ended.clear()
        if not any(job.done for job in jobs):
            started = time.perf_counter()
            _THREADS.ended.wait(STEP_BUDGET_S)
            self.waited_s += time.perf_counter() - started
