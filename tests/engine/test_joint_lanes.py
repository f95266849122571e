"""Steps that compute rows of several lanes: the same tokens, one KV cache, fewer steps."""

from __future__ import annotations

import random

import pytest

from coterie.core.events import Delta, Failed, Finished
from coterie.engine.engine import Engine
from coterie.engine.request_tracker import FAILED
from tests.helpers.models.toy_model import (
    ToyModel,
    drain,
    make_assignment,
    make_engine,
    make_lane,
    outputs,
    true_output,
)

NAMES = ("a", "b", "c")


def assignments(rng: random.Random, count: int) -> list:  # type: ignore[type-arg]
    return [
        make_assignment(
            f"r{index}",
            [rng.randrange(1, 30) for _ in range(rng.randrange(1, 40))],
            max_tokens=rng.randrange(1, 30),
            lane=rng.choice(NAMES),
            priority=rng.randrange(3, 7),
            n=rng.choice((1, 1, 1, 2)),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_those_of_each_request_alone(seed: int) -> None:
    """Few blocks: lanes preempt, each only its own sequences."""
    rng = random.Random(seed)
    sizes = {name: rng.randrange(24, 60) for name in NAMES}
    lanes = [make_lane(name, num_blocks=count, max_step_tokens=64) for name, count in sizes.items()]
    engine = make_engine(*lanes)
    work, events = assignments(rng, 24), []
    while work or engine.has_work():
        for _ in range(min(rng.randrange(4), len(work))):
            engine.add(work.pop())
        if rng.random() < 0.05 and engine.has_work():
            engine.abort(f"r{rng.randrange(24)}")
        events += engine.step()
        engine.check()
    told = {e.request_id: e for e in events if isinstance(e, Finished)}
    found = outputs(events)
    for assignment in assignments(random_of(seed), 24):
        ended = told[assignment.request_id]
        for choice, reason in enumerate(ended.choices):
            truth = true_output(assignment, choice)
            got = found.get((assignment.request_id, choice), [])
            assert got == (truth if reason != "abort" else truth[: len(got)])


def random_of(seed: int) -> random.Random:
    """As the test's generator was when it drew the assignments."""
    rng = random.Random(seed)
    for _ in NAMES:
        rng.randrange(24, 60)
    return rng


def steps_of(engine: Engine) -> float:
    for name in NAMES:
        for index in range(4):
            engine.add(make_assignment(f"{name}{index}", [index + 1] * 5, max_tokens=20, lane=name))
    drain(engine)
    return engine.stats()["steps"]


def test_lanes_of_one_block_size_run_in_the_same_steps() -> None:
    wide = {"max_step_tokens": 256}
    together = steps_of(make_engine(*(make_lane(name, **wide) for name in NAMES)))
    sizes = zip(NAMES, (4, 8, 16), strict=True)
    lanes = (make_lane(name, block_size=size, **wide) for name, size in sizes)
    in_turn = steps_of(make_engine(*lanes))
    assert together == 20 and in_turn == 60


def test_the_prompts_of_a_step_are_limited_for_all_lanes_together() -> None:
    model = ToyModel()
    engine = make_engine(
        *(make_lane(name, max_step_tokens=32, max_sequences=4) for name in NAMES), model=model
    )
    for name in NAMES:
        engine.add(make_assignment(f"{name}0", list(range(1, 30)) * 3, max_tokens=3, lane=name))
    firsts: list[str] = []
    while engine.has_work():
        before = model.num_rows
        for event in engine.step():
            if isinstance(event, Delta) and event.request_id not in firsts:
                firsts.append(event.request_id)
        assert model.num_rows - before <= 32 + 4
    assert len(firsts) == 3


def test_weight_decides_who_gets_the_prompt_tokens() -> None:
    lanes = [
        make_lane(name, weight=weight, num_blocks=600, context=2000, max_step_tokens=32,
                  max_sequences=8, max_queue=64)
        for name, weight in (("a", 3.0), ("b", 1.0))
    ]  # fmt: skip
    engine = make_engine(*lanes)
    for name in ("a", "b"):
        for index in range(30):
            prompt = [index + 1, *range(1, 29)] * 3
            engine.add(make_assignment(f"{name}{index}", prompt, max_tokens=1, lane=name))
    ended = {"a": 0, "b": 0}
    for _ in range(110):
        for event in engine.step():
            if isinstance(event, Finished):
                ended[event.request_id[0]] += 1
    assert ended["a"] / ended["b"] == pytest.approx(3.0, rel=0.25)


def test_a_step_that_fails_ends_its_requests_and_no_lane_is_stuck() -> None:
    model = ToyModel()
    engine = make_engine(*(make_lane(name) for name in NAMES), model=model)
    for name in NAMES:
        engine.add(make_assignment(name, [1, 2, 3], max_tokens=9, lane=name))
    engine.step()
    model.fail_next = True
    failed = [event for event in drain(engine) if isinstance(event, Failed)]
    assert {event.request_id for event in failed} == set(NAMES)
    assert {event.message for event in failed} == {FAILED}
    engine.check()
    again = make_assignment("again", [1, 2, 3], max_tokens=9, lane="b")
    engine.add(again)
    assert outputs(drain(engine))["again", 0] == true_output(again)
