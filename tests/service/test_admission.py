"""service/submit: who is admitted, where, and when a refused one may come again."""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coterie.core.errors import Overloaded, Saturated
from coterie.core.events import Finished, Timings, Usage
from coterie.core.fair_share import MAX_ABSENT, VirtualTokenCounters
from coterie.core.plan import Admitted, Assignment, LaneState, Rejected
from coterie.core.prefix import SHORT_BYTES, extend_chain, is_published, root_digest
from coterie.core.request import Limits, Sampling
from coterie.obs.metrics import MetricRegistry
from coterie.service.submit.admission import (
    MAX_GUESSED_S,
    MAX_RETRY_AFTER_S,
    Admission,
    AdmissionResult,
)
from coterie.service.submit.load import (
    EngineLoad,
    LoadProfile,
    ReplicaQueue,
    ReplicaRequest,
    token_group,
)
from coterie.service.submit.predict import LatencyPredictor, LeastSquares, LoadFeatures
from coterie.service.submit.replicas import EngineGroupLoad, ReplicaSet
from coterie.service.submit.reservations import MAX_AT_ENGINE, ReservationBook, RetryReservation
from coterie.service.submit.submitter import SubmittedRequest, Submitter
from coterie.service.submit.tenants import TenantShares

LANE = LaneState("s", 0, 4, 10_000, 10_000, (), frozenset(), 2.0, False, step_s=0.01, block_size=16)


class StillReplica:
    """A replica in which nothing happens."""

    def __init__(self, name: str, state: LaneState = LANE) -> None:
        self.name, self.lane_state = name, state

    def lane_states(self) -> dict[str, LaneState]:
        return {self.lane_state.lane: self.lane_state}

    def healthy(self) -> bool:
        return True

    def retry_after_s(self) -> float:
        return 1.0


class World:
    """Replicas, admission and a clock that stands still."""

    def __init__(self, *names: str, places: int = 1, lane: LaneState = LANE) -> None:
        self.now = 1000.0
        self.admission = Admission(self.clock)
        self.members = [StillReplica(name, lane) for name in names or ("a",)]
        self.replicas = ReplicaSet("s", self.members, places, clock=self.clock)  # type: ignore[arg-type]
        self.queue = self.replicas.queue(self.members[0])  # type: ignore[arg-type]

    def clock(self) -> float:
        return self.now

    def add(self, running: bool, count: int = 1, **more: Any) -> list[ReplicaRequest]:
        given: dict[str, Any] = {"priority": 5, "tenant": "t", "prompt_tokens": 10}
        given |= {"max_tokens": 100} | more
        made = [ReplicaRequest(**given) for _ in range(count)]
        for request in made:
            self.queue.add(request)
            if running:
                self.queue.started(request)
        return made

    def admit(self, work: Assignment) -> AdmissionResult:
        return self.admission.admit(self.replicas, work)

    def refused(self, work: Assignment) -> float | None:
        """The seconds that it is told to wait, inf if no time is promised; None if it was
        admitted."""
        try:
            self.admit(work)
        except Saturated as error:
            assert error.retry_after_s is None
            return math.inf
        except Overloaded as error:
            return error.retry_after_s
        return None

    def send(self, work: Assignment) -> AdmissionResult:
        result = self.admit(work)
        self.replicas.queue(result.replica).add(result.request)
        self.replicas.queue(result.replica).started(result.request)
        return result

    def end(self, result: AdmissionResult, **more: Any) -> None:
        queue = self.replicas.queue(result.replica)
        self.admission.ended(self.replicas, queue, result.request, **({"is_whole": True} | more))

    def train(self, token_s: float = 0.1, count: int = 40, tokens: int = 100) -> None:
        """Let requests run alone and end: `tokens` each, of `token_s`."""
        rng = random.Random(0)
        for index in range(count):
            result = self.send(asked(10_000 + index, max_tokens=tokens))
            queue = self.replicas.queue(result.replica)
            self.now += token_s * rng.uniform(0.98, 1.02)
            queue.produced(result.request, 1)
            self.now += token_s * (tokens - 1) * rng.uniform(0.98, 1.02)
            queue.produced(result.request, tokens - 1)
            self.end(result)


