"""The bounded cache of recently used values that all folders use."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LruCache(Generic[Key, Value]):
    """Holds at most `limit` values, or values whose sizes (by `size`) add up to `limit`. The least
    recently used value is evicted first. Thread-safe."""

    def __init__(self, limit: int, size: Callable[[Value], int] = lambda _: 1) -> None:
        """The `size` of a value must never change."""
        self.limit = limit
        # sum of the sizes of all values
        self.used = 0
        # values removed to make room for others
        self.evictions = 0
        self._size = size
        self._lock = threading.Lock()
        # least recently used first
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: Key) -> bool:
        return key in self._values

    def get(self, key: Key) -> Value | None:
        """Counts as a use."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def peek(self, key: Key) -> Value | None:
        """Does not count as a use."""
        return self._values.get(key)

    def get_or_make(self, key: Key, make: Callable[[], Value]) -> Value:
        """The cached value, or the result of `make`, which is then cached; two threads may both
        make it."""
        value = self.get(key)
        if value is None:
            value = make()
            self.put(key, value)
        return value

    def put(self, key: Key, value: Value) -> list[Value]:
        """Counts as a use. Returns the values that were evicted for it, the least recently used
        first. A value that alone exceeds the limit is not stored."""
        size = self._size(value)
        with self._lock:
            self._drop(key)
            evicted: list[Value] = []
            if size > self.limit:
                return evicted
            while self.used + size > self.limit:
                evicted.append(self._drop_oldest())
            self._values[key] = value
            self.used += size
            self.evictions += len(evicted)
            return evicted

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
            return list(self._values.items())

    def values(self) -> list[Value]:
        return [value for _, value in self.items()]

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self.used = 0

    def _drop(self, key: Key) -> Value | None:
        if key not in self._values:
            return None
        value = self._values.pop(key)
        self.used -= self._size(value)
        return value

    def _drop_oldest(self) -> Value:
        _, value = self._values.popitem(last=False)
        self.used -= self._size(value)
        return value
