"""Whether a request may be sent to a replica, and when a refused one may retry.

A request is admitted if its lane has room for it in the queue, if its last token is expected before
its own deadline, and if the deadlines of the others that are in flight there can still be met. All
of it is an estimate, from what the gateway counts (load.py) and how fast requests were
(predict.py); the worker has the last word. Nothing here scans requests: a decision costs the same
however many there are.

A deadline that could not be met on an idle engine is a cut, not a promise: the request is admitted
and ends there, without a token if need be. Deadlines of a lower priority do not hold a request
back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from coterie.core.errors import (
    AdmissionOffer,
    CoterieError,
    Overloaded,
    Saturated,
)
from coterie.core.lane import queue_capacity
from coterie.core.plan import Assignment
from coterie.core.prefix import PromptPrefixes
from coterie.core.quick_init import quick_init
from coterie.service.submit.estimate import (
    LaneView,
    LatencyEstimate,
    ends_s,
    fits_in_s,
    tokens_may_take_s,
)
from coterie.service.submit.load import ReplicaQueue, ReplicaRequest, replica_request
from coterie.service.submit.predict import MIN_SAMPLES, LoadFeatures, load_after
from coterie.service.submit.replicas import ReplicaSet
from coterie.service.submit.reservations import AHEAD, AHEAD_S, RetryReservation
from coterie.workers.contract import Replica

# the official clients give up above this
MAX_RETRY_AFTER_S = 120.0
MIN_RETRY_AFTER_S = 1.0
# nor for longer than this while nothing was measured: the first guesses are high
MAX_GUESSED_S = 30.0
# for deadlines, places are promised up to this far ahead
MAX_AHEAD_S = 30.0
# added to every estimated wait
CAUTION_S = 0.25
# a deadline is hopeless if even this share of the expected time to the first token is too long
HOPELESS = 0.5
# a request whose first token would come this soon is not refused
SOON_QUEUED_S = 0.01
# replicas that are tried, best first
TRIED_REPLICAS = 3
# of what is refused for a deadline, places are promised for this share of what ends: the rest of
# the capacity is for requests that come for the first time
PROMISED_SHARE = 0.2
# a smaller answer than this is not offered
MIN_OFFERED_TOKENS = 8


@quick_init
@dataclass(frozen=True, slots=True)
class AdmissionResult:
    """The estimate for a request that may be sent to `replica`. `outcome` is one of
    core.receipt.ADMISSIONS."""

    outcome: str
    replica: Replica
    assignment: Assignment
    request: ReplicaRequest
    # expected seconds to the first and to the last token
    first_token_s: float = 0.0
    total_s: float = 0.0
    # why its deadline is no promise; empty if it is one, or there is none
    reason: str = ""


class Admission:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def admit(
        self,
        replicas: ReplicaSet,
        assignment: Assignment,
        avoid: Collection[str] = (),
        *,
        is_accepted: bool = False,
    ) -> AdmissionResult:
        """The best replica that can take the request; raises Overloaded or Unavailable.
        `is_accepted`: it was accepted before, as a job is, so its deadline is no reason to refuse
        it. A reservation is used up."""
        now, shared = self._clock(), replicas.shared
        prefixes = PromptPrefixes(
            assignment.lane, assignment.adapters, assignment.tenant, assignment.prompt_ids
        )
        request = replica_request(assignment)
        ranked = replicas.ranked(TRIED_REPLICAS, avoid, assignment.adapters, request, prefixes)
        place = shared.reservations.use(_key(assignment), now)
        if place is not None:
            ranked = replicas.first_at(place.engine, ranked, avoid)
        refusals: list[tuple[_Refused, Replica]] = []
        for replica in ranked:
            state, queue = replicas.state(replica), replicas.queue(replica)
            request.cached_tokens = replicas.num_cached(replica, prefixes)
            if state is None:
                replicas.tenants.admitted(request)
                return AdmissionResult("admitted", replica, assignment, request)
            lane = LaneView(replicas, replica, state, request, now, has_place=place is not None)
            guard = replicas.tenants.guard(request.tenant, queue.load.num_sequences)
            estimate = lane.estimate(guard)
            try:
                if not is_accepted and request.deadline is not None:
                    _check_first_token(estimate, request.deadline - now)
                self._check_room(lane, request)
                if not is_accepted:
                    self._check_deadlines(lane, request, estimate, guard)
            except _Refused as refused:
                refusals.append((refused, replica))
                if refused.is_own:
                    # it would end later at the others
                    break
                continue
            if place is not None:
                shared.calibration.learn(is_admitted=True)
                replicas.retries["admitted"] += 1
                assignment = _expected(assignment)
            outcome = _outcome(request, queue)
            replicas.tenants.admitted(request)
            return AdmissionResult(
                outcome,
                replica,
                assignment,
                request,
                estimate.first_token_s,
                estimate.total_s,
                _why_not_promised(lane, request, is_accepted=is_accepted),
            )
        if place is not None:
            shared.calibration.learn(is_admitted=False)
            replicas.retries["refused"] += 1
        raise self._refusal(replicas, assignment, request, refusals)

    def overloaded(
        self, replicas: ReplicaSet, assignment: Assignment, replica: Replica, hint_s: float | None
    ) -> CoterieError:
        """The error for a request that the worker refused because its queue is full. `hint_s` is
        the worker's estimate."""
        refused = _Refused(f"the queue for {replicas.specialist} is full", 1, hint_s=hint_s or 0.0)
        request = replica_request(assignment)
        return self._refusal(replicas, assignment, request, [(refused, replica)])

    def ended(
        self,
        replicas: ReplicaSet,
        queue: ReplicaQueue,
        request: ReplicaRequest,
        *,
        is_whole: bool,
        is_moved: bool = False,
    ) -> bool | None:
        """Note that a request ended, and let the predictors learn from it. `is_whole`: it ended
        normally. `is_moved`: its first worker was lost, so its time teaches nothing. Returns
        whether it met its deadline; None if none was promised."""
        sums = queue.load.sums()
        predictors = () if is_moved else (replicas.predictor, replicas.shared.predictor)
        is_late = request.deadline is not None and sums.at > request.deadline
        is_judged = request.is_promised and (is_whole or is_late)
        for predictor in predictors:
            if is_whole:
                predictor.learn(request, sums)
            if is_judged:
                predictor.deadline_met(not is_late)
        replicas.tenants.ended(request)
        queue.remove(request)
        return not is_late if is_judged else None

    def _check_room(self, lane: LaneView, request: ReplicaRequest) -> None:
        """Refuse a request for which there is no place in the queue."""
        queue, state = lane.queue, lane.state
        ahead = queue.ahead(request.priority)
        is_new = not queue.holds(request.tenant)
        kept = 0
        # places are not kept free while the engine is idle. Reservations of others do not count
        # against a tenant that has no request here.
        if not lane.has_place and queue.running and not is_new:
            kept = sum(item.kept_from <= lane.now for item in lane.expected)
            # at most half of the queue, because a refused request may not come again
            kept = min(kept, max(state.max_queue // 2, 1))
        most = queue_capacity(state.max_queue, is_expected=lane.has_place, is_new=is_new)
        if ahead + kept >= most:
            # requests with a reservation will be in the queue before this one
            behind = ahead + lane.num_reserved()
            name = lane.replicas.specialist
            starts = max(behind - state.max_queue + 1, 1)
            raise _Refused(f"the queue of {state.max_queue} for {name} is full", starts)

    def _check_deadlines(
        self, lane: LaneView, request: ReplicaRequest, estimate: LatencyEstimate, guard: int
    ) -> None:
        """Refuse a request that would end after its deadline, or make others miss theirs."""
        load, predictor, name = lane.queue.load, lane.predictor, lane.replicas.specialist
        if request.deadline is not None:
            left_s = request.deadline - lane.now
            request.is_promised = predictor.is_fitted and lane.alone_s() <= left_s
        if not load.num_requests and not lane.comes_before(lane.now + estimate.total_s):
            # nothing is better than an idle engine
            return
        if request.is_promised and estimate.promised_s > left_s:
            raise _Refused(
                f"timeout: the last token is expected in {estimate.promised_s:.1f} s, and "
                f"{left_s:.1f} s are left",
                is_deadline=True,
                is_own=True,
                offer=self._offer(lane, request, estimate, left_s),
            )
        if self._makes_others_late(lane, request, estimate.total_s, guard):
            raise _Refused(f"{name} is busy: others would miss their deadlines", is_deadline=True)
        if self._takes_reserved(lane, request, estimate):
            raise _Refused(f"{name} is busy: its places are reserved", is_deadline=True)

    def _makes_others_late(
        self, lane: LaneView, request: ReplicaRequest, total_s: float, guard: int = 0
    ) -> bool:
        """Whether one of the others would miss its deadline because of this request, which runs for
        `total_s`."""
        predictor, load = lane.replicas.shared.predictor, lane.queue.load
        if not predictor.is_fitted:
            return False
        share, factor = predictor.output_share, lane.factor(predictor)
        before, after = lane.before, lane.after
        if guard:
            after = after.added(lane.num_tokens, guard)
        for place in lane.expected:
            # it comes while this one runs
            if place.due_at < lane.now + total_s:
                after = after.added(place.num_tokens)
        prompt_s = predictor.prompt_s(load.prompt_tokens + request.uncached)
        for num_tokens, deadline in load.deadlines(request.priority):
            left_s, tokens = deadline - lane.now, num_tokens * share
            is_late = factor * (prompt_s + predictor.tokens_s(tokens, after)) > left_s
            # one that is late anyway holds nobody back
            if is_late and predictor.tokens_s(tokens, before) <= left_s:
                return True
        return False

    def _takes_reserved(
        self, lane: LaneView, request: ReplicaRequest, estimate: LatencyEstimate
    ) -> bool:
        """Whether this request would make one late that was told to come while it runs."""
        predictor, tenants = lane.replicas.shared.predictor, lane.replicas.tenants
        ends_at = lane.now + estimate.total_s
        profile = lane.after
        for place in lane.expected:
            if place.due_at >= ends_at:
                return False
            if tenants.is_ahead(place.tenant, request.tenant):
                continue
            if place.whole_s < math.inf:
                share = (place.due_at - lane.now) / max(ends_at - lane.now, 1e-9)
                then = profile.after(share * estimate.num_tokens).added(place.num_tokens)
                if predictor.tokens_s(place.num_tokens, then) > place.whole_s:
                    return True
            profile = profile.added(place.num_tokens)
        return False

    def _offer(
        self, lane: LaneView, request: ReplicaRequest, estimate: LatencyEstimate, left_s: float
    ) -> AdmissionOffer | None:
        """Fewer tokens, or a later deadline, with which it would be admitted now."""
        if self._makes_others_late(lane, request, estimate.total_s):
            return None
        budget_s = (left_s - estimate.queue_s) / estimate.factor - estimate.first_s
        # with fewer tokens each of them takes as long, or longer: others end later than it
        token_s = lane.predictor.token_s(
            load_after(lane.queue.load, lane.queue.lane, request.num_sequences)
        )
        tokens = int(budget_s / token_s) if token_s > 0 else 0
        return AdmissionOffer(
            max_tokens=tokens if MIN_OFFERED_TOKENS <= tokens < request.max_tokens else None,
            deadline_ms=math.ceil(1050 * estimate.promised_s),
        )

    def _refusal(
        self,
        replicas: ReplicaSet,
        assignment: Assignment,
        request: ReplicaRequest,
        refusals: Sequence[tuple[_Refused, Replica]],
    ) -> CoterieError:
        """The error for a refused request, with a reservation at the replica that has probably the
        next place after all earlier reservations."""
        now, shared = self._clock(), replicas.shared
        replicas.tenants.refused(request.tenant)
        # of the tried replicas, the one with the fewest reservations
        refused, replica = min(refusals, key=lambda item: shared.reservations.num_at(item[1].name))
        wait_s = self._wait_s(replicas, replica, assignment, request, refused)
        param = "timeout_ms" if refused.is_deadline else refused.param
        predictor = replicas.best_predictor
        place = RetryReservation(
            key=_key(assignment),
            engine=replica.name,
            tenant=request.tenant,
            priority=request.priority,
            kept_from=now + wait_s - AHEAD * wait_s - AHEAD_S,
            due_at=now + wait_s,
            num_tokens=predictor.output_tokens(request.max_tokens),
            whole_s=tokens_may_take_s(predictor, request, assignment)
            if refused.is_deadline
            else math.inf,
        )
        error: Overloaded
        most_s = MAX_AHEAD_S if refused.is_deadline else MAX_RETRY_AFTER_S
        if wait_s <= most_s and shared.reservations.add(place, now):
            error = Overloaded(refused.reason, param=param, retry_after_s=wait_s)
        else:
            error = Saturated(f"{refused.reason}; no place can be promised", param=param)
        error.offer = refused.offer
        return error

    def _wait_s(
        self,
        replicas: ReplicaSet,
        replica: Replica,
        assignment: Assignment,
        request: ReplicaRequest,
        refused: _Refused,
    ) -> float:
        """Seconds until there is probably a place for it at this replica; inf = cannot be said."""
        now, queue, shared = self._clock(), replicas.queue(replica), replicas.shared
        load, predictor = queue.load, replicas.best_predictor
        token_s = predictor.token_s(LoadFeatures(len(load.lanes), load.num_sequences, 0))
        next_s = 0.0
        if refused.is_deadline:
            earlier = list(shared.reservations.at(replica.name, request.priority, now))
            wait_s = fits_in_s(predictor, queue, request, assignment, earlier, now)
            if earlier:
                # places are promised for a part of what ends, one after the other
                beside = max(load.num_requests, 1)
                crowd = LoadFeatures(max(len(load.lanes), 1), max(load.num_sequences, 1), 0)
                run_s = predictor.mean_tokens * predictor.token_s(crowd) / beside
                next_s = earlier[-1].due_at + run_s / PROMISED_SHARE - now
        else:
            wait_s = ends_s(predictor, queue, refused.ends, token_s)
        wait_s = shared.calibration.factor * wait_s + CAUTION_S
        if not predictor.is_fitted:
            wait_s = min(wait_s, MAX_GUESSED_S)
        return max(wait_s, next_s, refused.hint_s, MIN_RETRY_AFTER_S)


class _Refused(Exception):
    """Why a replica cannot take a request, and how many others have to end first."""

    def __init__(
        self,
        reason: str,
        ends: int = 1,
        *,
        is_deadline: bool = False,
        is_own: bool = False,
        param: str | None = None,
        hint_s: float = 0.0,
        offer: AdmissionOffer | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason, self.ends, self.is_deadline = reason, ends, is_deadline
        # its own deadline is the reason, at this replica
        self.is_own = is_own
        self.param, self.hint_s, self.offer = param, hint_s, offer


def _outcome(request: ReplicaRequest, queue: ReplicaQueue) -> str:
    if len(queue) + request.num_sequences <= queue.places:
        return "admitted"
    return "preempted_other" if any(queue.num_running[: request.priority]) else "queued"


def _why_not_promised(lane: LaneView, request: ReplicaRequest, *, is_accepted: bool) -> str:
    if request.deadline is None or request.is_promised or is_accepted:
        return ""
    count = lane.predictor.num_samples
    if not lane.predictor.is_fitted:
        return f"deadline not promised: {count} of {MIN_SAMPLES} requests measured so far"
    left_s = max(request.deadline - lane.now, 0.0)
    return (
        f"deadline not promised: {lane.alone_s():.1f} s expected on an idle engine, "
        f"{left_s:.1f} s left"
    )


def _expected(assignment: Assignment) -> Assignment:
    return replace(assignment, limits=replace(assignment.limits, is_expected=True))


def _key(assignment: Assignment) -> int:
    return hash((assignment.tenant, assignment.prompt_key))


def _check_first_token(estimate: LatencyEstimate, left_s: float) -> None:
    """Refuse a request that would probably end in the queue: it may come again when that is
    shorter. Where a place is free it begins, and returns what it has at its deadline."""
    if not estimate.queue_s or HOPELESS * estimate.first_token_s <= max(left_s, SOON_QUEUED_S):
        return
    raise _Refused(
        f"timeout: the first token is expected in {estimate.first_token_s:.1f} s, and "
        f"{max(left_s, 0.0):.1f} s are left",
        param="timeout_ms",
        hint_s=estimate.first_token_s - left_s,
    )