def asked(
    prompt: int = 1,
    priority: int = 5,
    tenant: str = "t",
    deadline: float | None = None,
    max_tokens: int = 100,
    arrived_at: float = 1000.0,
) -> Assignment:
    limits = Limits(max_tokens=max_tokens, priority=priority)
    ids = (prompt,) * 10
    return Assignment("r", "s", ids, Sampling(), limits, (), "", tenant, deadline, arrived_at)


def test_admission_refuses_at_the_bound_of_each_priority() -> None:
    world = World()
    world.add(running=False, count=3)
    assert world.refused(asked()) is None
    world = World()
    world.add(running=False, count=4, priority=1)
    assert world.refused(asked(priority=1)) is not None
    # those that wait below take no place from it
    assert world.refused(asked(priority=9)) is None
    world.add(running=False, count=4, priority=9)
    assert world.refused(asked(priority=9)) is not None
    # a tenant of which nobody is here finds a place, and their number is bounded
    for tenant in ("u", "w"):
        assert world.refused(asked(priority=9, tenant=tenant)) is None
        world.add(running=False, priority=9, tenant=tenant)
    assert world.refused(asked(priority=9, tenant="v")) is not None
    # what runs does not wait
    world = World(places=64)
    world.add(running=True, count=50)
    assert world.refused(asked()) is None


def test_retry_after_is_a_place_in_line_at_the_measured_speed() -> None:
    world = World()
    world.train(token_s=0.1)
    world.add(running=True)
    world.add(running=False, count=4)
    waits = [world.refused(asked(prompt)) or 0.0 for prompt in range(3)]
    # one runs at a time, for ten seconds each
    assert waits == pytest.approx([10, 20, 30], rel=0.35)
    assert all(wait > 10 * (place + 1) for place, wait in enumerate(waits))
    # nobody is sent away for longer than clients obey: then no time is promised
    others = [world.refused(asked(prompt)) for prompt in range(3, 200)]
    assert all(wait in (math.inf, None) or wait <= MAX_RETRY_AFTER_S for wait in others)
    assert None not in others
    with pytest.raises(Saturated) as caught:
        world.admit(asked(1000))
    assert caught.value.retry_after_s is None and "no place can be promised" in str(caught.value)


def test_the_first_guess_sends_nobody_away_for_long() -> None:
    # five answers of 10,000 tokens each: minutes by the first guess of an engine's speed
    world = World()
    world.add(running=True, max_tokens=10_000)
    world.add(running=False, count=4, max_tokens=10_000)
    assert [world.refused(asked(prompt)) for prompt in range(15)] == [MAX_GUESSED_S] * 15
    # what was measured is told as it is
    world = World()
    world.train(token_s=0.1)
    world.add(running=True, max_tokens=10_000)
    world.add(running=False, count=4, max_tokens=10_000)
    assert world.refused(asked(1)) == math.inf


def test_a_promised_place_is_kept_for_whom_it_was_promised() -> None:
    world = World()
    world.add(running=True)
    (first, *_) = world.add(running=False, count=4)
    wait_s = world.refused(asked(7))
    # who comes too early is no better off
    assert wait_s is not None
    again_s = world.refused(asked(7))
    assert again_s is not None
    world.now += again_s
    world.queue.started(first)
    assert world.refused(asked(8)) is not None
    result = world.admit(asked(7))
    assert result.assignment.limits.is_expected
    # it was taken; whoever asks next finds what is there
    assert world.refused(asked(9)) is None
    # who does not come loses it, and nobody waits for ever behind it
    world.now += MAX_RETRY_AFTER_S
    assert world.refused(asked(8)) is None


