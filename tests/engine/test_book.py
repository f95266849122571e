"""engine/request_tracker.py: what is kept of requests that ended."""

from __future__ import annotations

from coterie.core.events import Finished
from coterie.engine.request_tracker import SLACK
from tests.helpers.models.toy_model import (
    ManualClock,
    drain,
    make_assignment,
    make_engine,
    make_lane,
)


def test_deadlines_of_ended_requests_are_forgotten() -> None:
    clock = ManualClock()
    engine = make_engine(make_lane(max_sequences=2), clock=clock)
    late = clock.now + 86_400
    engine.add(make_assignment("a", [1, 2], max_tokens=50, deadline=late - 1))
    for index in range(3 * SLACK):
        engine.add(make_assignment(f"b{index}", [1, 2], max_tokens=50, deadline=late))
        engine.abort(f"b{index}")
        assert len(engine._tracker._deadlines) <= SLACK + 4
    engine.step()
    clock.now = late
    ends = {e.request_id: e for e in drain(engine) if isinstance(e, Finished)}
    # the one that still ran has kept its own
    assert ends["a"].choices == ("timeout",)
