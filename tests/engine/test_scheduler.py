"""The scheduler alone: order, budgets, preemption, adapter turns, sessions and forks."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

import coterie.engine.scheduler as scheduler_module
from coterie.core.errors import ConfigError
from coterie.core.events import Event, Finished, TimeSpent
from coterie.core.lane import LaneConfig
from coterie.core.plan import AdapterChoice, stack_key
from coterie.engine.adapter_holds import AdapterHolds
from coterie.engine.draw import DrawState
from coterie.engine.engine import FIRST_GUESS_S, DeficitRoundRobin, LaneThroughput
from coterie.engine.scheduler import MAX_PASSED_OVER, AdapterTurns, Scheduler
from coterie.engine.sequence import (
    BASE,
    Sequence,
    SequenceAdapters,
    SequenceStatus,
    TenantShare,
)
from coterie.engine.step import StepPlan
from tests.helpers.models.toy_model import ToyAdapters, make_assignment, make_engine, make_lane

order = itertools.count()


def front_of(name: str) -> SequenceAdapters:
    adapters = (AdapterChoice(name, name),)
    return SequenceAdapters(stack_key(adapters), adapters)


def make_sequence(
    prompt: int | list[int], *, priority: int = 5, key: str = "", **rest: Any
) -> Sequence:
    tokens = [next(order) + 1000] * prompt if isinstance(prompt, int) else list(prompt)
    number = next(order)
    return Sequence(
        request_id=f"r{number}",
        choice=0,
        tokens=tokens,
        num_prompt=len(tokens),
        max_total=rest.pop("max_total", 200),
        front=front_of(key) if key else BASE,
        root=b"root",
        rank=(-priority, float(number), number, 0),
        draw=DrawState(seed=0, choice=0),
        **rest,
    )


def advance(scheduler: Scheduler) -> StepPlan | None:
    """One step: everyone who draws gets a token, whoever is full ends."""
    plan = scheduler.schedule()
    scheduler.check()
    if plan is not None:
        assert plan.num_tokens == sum(row.num_tokens for row in plan.rows)
        assert plan.num_tokens <= scheduler.config.max_step_tokens
        scheduler.commit(plan)
        for sequence in plan.draws:
            sequence.tokens.append(7)
            if len(sequence.tokens) >= sequence.max_total:
                scheduler.end(sequence)
        scheduler.check()
    return plan


def members(plan: StepPlan | None) -> list[Sequence]:
    assert plan is not None
    return [row.sequence for row in plan.rows]


def test_priority_then_arrival() -> None:
    scheduler = Scheduler(make_lane(max_sequences=2, max_step_tokens=8))
    early, late = make_sequence(4), make_sequence(4)
    urgent = make_sequence(4, priority=9)
    for sequence in (late, early, urgent):
        scheduler.add(sequence)
    assert members(advance(scheduler)) == [urgent, early]
    assert late.status is SequenceStatus.WAITING


def test_one_plan_mixes_chunks_and_decode() -> None:
    scheduler = Scheduler(make_lane(max_step_tokens=10))
    scheduler.add(short := make_sequence(3))
    advance(scheduler)
    scheduler.add(long := make_sequence(25))
    shapes = []
    for _ in range(4):
        plan = advance(scheduler)
        assert plan is not None
        shapes.append([(r.sequence is long, r.start, r.num_tokens, r.phase) for r in plan.rows])
    assert shapes[0] == [(False, 3, 1, "decode"), (True, 0, 9, "prefill")]
    assert shapes[1][1] == (True, 9, 9, "prefill")
    assert shapes[2][1] == (True, 18, 7, "prefill")
    assert shapes[3] == [(False, 6, 1, "decode"), (True, 25, 1, "decode")]
    assert short.num_output == 5


def test_a_large_step_scores_few_prompt_tokens() -> None:
    """Each of them needs a row of logits."""
    lane = make_lane(num_blocks=4096, context=400, max_sequences=32, max_step_tokens=8192)
    scheduler = Scheduler(lane)
    for number in range(20):
        scheduler.add(sequence := make_sequence(150 + number, max_total=180))
        sequence.draw.prompt_logprobs = 0
    scheduler.add(plain := make_sequence(300, max_total=310))
    first = advance(scheduler)
    assert first is not None
    assert [row.num_tokens for row in first.rows if row.sequence is plain] == [300]
    assert sum(row.num_tokens for row in first.rows if row.sequence is not plain) == 512
    while scheduler.has_work:
        plan = advance(scheduler)
        assert plan is not None
        assert sum(row.num_tokens for row in plan.rows if row.num_tokens > 1) <= 512


def test_prompts_leave_steps_short_while_others_decode() -> None:
    scheduler = Scheduler(make_lane(max_step_tokens=40, max_mixed_tokens=8))
    scheduler.add(make_sequence(30))
    # nothing decodes: the whole prompt; then only so many tokens of the next one
    assert [row.num_tokens for row in advance(scheduler).rows] == [30]  # type: ignore[union-attr]
    scheduler.add(make_sequence(20))
    steps = [advance(scheduler) for _ in range(4)]
    counts = [[row.num_tokens for row in plan.rows] for plan in steps if plan is not None]
    assert counts == [[1, 8], [1, 8], [1, 4], [1, 1]]
    # the same for a lane beside others that have work
    scheduler = Scheduler(make_lane(max_step_tokens=40, max_mixed_tokens=8))
    scheduler.add(make_sequence(30))
    plan = scheduler.schedule(shared=True)
    assert plan is not None and plan.num_tokens == 8


def test_a_prompt_may_be_limited_to_short_steps() -> None:
    """That of a shadow: whoever comes waits for the end of a step."""
    scheduler = Scheduler(make_lane(max_step_tokens=40))
    scheduler.add(make_sequence(20, share=TenantShare("shadow", step_tokens=8)))
    steps = [advance(scheduler) for _ in range(2)]
    scheduler.add(make_sequence(20))
    steps += [advance(scheduler) for _ in range(2)]
    counts = [[row.num_tokens for row in plan.rows] for plan in steps if plan is not None]
    assert counts == [[8], [8], [4, 20], [1, 1]]


def test_admission_needs_prompt_and_one_step() -> None:
    scheduler = Scheduler(make_lane(num_blocks=4, block_size=4, max_step_tokens=32))
    scheduler.add(exact := make_sequence(15, max_total=16))
    assert members(advance(scheduler)) == [exact]
    scheduler = Scheduler(make_lane(num_blocks=4, block_size=4, max_step_tokens=32))
    scheduler.add(make_sequence(8, max_total=12))
    scheduler.add(second := make_sequence(4, max_total=16))
    # 3 blocks for the first, 2 for the second: it waits until the first has ended
    assert len(members(advance(scheduler))) == 1
    while second.status is SequenceStatus.WAITING:
        assert advance(scheduler) is not None
    assert len(scheduler.running) == 1


def test_only_a_strictly_higher_priority_preempts() -> None:
    scheduler = Scheduler(make_lane(num_blocks=8, block_size=4, max_step_tokens=64))
    old, young = make_sequence(12, priority=3), make_sequence(12, priority=3)
    scheduler.add(old)
    scheduler.add(young)
    advance(scheduler)
    scheduler.add(equal := make_sequence(4, priority=3))
    advance(scheduler)
    assert equal.status is SequenceStatus.WAITING and scheduler.num_preemptions == 0
    scheduler.add(urgent := make_sequence(12, priority=4))
    advance(scheduler)
    assert urgent.status is old.status is SequenceStatus.RUNNING
    assert young.status is SequenceStatus.WAITING and young.num_preemptions == 1
    assert scheduler.waiting[0] is young


def test_nobody_is_preempted_in_vain() -> None:
    """The urgent one would not fit even without all that rank below it."""
    scheduler = Scheduler(make_lane(num_blocks=8, block_size=4, max_step_tokens=64))
    scheduler.add(make_sequence(20, priority=7))
    scheduler.add(low := make_sequence(4, priority=1))
    advance(scheduler)
    scheduler.add(urgent := make_sequence(16, priority=5))
    advance(scheduler)
    assert low.status is SequenceStatus.RUNNING and urgent.status is SequenceStatus.WAITING
    assert scheduler.num_preemptions == 0


def test_growth_takes_from_the_youngest_and_everyone_ends() -> None:
    scheduler = Scheduler(make_lane(num_blocks=9, block_size=2, max_step_tokens=16))
    work = [make_sequence(3, max_total=16) for _ in range(5)]
    for sequence in work:
        scheduler.add(sequence)
    finished: list[Sequence] = []
    for _ in range(400):
        if not scheduler.has_work:
            break
        assert advance(scheduler) is not None
        finished += [s for s in work if s.status is SequenceStatus.ENDED and s not in finished]
    assert finished == work and scheduler.num_preemptions > 0
    assert work[0].num_preemptions == 0
    assert scheduler.space.cache.num_available == 9


def test_preempted_sequences_find_their_blocks_again() -> None:
    scheduler = Scheduler(make_lane(num_blocks=20, block_size=4, max_step_tokens=64))
    scheduler.add(sequence := make_sequence(30))
    for _ in range(4):
        advance(scheduler)
    scheduler._preempt(sequence)
    plan = advance(scheduler)
    assert plan is not None and plan.rows[0].start == 32
    assert scheduler.space.prefix_query_tokens == 30


def test_copy_on_write() -> None:
    scheduler = Scheduler(make_lane(block_size=4))
    leader = make_sequence([1, 2, 3, 4, 5, 6])
    follower = make_sequence([1, 2, 3, 4, 5, 6], status=SequenceStatus.FOLLOWING)
    leader.followers.append(follower)
    scheduler.add(leader)
    plan = advance(scheduler)
    assert plan is not None and plan.draws == [leader, follower] and plan.draw_rows == [0, 0]
    assert follower.blocks == leader.blocks[:2]
    plan = advance(scheduler)
    assert plan is not None
    # one of the two copies the half-filled block, the other keeps it; the full one stays shared
    assert len(plan.copies) == 1 and leader.blocks[0] == follower.blocks[0]
    assert leader.blocks[1] != follower.blocks[1]
    assert plan.copies[0][0] in (leader.blocks[1], follower.blocks[1])
    plan = advance(scheduler)
    assert plan is not None and not plan.copies


def test_an_ended_sequence_becomes_its_sessions_entry() -> None:
    scheduler = Scheduler(make_lane(block_size=4))
    scheduler.add(good := make_sequence([1] * 9))
    scheduler.add(bad := make_sequence([2] * 9))
    advance(scheduler)
    scheduler.end(good, session=("t", "s"))
    scheduler.end(bad)
    cache = scheduler.space.cache
    ((session, blocks),) = cache._sessions.items()
    assert session == ("t", "s") and list(blocks) == cache.match(good.chain[:2])
    scheduler.check()


def test_a_cold_adapter_key_never_starves() -> None:
    config = make_lane(num_blocks=400, context=900, max_sequences=8)
    scheduler = Scheduler(config, AdapterHolds(ToyAdapters(4)), grouped=True)
    hot = [make_sequence(4, priority=6, key="hot", max_total=500) for _ in range(5)]
    cold = [make_sequence(4, key=f"cold{i}", max_total=500) for i in range(3)]
    for sequence in (*hot, *cold):
        scheduler.add(sequence)
    waited = dict.fromkeys((s.adapter_key for s in (hot[0], *cold)), 0)
    for _ in range(200):
        plan = advance(scheduler)
        assert plan is not None and len(plan.segments) == 1
        served = plan.segments[0].stack.key
        assert {row.sequence.adapter_key for row in plan.rows} == {served}
        if served == hot[0].adapter_key:
            assert len(plan.rows) <= 5
        for key in waited:
            waited[key] = 0 if key == served else waited[key] + 1
            assert waited[key] < MAX_PASSED_OVER + len(waited)
    # yet the hot key keeps most of the steps
    assert hot[0].num_output > 80 > cold[0].num_output > 20


def test_one_step_serves_every_stack_in_segments() -> None:
    """Rows are chosen by rank within the step's budget and then sorted, those without first."""
    config = make_lane(num_blocks=200, max_sequences=8, max_step_tokens=20)
    scheduler = Scheduler(config, AdapterHolds(ToyAdapters(4)))
    work = [make_sequence(3, key=key) for key in ("a", "", "b", "a", "")]
    for sequence in work:
        scheduler.add(sequence)
    advance(scheduler)
    scheduler.add(late := make_sequence(30, key="b"))
    for _ in range(3):
        plan = advance(scheduler)
        assert plan is not None and plan.num_tokens <= 20
        keys = [row.sequence.adapter_key for row in plan.rows]
        assert keys == sorted(keys) and keys[:2] == ["", ""] and len(keys) == 6
        assert plan.rows[plan.segments[-1].last - 1].sequence.adapter_key == keys[-1]
        shares = {share.stack.key: (share.first, share.last) for share in plan.segments}
        assert shares == {key: (keys.index(key), 6 - keys[::-1].index(key)) for key in keys[2:]}
        for draw, row in zip(plan.draws, plan.draw_rows, strict=True):
            assert plan.rows[row].sequence is draw
    assert late.num_output == 2 and [s.num_output for s in work] == [4] * 5


