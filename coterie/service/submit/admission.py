"""Which replica a request goes to, whether it may queue there, and when a refused one may retry.

The report of a worker is one step old and does not include requests on their way. So this module
counts the requests itself: it sees each submission, each `Started` and each end.

A request is refused if too many requests of its priority or higher already wait; lower priorities
do not count. A `Retry-After` is a reservation: the time at which a place is probably free after all
earlier reservations, at the measured speed. From then on the place is kept for a while, for a
request of the same tenant with the same prompt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from coterie.core.errors import CoterieError, InvalidRequest, Overloaded, Unavailable
from coterie.core.lane import queue_capacity
from coterie.core.plan import AdapterChoice, Assignment, LaneState
from coterie.core.request import own_tenant
from coterie.workers.contract import Replica

# the official clients give up above this
MAX_RETRY_AFTER_S = 120.0
MIN_RETRY_AFTER_S = 1.0
# weight of the newest answer in the moving averages
NEWEST = 0.2
# estimates are increased, because answers differ in length: factor and seconds
CAUTION, CAUTION_S = 1.2, 0.25
# a reserved place is kept this long after its time; and before it for this share of the wait, if
# another request would take it
KEPT_S = 3.0
AHEAD, AHEAD_S = 0.25, 0.5
# how much too early a reservation may be used: clocks and timers differ
EARLY_S = 0.05
# most reservations of one tenant: a tenant that does not wait must not delay others
MAX_RESERVATIONS = 64
# seconds per token before anything was measured
FIRST_GUESS_S = 0.02
# a request that waits longer than this found no room: a few steps take less
WAITS_S = 1.0
# a deadline cannot be met if even this share of the expected wait is too long
HOPELESS = 0.5
# a request that would be answered this soon is not refused
SOON_S = 0.05
# prompt tokens that the largest step of any engine computes
LARGEST_STEP = 8192


@dataclass(slots=True)
class RetryReservation:
    """A reserved place in the queue. `key` identifies the request when it comes again."""

    key: int
    tenant: str
    priority: int
    # time.monotonic()
    kept_from: float
    due_at: float


@dataclass(slots=True)
class SpecialistTimings:
    """The speed of one specialist, measured when requests end; and its reservations."""

    # seconds per token of an answer, from start to end; 0 = not known
    token_s: float = 0.0
    # share of max_tokens that answers use
    used: float = 1.0
    reservations: list[RetryReservation] = field(default_factory=list)

    def ended(self, run_s: float, num_tokens: int, max_tokens: int) -> None:
        if num_tokens < 1:
            return
        token_s = run_s / num_tokens
        known = self.token_s or token_s
        self.token_s = known + NEWEST * (token_s - known)
        self.used += NEWEST * (min(num_tokens / max_tokens, 1.0) - self.used)

    def run_s(self, request: ReplicaRequest, state: LaneState | None) -> float:
        """Expected seconds from its start to its end."""
        token_s = self.token_s or (state.step_s if state is not None else 0.0) or FIRST_GUESS_S
        return token_s * request.max_tokens * self.used

    def expire(self, now: float) -> None:
        self.reservations = [item for item in self.reservations if item.due_at + KEPT_S > now]


class Admission:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._timings: dict[str, SpecialistTimings] = {}

    def check(
        self, specialist: str, assignment: Assignment, queue: ReplicaQueue, state: LaneState
    ) -> Assignment:
        """Refuse a request for which there is no place. If it has a reservation, it uses that."""
        timings, now = self._timings_of(specialist), self._clock()
        timings.expire(now)
        request, key = replica_request(assignment), _key(assignment)
        ahead = len(queue.ahead(request.priority))
        # a reservation cannot be used too early
        mine = next(
            (p for p in timings.reservations if p.key == key and p.due_at <= now + EARLY_S), None
        )
        is_new = not queue.holds(request.tenant)
        kept = 0
        # places are not kept free while the engine is idle. Reservations of others do not count
        # against a tenant that has no request here.
        if mine is None and queue.running and not is_new:
            kept = sum(
                item.priority >= request.priority and item.kept_from <= now
                for item in timings.reservations
            )
            # at most half of the queue, because a refused request may not come again
            kept = min(kept, max(state.max_queue // 2, 1))
        most = queue_capacity(state.max_queue, is_expected=mine is not None, is_new=is_new)
        if mine is not None:
            timings.reservations.remove(mine)
        if ahead + kept >= most:
            raise self.overloaded(specialist, assignment, queue, state)
        if mine is None:
            return assignment
        return replace(assignment, limits=replace(assignment.limits, is_expected=True))

    def check_deadline(
        self, specialist: str, assignment: Assignment, queue: ReplicaQueue, state: LaneState
    ) -> None:
        """Refuse a request that cannot get one token before its deadline; the error says when it
        could."""
        if assignment.deadline is None:
            return
        request, timings = replica_request(assignment), self._timings_of(specialist)
        left_s = assignment.deadline - self._clock()
        steps = math.ceil(request.prompt_tokens / LARGEST_STEP)
        queue_s = 0.0
        if not _may_preempt(request, queue):
            queue_s = self._start_s(timings, queue.ahead(request.priority), queue, state)
        expected_s = queue_s + steps * state.step_s
        if HOPELESS * expected_s <= max(left_s, SOON_S):
            return
        reason = f"the first token is expected in {expected_s:.1f} s, and {left_s:.1f} s are left"
        if not queue_s:
            raise InvalidRequest(f"timeout: {reason}", param="timeout_ms")
        wait_s = min(max(expected_s - left_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
        raise Overloaded(f"timeout: {reason}", param="timeout_ms", retry_after_s=wait_s)

    def overloaded(
        self,
        specialist: str,
        assignment: Assignment,
        queue: ReplicaQueue,
        state: LaneState | None,
        hint_s: float | None = None,
    ) -> CoterieError:
        """The error for a refused request, with the time of the next free place. `hint_s` is the
        worker's estimate."""
        now, timings, request = (
            self._clock(),
            self._timings_of(specialist),
            replica_request(assignment),
        )
        timings.expire(now)
        num_reserved = sum(item.priority >= request.priority for item in timings.reservations)
        ahead = queue.ahead(request.priority)
        max_queue = state.max_queue if state is not None else len(ahead)
        # requests with a reservation will be in the queue before this one
        behind = ahead + [request] * num_reserved
        starts = max(len(behind) - max_queue + 1, 1)
        wait_s = self._start_s(timings, behind[: starts - 1], queue, state)
        wait_s = max(CAUTION * wait_s + CAUTION_S, hint_s or 0.0, MIN_RETRY_AFTER_S)
        theirs = sum(item.tenant == request.tenant for item in timings.reservations)
        if wait_s <= MAX_RETRY_AFTER_S and theirs < MAX_RESERVATIONS:
            due_at = now + wait_s
            kept_from = due_at - AHEAD * wait_s - AHEAD_S
            reservation = RetryReservation(
                _key(assignment), request.tenant, request.priority, kept_from, due_at
            )
            timings.reservations.append(reservation)
        limit = f" of {state.max_queue}" if state is not None else ""
        return Overloaded(
            f"the queue{limit} for {specialist} is full",
            retry_after_s=min(wait_s, MAX_RETRY_AFTER_S),
        )

    def ended(self, specialist: str, request: ReplicaRequest, num_tokens: int) -> None:
        """Note a request that ended normally with this many tokens."""
        if request.started_at is not None:
            run_s = self._clock() - request.started_at
            self._timings_of(specialist).ended(run_s, num_tokens, request.max_tokens)

    def _start_s(
        self,
        timings: SpecialistTimings,
        before: Iterable[ReplicaRequest],
        queue: ReplicaQueue,
        state: LaneState | None,
    ) -> float:
        """Seconds until a request after `before` starts: each start needs an end."""
        now = self._clock()
        ends = [_left_s(request, timings.run_s(request, state), now) for request in queue.running]
        # if a place stays free while a request waits, there is no memory for more
        if all(now - request.taken_at < WAITS_S for request in queue.waiting):
            ends += [0.0] * max(queue.places - len(ends), 0)
        if not ends:
            return 0.0
        heapify(ends)
        for request in before:
            end = heappop(ends)
            if end > MAX_RETRY_AFTER_S:
                return end
            heappush(ends, end + timings.run_s(request, state))
        return ends[0]

    def _timings_of(self, specialist: str) -> SpecialistTimings:
        return self._timings.setdefault(specialist, SpecialistTimings())