def test_what_one_tenant_was_promised_keeps_no_other_out() -> None:
    world = World(places=2)
    world.add(running=True, count=2)
    world.add(running=False, count=4)
    waits = [world.refused(asked(prompt)) or 0.0 for prompt in range(6)]
    world.now += max(waits)
    # places are kept for those who were told to come
    assert world.refused(asked(tenant="u")) is None
    # they came, and took the room beyond the bound
    while world.refused(asked(prompt := waits.index(max(waits)))) is None:
        world.add(running=False)
        waits[prompt] = 0.0
    assert world.queue.waiting == 5
    assert world.refused(asked(tenant="u")) is None


def test_a_deadline_counts_to_the_last_token() -> None:
    world = World(places=8)
    world.train(token_s=0.1)
    # ten seconds alone
    assert world.refused(asked(deadline=world.now + 14.0)) is None
    for prompt in range(4):
        world.send(asked(prompt))
    # nothing was measured with five sequences, so the guess says how much slower these are
    alone = world.replicas.predictor.token_s(LoadFeatures(1, 1, 0))
    five = world.replicas.predictor.token_s(LoadFeatures(1, 5, 0))
    assert alone == pytest.approx(0.1, rel=0.1) and five > alone
    with pytest.raises(Overloaded) as caught:
        world.admit(asked(9, deadline=world.now + 100 * (alone + 0.2 * (five - alone))))
    error = caught.value
    assert "the last token is expected in" in error.message and error.param == "timeout_ms"
    assert error.retry_after_s is not None and error.offer is not None
    # the offer holds: with that deadline, or with fewer tokens, it is admitted
    assert error.offer.deadline_ms is not None
    later = world.now + error.offer.deadline_ms / 1000
    assert world.refused(asked(9, deadline=later)) is None
    # a deadline that nobody could meet is a cut: the answer ends there
    assert world.refused(asked(10, deadline=world.now + 5.0)) is None
    # so is one that allows no first token: a place is free
    assert world.refused(asked(11, deadline=world.now + 0.001)) is None
    assert world.refused(asked(12, deadline=world.now - 1.0)) is None


def test_an_offer_of_fewer_tokens_is_admitted() -> None:
    world = World(places=8)
    world.train(token_s=0.1)
    for prompt in range(3):
        world.send(asked(prompt))
    deadline = world.now + 10.5
    with pytest.raises(Overloaded) as caught:
        world.admit(asked(9, deadline=deadline))
    offer = caught.value.offer
    assert offer is not None and offer.max_tokens is not None and offer.max_tokens < 100
    result = world.admit(asked(9, deadline=deadline, max_tokens=offer.max_tokens))
    assert result.total_s < 10.5


def test_deadlines_of_others_stay_feasible() -> None:
    world = World(places=8)
    world.train(token_s=0.1)
    factor = world.replicas.shared.predictor.factor
    alone = world.replicas.shared.predictor.token_s(LoadFeatures(1, 1, 0))
    # it would be met alone, and not with another one
    tight = world.send(asked(1, deadline=world.now + 1.02 * factor * 100 * alone))
    assert tight.request.is_promised
    with pytest.raises(Overloaded) as caught:
        world.admit(asked(2))
    assert "others would miss" in caught.value.message and caught.value.offer is None
    # not for a more urgent one
    assert world.refused(asked(3, priority=9)) is None
    # when it is late anyway, or has little left, it holds nobody back
    world.queue.produced(tight.request, 90)
    assert world.refused(asked(4)) is None
    late = World(places=8)
    late.train(token_s=0.1)
    late.send(asked(1, deadline=late.now + 5.0))
    assert late.refused(asked(2)) is None


