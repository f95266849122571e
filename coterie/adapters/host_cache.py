"""Adapters that were read before, in RAM: least recently used first out, within a byte budget.

Thread-safe. Knows neither disk nor device.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from coterie.adapters.base import Adapter


class HostCache:
    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.evictions = 0
        self._lock = threading.Lock()
        self._adapters: OrderedDict[str, Adapter] = OrderedDict()

    def __contains__(self, digest: str) -> bool:
        return digest in self._adapters

    def __len__(self) -> int:
        return len(self._adapters)

    def get(self, digest: str) -> Adapter | None:
        with self._lock:
            adapter = self._adapters.get(digest)
            if adapter is not None:
                self._adapters.move_to_end(digest)
            return adapter

    def put(self, adapter: Adapter) -> None:
        """Keep it, unless it alone is over the budget."""
        with self._lock:
            if adapter.nbytes > self.budget_bytes or adapter.digest in self._adapters:
                return
            while self.used_bytes + adapter.nbytes > self.budget_bytes:
                _, old = self._adapters.popitem(last=False)
                self.used_bytes -= old.nbytes
                self.evictions += 1
            self._adapters[adapter.digest] = adapter
            self.used_bytes += adapter.nbytes

    def clear(self) -> None:
        with self._lock:
            self._adapters.clear()
            self.used_bytes = 0
