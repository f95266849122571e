"""Which replica a request goes to, whether it may queue there, and when a refused one comes back.

A worker's report is a step old, and says nothing of what is on its way: what was handed out is
known here, and its `Started` and its end come by here too.

A request of some priority is refused when as many of its priority or a higher one wait as may: who
waits below it takes no place from it. A `Retry-After` is a reservation: the moment at which a place
is likely to be free behind everybody who was told one before, at the speed that was measured. The
place is kept for a while from then on, for a request of the same tenant with the same prompt.
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

# official clients give up beyond this
MAX_RETRY_AFTER_S = 120.0
MIN_RETRY_AFTER_S = 1.0
# weight of the newest answer
NEWEST = 0.2
# answers differ in length: a place that is free a little too early is kept
CAUTION, CAUTION_S = 1.2, 0.25
# a place is kept so long from its moment on, and this part of the wait before, where somebody
# else would take it
KEPT_S = 3.0
AHEAD, AHEAD_S = 0.25, 0.5
# clocks and timers differ
EARLY_S = 0.05
# that one tenant is told at most: one that does not wait pushes nobody further away
MAX_PROMISES = 64
# what a token takes before anything was measured
FIRST_GUESS_S = 0.02
# who waits longer than a few steps take finds no room
WAITS_S = 1.0
# a deadline is hopeless when even this part of the expected wait is too long for it
HOPELESS = 0.5
# and it is no use to refuse what is about to be answered anyway
SOON_S = 0.05
# prompt tokens that the largest step of any engine computes
LARGEST_STEP = 8192


@dataclass(slots=True)
class RetryReservation:
    """A place that was told to somebody. `key` knows the request again."""

    key: int
    tenant: str
    priority: int
    # time.monotonic()
    kept_from: float
    due_at: float


@dataclass(slots=True)
class SpecialistTimings:
    """How one specialist answers, measured at the ends of requests."""

    # seconds from start to end per token of an answer; 0 = not known
    token_s: float = 0.0
    # how much of what answers may have at most they use
    used: float = 1.0
    promises: list[RetryReservation] = field(default_factory=list)

    def ended(self, run_s: float, num_tokens: int, max_tokens: int) -> None:
        if num_tokens < 1:
            return
        token_s = run_s / num_tokens
        known = self.token_s or token_s
        self.token_s = known + NEWEST * (token_s - known)
        self.used += NEWEST * (min(num_tokens / max_tokens, 1.0) - self.used)

    def run_s(self, ticket: ReplicaRequest, state: LaneState | None) -> float:
        """From its start to its end."""
        token_s = self.token_s or (state.step_s if state is not None else 0.0) or FIRST_GUESS_S
        return token_s * ticket.max_tokens * self.used

    def expire(self, now: float) -> None:
        self.promises = [item for item in self.promises if item.due_at + KEPT_S > now]


class Admission:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._paces: dict[str, SpecialistTimings] = {}

    def check(
        self, specialist: str, assignment: Assignment, line: ReplicaQueue, state: LaneState
    ) -> Assignment:
        """Refuse what finds no place. One that was promised is taken, and marked so."""
        pace, now = self._pace(specialist), self._clock()
        pace.expire(now)
        ticket, key = replica_request(assignment), _key(assignment)
        ahead = len(line.ahead(ticket.priority))
        # who comes too early has none yet
        mine = next((p for p in pace.promises if p.key == key and p.due_at <= now + EARLY_S), None)
        is_new = not line.holds(ticket.tenant)
        kept = 0
        # no place is kept empty while the engine stands idle, and none that is promised to others
        # is one of those for a tenant of which nobody is here
        if mine is None and line.running and not is_new:
            kept = sum(
                item.priority >= ticket.priority and item.kept_from <= now for item in pace.promises
            )
            # never the whole queue: who was refused may not come back
            kept = min(kept, max(state.max_queue // 2, 1))
        most = queue_capacity(state.max_queue, is_expected=mine is not None, is_new=is_new)
        if mine is not None:
            pace.promises.remove(mine)
        if ahead + kept >= most:
            raise self.overloaded(specialist, assignment, line, state)
        if mine is None:
            return assignment
        return replace(assignment, limits=replace(assignment.limits, is_expected=True))

    def check_deadline(
        self, specialist: str, assignment: Assignment, line: ReplicaQueue, state: LaneState
    ) -> None:
        """Refuse what cannot have one token in its time, and say when it could."""
        if assignment.deadline is None:
            return
        ticket, pace = replica_request(assignment), self._pace(specialist)
        left_s = assignment.deadline - self._clock()
        steps = math.ceil(ticket.prompt_tokens / LARGEST_STEP)
        queue_s = 0.0
        if not _is_let_in(ticket, line):
            queue_s = self._start_s(pace, line.ahead(ticket.priority), line, state)
        expected_s = queue_s + steps * state.step_s
        if HOPELESS * expected_s <= max(left_s, SOON_S):
            return
        said = f"the first token is expected in {expected_s:.1f} s, and {left_s:.1f} s are left"
        if not queue_s:
            raise InvalidRequest(f"timeout: {said}", param="timeout_ms")
        wait_s = min(max(expected_s - left_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
        raise Overloaded(f"timeout: {said}", param="timeout_ms", retry_after_s=wait_s)

    def overloaded(
        self,
        specialist: str,
        assignment: Assignment,
        line: ReplicaQueue,
        state: LaneState | None,
        hint_s: float | None = None,
    ) -> CoterieError:
        """The refusal, with the next place that will be free. `hint_s` is what the worker said."""
        now, pace, ticket = self._clock(), self._pace(specialist), replica_request(assignment)
        pace.expire(now)
        promised = sum(item.priority >= ticket.priority for item in pace.promises)
        ahead = line.ahead(ticket.priority)
        max_queue = state.max_queue if state is not None else len(ahead)
        # those who were told a place will stand in line before this one
        behind = ahead + [ticket] * promised
        starts = max(len(behind) - max_queue + 1, 1)
        wait_s = self._start_s(pace, behind[: starts - 1], line, state)
        wait_s = max(CAUTION * wait_s + CAUTION_S, hint_s or 0.0, MIN_RETRY_AFTER_S)
        theirs = sum(item.tenant == ticket.tenant for item in pace.promises)
        if wait_s <= MAX_RETRY_AFTER_S and theirs < MAX_PROMISES:
            due_at = now + wait_s
            kept_from = due_at - AHEAD * wait_s - AHEAD_S
            promise = RetryReservation(
                _key(assignment), ticket.tenant, ticket.priority, kept_from, due_at
            )
            pace.promises.append(promise)
        queue = f" of {state.max_queue}" if state is not None else ""
        return Overloaded(
            f"the queue{queue} for {specialist} is full",
            retry_after_s=min(wait_s, MAX_RETRY_AFTER_S),
        )

    def ended(self, specialist: str, ticket: ReplicaRequest, num_tokens: int) -> None:
        """A request came to its own end with so many tokens."""
        if ticket.started_at is not None:
            run_s = self._clock() - ticket.started_at
            self._pace(specialist).ended(run_s, num_tokens, ticket.max_tokens)

    def _start_s(
        self,
        pace: SpecialistTimings,
        before: Iterable[ReplicaRequest],
        line: ReplicaQueue,
        state: LaneState | None,
    ) -> float:
        """Until whoever comes behind `before` starts: each start needs the end of somebody."""
        now = self._clock()
        ends = [_left_s(ticket, pace.run_s(ticket, state), now) for ticket in line.running]
        # a row that stays free while somebody waits is of no use: there is no room for more
        if all(now - ticket.taken_at < WAITS_S for ticket in line.waiting):
            ends += [0.0] * max(line.places - len(ends), 0)
        if not ends:
            return 0.0
        heapify(ends)
        for ticket in before:
            end = heappop(ends)
            if end > MAX_RETRY_AFTER_S:
                return end
            heappush(ends, end + pace.run_s(ticket, state))
        return ends[0]

    def _pace(self, specialist: str) -> SpecialistTimings:
        return self._paces.setdefault(specialist, SpecialistTimings())


def _left_s(ticket: ReplicaRequest, run_s: float, now: float) -> float:
    """Of one that runs. One that runs longer than others did may end at any moment, or not."""
    gone_s = now - (ticket.started_at or now)
    return max(run_s - gone_s, 0.1 * run_s)


def _is_let_in(ticket: ReplicaRequest, line: ReplicaQueue) -> bool:
    """The engine preempts for it: somebody of a lower priority, or for a tenant without any."""
    if any(other.priority < ticket.priority for other in line.running):
        return True
    return not any(other.tenant == ticket.tenant for other in line.running)


def _key(assignment: Assignment) -> int:
    return hash((assignment.tenant, assignment.prompt_ids))


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
