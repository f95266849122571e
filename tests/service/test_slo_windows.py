"""service/slo/: sketches and windows against plain lists, for any input."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.service.slo.board import SpecialistSlo
from coterie.service.slo.correctness import (
    SLICES,
    CorrectnessWindow,
    RecentOutcomes,
    rate_of,
    wilson,
)
from coterie.service.slo.quantiles import ERROR, MAX_S, MIN_S, LatencySketch, RollingSketch

QUICK = settings(max_examples=25, deadline=None)
durations = st.floats(MIN_S, MAX_S, allow_nan=False)
SHARES = (0.5, 0.95, 0.99)


@QUICK
@given(st.lists(durations, min_size=1, max_size=200))
def test_a_quantile_is_within_the_error_of_the_true_one(values: list[float]) -> None:
    sketch = LatencySketch()
    for value in values:
        sketch.add(value)
    ordered = sorted(values)
    for share, found in zip(SHARES, sketch.quantiles(*SHARES), strict=True):
        true = ordered[max(math.ceil(share * len(ordered)), 1) - 1]
        assert abs(found - true) <= ERROR * true * 1.0001


@QUICK
@given(st.lists(durations, max_size=60), st.lists(durations, max_size=60))
def test_merged_sketches_equal_one_sketch_of_all(left: list[float], right: list[float]) -> None:
    one, two, both = LatencySketch(), LatencySketch(), LatencySketch()
    for value in left:
        one.add(value)
        both.add(value)
    for value in right:
        two.add(value)
        both.add(value)
    one.merge(two)
    assert one.buckets == both.buckets and one.count == both.count


@QUICK
@given(st.lists(st.tuples(st.floats(0, 50), durations), min_size=1, max_size=100))
def test_a_rolling_sketch_holds_the_window_and_little_more(
    steps: list[tuple[float, float]],
) -> None:
    window_s, now = 100.0, 1000.0
    rolling, seen = RollingSketch(window_s), list[tuple[float, float]]()
    for gap_s, value in steps:
        now += gap_s
        rolling.add(now, value)
        seen.append((now, value))
        count = rolling.merged(now).count
        inside = sum(at > now - window_s for at, _ in seen)
        nearly = sum(at > now - window_s * 1.09 for at, _ in seen)
        assert inside <= count <= nearly
    copy = RollingSketch(window_s)
    for index in range(rolling.newest() - 30, rolling.newest() + 1):
        copy.restore(index, rolling.part(index))
    assert copy.merged(now).buckets == rolling.merged(now).buckets
    assert rolling.merged(now + 2 * window_s).count == 0


@QUICK
@given(st.lists(st.tuples(st.floats(0, 20), st.booleans()), max_size=200), st.integers(1, 30))
def test_the_window_counts_what_is_in_it(steps: list[tuple[float, bool]], least: int) -> None:
    window_s, now = 100.0, 5000.0
    window, seen = CorrectnessWindow(window_s, least), list[tuple[float, bool]]()
    for gap_s, valid in steps:
        now += gap_s
        window.add(now, valid)
        seen.append((now, valid))
    rate = window.rate(now)
    inside = [valid for at, valid in seen if at > now - window_s]
    nearly = [valid for at, valid in seen if at > now - window_s * (1 + 2 / SLICES)]
    assert len(inside) <= rate.judged <= len(nearly)
    assert sum(inside) <= rate.valid <= sum(nearly)
    assert rate.is_known == (rate.judged >= least)
    if rate.rate is not None and rate.low is not None and rate.high is not None:
        assert 0 <= rate.low <= rate.rate <= rate.high <= 1
    copy = CorrectnessWindow(window_s, least)
    copy.restore(window.state())
    assert copy.rate(now) == rate
    assert len(window.state()) <= SLICES + 1


def test_the_interval_is_wilsons() -> None:
    # the textbook's values for 15 of 20 and for 0 of 10
    assert wilson(15, 20) == pytest.approx((0.5313, 0.8881), abs=1e-3)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-3)
    assert wilson(0, 0) == (0.0, 1.0)


def test_too_few_judged_answers_are_unknown_never_healthy() -> None:
    assert not rate_of(19, 19, 20).is_known
    assert rate_of(19, 19, 20).rate is None
    assert rate_of(20, 20, 20).rate == 1.0


@QUICK
@given(st.lists(st.booleans(), max_size=80))
def test_recent_outcomes_are_the_newest(outcomes: list[bool]) -> None:
    recent = RecentOutcomes(30, 10)
    for valid in outcomes:
        recent.add(valid)
    rate = recent.rate()
    assert (rate.valid, rate.judged) == (sum(outcomes[-30:]), len(outcomes[-30:]))
    copy = RecentOutcomes(30, 10)
    copy.restore(recent.state())
    assert copy.rate() == rate


@QUICK
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_the_preempted_share_counts_requests_not_preemptions(counts: list[int]) -> None:
    slo = SpecialistSlo(3600)
    assert slo.delivered(0).preempted_share is None
    for number in counts:
        slo.ended(10.0, number)
    delivered = slo.delivered(10.0)
    assert delivered.requests == len(counts)
    assert delivered.preempted_share == sum(map(bool, counts)) / len(counts)


def test_what_is_delivered_survives_a_restart() -> None:
    slo = SpecialistSlo(3600)
    for step in range(200):
        slo.first_token(100.0, 0.1 + step / 1000, 0.05)
        slo.tokens(100.0, 0.02, 3)
        slo.ended(100.0, step % 10 == 0)
    copy = SpecialistSlo(3600)
    stored = json.loads(json.dumps({slo.newest(): slo.part(slo.newest())}))
    copy.restore({int(index): part for index, part in stored.items()}, 101.0)
    delivered = copy.delivered(101.0)
    assert delivered == slo.delivered(101.0)
    assert delivered.ttft.count == 200 and delivered.itl.count == 600
    assert delivered.itl.p99_s == pytest.approx(0.02, rel=ERROR)
    assert delivered.admission_to_first_token_p95_s == pytest.approx(0.05, rel=ERROR)
    assert delivered.preempted_share == 0.1
    assert copy.delivered(100.0 + 2 * 3600).ttft.p95_s is None