def test_a_reserved_place_is_not_taken_by_one_that_would_still_run() -> None:
    world = World(places=8)
    world.train(token_s=0.1)
    world.send(asked(1))
    world.send(asked(2, max_tokens=400))
    predictor = world.replicas.shared.predictor
    two = LoadProfile([(100.0, 2.0)], 1)
    time_s = predictor.factor * (predictor.tokens_s(100, two) * 1.05 + 0.2)
    # it tolerates one beside it, so it is to come when the first one has ended
    wait_s = world.refused(asked(3, deadline=world.now + time_s, arrived_at=world.now))
    assert wait_s is not None and wait_s > 10.0
    # a long one would run when it comes, a short one would not
    assert world.refused(asked(4, max_tokens=400)) is not None
    assert world.refused(asked(5, max_tokens=10)) is None
    # a more urgent request is not held back
    assert world.refused(asked(6, max_tokens=400, priority=9)) is None
    # one that tolerates nobody is promised nothing: an idle engine is not to be had
    with pytest.raises(Saturated):
        world.admit(asked(7, deadline=world.now + 13.0, arrived_at=world.now))


def test_jobs_are_not_refused_for_their_deadlines() -> None:
    world = World(places=8)
    world.train(token_s=0.1)
    world.send(asked(1, deadline=world.now + 11.0))
    work = asked(2, deadline=world.now + 11.0)
    assert world.refused(work) is not None
    assert world.admission.admit(world.replicas, work, is_accepted=True).outcome == "admitted"


def test_outcomes() -> None:
    world = World(places=1)
    assert world.admit(asked()).outcome == "admitted"
    world.add(running=True)
    assert world.admit(asked()).outcome == "queued"
    assert world.admit(asked(priority=9)).outcome == "preempted_other"


def test_a_replica_that_has_the_prompt_cached_is_preferred() -> None:
    world = World("a", "b", places=8)
    ids = tuple(range(160))
    work = replace(asked(), prompt_ids=ids)
    chain: list[bytes] = []
    extend_chain(chain, root_digest("s", (), "t"), ids, 16, 9)
    digests = frozenset(d[:SHORT_BYTES] for n, d in enumerate(chain, 1) if is_published(n))
    world.members[1].lane_state = replace(LANE, prefix_digests=digests)
    result = world.admit(work)
    assert (result.replica.name, result.request.cached_tokens) == ("b", 128)
    # another tenant's blocks are not found
    assert world.admit(replace(work, tenant="u")).replica.name == "a"
    # not at any price
    world.queue = world.replicas.queue(world.members[1])  # type: ignore[arg-type]
    world.add(running=True, count=4)
    assert world.admit(work).replica.name == "a"


def test_of_many_replicas_the_least_loaded_and_the_warm_are_compared() -> None:
    world = World(*(f"r{n}" for n in range(40)), places=8)
    ids = tuple(range(320))
    chain: list[bytes] = []
    extend_chain(chain, root_digest("s", (), "t"), ids, 16, 19)
    digests = frozenset(d[:SHORT_BYTES] for n, d in enumerate(chain, 1) if is_published(n))
    world.members[33].lane_state = replace(LANE, prefix_digests=digests)
    for member in world.members:
        world.queue = world.replicas.queue(member)  # type: ignore[arg-type]
        world.add(running=True, count=0 if member.name == "r7" else 2, max_tokens=10)
    assert world.admit(asked()).replica.name == "r7"
    cold = replace(asked(max_tokens=1), prompt_ids=ids)
    assert world.admit(cold).replica.name == "r33"


def test_what_a_predictor_learnt_is_kept() -> None:
    world = World(places=8)
    world.train(token_s=0.1, count=61)
    learnt = world.replicas.predictor
    # as it lies on the disk
    saved = json.loads(json.dumps(learnt.saved()))
    kept = LatencyPredictor()
    kept.restore(saved)
    load = LoadFeatures(2, 5, 30)
    assert (kept.first_s(50, load), kept.token_s(load)) == (
        learnt.first_s(50, load),
        learnt.token_s(load),
    )
    assert kept.is_fitted and kept.factor == pytest.approx(learnt.factor, rel=0.03)
    assert kept.output_share == pytest.approx(learnt.output_share, rel=0.03)
    # it goes on from there
    assert kept.saved()["first"] == learnt.saved()["first"]
    faults: list[dict[str, Any]] = [
        {},
        saved | {"drift": "fast"},
        saved | {"drift": float("nan")},
        saved | {"first": saved["tokens"]},
        saved | {"ratios": [0.0] * 130},
        saved | {"tokens": saved["tokens"] | {"sums": [float("inf")] * 4}},
    ]
    for broken in faults:
        untouched = LatencyPredictor()
        with pytest.raises((KeyError, TypeError, ValueError)):
            untouched.restore(broken)
        assert untouched.saved() == LatencyPredictor().saved()


