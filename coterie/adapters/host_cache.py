"""Adapters that were read and stacks that were composed before, in RAM, within one byte budget.

Least recently used first out. A stack of one adapter is kept in its place: composed, it reaches the
device in one copy. Thread-safe. Knows neither disk nor device.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from coterie.adapters.base import Adapter
from coterie.adapters.image import StackImage


class HostCache:
    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.evictions = 0
        self._lock = threading.Lock()
        # adapters by digest, images by their stack's key: the two differ in length
        self._held: OrderedDict[str, Adapter | StackImage] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, key: str, digests: Sequence[str]) -> bool:
        """A stack can be placed without reading the disk."""
        return key in self._held or all(digest in self._held for digest in digests)

    def adapter(self, digest: str) -> Adapter | None:
        held = self._get(digest)
        return held if isinstance(held, Adapter) else None

    def image(self, key: str) -> StackImage | None:
        held = self._get(key)
        return held if isinstance(held, StackImage) else None

    def keep(self, adapter: Adapter) -> None:
        with self._lock:
            self._put(adapter.digest, adapter)

    def keep_image(self, key: str, image: StackImage, digests: Sequence[str]) -> None:
        with self._lock:
            if len(digests) == 1 and image.nbytes <= self.budget_bytes:
                self._drop(digests[0])
            self._put(key, image)

    def clear(self) -> None:
        with self._lock:
            self._held.clear()
            self.used_bytes = 0

    def _get(self, name: str) -> Adapter | StackImage | None:
        with self._lock:
            held = self._held.get(name)
            if held is not None:
                self._held.move_to_end(name)
            return held

    def _put(self, name: str, held: Adapter | StackImage) -> None:
        """What alone is over the budget is not kept."""
        if held.nbytes > self.budget_bytes or name in self._held:
            return
        while self.used_bytes + held.nbytes > self.budget_bytes:
            self._drop(next(iter(self._held)))
            self.evictions += 1
        self._held[name] = held
        self.used_bytes += held.nbytes

    def _drop(self, name: str) -> None:
        held = self._held.pop(name, None)
        if held is not None:
            self.used_bytes -= held.nbytes
