"""How long one request would take at one replica, and when one that cannot run now could."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coterie.core.plan import Assignment, LaneState
from coterie.core.quick_init import quick_init
from coterie.service.submit.load import LoadProfile, ReplicaQueue, ReplicaRequest
from coterie.service.submit.predict import LatencyPredictor, LoadFeatures, load_after
from coterie.service.submit.replicas import ReplicaSet
from coterie.service.submit.reservations import RetryReservation
from coterie.workers.contract import Replica

# a request that waits longer than this found no room: a few steps take less
WAITS_S = 1.0
# share of the usual caution for a request that comes when it was told to
TOLD_CAUTION = 0.3
# ends of others that are looked at for a time to come again
MAX_ENDS = 8


@quick_init
@dataclass(frozen=True, slots=True)
class LatencyEstimate:
    """Expected seconds for one request at one engine."""

    # until a place is free
    queue_s: float
    # from then to the first token; all further tokens; how many tokens
    first_s: float
    tokens_s: float
    num_tokens: int
    # what first_s and tokens_s are multiplied by so that they are seldom exceeded
    factor: float

    @property
    def first_token_s(self) -> float:
        return self.queue_s + self.first_s

    @property
    def total_s(self) -> float:
        return self.queue_s + self.first_s + self.tokens_s

    @property
    def promised_s(self) -> float:
        return self.queue_s + self.factor * (self.total_s - self.queue_s)


class LaneView:
    """What one decision looks at: a lane at one replica, at one moment."""

    __slots__ = (
        "after", "before", "expected", "has_place", "now", "num_tokens", "predictor", "queue",
        "replica", "replicas", "request", "state",
    )  # fmt: skip

    def __init__(
        self,
        replicas: ReplicaSet,
        replica: Replica,
        state: LaneState,
        request: ReplicaRequest,
        now: float,
        *,
        has_place: bool,
    ) -> None:
        """`has_place`: the request comes back when it was told to."""
        self.replicas, self.replica, self.state, self.request = replicas, replica, state, request
        self.now, self.has_place = now, has_place
        self.queue, self.predictor = replicas.queue(replica), replicas.best_predictor
        # others that will probably come because they were told to
        self.expected: Sequence[RetryReservation] = ()
        if not has_place:
            book = replicas.shared.reservations
            self.expected = book.expected_at(replica.name, request.priority, now)
        self.num_tokens = self.predictor.output_tokens(request.max_tokens)
        # what runs, without and with this request
        self.before = self.queue.load.profile(self.queue.lane, self.predictor.output_share)
        self.after = self.before.added(self.num_tokens)

    def factor(self, predictor: LatencyPredictor) -> float:
        """What expected times are multiplied by. Less for a request that was told to come."""
        factor = predictor.factor
        return 1.0 + TOLD_CAUTION * (factor - 1.0) if self.has_place else factor

    def num_reserved(self) -> int:
        book = self.replicas.shared.reservations
        return sum(1 for _ in book.at(self.replica.name, self.request.priority, self.now))

    def comes_before(self, at: float) -> bool:
        """Whether another one is expected before `at`."""
        return any(place.due_at < at for place in self.expected[:1])

    def alone_s(self) -> float:
        """Expected seconds at an idle engine."""
        alone = LoadFeatures(1, self.request.num_sequences, 0)
        first_s = self.predictor.first_s(self.request.uncached, alone)
        return first_s + (self.num_tokens - 1) * self.predictor.token_s(alone)

    def estimate(self, guard: int) -> LatencyEstimate:
        """`guard`: sequences for which there must be room besides."""
        predictor, queue, request = self.predictor, self.queue, self.request
        load = load_after(queue.load, queue.lane, request.num_sequences)
        wait_s = 0.0
        if not may_preempt(request, queue):
            wait_s = queue_s(self, predictor.token_s(load))
        first_s = predictor.first_s(request.uncached, load)
        profile, tokens = self.after, self.num_tokens
        if guard:
            profile = profile.added(tokens, guard)
        tokens_s = predictor.tokens_s(tokens - 1, profile)
        ends_at, is_changed = self.now + wait_s + first_s + tokens_s, False
        for place in self.expected:
            if place.due_at >= ends_at:
                break
            profile, is_changed = profile.added(place.num_tokens), True
        if is_changed:
            tokens_s = predictor.tokens_s(tokens - 1, profile)
        return LatencyEstimate(wait_s, first_s, tokens_s, tokens, self.factor(predictor))


def may_preempt(request: ReplicaRequest, queue: ReplicaQueue) -> bool:
    """Whether the engine would preempt another request for it: one of lower priority, or for a
    tenant with nothing running."""
    if any(queue.num_running[: request.priority]):
        return True
    return request.tenant not in queue.tenants_running


def queue_s(lane: LaneView, token_s: float) -> float:
    """Seconds until a place is free for it."""
    queue, request, predictor = lane.queue, lane.request, lane.predictor
    missing = len(queue) + request.num_sequences - queue.places
    kv_tokens = queue.prompt_tokens + request.prompt_tokens
    kv_tokens += math.ceil(predictor.used * (queue.output_tokens + request.max_tokens))
    is_stuck = queue.stuck_s() > WAITS_S
    if missing <= 0 and not is_stuck and kv_tokens <= lane.state.total_tokens:
        return 0.0
    return ends_s(predictor, queue, max(missing, queue.ahead(request.priority) + 1), token_s)


def ends_s(predictor: LatencyPredictor, queue: ReplicaQueue, count: int, token_s: float) -> float:
    """Seconds until so many requests of this lane have ended."""
    load = queue.load
    cycles, index = divmod(count - 1, max(queue.running, 1))
    # requests of other lanes end meanwhile too
    here = max(load.num_requests, 1)
    index = min(math.ceil((index + 1) * here / max(len(queue), 1)), here)
    mean = queue.output_tokens / max(len(queue), 1)
    tokens = load.tokens_until_end(index) + cycles * mean
    return tokens * predictor.used * token_s


def fits_in_s(
    predictor: LatencyPredictor,
    queue: ReplicaQueue,
    request: ReplicaRequest,
    assignment: Assignment,
    earlier: Sequence[RetryReservation],
    now: float,
) -> float:
    """Seconds until so many requests have ended that this one would meet its deadline, if it comes
    again with as much time as it had, and that the others would meet theirs. inf = it tolerates
    nobody beside it, and an idle engine cannot be promised."""
    tokens = predictor.output_tokens(request.max_tokens)
    may_take_s = tokens_may_take_s(predictor, request, assignment)
    profile = queue.load.profile(queue.lane, predictor.output_share)
    beside = LoadProfile([(float(tokens), 2.0)], min(profile.lanes, 2))
    if predictor.tokens_s(tokens, beside) > may_take_s:
        return math.inf
    for place in earlier:
        profile = profile.added(place.num_tokens)
    others = list(queue.load.deadlines(request.priority))
    wait_s = 0.0
    for ended, _ in profile.steps[:MAX_ENDS]:
        then = profile.after(ended).added(tokens)
        wait_s = predictor.tokens_s(ended, profile)
        if predictor.tokens_s(tokens, then) <= may_take_s and not any(
            num_tokens > ended
            and now + wait_s + predictor.factor * predictor.tokens_s(num_tokens - ended, then)
            > deadline
            for num_tokens, deadline in others
        ):
            return wait_s
    return predictor.tokens_s(profile.steps[-1][0], profile) if profile.steps else 0.0


def tokens_may_take_s(
    predictor: LatencyPredictor, request: ReplicaRequest, assignment: Assignment
) -> float:
    """How long its tokens may be expected to take, if it comes again with as much time as it
    had."""
    if request.deadline is None or not predictor.is_fitted:
        return math.inf
    whole_s = request.deadline - assignment.arrived_at
    first_s = predictor.first_s(request.uncached, LoadFeatures(1, request.num_sequences, 0))
    return max(whole_s / predictor.factor - first_s, 0.0)