def test_admission_says_why_a_deadline_is_no_promise() -> None:
    world = World(places=8)
    early = world.admit(asked(deadline=world.now + 3.0))
    assert early.reason == "deadline not promised: 0 of 12 requests measured so far"
    assert not early.request.is_promised
    world.train(token_s=0.1)
    assert world.admit(asked(deadline=world.now + 14.0)).reason == ""
    assert world.admit(asked()).reason == ""
    cut = world.admit(asked(deadline=world.now + 3.0))
    assert cut.reason.startswith("deadline not promised: 10.")
    assert cut.reason.endswith(" s expected on an idle engine, 3.0 s left")


def test_a_predictor_finds_the_coefficients_of_an_engine() -> None:
    rng, fit = random.Random(1), LeastSquares((0.01, 0.01, 0.005, 5e-4))
    true = (0.004, 0.011, 0.0023, 0.0002)
    for _ in range(400):
        tokens, lanes, sequences = rng.randrange(5, 200), rng.randrange(1, 9), rng.randrange(8, 30)
        features = (tokens, tokens * lanes, tokens * sequences, rng.randrange(2000))
        value = sum(c * x for c, x in zip(true, features, strict=True))
        fit.learn(features, value * rng.lognormvariate(0, 0.05))
    assert fit.coefficients == pytest.approx(true, rel=0.6)
    some = (50, 50 * 4, 50 * 12, 300)
    expected = sum(c * x for c, x in zip(true, some, strict=True))
    assert fit.value(some) == pytest.approx(expected, rel=0.03)
    # it forgets: the engine became three times slower
    for _ in range(2000):
        fit.learn(some, 3 * expected)
    assert fit.value(some) == pytest.approx(3 * expected, rel=0.05)


def test_the_factor_covers_the_error_and_the_margin_follows_misses() -> None:
    world, rng = World(places=4), random.Random(2)
    for index in range(400):
        result = world.send(asked(index))
        noise = rng.lognormvariate(0, 0.1)
        world.now += 0.1
        world.queue.produced(result.request, 1)
        world.now += 9.9 * noise
        world.queue.produced(result.request, 99)
        world.end(result)
    predictor = world.replicas.predictor
    # three standard deviations, not ten
    assert 1.15 < predictor.factor < 1.6
    before = predictor.margin
    predictor.deadline_met(False)
    assert predictor.margin > before + 0.05
    for _ in range(3000):
        predictor.deadline_met(True)
    assert predictor.margin < before


