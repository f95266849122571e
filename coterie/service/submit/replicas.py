"""The replicas of a specialist, and which of them suits a request best.

They are compared in seconds: the expected time to the last token, with the prompt tokens that a
replica probably has cached. A replica that preempts, or would have to load adapters first, counts
as if it had more sequences.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import nsmallest

from coterie.core.errors import Unavailable
from coterie.core.plan import AdapterChoice, LaneState
from coterie.core.prefix import PromptPrefixes
from coterie.service.submit.load import EngineLoad, ReplicaQueue, ReplicaRequest
from coterie.service.submit.predict import LatencyPredictor
from coterie.service.submit.reservations import ReservationBook, RetryCalibration
from coterie.service.submit.tenants import TenantShares
from coterie.workers.contract import Replica

# a replica that preempts counts as if it had this many more sequences
PREEMPTING_PENALTY = 16
# the same for a replica that would have to load an adapter first
COLD_PENALTY = 2

# of more replicas, only so many are compared in every respect: the least loaded
MAX_COMPARED = 8

NO_REQUEST = ReplicaRequest(0, "", 1, 1)


class EngineGroupLoad:
    """What the lanes of one group of engines share: the engines' load, the speed that was measured,
    and the reservations."""

    def __init__(
        self, replicas: Iterable[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.engines = {name: EngineLoad(clock) for name in replicas}
        self.predictor = LatencyPredictor()
        self.reservations = ReservationBook()
        self.calibration = RetryCalibration()


class ReplicaSet:
    def __init__(
        self,
        specialist: str,
        replicas: Sequence[Replica],
        places: int = 1,
        shared: EngineGroupLoad | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`places`: how many sequences each replica can run at once. `shared`: with the other
        specialists of the same engines."""
        self.specialist = specialist
        self.members = tuple(replicas)
        self.names = tuple(replica.name for replica in replicas)
        # replicas that get no requests now, although they are healthy
        self.ejected: Callable[[], Collection[str]] = frozenset
        # those that get none even if no other can take them
        self.drained: Callable[[], Collection[str]] = frozenset
        self.shared = shared or EngineGroupLoad((replica.name for replica in replicas), clock)
        self.predictor = LatencyPredictor()
        self.tenants = TenantShares(clock)
        # requests that came back when they were told to: admitted, or refused again
        self.retries = {"admitted": 0, "refused": 0}
        self._queues = {
            replica.name: ReplicaQueue(specialist, places, self.shared.engines[replica.name], clock)
            for replica in replicas
        }

    @property
    def best_predictor(self) -> LatencyPredictor:
        """The specialist's own, or that of all its engines' lanes until it has seen enough."""
        return self.predictor if self.predictor.is_fitted else self.shared.predictor

    def pick(
        self,
        avoid: Collection[str] = (),
        adapters: Sequence[AdapterChoice] = (),
        request: ReplicaRequest = NO_REQUEST,
        prefixes: PromptPrefixes | None = None,
    ) -> Replica:
        """The healthy replica with the shortest expected time; raises Unavailable."""
        return self.ranked(1, avoid, adapters, request, prefixes)[0]

    def ranked(
        self,
        count: int,
        avoid: Collection[str] = (),
        adapters: Sequence[AdapterChoice] = (),
        request: ReplicaRequest = NO_REQUEST,
        prefixes: PromptPrefixes | None = None,
    ) -> list[Replica]:
        """The `count` best healthy replicas that are not in `avoid`; raises Unavailable."""
        able: Sequence[Replica] = [r for r in self._open() if r.name not in avoid]
        if out := self.ejected():
            able = [replica for replica in able if replica.name not in out] or able
        if not able:
            raise Unavailable(
                f"no worker for {self.specialist} can take requests now",
                retry_after_s=self.retry_after_s(),
            )
        if len(able) == 1:
            return list(able)
        if len(able) > MAX_COMPARED:
            able = self._candidates(able, prefixes)
        times = self._expected_s(able, adapters, request, prefixes)
        if count == 1:
            return [able[times.index(min(times))]]
        return [able[index] for index in nsmallest(count, range(len(able)), key=times.__getitem__)]

    def with_place(
        self,
        request: ReplicaRequest,
        avoid: Collection[str],
        adapters: Sequence[AdapterChoice] = (),
    ) -> Replica | None:
        """The best healthy replica that would run the request at once."""
        try:
            ranked = self.ranked(len(self.members), avoid, adapters, request)
        except Unavailable:
            return None
        return next((replica for replica in ranked if self._has_place(replica, request)), None)

    def _has_place(self, replica: Replica, request: ReplicaRequest) -> bool:
        state, queue = self.state(replica), self.queue(replica)
        if any(queue.num_running[: request.priority]):
            # the engine would preempt one of them
            return True
        if len(queue) + request.num_sequences > queue.places:
            return False
        # prompts that were sent and are not computed take from what was reported as free
        free = None if state is None else state.free_tokens - queue.load.prompt_tokens
        return free is None or request.prompt_tokens < free

    def first_at(
        self, name: str, ranked: list[Replica], avoid: Collection[str] = ()
    ) -> list[Replica]:
        """`ranked` with the replica of this name first, if it can take requests."""
        for replica in self._open():
            if replica.name == name and name not in avoid:
                return [replica, *(other for other in ranked if other is not replica)]
        return ranked

    def num_cached(self, replica: Replica, prefixes: PromptPrefixes | None) -> int:
        """Tokens of a prompt that the replica probably has cached."""
        state = self.state(replica)
        if prefixes is None or state is None or not state.prefix_digests:
            return 0
        return prefixes.num_cached(state.prefix_digests, state.block_size)

    def _candidates(
        self, able: Sequence[Replica], prefixes: PromptPrefixes | None
    ) -> Sequence[Replica]:
        """Those with the fewest sequences, and those of them that have the prompt's beginning."""
        queues = self._queues
        busy = [queues[replica.name].load.num_sequences for replica in able]
        order = sorted(range(len(able)), key=busy.__getitem__)
        found = order[:MAX_COMPARED]
        state = self.state(able[0])
        first = prefixes.first(state.block_size) if prefixes is not None and state else None
        if first is not None:
            for index in order[MAX_COMPARED:]:
                state = self.state(able[index])
                if state is not None and first in (state.prefix_digests or ()):
                    found.append(index)
                    if len(found) == MAX_COMPARED + MAX_COMPARED // 2:
                        break
        return [able[index] for index in found]

    def state(self, replica: Replica) -> LaneState | None:
        return replica.lane_states().get(self.specialist)

    def shown_state(self, replica: Replica) -> str:
        """How a replica stands, in a word: one that an operator drains is `draining`."""
        is_drained = replica.healthy() and replica.name in self.drained()
        return "draining" if is_drained else replica.state()

    def queue(self, replica: Replica) -> ReplicaQueue:
        return self._queues[replica.name]

    def is_full(self, replica: Replica) -> bool:
        state = self.state(replica)
        return state is not None and self.queue(replica).waiting >= state.max_queue

    def has_room(self) -> bool:
        """Whether a healthy replica has room in its queue."""
        return any(not self.is_full(r) for r in self._open())

    def queued(self) -> int:
        return sum(queue.waiting for queue in self._queues.values())

    def running(self) -> int:
        return sum(queue.running for queue in self._queues.values())

    def states(self) -> list[LaneState]:
        return self._reported(self.members)

    def taking(self) -> tuple[list[LaneState], int]:
        """The states of the replicas that nobody drains, and how many requests wait there."""
        members = self._undrained()
        return self._reported(members), sum(self.queue(one).waiting for one in members)

    def retry_after_s(self) -> float:
        """Seconds until a replica that nobody drains may be healthy again."""
        return min(replica.retry_after_s() for replica in self._undrained() or self.members)

    def ready(self) -> bool:
        return bool(self._open())

    def _open(self) -> list[Replica]:
        """The healthy ones that nobody drains."""
        return [r for r in self._undrained() if r.healthy()]

    def _undrained(self) -> Sequence[Replica]:
        if out := self.drained():
            return [r for r in self.members if r.name not in out]
        return self.members

    def _reported(self, replicas: Iterable[Replica]) -> list[LaneState]:
        reported = (self.state(replica) for replica in replicas)
        return [state for state in reported if state is not None]

    def _expected_s(
        self,
        replicas: Sequence[Replica],
        adapters: Sequence[AdapterChoice],
        request: ReplicaRequest,
        prefixes: PromptPrefixes | None,
    ) -> list[float]:
        """Seconds to the last token at each replica."""
        digests = {adapter.digest for adapter in adapters}
        predictor, name = self.best_predictor, self.specialist
        first, token = predictor.coefficients
        output, prompt = request.max_tokens * predictor.used, request.prompt_tokens
        # of a lane and of a sequence: for the first token and for all others together
        lane_s, sequence_s = first[3] + output * token[1], first[4] + output * token[2]
        times = []
        for replica in replicas:
            state, queue = replica.lane_states().get(name), self._queues[replica.name]
            load = queue.load
            extra = 0
            if state is not None and state.preempting:
                extra = PREEMPTING_PENALTY
            if digests and (state is None or not digests.issubset(state.resident_adapters)):
                extra += COLD_PENALTY
            sequences = load.num_sequences_with(name, request.num_sequences) + extra
            cached = self.num_cached(replica, prefixes) if prefixes is not None else 0
            spent_s = first[1] * max(prompt - cached, 1) + first[2] * load.prompt_tokens
            spent_s += lane_s * load.num_lanes(name) + sequence_s * sequences
            # each place that is missing has to become free first
            missing = queue.waiting + queue.running + extra + 1 - queue.places
            if missing > 0:
                token_s = token[0] + token[1] * len(load.lanes) + token[2] * sequences
                spent_s += missing / queue.places * output * token_s
            times.append(spent_s)
        return times
