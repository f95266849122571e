"""Adapters in the engine, over the toy whose rows remember which stack they ran with.

Every token is checked against a chain computed without an engine, so a slot reused in flight, a
prefix block of another stack or a row in the wrong segment changes an answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coterie.core.events import Failed, Finished, Started
from coterie.core.plan import AdapterChoice, Admitted, Assignment, Rejected
from coterie.engine.adapter_holds import PATIENCE_STEPS
from coterie.engine.engine import Engine
from tests.helpers.models.toy_model import (
    ToyAdapters,
    drain,
    make_assignment,
    make_engine,
    make_lane,
    outputs,
    true_output,
)


def stack(*digests: str, weight: float = 1.0) -> tuple[AdapterChoice, ...]:
    return tuple(AdapterChoice(digest.partition(":")[0], digest, weight) for digest in digests)


def add(engine: Engine, *work: Assignment) -> None:
    for assignment in work:
        verdict = engine.add(assignment)
        assert isinstance(verdict, Admitted), verdict


def check_outputs(events: list[Any], work: list[Assignment]) -> None:
    found = outputs(events)
    for assignment in work:
        for choice in range(assignment.sampling.n or 1):
            assert found[assignment.request_id, choice] == true_output(assignment, choice)


@pytest.mark.parametrize("batching", ["mixed", "grouped"])
def test_many_stacks_in_few_seats_under_pressure(batching: str) -> None:
    """Preemption, prefix sharing within a stack, eviction: every answer is its own stack's."""
    pool = ToyAdapters(3, load_ticks=2)
    lane = make_lane(num_blocks=24, max_step_tokens=24)
    engine = make_engine(lane, adapters=pool, batching=batching)
    stacks = [(), stack("a"), stack("b:3"), stack("a", "b:3"), stack("a", weight=0.5), stack("c:5")]
    work = [
        make_assignment(
            f"r{i}", range(1, 8 + i % 5), max_tokens=14, adapters=stacks[i % 6], temperature=i % 2
        )
        for i in range(24)
    ]
    add(engine, *work)
    check_outputs(drain(engine, pool=pool), work)
    stats = engine.stats()
    assert stats["preemptions"] > 0 and stats["adapter_evictions"] > 2
    assert stats["prefix_hits_tokens"] > 0 and not pool.users


def test_a_stack_that_is_loaded_blocks_nobody() -> None:
    """The best-ranked waits for its adapter; everybody else runs meanwhile, and then it."""
    pool = ToyAdapters(4, load_ticks=20)
    engine = make_engine(adapters=pool)
    slow = make_assignment("slow", [1, 2, 3], adapters=stack("cold"), priority=9)
    others = [make_assignment(f"r{i}", [4, 5, i], max_tokens=6) for i in range(3)]
    add(engine, slow, *others)
    events: list[Any] = []
    for _ in range(12):
        pool.tick()
        events += engine.step()
    assert {e.request_id for e in events if isinstance(e, Finished)} == {"r0", "r1", "r2"}
    assert not any(e.request_id == "slow" for e in events)
    events += drain(engine, pool=pool)
    check_outputs(events, [slow, *others])


def test_a_failed_load_fails_exactly_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    pool = ToyAdapters(4, load_ticks=3)
    engine = make_engine(adapters=pool)
    bad = [make_assignment(f"bad{i}", [1, i], adapters=stack("bad"), n=1 + i) for i in range(2)]
    good = [make_assignment("good", [1, 2], adapters=stack("a")), make_assignment("base", [1, 2])]
    add(engine, *bad, *good)
    events = drain(engine, pool=pool)
    failed = {e.request_id: e for e in events if isinstance(e, Failed)}
    assert failed.keys() == {"bad0", "bad1"}
    assert {e.code for e in failed.values()} == {"weights_error"}
    # the words of a weights error name files: those are for the log
    assert all("bad" in e.message and "safetensors" not in e.message for e in failed.values())
    assert "adapter.safetensors is broken" in {vars(r).get("reason") for r in caplog.records}
    check_outputs(events, good)
    assert not pool.users and engine.stats()["waiting"] == 0


