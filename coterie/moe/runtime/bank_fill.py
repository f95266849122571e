"""Fills the host's bank from the store, on threads of its own, while requests are served.

Experts are read in the order of the store. Those that a step waits for come first, so that a layer
waits for the experts that it uses and for no other ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

from coterie.core.errors import CoterieError, WeightsError
from coterie.weights.shortage import MemoryShortage, is_shortage, started

if TYPE_CHECKING:
    from coterie.moe.store.base import Key

_log = logging.getLogger(__name__)

_PAUSE_S = 0.5


class BankPlacer(Protocol):
    """Reads an expert, arranges it, and writes it to its place; any thread may call it. Returns the
    bytes read."""

    def __call__(self, key: Key) -> int: ...
    def close(self) -> None: ...


class BankFill:
    """The engine's thread calls the public methods. Reading begins at once."""

    def __init__(self, place: BankPlacer, keys: Sequence[Key], readers: int) -> None:
        self._place, self._started = place, time.perf_counter()
        self._count = len(keys)
        # not yet taken by a thread, those that steps wait for apart; and not yet in the bank
        self._waiting, self._missing = deque(keys), set(keys)
        self._urgent: deque[Key] = deque()
        self._taken: set[Key] = set()
        self._failed: dict[Key, CoterieError] = {}
        self._changed = threading.Condition()
        self._paused = self._closed = False
        self._running = 0
        self.read_bytes = 0
        # by layer, since `take_waits`: seconds that steps waited, and the experts that were missing
        self._waited_s: defaultdict[int, float] = defaultdict(float)
        self._late: Counter[int] = Counter()
        self._threads = started(self._work, "experts-fill", min(readers, len(keys)))

    @property
    def is_complete(self) -> bool:
        return not self._missing

    @property
    def num_filled(self) -> int:
        return self._count - len(self._missing)

    def holds(self, key: Key) -> bool:
        return key not in self._missing

    def need(self, layer: int, experts: Sequence[int]) -> None:
        """Wait until these are in the bank. Raises what kept one from being read; the next call
        reads it again."""
        wanted = [(layer, expert) for expert in experts if (layer, expert) in self._missing]
        if not wanted:
            return
        begin = time.perf_counter()
        with self._changed:
            for key in wanted:
                if self._failed.pop(key, None) is not None or key not in self._taken:
                    self._taken.discard(key)
                    self._urgent.append(key)
            self._changed.notify_all()
            while any(key in self._missing and key not in self._failed for key in wanted):
                self._changed.wait()
            problem = next((self._failed[key] for key in wanted if key in self._failed), None)
        self._waited_s[layer] += time.perf_counter() - begin
        self._late[layer] += len(wanted)
        if problem is not None:
            raise problem

    def take_waits(self) -> tuple[dict[int, float], dict[int, int]]:
        """By layer, since the last call: seconds that steps waited, and for how many experts."""
        waits: tuple[dict[int, float], dict[int, int]] = dict(self._waited_s), dict(self._late)
        self._waited_s.clear()
        self._late.clear()
        return waits

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all are there, at most so long. Raises if one could not be read."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or not self._missing, seconds)
            for problem in self._failed.values():
                raise problem
        return self.is_complete

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No read is begun inside, because the machine is measured. Waits for those that run, but
        not for a disk that does not answer."""
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: not self._running, _PAUSE_S)
        try:
            yield
        finally:
            with self._changed:
                self._paused = False
                self._changed.notify_all()

    def close(self) -> None:
        """Waits for reads that run; drops the others."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._place.close()

    def _next(self) -> Key | None:
        """None: all are there, or this was closed."""
        while not self._closed and self._missing:
            for queue in () if self._paused else (self._urgent, self._waiting):
                while queue:
                    key = queue.popleft()
                    if key not in self._taken:
                        self._taken.add(key)
                        self._running += 1
                        return key
            self._changed.wait()
        return None

    def _work(self) -> None:
        with torch.inference_mode():
            while True:
                with self._changed:
                    key = self._next()
                if key is None:
                    return
                self._read(key)

    def _read(self, key: Key) -> None:
        problem, count = None, 0
        try:
            count = self._place(key)
        except CoterieError as error:
            problem = error
        except Exception as error:
            kind = MemoryShortage if is_shortage(error) else WeightsError
            problem = kind(f"expert {key} could not be read: {error}")
        with self._changed:
            self._running -= 1
            if problem is None:
                self.read_bytes += count
                self._missing.discard(key)
            else:
                self._failed[key] = problem
                _log.error("%s", problem)
            if not self._missing:
                spent = time.perf_counter() - self._started
                _log.info("%d experts in RAM after %.1f s", self._count, spent)
            self._changed.notify_all()