def _left_s(request: ReplicaRequest, run_s: float, now: float) -> float:
    """Seconds that a running request still needs. If it already runs longer than expected, it may
    end at any moment or later."""
    gone_s = now - (request.started_at or now)
    return max(run_s - gone_s, 0.1 * run_s)


def _may_preempt(request: ReplicaRequest, queue: ReplicaQueue) -> bool:
    """Whether the engine would preempt another request for it: one of lower priority, or for a
    tenant with nothing running."""
    if any(other.priority < request.priority for other in queue.running):
        return True
    return not any(other.tenant == request.tenant for other in queue.running)


def _key(assignment: Assignment) -> int:
    return hash((assignment.tenant, assignment.prompt_ids))


# a replica that preempts counts as if it had this many more requests
PREEMPTING_PENALTY = 16
# the same for a replica that would have to load an adapter first
COLD_PENALTY = 2


@dataclass(slots=True, eq=False)
class ReplicaRequest:
    """A request at a replica: what admission needs to know about it."""

    priority: int
    tenant: str
    prompt_tokens: int
    # token limit of its answer
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
    """The waiting and the running requests of one replica, each in order of arrival."""

    # sequences that may run at once
    places: int = 1
    waiting: dict[ReplicaRequest, None] = field(default_factory=dict)
    running: dict[ReplicaRequest, None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, request: ReplicaRequest) -> None:
        request.taken_at = time.monotonic()
        self.waiting[request] = None

    def started(self, request: ReplicaRequest) -> None:
        """Note the start. After a crash it is called again and changes nothing."""
        if request in self.waiting:
            del self.waiting[request]
            request.started_at = time.monotonic()
            self.running[request] = None

    def remove(self, request: ReplicaRequest) -> None:
        self.waiting.pop(request, None)
        self.running.pop(request, None)

    def ahead(self, priority: int) -> list[ReplicaRequest]:
        """The waiting requests that come before a request of this priority, in order of arrival."""
        return [request for request in self.waiting if request.priority >= priority]

    def holds(self, tenant: str) -> bool:
        return any(
            t.tenant == tenant for requests in (self.waiting, self.running) for t in requests
        )


