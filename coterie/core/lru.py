"""One bounded cache for whoever keeps what was used last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LruCache(Generic[Key, Value]):
    """At most `limit` values, or values of `limit` in all by `size`; the least recently used leaves
    first. Any thread may call it."""

    def __init__(self, limit: int, size: Callable[[Value], int] = lambda _: 1) -> None:
        """`size` of a value never changes."""
        self.limit = limit
        # the sizes of all values
        self.used = 0
        # values that left for others
        self.evictions = 0
        self._size = size
        self._lock = threading.Lock()
        # least recently used first
        self._held: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def get(self, key: Key) -> Value | None:
        """Counts as a use."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def peek(self, key: Key) -> Value | None:
        """Does not count as a use."""
        return self._held.get(key)

    def get_or_make(self, key: Key, make: Callable[[], Value]) -> Value:
        """What is kept, or what `make` answers, kept from now on; two threads may both make it."""
        found = self.get(key)
        if found is None:
            found = make()
            self.put(key, found)
        return found

    def put(self, key: Key, value: Value) -> list[Value]:
        """Counts as a use. What had to leave for it, the least recently used first. A value that
        alone is over the limit is not kept."""
        size = self._size(value)
        with self._lock:
            self._drop(key)
            left: list[Value] = []
            if size > self.limit:
                return left
            while self.used + size > self.limit:
                left.append(self._drop_oldest())
            self._held[key] = value
            self.used += size
            self.evictions += len(left)
            return left

    def pop(self, key: Key) -> Value | None:
        with self._lock:
            return self._drop(key)

    def pop_oldest(self) -> Value:
        """The least recently used. Raises KeyError when there is none."""
        with self._lock:
            return self._drop_oldest()

    def items(self) -> list[tuple[Key, Value]]:
        """The least recently used first."""
        with self._lock:
            return list(self._held.items())

    def values(self) -> list[Value]:
        return [value for _, value in self.items()]

    def clear(self) -> None:
        with self._lock:
            self._held.clear()
            self.used = 0

    def _drop(self, key: Key) -> Value | None:
        if key not in self._held:
            return None
        value = self._held.pop(key)
        self.used -= self._size(value)
        return value

    def _drop_oldest(self) -> Value:
        _, value = self._held.popitem(last=False)
        self.used -= self._size(value)
        return value
