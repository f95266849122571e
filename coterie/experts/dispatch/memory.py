"""How much an expert was used lately, under one half-life, and residents ranked by that.

Instead of letting old scores fade, newer uses weigh more: scores then only grow, and a heap with
outdated (too low) entries still finds the lowest resident in O(log n).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

_RESCALE = 1e60


@dataclass(frozen=True, slots=True)
class Policy:
    # tokens after which a use counts half; infinite for plain frequency
    half_life: float
    # fresh uses by which a newcomer must lead before it takes a resident's place
    margin: float
    # what one count of the heatmap is worth
    prior: float = 0.0


class Memory:
    """Scores of all experts (by number) under one policy."""

    def __init__(self, policy: Policy, prior: Iterable[float]) -> None:
        self.policy = policy
        self.scores = [count * policy.prior for count in prior]
        self.weight = 1.0
        self._growth = 2.0 ** (1.0 / policy.half_life)

    @property
    def lead(self) -> float:
        """How far above a resident's score a newcomer's must lie."""
        return self.policy.margin * self.weight

    def tick(self) -> bool:
        """A token has passed. True when all scores were scaled down (rankings are then stale)."""
        self.weight *= self._growth
        if self.weight < _RESCALE:
            return False
        scale = 1.0 / self.weight
        self.scores[:] = [score * scale for score in self.scores]
        self.weight = 1.0
        return True


class Ranking:
    """A set of experts that can tell its lowest scored member."""

    def __init__(self, memory: Memory) -> None:
        self.members: set[int] = set()
        self._memory = memory
        # (score when pushed, expert); experts that left stay until they surface
        self._heap: list[tuple[float, int]] = []

    def add(self, expert: int) -> None:
        self.members.add(expert)
        heappush(self._heap, (self._memory.scores[expert], expert))
        if len(self._heap) > 4 * len(self.members) + 64:
            self.rank_by(self._memory)

    def remove(self, expert: int) -> None:
        self.members.discard(expert)

    def rank_by(self, memory: Memory) -> None:
        """Rank anew, by these scores. O(n)."""
        self._memory = memory
        scores = memory.scores
        self._heap = [(scores[expert], expert) for expert in self.members]
        heapify(self._heap)

    def lowest(self, busy: Collection[int] = ()) -> int | None:
        """The member with the lowest score that is not busy; ties go to the lowest number."""
        heap, scores, members = self._heap, self._memory.scores, self.members
        aside: list[tuple[float, int]] = []
        found = None
        while heap:
            score, expert = heap[0]
            if expert not in members:
                heappop(heap)
            elif score != scores[expert]:
                heapreplace(heap, (scores[expert], expert))
            elif expert in busy:
                aside.append(heappop(heap))
            else:
                found = expert
                break
        for entry in aside:
            heappush(heap, entry)
        return found