def test_turns_clear_when_one_key_is_left() -> None:
    turns = AdapterTurns()
    for _ in range(3):
        assert turns.pick(["a", "b"]) == "a"
    assert turns.pick(["b"]) == "b"
    assert [turns.pick(["a", "b"]) for _ in range(5)] == ["a"] * 4 + ["b"]


class FakeLane:
    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.busy = True


def test_lanes_get_tokens_by_weight() -> None:
    lanes = [FakeLane(1.0), FakeLane(2.0), FakeLane(5.0)]
    turns = DeficitRoundRobin(lanes, lambda lane: lane.busy)
    served = [0, 0, 0]
    costs = (512, 40, 64)
    for _ in range(4000):
        index = turns.order()[0]
        served[index] += costs[index]
        turns.charge(index, costs[index])
    shares = [tokens / sum(served) for tokens in served]
    assert shares == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.02)


def test_an_idle_lane_saves_nothing_up() -> None:
    lanes = [FakeLane(1.0), FakeLane(1.0)]
    turns = DeficitRoundRobin(lanes, lambda lane: lane.busy)
    lanes[1].busy = False
    for _ in range(100):
        assert turns.order() == [0]
        turns.charge(0, 500)
    lanes[1].busy = True
    served = []
    for _ in range(40):
        served.append(turns.order()[0])
        turns.charge(served[-1], 32)
    assert 19 <= sum(served) <= 21


