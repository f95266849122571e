"""The LRU cache against a plain list of what was used, oldest first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from coterie.core.lru import LruCache

KEYS = st.sampled_from("abcdef")
SIZES = st.integers(0, 6)
Value = tuple[int, int]  # serial number, size


class LruMachine(RuleBasedStateMachine):
    """Values have sizes in one half of the runs, and count one each in the other."""

    @initialize(limit=st.integers(0, 8), sized=st.booleans())
    def start(self, limit: int, sized: bool) -> None:
        self.limit, self.sized = limit, sized
        self.cache: LruCache[str, Value] = LruCache(limit, self.size) if sized else LruCache(limit)
        self.model: list[tuple[str, Value]] = []
        self.serial = self.evictions = 0

    def size(self, value: Value) -> int:
        return value[1] if self.sized else 1

    def at(self, key: str) -> int | None:
        return next((place for place, (held, _) in enumerate(self.model) if held == key), None)

    def touch(self, key: str) -> Value | None:
        place = self.at(key)
        if place is None:
            return None
        self.model.append(self.model.pop(place))
        return self.model[-1][1]

    def store(self, key: str, value: Value) -> list[Value]:
        place = self.at(key)
        if place is not None:
            del self.model[place]
        left = []
        if self.size(value) <= self.limit:
            while sum(self.size(held) for _, held in self.model) + self.size(value) > self.limit:
                left.append(self.model.pop(0)[1])
            self.model.append((key, value))
        self.evictions += len(left)
        return left

    def new(self, size: int) -> Value:
        self.serial += 1
        return self.serial, size

    @rule(key=KEYS, size=SIZES)
    def put(self, key: str, size: int) -> None:
        value = self.new(size)
        assert self.cache.put(key, value) == self.store(key, value)

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        assert self.cache.get(key) == self.touch(key)

    @rule(key=KEYS)
    def peek(self, key: str) -> None:
        place = self.at(key)
        assert self.cache.peek(key) == (None if place is None else self.model[place][1])
        assert (key in self.cache) == (place is not None)

    @rule(key=KEYS, size=SIZES)
    def get_or_make(self, key: str, size: int) -> None:
        value = self.new(size)
        found = self.touch(key)
        if found is None:
            self.store(key, value)
        assert self.cache.get_or_make(key, lambda: value) == (found or value)

    @rule(key=KEYS)
    def pop(self, key: str) -> None:
        place = self.at(key)
        assert self.cache.pop(key) == (None if place is None else self.model.pop(place)[1])

    @rule()
    def pop_oldest(self) -> None:
        if self.model:
            assert self.cache.pop_oldest() == self.model.pop(0)[1]
        else:
            with pytest.raises(KeyError):
                self.cache.pop_oldest()

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.model.clear()

    @invariant()
    def same(self) -> None:
        if hasattr(self, "cache"):
            assert self.cache.items() == self.model
            assert self.cache.values() == [value for _, value in self.model]
            assert len(self.cache) == len(self.model)
            assert self.cache.used == sum(self.size(v) for v in self.cache.values()) <= self.limit
            assert self.cache.evictions == self.evictions


TestLru = LruMachine.TestCase


def test_many_threads_keep_the_books() -> None:
    cache: LruCache[int, int] = LruCache(50, size=lambda value: value)

    def work(seed: int) -> None:
        random = Random(seed)
        for _ in range(3000):
            key = random.randrange(40)
            assert cache.get_or_make(key, lambda key=key: key % 7) == key % 7  # type: ignore[misc]
            if random.random() < 0.2:
                cache.pop(random.randrange(40))
            assert cache.used <= 50

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert cache.used == sum(cache.values()) <= 50