class ReplicaSet:
    def __init__(self, specialist: str, replicas: Sequence[Replica], places: int = 1) -> None:
        """`places`: how many sequences each replica can run at once."""
        self.specialist = specialist
        self.members = tuple(replicas)
        self._queues = {replica.name: ReplicaQueue(places) for replica in replicas}

    def pick(self, avoid: Collection[str] = (), adapters: Sequence[AdapterChoice] = ()) -> Replica:
        """The least loaded healthy replica that is not in `avoid`; raises Unavailable."""
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

    def queue(self, replica: Replica) -> ReplicaQueue:
        return self._queues[replica.name]

    def is_full(self, replica: Replica) -> bool:
        state = self.state(replica)
        return state is not None and len(self.queue(replica).waiting) >= state.max_queue

    def queued(self) -> int:
        return sum(len(queue.waiting) for queue in self._queues.values())

    def running(self) -> int:
        return sum(len(queue.running) for queue in self._queues.values())

    def states(self) -> list[LaneState]:
        reported = (self.state(replica) for replica in self.members)
        return [state for state in reported if state is not None]

    def ready(self) -> bool:
        return any(replica.healthy() for replica in self.members)

    def _cold(self, replica: Replica, digests: set[str]) -> float:
        state = self.state(replica)
        warm = state is not None and digests.issubset(state.resident_adapters)
        return 0 if warm else COLD_PENALTY

    def _load(self, replica: Replica) -> float:
        state = self.state(replica)
        preempting = state is not None and state.preempting
        return len(self.queue(replica)) + (PREEMPTING_PENALTY if preempting else 0)