def test_pace_follows_the_measured_rate() -> None:
    pace = LaneThroughput()
    assert pace.retry_after_s(256, 1000) == FIRST_GUESS_S
    for step in range(400):
        pace.record(0.1, 64, num_ended=step % 5 == 0)
    # two requests end per second: an eighth of 256 is gone in 16 s
    assert pace.retry_after_s(256, 1000) == pytest.approx(16.0, rel=0.1)
    assert pace.first_token_s(640, 0) == pytest.approx(1.1, rel=0.05)
    assert pace.first_token_s(640, 4) == pytest.approx(3.1, rel=0.1)
    for _ in range(6000):
        pace.record(0.02, 64, num_ended=1)
    assert pace.retry_after_s(256, 1000) == pytest.approx(0.64, rel=0.1)


def test_lane_settings_are_checked() -> None:
    for wrong in (
        {"num_blocks": -1},
        {"context": -1},
        {"block_size": 0},
        {"max_queue": 0},
        {"weight": 0.0},
        {"kv_cache_slots": -1},
        {"max_sequences": 64, "max_step_tokens": 32},
        {"max_step_tokens": -1},
        {"max_mixed_tokens": -1},
    ):
        with pytest.raises(ConfigError):
            make_lane(**wrong)
    # open until a worker has divided its KV bytes: no engine takes it so
    for open_yet in ({"num_blocks": 0}, {"context": 0}, {"max_step_tokens": 0}):
        with pytest.raises(ConfigError, match=f"{next(iter(open_yet))} must be at least 1"):
            make_engine(make_lane(**open_yet))
    assert LaneConfig(name="a", num_blocks=10, context=1000).capacity_tokens == 160
    assert LaneConfig(name="a", num_blocks=10, context=50).table_width == 4


