"""The jobs that wait, in the order in which they may begin."""

from __future__ import annotations

import heapq
import time

from coterie.service.jobs.store import WaitingJob

# a job that was running in this many servers when they died runs alone, without other jobs
SUSPECT_CRASHES = 3
LEVELS = 10
# a suspect of crashes, the priority with the highest first, the order of acceptance, the id
_Place = tuple[bool, int, int, str]


def _place(entry: WaitingJob) -> _Place:
    return is_suspect(entry), -entry.priority, entry.seq, entry.id


class JobQueue:
    def __init__(self) -> None:
        self._heap: list[_Place] = []
        # those that may not begin before a time.monotonic(), the next one first
        self._deferred: list[tuple[float, _Place]] = []
        self._entries: dict[str, WaitingJob] = {}
        self._levels = [0] * LEVELS
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._entries

    def push(self, entry: WaitingJob) -> None:
        heapq.heappush(self._heap, _place(entry))
        self._add(entry)

    def defer(self, entry: WaitingJob, until: float) -> None:
        """As `push`, but it gets its place at `until`, a time.monotonic()."""
        heapq.heappush(self._deferred, (until, _place(entry)))
        self._add(entry)

    def due_at(self) -> float | None:
        """When the next deferred job gets its place."""
        return self._deferred[0][0] if self._deferred else None

    def _add(self, entry: WaitingJob) -> None:
        self._entries[entry.id] = entry
        self._levels[entry.priority] += 1
        self.nbytes += entry.nbytes

    def release(self) -> None:
        """Deferred jobs whose time has come get their places."""
        now = time.monotonic()
        while self._deferred and self._deferred[0][0] <= now:
            heapq.heappush(self._heap, heapq.heappop(self._deferred)[1])

    def peek(self) -> WaitingJob | None:
        while self._heap and self._heap[0][3] not in self._entries:
            heapq.heappop(self._heap)
        return self._entries[self._heap[0][3]] if self._heap else None

    def drop(self, job_id: str) -> WaitingJob | None:
        """Remove the job from the queue, at any position."""
        entry = self._entries.pop(job_id, None)
        if entry is not None:
            self._levels[entry.priority] -= 1
            self.nbytes -= entry.nbytes
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [item for item in self._heap if item[3] in self._entries]
            heapq.heapify(self._heap)
        return entry

    def ahead(self, priority: int) -> int:
        """How many waiting jobs would run before a job of this priority that arrives now."""
        return sum(self._levels[priority:])


def is_suspect(entry: WaitingJob) -> bool:
    return entry.crashes >= SUSPECT_CRASHES
