"""Chooses what an encoder computes next: inputs of several requests in one batch, owners in turn.

An owner is a tenant. A request of thousands of inputs does not delay a small one of another
owner by more than a batch; requests of one owner run in the order of their arrival, a small share
each, so that a short one need not wait for a long one either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
# inputs that one request adds to a batch before the next one's turn
TURN_INPUTS = 16


@dataclass(slots=True)
class OpenJob:
    """A request whose vectors are not complete. `order`: its inputs by length, shortest first, so
    that a batch has few different lengths."""

    job_id: str
    owner: str
    inputs: Sequence[Ids]
    splits: Sequence[int] | None
    dim: int
    order: list[int] = field(init=False)
    next: int = 0
    # when its first batch began; None = it waits
    begun_at: float | None = None
    vectors: NDArray[np.float32] = field(init=False)
    num_done: int = 0

    def __post_init__(self) -> None:
        self.order = sorted(range(len(self.inputs)), key=lambda index: len(self.inputs[index]))
        self.vectors = np.empty((len(self.inputs), self.dim), np.float32)

    @property
    def is_done(self) -> bool:
        return self.num_done == len(self.inputs)


@dataclass(frozen=True, slots=True)
class BatchRow:
    job: OpenJob
    index: int


class BatchQueue:
    def __init__(self, batch_tokens: int) -> None:
        self._batch_tokens = batch_tokens
        # owner -> its jobs, both in the order of their turns
        self._owners: dict[str, deque[OpenJob]] = {}
        self._by_id: dict[str, OpenJob] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, job: OpenJob) -> None:
        self._by_id[job.job_id] = job
        self._owners.setdefault(job.owner, deque()).append(job)

    def drop(self, job_id: str) -> None:
        job = self._by_id.pop(job_id, None)
        jobs = self._owners.get(job.owner) if job is not None else None
        if job is not None and jobs is not None and job in jobs:
            jobs.remove(job)
            if not jobs:
                del self._owners[job.owner]

    def take(self) -> list[BatchRow]:
        """The next batch: at least one input, at most as many tokens as configured."""
        rows: list[BatchRow] = []
        room = self._batch_tokens
        while self._owners and room > 0:
            owner, jobs = next(iter(self._owners.items()))
            job = jobs[0]
            for _ in range(TURN_INPUTS):
                index = job.order[job.next]
                size = len(job.inputs[index])
                if rows and size > room:
                    return rows
                rows.append(BatchRow(job, index))
                room -= size
                job.next += 1
                if job.next == len(job.order):
                    break
            jobs.rotate(-1)
            if job.next == len(job.order):
                jobs.remove(job)
            # this owner's next turn comes after the others'
            del self._owners[owner]
            if jobs:
                self._owners[owner] = jobs
        return rows

    def done(self, rows: Sequence[BatchRow], vectors: NDArray[np.float32]) -> list[OpenJob]:
        """Keeps the vectors of a batch. Returns the jobs that are complete."""
        complete: list[OpenJob] = []
        for row, vector in zip(rows, vectors, strict=True):
            row.job.vectors[row.index] = vector
            row.job.num_done += 1
            if row.job.is_done and self._by_id.pop(row.job.job_id, None) is not None:
                complete.append(row.job)
        return complete
