"""Whose turn it is: lanes by weight, adapter keys inside a lane, and how many may wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar


def queue_capacity(max_queue: int, *, is_expected: bool, is_new: bool) -> int:
    """How many may wait for such a request to find room. Who was told to come (`is_expected`) finds
    a quarter more, a tenant of which nobody is here (`is_new`) another quarter, which none of
    those can fill."""
    extra = max(1, max_queue // 4)
    return max_queue + (2 * extra if is_new else extra if is_expected else 0)


# A key that was passed over this often in a row goes next, whatever the ranks say.
MAX_PASSED_OVER = 4
# Every step reads all weights, however few tokens it computes: it is charged at least this many.
STEP_FLOOR_TOKENS = 32


class AdapterTurns:
    """One adapter key per step: the best-ranked sequence's, unless another has waited too long.

    With K keys at work each is served at least once in MAX_PASSED_OVER + K steps.
    """

    def __init__(self) -> None:
        self._passed_over: dict[str, int] = {}

    def pick(self, keys: Sequence[str]) -> str:
        """`keys` have work, best rank first, each once."""
        if len(keys) == 1:
            self._passed_over.clear()
            return keys[0]
        passed = {key: self._passed_over.get(key, 0) for key in keys}
        longest = max(keys, key=lambda key: passed[key])
        chosen = longest if passed[longest] >= MAX_PASSED_OVER else keys[0]
        self._passed_over = {key: 0 if key == chosen else passed[key] + 1 for key in keys}
        return chosen


class WeightedLane(Protocol):
    @property
    def weight(self) -> float: ...


Lane = TypeVar("Lane", bound=WeightedLane)


class DeficitRoundRobin(Generic[Lane]):
    """Deficit round-robin by tokens: over time each busy lane gets tokens in proportion to its
    weight. A lane without work saves nothing up."""

    def __init__(self, lanes: Sequence[Lane], has_work: Callable[[Lane], bool]) -> None:
        self._lanes = lanes
        self._has_work = has_work
        self._deficits = [0.0] * len(lanes)
        self._turn = 0
        self._contended = False

    def order(self) -> list[int]:
        """Lanes with work, the one to serve first. Settles whose turn it is."""
        busy = [index for index, lane in enumerate(self._lanes) if self._has_work(lane)]
        self._contended = len(busy) > 1
        if not self._contended:
            self._deficits = [0.0] * len(self._lanes)
            return busy
        for index in range(len(self._lanes)):
            if index not in busy:
                self._deficits[index] = 0.0
        while self._turn not in busy or self._deficits[self._turn] <= 0:
            self._turn = (self._turn + 1) % len(self._lanes)
            if self._turn in busy:
                self._deficits[self._turn] += STEP_FLOOR_TOKENS * self._lanes[self._turn].weight
        return sorted(busy, key=lambda index: (index - self._turn) % len(self._lanes))

    def charge(self, index: int, num_tokens: int) -> None:
        """The lane was served. Alone it owes nobody."""
        if self._contended:
            self._deficits[index] -= max(num_tokens, STEP_FLOOR_TOKENS)