@pytest.mark.parametrize(
    ("given", "kind", "tokens"),
    [
        ((0, 0), "cpu", (512, 0)),
        ((0, 0), "cuda", (8192, 2048)),
        ((256, 64), "cuda", (256, 64)),
        ((256, 64), "cpu", (256, 64)),
    ],
)
def test_tokens_of_a_step_suit_the_device(
    given: tuple[int, int], kind: str, tokens: tuple[int, int]
) -> None:
    step, mixed = given
    lane = LaneConfig("a", max_step_tokens=step, max_mixed_tokens=mixed).for_device(kind)
    assert (lane.max_step_tokens, lane.max_mixed_tokens) == tokens


def test_steps_that_copy_experts_are_as_large_as_possible() -> None:
    lane = LaneConfig("a", max_step_tokens=0)
    assert lane.for_device("cuda", copies_experts=True).max_mixed_tokens == 0
    given = LaneConfig("a", max_step_tokens=0, max_mixed_tokens=64)
    assert given.for_device("cuda", copies_experts=True).max_mixed_tokens == 64


def untimed(events: Iterable[Event]) -> list[Event]:
    """Without the seconds that stages took, which vary."""
    return [
        replace(event, timings=replace(event.timings, spent=TimeSpent()))
        if isinstance(event, Finished)
        else event
        for event in events
    ]


