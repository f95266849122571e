"""The threads that move experts' bytes, and the handle of one move: bytes, times, or the error."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from coterie.core.errors import CoterieError

LoadTask = Callable[[], None]

if TYPE_CHECKING:
    from coterie.moe.store.base import Key


class ExpertLoad:
    """The promise of one expert's bytes in one place. Told to whoever asked, once."""

    __slots__ = (
        "_lock", "_sinks", "begun_s", "done_s", "error", "event", "host_hit", "job", "key",
        "moved_bytes", "read_bytes", "slot",
    )  # fmt: skip

    def __init__(self, key: Key, slot: int | None = None) -> None:
        self.key, self.slot = key, slot
        self.error: CoterieError | None = None
        self.read_bytes = self.moved_bytes = 0
        self.host_hit = False
        self.begun_s = self.done_s = 0.0
        # CUDA: recorded behind the copy; a stream that reads the slot waits for it
        self.event: Any = None
        # what the crew was given, while it may still be withdrawn
        self.job: LoadTask | None = None
        self._lock = threading.Lock()
        self._sinks: list[SimpleQueue[ExpertLoad]] | None = []

    @property
    def done(self) -> bool:
        return self._sinks is None

    def tell(self, sink: SimpleQueue[ExpertLoad]) -> None:
        """Put this into `sink` when it is done (now, if it is)."""
        with self._lock:
            if self._sinks is not None:
                self._sinks.append(sink)
                return
        sink.put(self)

    def finish(self, error: CoterieError | None = None) -> None:
        with self._lock:
            sinks, self._sinks = self._sinks, None
            self.error, self.done_s = error, time.perf_counter()
        for sink in sinks or ():
            sink.put(self)

    def settle(self) -> ExpertLoad:
        """Wait for the end, whatever it is."""
        if not self.done:
            sink: SimpleQueue[ExpertLoad] = SimpleQueue()
            self.tell(sink)
            sink.get()
        return self

    def wait(self) -> ExpertLoad:
        self.settle()
        if self.error is not None:
            raise self.error
        return self


class LoadWorkers:
    """Threads that run jobs: urgent ones in order; others when no urgent one waits or runs."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._threads: list[threading.Thread] = []
        self._urgent: deque[LoadTask] = deque()
        self._spare: deque[LoadTask] = deque()
        self._waiting = self._urgent_running = self._spare_running = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def idle(self) -> bool:
        return not (self._urgent or self._spare or self._urgent_running or self._spare_running)

    def put(self, job: LoadTask, *, urgent: bool) -> None:
        with self._changed:
            if self._closed and not urgent:
                return
            (self._urgent if urgent else self._spare).append(job)
            # a thread that was told of a job counts as waiting until it has taken it
            jobs = len(self._urgent) + len(self._spare)
            if jobs > self._waiting and len(self._threads) < self._size:
                thread = threading.Thread(target=self._work, name="experts", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()

    def withdraw(self, job: LoadTask) -> bool:
        """Take back a job that is not urgent, if it has not begun."""
        with self._changed:
            if job not in self._spare:
                return False
            self._spare.remove(job)
            return True

    def close(self) -> None:
        """Ends what runs and what is urgent; what nobody waits for is dropped."""
        with self._changed:
            self._closed = True
            self._spare.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _next(self) -> tuple[LoadTask, bool] | None:
        if self._urgent:
            self._urgent_running += 1
            return self._urgent.popleft(), True
        if self._spare and not self._urgent_running:
            self._spare_running += 1
            return self._spare.popleft(), False
        return None

    def _work(self) -> None:
        with torch.inference_mode():
            while True:
                with self._changed:
                    while (taken := self._next()) is None and not self._closed:
                        self._waiting += 1
                        self._changed.wait()
                        self._waiting -= 1
                if taken is None:
                    return
                job, urgent = taken
                try:
                    job()
                finally:
                    with self._changed:
                        self._urgent_running -= urgent
                        self._spare_running -= not urgent
                        if self._spare and not (self._urgent or self._urgent_running):
                            self._changed.notify()
                del job, taken
