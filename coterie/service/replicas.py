"""Which replica of a specialist takes the next request: the least loaded healthy one.

Counts what it handed out itself, because a report is one step old. Knows no admission rules.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from coterie.core.errors import Unavailable
from coterie.core.plan import AdapterChoice, LaneState
from coterie.workers.base import Replica

# a replica that is preempting is as good as this many requests further away
PREEMPTING_PENALTY = 16
# so is one that would have to load an adapter of the request first
COLD_PENALTY = 2


class ReplicaSet:
    def __init__(self, specialist: str, replicas: Sequence[Replica]) -> None:
        self.specialist = specialist
        self.members = tuple(replicas)
        self._in_flight = {replica.name: 0 for replica in replicas}

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

    def unreported(self, replica: Replica) -> int:
        """Requests handed out that the worker's last report could not count yet."""
        state = self.state(replica)
        known = state.queued + state.running if state is not None else 0
        return max(0, self._in_flight[replica.name] - known)

    def is_full(self, replica: Replica) -> bool:
        state = self.state(replica)
        return state is not None and state.queued + self.unreported(replica) >= state.max_queue

    def queued(self) -> int:
        return sum(state.queued for state in self.states())

    def states(self) -> list[LaneState]:
        found = (self.state(replica) for replica in self.members)
        return [state for state in found if state is not None]

    def ready(self) -> bool:
        return any(replica.healthy() for replica in self.members)

    def took(self, replica: Replica) -> None:
        self._in_flight[replica.name] += 1

    def gave_back(self, replica: Replica) -> None:
        self._in_flight[replica.name] -= 1

    def _cold(self, replica: Replica, digests: set[str]) -> float:
        state = self.state(replica)
        warm = state is not None and digests.issubset(state.resident_adapters)
        return 0 if warm else COLD_PENALTY

    def _load(self, replica: Replica) -> float:
        state = self.state(replica)
        if state is None:
            return self._in_flight[replica.name]
        waiting = state.queued + state.running + self.unreported(replica)
        return waiting + (PREEMPTING_PENALTY if state.preempting else 0)
