"""Which job is next: by priority, then by acceptance; suspects of a crash last, and each alone.

Ids only; a place in line is a few dozen bytes. Knows no store and no clock.
"""

from __future__ import annotations

import heapq

from coterie.service.jobs.tables import Waiting

# a job that ran in this many servers when they died runs with no other job beside it
SUSPECT_CRASHES = 3
LEVELS = 10


class JobQueue:
    def __init__(self) -> None:
        self._heap: list[tuple[bool, int, int, str]] = []
        self._entries: dict[str, Waiting] = {}
        self._levels = [0] * LEVELS
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._entries

    def push(self, entry: Waiting) -> None:
        heapq.heappush(self._heap, (is_suspect(entry), -entry.priority, entry.seq, entry.id))
        self._entries[entry.id] = entry
        self._levels[entry.priority] += 1
        self.nbytes += entry.nbytes

    def peek(self) -> Waiting | None:
        while self._heap and self._heap[0][3] not in self._entries:
            heapq.heappop(self._heap)
        return self._entries[self._heap[0][3]] if self._heap else None

    def drop(self, job_id: str) -> Waiting | None:
        """Out of the line, wherever it stood."""
        entry = self._entries.pop(job_id, None)
        if entry is not None:
            self._levels[entry.priority] -= 1
            self.nbytes -= entry.nbytes
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [item for item in self._heap if item[3] in self._entries]
            heapq.heapify(self._heap)
        return entry

    def ahead(self, priority: int) -> int:
        """How many come before a job of this priority that arrives now."""
        return sum(self._levels[priority:])


def is_suspect(entry: Waiting) -> bool:
    return entry.crashes >= SUSPECT_CRASHES