def test_refusals() -> None:
    engine = make_engine(make_lane(num_blocks=8), adapters=ToyAdapters(2))
    cases = [
        (make_assignment("x", [1], adapters=stack("none")), "weights_error"),
        (make_assignment("x", [1] * 22, adapters=stack("soft:10")), "context_length_exceeded"),
        (
            make_assignment("x", [1] * 6, num_beams=2, max_tokens=4, adapters=stack("s:10")),
            "context_length_exceeded",
        ),
        # ids behind the vocabulary are the engine's own
        (make_assignment("x", [48], adapters=stack("soft:10")), "invalid_request"),
    ]
    for assignment, code in cases:
        verdict = engine.add(assignment)
        assert isinstance(verdict, Rejected) and verdict.code == code, assignment
    add(engine, fits := make_assignment("y", [1] * 21, max_tokens=None, adapters=stack("soft:10")))
    events = drain(engine)
    assert outputs(events)["y", 0] == true_output(fits, count=1)


def test_slots_are_not_reused_in_flight() -> None:
    """Loads one after the other into a pool with one slot to spare, while "a" runs."""
    pool = ToyAdapters(2)
    engine = make_engine(make_lane(num_blocks=200), adapters=pool)
    long = make_assignment("long", [1, 2, 3], max_tokens=120, adapters=stack("a:2"))
    add(engine, long)
    events: list[Any] = []
    work = [long]
    for number in range(20):
        work.append(make_assignment(f"r{number}", [4, 5], adapters=stack(f"b{number}:1")))
        add(engine, work[-1])
        for _ in range(4):
            events += engine.step()
            engine.check()
    check_outputs(events + drain(engine), work)
    assert pool.num_evictions >= 19


def test_the_same_name_with_other_bytes_is_another_adapter() -> None:
    """A reload under one name: no block of the former, not even for the same prompt."""
    pool = ToyAdapters(4)
    engine = make_engine(adapters=pool)
    versions = [
        (AdapterChoice("name", "old"),),
        (AdapterChoice("name", "new"),),
        (AdapterChoice("name", "new", 0.5),),
        (),
    ]
    work = [
        make_assignment(f"r{i}", range(1, 20), adapters=versions[i % 4], session="s")
        for i in range(8)
    ]
    for i, assignment in enumerate(work):
        add(engine, assignment)
        events = drain(engine)
        check_outputs(events, [assignment])
        started = next(e for e in events if isinstance(e, Started))
        assert started.cached_tokens == (0 if i < 4 else 16)


def hot_stream(
    engine: Engine, pool: ToyAdapters, steps: int, *, tokens: int = 10
) -> tuple[list[Any], list[Assignment]]:
    """Two hot stacks that always have somebody waiting."""
    events: list[Any] = []
    work: list[Assignment] = []
    for step in range(steps):
        if len(work) - sum(isinstance(e, Finished) for e in events) < 8:
            hot = stack("hot0" if len(work) % 2 else "hot1")
            new = make_assignment(
                f"hot{len(work)}", [step % 40, 7], max_tokens=tokens, adapters=hot, arrived_at=step
            )
            add(engine, new)
            work.append(new)
        pool.tick()
        events += engine.step()
        engine.check()
        if not any(a.request_id[:4] == "cold" for a in work) and step == 5:
            cold = [
                make_assignment(f"cold{i}", [9, i], max_tokens=4, adapters=stack(f"c{i}"))
                for i in range(3)
            ]
            add(engine, *(replace(one, arrived_at=5.0) for one in cold))
            work += cold
    return events, work


def test_a_cold_stack_does_not_starve_behind_hot_ones() -> None:
    """Two holds, two stacks that never run dry: three cold ones still come, one after the other,
    each after at most the patience, the longest output of a running request and its own."""
    pool = ToyAdapters(2)
    engine = make_engine(make_lane(num_blocks=200, max_sequences=4), adapters=pool)
    # of the hot ones at most ten tokens and a prefill; of each cold one four
    bound = 3 * (PATIENCE_STEPS + 11 + 5)
    events, work = hot_stream(engine, pool, 5 + bound)
    ended = {e.request_id for e in events if isinstance(e, Finished)}
    assert {"cold0", "cold1", "cold2"} <= ended
    # and it is the hot ones that had most of the time
    assert len(ended) > 12
    check_outputs(events + drain(engine, pool=pool), work)