def test_sums_hold_whatever_happens() -> None:
    rng, now = random.Random(3), [0.0]
    load = EngineLoad(lambda: now[0])
    queues = [ReplicaQueue(name, 4, load, lambda: now[0]) for name in ("x", "y")]
    alive: list[tuple[ReplicaQueue, ReplicaRequest]] = []
    for _ in range(3000):
        now[0] += rng.random()
        if rng.random() < 0.3 or not alive:
            deadline = now[0] + rng.random() * 50 if rng.random() < 0.5 else None
            request = ReplicaRequest(
                rng.randrange(10), rng.choice("tu"), rng.randrange(1, 50), rng.randrange(1, 99),
                deadline, num_sequences=rng.randrange(1, 3),
            )  # fmt: skip
            alive.append((rng.choice(queues), request))
            alive[-1][0].add(request)
        else:
            queue, request = rng.choice(alive)
            if rng.random() < 0.5:
                queue.produced(request, rng.randrange(1, 5))
            else:
                queue.remove(request)
                queue.remove(request)
                alive.remove((queue, request))
        requests = [request for _, request in alive]
        assert load.num_requests == len(requests) == sum(len(queue) for queue in queues)
        in_lane = Counter[str]()
        for queue, request in alive:
            in_lane[queue.lane] += request.num_sequences
        assert load.num_sequences == sum(min(count, 4) for count in in_lane.values())
        waiting = [r.uncached for r in requests if r.first_token_at is None]
        assert load.prompt_tokens == sum(waiting)
        assert load.lanes == Counter(queue.lane for queue, _ in alive)
        lefts = sorted(r.tokens_left for r in requests)
        for place, left in enumerate(lefts, 1):
            assert token_group(load.tokens_until_end(place)) == token_group(left)
        tight = {
            (r.priority, token_group(r.tokens_left)): min(
                o.deadline
                for o in requests
                if o.deadline is not None and (o.priority, o.group) == (r.priority, r.group)
            )
            for r in requests
            if r.deadline is not None
        }
        assert sorted(d for _, d in load.deadlines(0)) == sorted(tight.values())
    for queue in queues:
        assert queue.tenants == Counter(r.tenant for q, r in alive if q is queue)
        assert queue.prompt_tokens == sum(r.prompt_tokens for q, r in alive if q is queue)


def test_reservations_are_bounded_and_expire() -> None:
    book = ReservationBook()

    def place(key: int, due_at: float, tenant: str = "t", engine: str = "a") -> RetryReservation:
        return RetryReservation(key, engine, tenant, 5, due_at - 1, due_at)

    added = [book.add(place(key, 10.0 + key, f"t{key % 3}"), 0.0) for key in range(200)]
    assert sum(added) == len(book) == MAX_AT_ENGINE
    assert [item.key for item in book.at("a", 5, 0.0)][:3] == [0, 1, 2]
    assert not list(book.at("a", 6, 0.0)) and not list(book.at("b", 0, 0.0))
    # too early, at its time, once
    assert book.use(0, 9.0) is None and book.use(0, 10.0) is not None
    assert book.use(0, 10.0) is None
    assert book.use(1, 1000.0) is None
    assert not list(book.at("a", 5, 1000.0)) and not len(book)


def test_a_due_place_lets_one_request_of_its_tenant_in() -> None:
    book = ReservationBook()
    for key, due_at in enumerate((10.0, 11.0)):
        assert book.add(RetryReservation(key, "a", "t", 5, due_at - 1, due_at), 0.0)
    assert not book.let_in("t", 5, 9.0)
    assert not book.let_in("other", 5, 10.0) and not book.let_in("t", 4, 10.0)
    assert book.let_in("t", 5, 10.0) and not book.let_in("t", 5, 10.0)
    # the place is still reserved, and used up when the prompt is known
    assert book.use(0, 10.0) is not None
    assert book.let_in("t", 5, 11.0) and not book.let_in("t", 5, 11.0)
    assert book.add(RetryReservation(2, "a", "t", 5, 19.0, 20.0), 11.0)
    assert not book.let_in("t", 5, 23.5)


def test_virtual_tokens() -> None:
    counters = VirtualTokenCounters()
    counters.enter("a")
    counters.charge("a", 100)
    # who comes later starts where the others are, and one with a double share pays half
    counters.enter("b")
    assert counters.of("b") == 100
    counters.charge("b", 100, share=2.0)
    assert counters.of("b") == 150
    # leaving does not clear what one got, and staying away saves nothing up
    counters.leave("b")
    counters.charge("a", 500)
    counters.enter("b")
    assert counters.of("b") == 600
    counters.leave("b")
    counters.leave("a")
    counters.charge("a", 1)
    assert len(counters) == 0
    for index in range(2 * MAX_ABSENT):
        counters.enter(f"t{index}")
        counters.leave(f"t{index}")
    assert len(counters._absent) == MAX_ABSENT