# ten every time, the others with all tests
SEEDS = [*range(10), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(10, 25))]


@pytest.mark.parametrize("seed", SEEDS)
def test_decode_steps_are_planned_as_any_others(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines step by step, one without the short way: same events, blocks and tables."""
    monkeypatch.setattr(scheduler_module, "MIN_ARRAY_ROWS", 1)
    rng = random.Random(seed)
    lane = make_lane(
        block_size=rng.choice([2, 4]),
        num_blocks=rng.choice([16, 40, 200]),
        max_sequences=6,
        context=32,
        kv_cache_slots=rng.choice([0, 2]),
    )
    short, plain = make_engine(lane), make_engine(lane)
    schedulers = [engine._lanes[0].scheduler for engine in (short, plain)]
    schedulers[1]._schedule_decoding = lambda: None  # type: ignore[method-assign]
    for number in range(80):
        if number < 50 and rng.random() < 0.3:
            prompt = [rng.randint(1, 3) for _ in range(rng.randint(1, 9))]
            shape = rng.choice([(1, 1), (1, 1), (3, 1), (2, 2)])
            request = make_assignment(
                f"r{number}", prompt, n=shape[0], num_beams=shape[1], ignore_eos=False,
                max_tokens=rng.randint(1, 20), temperature=rng.choice([0.0, 1.0]),
                session=rng.choice(["", "s"]), tenant=rng.choice(["t", "u"]),
            )  # fmt: skip
            assert short.add(request) == plain.add(request)
        elif rng.random() < 0.1:
            aborted = f"r{rng.randint(0, number)}"
            short.abort(aborted)
            plain.abort(aborted)
        assert untimed(short.step()) == untimed(plain.step())
        short.check()
        tables = [scheduler.space.tables.array for scheduler in schedulers]
        assert (tables[0] == tables[1]).all()
        caches = [scheduler.space.cache for scheduler in schedulers]
        assert caches[0]._block_of == caches[1]._block_of
        assert list(caches[0]._idle) == list(caches[1]._idle)


def served_tokens(
    shares: dict[str, TenantShare], sizes: dict[str, tuple[int, int]], places: int
) -> Counter[str]:
    """Tokens of each tenant, if all of them always have requests that wait."""
    scheduler = Scheduler(make_lane(block_size=4, num_blocks=256, max_sequences=places))
    got: Counter[str] = Counter()
    for _ in range(1500):
        waiting = Counter(sequence.share.tenant for sequence in scheduler.waiting)
        for tenant, share in shares.items():
            for _ in range(3 - waiting[tenant]):
                prompt, output = sizes[tenant]
                scheduler.add(make_sequence(prompt, max_total=prompt + output, share=share))
        plan = advance(scheduler)
        assert plan is not None
        for row in plan.rows:
            got[row.sequence.share.tenant] += row.num_tokens
    return got


def test_tenants_that_wait_get_equal_tokens_whatever_their_requests_cost() -> None:
    shares = {tenant: TenantShare(tenant) for tenant in "abc"}
    # one sends long requests, one short ones
    got = served_tokens(shares, {"a": (60, 20), "b": (4, 4), "c": (16, 8)}, 2)
    assert max(got.values()) < 1.25 * min(got.values()), got
    shares["a"] = TenantShare("a", weight=3.0)
    got = served_tokens(shares, {"a": (16, 8), "b": (16, 8), "c": (16, 8)}, 1)
    assert got["a"] == pytest.approx(3 * got["b"], rel=0.25), got
    assert got["b"] == pytest.approx(got["c"], rel=0.25), got


def test_a_higher_priority_goes_before_a_tenant_that_got_less() -> None:
    scheduler = Scheduler(make_lane(block_size=4, num_blocks=64, max_sequences=1))
    scheduler.add(first := make_sequence(8, share=TenantShare("a"), max_total=40))
    advance(scheduler)
    scheduler.add(make_sequence(8, share=TenantShare("b")))
    scheduler.add(urgent := make_sequence(8, priority=9, share=TenantShare("a")))
    scheduler.end(first)
    advance(scheduler)
    assert scheduler.running == [urgent]