def test_a_higher_priority_takes_the_seat_at_once() -> None:
    pool = ToyAdapters(1)
    engine = make_engine(adapters=pool)
    low = [
        make_assignment(f"low{i}", [1, i], max_tokens=60, priority=1, adapters=stack("a"))
        for i in range(3)
    ]
    add(engine, *low)
    events = [event for _ in range(4) for event in engine.step()]
    urgent = make_assignment("urgent", [9, 9], max_tokens=5, priority=5, adapters=stack("b"))
    equal = make_assignment("equal", [9, 8], max_tokens=5, priority=1, adapters=stack("c"))
    add(engine, urgent, equal)
    for _ in range(8):
        pool.tick()
        events += engine.step()
        engine.check()
    assert [e.request_id for e in events if isinstance(e, Finished)] == ["urgent"]
    events += drain(engine, pool=pool)
    ends = {e.request_id: e.timings.num_preemptions for e in events if isinstance(e, Finished)}
    assert ends["urgent"] == ends["equal"] == 0 and ends["low0"] == 1
    check_outputs(events, [*low, urgent, equal])


def test_room_goes_to_the_highest_priority_that_waits() -> None:
    """Not to whoever asked for theirs first, and among equals to the longest wait."""
    pool = ToyAdapters(1)
    engine = make_engine(adapters=pool)
    first = make_assignment("first", [1, 2], max_tokens=12, adapters=stack("a"), priority=5)
    add(engine, first)
    events = engine.step()
    names = (("low", "b", 0), ("high", "c", 3), ("equal", "d", 3))
    work = [
        make_assignment(name, [3, 4], max_tokens=3, adapters=stack(digest), priority=priority)
        for name, digest, priority in names
    ]
    for assignment in work:
        add(engine, assignment)
        events += engine.step()
    events += drain(engine, pool=pool)
    check_outputs(events, [first, *work])
    ended = [event.request_id for event in events if isinstance(event, Finished)]
    assert ended == ["first", "high", "equal", "low"]


def test_beams_and_forks_hold_their_stack_together() -> None:
    """One seat: beams that wait for a sibling in the queue must not lock it for ever."""
    pool = ToyAdapters(1)
    lane = make_lane(num_blocks=16, max_sequences=3, max_step_tokens=8)
    engine = make_engine(lane, adapters=pool)
    beams = [
        make_assignment(
            f"beam{i}", range(1, 8), num_beams=3, max_tokens=9, adapters=stack(f"b{i}:2")
        )
        for i in range(2)
    ]
    forks = [
        make_assignment(f"fork{i}", range(2, 9), n=4, temperature=1.0, adapters=stack(f"f{i}"))
        for i in range(2)
    ]
    add(engine, beams[0], forks[0], beams[1], forks[1])
    events = drain(engine, pool=pool)
    check_outputs(events, forks)
    alone = make_engine(make_lane(num_blocks=100), adapters=ToyAdapters(1))
    for beam in beams:
        add(alone, beam)
        assert outputs(drain(alone))[beam.request_id, 0] == outputs(events)[beam.request_id, 0]
    assert not pool.users


def test_an_abort_gives_the_seat_back_at_once() -> None:
    pool = ToyAdapters(1)
    engine = make_engine(adapters=pool)
    add(engine, make_assignment("a", [1], max_tokens=90, n=3, adapters=stack("a"), temperature=1.0))
    engine.step()
    add(engine, make_assignment("w", [1], adapters=stack("w")))
    engine.step()
    add(engine, b := make_assignment("b", [1], adapters=stack("b")))
    engine.abort("w")
    engine.abort("a")
    engine.check()
    assert not pool.users
    check_outputs(drain(engine, pool=pool), [b])
    assert engine.lane_states()[0].resident_adapters == pool.resident() != ()