def test_a_tenant_that_got_more_leaves_room_for_one_that_was_refused() -> None:
    now = [0.0]
    shares = TenantShares(lambda: now[0])

    def request(tenant: str, share: float = 1.0) -> ReplicaRequest:
        return ReplicaRequest(5, tenant, 50, 50, share=share)

    small, large = request("small"), [request("large") for _ in range(20)]
    shares.admitted(small)
    for item in large:
        shares.admitted(item)
    # nobody waits, so it makes no difference
    assert shares.guard("large", 8) == 0
    shares.refused("small")
    assert shares.guard("large", 8) == 5 and shares.guard("small", 8) == 0
    assert shares.is_ahead("large", "small") and not shares.is_ahead("small", "large")
    # a tenant that is not here yet starts with the lowest
    assert shares.guard("new", 8) == 0
    # with a share of a hundred, it got little
    for _ in range(20):
        shares.admitted(request("paying", share=100.0))
    assert shares.guard("paying", 8) == 0
    # once the small one is admitted, or does not come again, nothing is kept
    again = request("small")
    shares.admitted(again)
    assert shares.guard("large", 8) == 0
    shares.refused("small")
    now[0] += 60.0
    assert shares.guard("large", 8) == 0
    for item in (small, again, *large):
        shares.ended(item)
    assert set(shares._counters._tokens) == {"paying"}


def test_lanes_of_one_engine_share_its_load() -> None:
    world = World(places=8)
    shared = EngineGroupLoad(["a"], world.clock)
    sets = [
        ReplicaSet(name, world.members, 8, shared, world.clock)  # type: ignore[arg-type]
        for name in ("s", "other")
    ]
    queue = sets[1].queue(world.members[0])  # type: ignore[arg-type]
    queue.add(ReplicaRequest(5, "t", 10, 100))
    assert shared.engines["a"].num_lanes("s") == 2 and shared.engines["a"].num_sequences == 1
    # what one lane measured is the other one's first guess
    assert sets[0].best_predictor is sets[1].best_predictor is shared.predictor
    assert isinstance(shared.predictor, LatencyPredictor)


def calls_of_a_decision(num_requests: int) -> int:
    """Function calls of one decision, with so many requests in flight at its engine."""
    world, rng, calls = World(places=64, lane=replace(LANE, max_queue=10**6)), random.Random(5), [0]
    world.train(token_s=0.1)
    for index in range(num_requests):
        world.add(
            running=index < 64,
            max_tokens=rng.randrange(1, 2000),
            deadline=world.now + 1e6 + rng.random(),
        )

    def count(_frame: object, event: str, _argument: object) -> None:
        calls[0] += event in ("call", "c_call")

    work = asked(1, deadline=world.now + 1e6)
    sys.setprofile(count)
    try:
        world.admit(work)
    finally:
        sys.setprofile(None)
    return calls[0]


def test_a_decision_costs_the_same_however_many_requests_there_are() -> None:
    few, many = calls_of_a_decision(500), calls_of_a_decision(5000)
    assert many < 1.5 * few < 3000, (few, many)


def test_the_rounds_of_a_profile() -> None:
    """Against a sum over every token."""
    rng = random.Random(6)
    for _ in range(100):
        left = sorted(rng.randrange(1, 40) for _ in range(rng.randrange(1, 12)))
        lanes = rng.randrange(1, 5)
        profile = LoadProfile([(float(tokens), 1.0) for tokens in left], lanes)
        for num_tokens in (1, 7, 25, 60):
            active = [sum(tokens >= n for tokens in left) for n in range(1, num_tokens + 1)]
            expected = sum(min(lanes, count) for count in active), sum(active)
            assert profile.rounds(num_tokens) == pytest.approx(expected)
        shifted = profile.after(5).rounds(10)
        assert shifted[1] == pytest.approx(sum(min(max(tokens - 5, 0), 10) for tokens in left))


