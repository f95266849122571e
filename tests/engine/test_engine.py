"""The engine end to end over the KV-faithful toy model: tokens, events, ends."""

from __future__ import annotations

from toy import (
    drain,
    make_assignment,
    make_engine,
    make_lane,
    outputs,
    true_output,
)

from coterie.core.events import Finished, Started
from coterie.core.plan import Admitted


def test_one_request() -> None:
    engine = make_engine()
    assignment = make_assignment("a", range(1, 30), max_tokens=12)
    assert isinstance(engine.add(assignment), Admitted)
    events = drain(engine)
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert outputs(events)["a", 0] == true_output(assignment)


def test_many_requests_under_pressure() -> None:
    engine = make_engine(make_lane(num_blocks=20, prefix_cache=False))
    work = [
        make_assignment(f"r{i}", range(1, 5 + 3 * i), max_tokens=20, arrived_at=i) for i in range(8)
    ]
    for assignment in work:
        assert isinstance(engine.add(assignment), Admitted)
    events = drain(engine)
    found = outputs(events)
    for assignment in work:
        assert found[assignment.request_id, 0] == true_output(assignment)
    assert engine.stats()["preemptions"] > 0


def test_choices_fork() -> None:
    engine = make_engine()
    assignment = make_assignment("a", range(1, 11), n=5, temperature=1.0, max_tokens=9)
    engine.add(assignment)
    found = outputs(drain(engine))
    for choice in range(5):
        assert found["a", choice] == true_output(assignment, choice)
