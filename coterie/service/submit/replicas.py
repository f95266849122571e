"""Which replica of a specialist takes the next request, and who waits and runs at each.

A worker's report is a step old, and says nothing of what is on its way: what was handed out is
known here, and its `Started` and its end come by here too.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from coterie.core.errors import Unavailable
from coterie.core.plan import AdapterChoice, Assignment, LaneState
from coterie.core.request import own_tenant
from coterie.workers.contract import Replica

# a replica that is preempting is as good as this many requests further away
PREEMPTING_PENALTY = 16
# so is one that would have to load an adapter of the request first
COLD_PENALTY = 2


@dataclass(slots=True, eq=False)
class ReplicaRequest:
    """A request at a replica, as far as waiting is concerned."""

    priority: int
    tenant: str
    prompt_tokens: int
    # most tokens of its answer
    max_tokens: int
    # time.monotonic()
    taken_at: float = 0.0
    # None = it waits
    started_at: float | None = None


def replica_request(assignment: Assignment) -> ReplicaRequest:
    limits = assignment.limits
    tenant = own_tenant(assignment.tenant)
    return ReplicaRequest(
        limits.priority, tenant, len(assignment.prompt_ids), limits.max_tokens or 1
    )


@dataclass(slots=True)
class ReplicaQueue:
    """Who waits and who runs at one replica, each in the order in which they came."""

    # sequences that may run at once
    places: int = 1
    waiting: dict[ReplicaRequest, None] = field(default_factory=dict)
    running: dict[ReplicaRequest, None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def took(self, ticket: ReplicaRequest) -> None:
        ticket.taken_at = time.monotonic()
        self.waiting[ticket] = None

    def started(self, ticket: ReplicaRequest) -> None:
        """Told again after a crash, when it changes nothing."""
        if ticket in self.waiting:
            del self.waiting[ticket]
            ticket.started_at = time.monotonic()
            self.running[ticket] = None

    def gave_back(self, ticket: ReplicaRequest) -> None:
        self.waiting.pop(ticket, None)
        self.running.pop(ticket, None)

    def ahead(self, priority: int) -> list[ReplicaRequest]:
        """Those that wait and come before a request of this priority, first come first."""
        return [ticket for ticket in self.waiting if ticket.priority >= priority]

    def holds(self, tenant: str) -> bool:
        return any(t.tenant == tenant for tickets in (self.waiting, self.running) for t in tickets)


class ReplicaSet:
    def __init__(self, specialist: str, replicas: Sequence[Replica], places: int = 1) -> None:
        """`places`: sequences that run at once in each."""
        self.specialist = specialist
        self.members = tuple(replicas)
        self._lines = {replica.name: ReplicaQueue(places) for replica in replicas}

    def pick(self, avoid: Collection[str] = (), adapters: Sequence[AdapterChoice] = ()) -> Replica:
        """The least loaded healthy member outside `avoid`; raises Unavailable."""
        able = [r for r in self.members if r.healthy() and r.name not in avoid]
        if not able:
            wait_s = min(replica.retry_after_s() for replica in self.members)
            raise Unavailable(
                f"no worker for {self.specialist} can take requests now", retry_after_s=wait_s
            )
        if not adapters:
            return min(able, key=self._load)
        digests = {adapter.digest for adapter in adapters}
        return min(able, key=lambda replica: self._load(replica) + self._cold(replica, digests))

    def state(self, replica: Replica) -> LaneState | None:
        return replica.lane_states().get(self.specialist)

    def line(self, replica: Replica) -> ReplicaQueue:
        return self._lines[replica.name]

    def is_full(self, replica: Replica) -> bool:
        state = self.state(replica)
        return state is not None and len(self.line(replica).waiting) >= state.max_queue

    def queued(self) -> int:
        return sum(len(line.waiting) for line in self._lines.values())

    def running(self) -> int:
        return sum(len(line.running) for line in self._lines.values())

    def states(self) -> list[LaneState]:
        found = (self.state(replica) for replica in self.members)
        return [state for state in found if state is not None]

    def ready(self) -> bool:
        return any(replica.healthy() for replica in self.members)

    def _cold(self, replica: Replica, digests: set[str]) -> float:
        state = self.state(replica)
        warm = state is not None and digests.issubset(state.resident_adapters)
        return 0 if warm else COLD_PENALTY

    def _load(self, replica: Replica) -> float:
        state = self.state(replica)
        preempting = state is not None and state.preempting
        return len(self.line(replica)) + (PREEMPTING_PENALTY if preempting else 0)