@pytest.mark.parametrize(
    ("deadline_in_s", "event", "counted"),
    [
        # the engine ended it; and the gateway, because the worker was silent
        (5.0, Finished("r", ("timeout",), Usage(3, 0), Timings()), True),
        (-0.01, None, True),
        # its caller left in time, or it has no deadline
        (5.0, None, False),
        (None, None, False),
    ],
)
def test_a_deadline_that_nobody_promised_is_counted_as_cut(
    deadline_in_s: float | None, event: Finished | None, counted: bool
) -> None:
    world, registry = World(), MetricRegistry()
    series = SimpleNamespace(registry=registry)
    served = SimpleNamespace(name="s", replicas=world.replicas, series=series)
    work = asked(1)
    request = world.admit(work).request
    request.deadline = None if deadline_in_s is None else time.monotonic() + deadline_in_s

    async def main() -> None:
        replica = cast(Any, world.members[0])
        submitted = SubmittedRequest(world.admission, cast(Any, served), replica, work, request)
        submitted.events.end(event)

    asyncio.run(main())
    line = 'coterie_deadlines_total{model_name="s",outcome="cut"} 1'
    assert (line in registry.render()) == counted


@pytest.mark.parametrize("is_late", [False, True])
def test_a_moved_request_keeps_its_promise_and_teaches_nothing(is_late: bool) -> None:
    world = World()
    world.train()
    known = json.dumps(world.replicas.predictor.saved())
    result = world.send(asked(1, deadline=world.now + 100.0))
    assert result.request.is_promised
    world.now += 101.0 if is_late else 50.0
    queue = world.replicas.queue(result.replica)
    is_met = world.admission.ended(
        world.replicas, queue, result.request, is_whole=True, is_moved=True
    )
    assert is_met is not is_late
    assert json.dumps(world.replicas.predictor.saved()) == known


class MovingReplica(StillReplica):
    """`refusing` names those that refuse what they get; "a" loses each request before its
    verdict."""

    def __init__(self, name: str, refusing: str, unwilling: str) -> None:
        super().__init__(name)
        self.refusing, self.unwilling = refusing, unwilling
        self.num_submitted = 0
        self.owner: MovingReplica = self

    async def submit(self, work: Assignment, _: Any, on_outage: Any) -> Admitted | Rejected:
        self.num_submitted += 1
        self.owner = self
        if self.name == "a":
            on_outage()
        if self.owner.name in self.refusing:
            return Rejected("overloaded", f"{self.owner.name} is full", 1.0)
        return Admitted(self.owner.name)

    def move(self, _: str, to: MovingReplica) -> bool:
        if to.name in self.unwilling:
            return False
        self.owner = to
        return True

    async def abort(self, _: str) -> None:
        pass


@pytest.mark.parametrize(
    ("names", "refusing", "unwilling", "answered_by", "continued_by"),
    [
        ("abc", "b", "", "c", "b"),
        # one that does not take it is not the only one
        ("abc", "", "b", "c", "c"),
        ("ab", "b", "", None, "b"),
        ("abcd", "bc", "", None, "b"),
    ],
)
def test_a_request_that_moved_before_its_verdict_is_replanned_elsewhere(
    names: str, refusing: str, unwilling: str, answered_by: str | None, continued_by: str
) -> None:
    members = [MovingReplica(name, refusing, unwilling) for name in names]
    replicas = ReplicaSet("s", cast(Any, members), 1)
    series = SimpleNamespace(registry=MetricRegistry())
    served = cast(Any, SimpleNamespace(name="s", replicas=replicas, series=series))
    submitter, moves = Submitter(), list[tuple[str, str]]()

    async def main() -> str:
        submitted = await submitter.enqueue(
            served, asked(1), on_move=lambda left, to: moves.append((left, to))
        )
        return submitted.replica.name

    if answered_by is None:
        with pytest.raises(Overloaded):
            asyncio.run(main())
    else:
        assert asyncio.run(main()) == answered_by
    assert sum(one.num_submitted for one in members) <= 2
    assert members[1].num_submitted == 0, "it had it already, by the move"
    # the receipt is told of it, although it had no verdict yet
    assert moves == [("a", continued_by)]
