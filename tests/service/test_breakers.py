"""service/breaker/: the three state machines, with a clock that the test moves."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.service.breaker.correctness import (
    CLOSED,
    MAX_TRIP_FACTOR,
    SHADOW_ONLY,
    BreakerSettings,
    CorrectnessBreaker,
)
from coterie.service.breaker.replica import EjectionRules, ReplicaBreaker
from coterie.service.breaker.spike import (
    HIGH_LOAD,
    LOW_LOAD,
    NORMAL,
    PRIORITY_FLOOR,
    IntentThresholds,
    SpikeController,
)

QUICK = settings(max_examples=25, deadline=None)
SETTINGS = BreakerSettings(0.9, window_s=86_400, min_judged=20, breach_s=60, recovery_s=300)


def fed(
    breaker: CorrectnessBreaker, now: float, count: int, rate: float, gap_s: float = 1.0
) -> tuple[float, list[tuple[float, str]]]:
    """Answers at an even pace of which `rate` are valid, evenly spread; the changes they caused."""
    changes, due = list[tuple[float, str]](), 0.0
    for _ in range(count):
        now += gap_s
        due += rate
        valid = due >= 1
        due -= valid
        breaker.add(now, valid)
        change = breaker.look(now)
        if change is not None:
            changes.append((now, change.state))
    return now, changes


def test_regression_and_recovery() -> None:
    breaker = CorrectnessBreaker(SETTINGS)
    # a day of good answers must not hide a regression
    now, changes = fed(breaker, 0.0, 5000, 0.98)
    assert not changes
    began = now
    now, changes = fed(breaker, now, 400, 0.5)
    assert [state for _, state in changes] == [SHADOW_ONLY]
    tripped = changes[0][0]
    assert 60 < tripped - began < 120
    # still bad: stays
    now, changes = fed(breaker, now, 1000, 0.6)
    assert not changes
    # good again: reset only when it lasts
    began = now
    now, changes = fed(breaker, now, 1000, 0.99)
    assert [state for _, state in changes] == [CLOSED]
    assert changes[0][0] - began >= 300
    # the day's rate still shows what happened
    whole = breaker.window.rate(now)
    assert whole.rate is not None and 0.8 < whole.rate < 0.95


def test_a_short_breach_does_not_trip() -> None:
    breaker = CorrectnessBreaker(SETTINGS)
    now, _ = fed(breaker, 0.0, 200, 1.0)
    now, changes = fed(breaker, now, 15, 0.0)
    now, later = fed(breaker, now, 500, 1.0)
    assert not changes and not later


def test_too_few_answers_never_trip_and_never_reset() -> None:
    breaker = CorrectnessBreaker(SETTINGS)
    now, changes = fed(breaker, 0.0, 19, 0.0, gap_s=600)
    assert not changes and not breaker.recent().is_known
    breaker.force(SHADOW_ONLY, now)
    now, changes = fed(breaker, now, 19, 1.0, gap_s=600)
    assert not changes and breaker.state == SHADOW_ONLY


def test_silence_after_a_breach_trips_and_silence_never_resets() -> None:
    breaker = CorrectnessBreaker(SETTINGS)
    now, _ = fed(breaker, 0.0, 40, 0.2)
    assert breaker.state == CLOSED
    breaker.look(now + 61)
    assert breaker.state == SHADOW_ONLY
    for hour in range(48):
        breaker.look(now + 61 + 3600 * hour)
    assert breaker.state == SHADOW_ONLY


def test_flapping_input_does_not_flap() -> None:
    """Good and bad spells of five minutes each, for four hours: each trip makes the next reset
    slower."""
    breaker = CorrectnessBreaker(SETTINGS)
    now, changes = 0.0, list[tuple[float, str]]()
    for _ in range(24):
        now, some = fed(breaker, now, 300, 0.3)
        changes += some
        now, some = fed(breaker, now, 300, 1.0)
        changes += some
    assert len(changes) <= 5


@pytest.mark.full
def test_noise_around_a_healthy_rate_does_not_trip() -> None:
    """True rate 0.94 with a floor of 0.9: twelve days at an answer every 20 s."""
    trips = 0
    for seed in range(12):
        rng = random.Random(seed)
        breaker = CorrectnessBreaker(SETTINGS)
        for step in range(4320):
            breaker.add(step * 20.0, rng.random() < 0.94)
            trips += breaker.look(step * 20.0) is not None
    assert not trips


@QUICK
@given(
    st.lists(
        st.tuples(st.floats(0.1, 200), st.integers(1, 40), st.sampled_from([0.0, 0.4, 0.85, 1.0])),
        min_size=1,
        max_size=40,
    )
)
def test_changes_are_never_closer_than_the_settings_say(
    spells: list[tuple[float, int, float]],
) -> None:
    breaker = CorrectnessBreaker(SETTINGS)
    now, last, changes = 0.0, 0.0, 0
    for gap_s, count, rate in spells:
        for step in range(count):
            now += gap_s
            breaker.add(now, (step + 1) * rate % 1 < rate if rate < 1 else True)
            before = breaker.state
            change = breaker.look(now)
            if change is None:
                assert breaker.state == before
                continue
            changes += 1
            assert change.state != before
            least = SETTINGS.breach_s if before == CLOSED else SETTINGS.recovery_s
            assert now - last >= least
            assert change.rate.judged >= SETTINGS.min_judged
            last = now
    assert breaker.recovery_s(now) <= MAX_TRIP_FACTOR * SETTINGS.recovery_s
    copy = CorrectnessBreaker(SETTINGS)
    copy.restore(breaker.saved(), now)
    assert copy.saved() == breaker.saved()


def test_a_clock_that_was_set_back_before_a_restart_delays_no_change() -> None:
    began = 1e9
    before = CorrectnessBreaker(SETTINGS)
    now, changes = fed(before, began, 40, 0.5)
    assert not changes and before.saved()["since"] is not None
    # a month earlier
    restarted = now - 30 * 86_400
    after = CorrectnessBreaker(SETTINGS)
    after.restore(before.saved(), restarted)
    now, changes = fed(after, restarted, 120, 0.5)
    assert [state for _, state in changes] == [SHADOW_ONLY]
    # the bad answers are forgotten with the window that they were given in
    assert after.window.rate(now + SETTINGS.window_s * 1.1).judged == 0


def test_a_replica_is_ejected_longer_each_time() -> None:
    breaker = ReplicaBreaker(["a", "b", "c", "d"], EjectionRules(5, 30, 300, 0.5))
    now = 100.0
    for _ in range(4):
        assert not breaker.failed("a", now)
    breaker.succeeded("a", now)
    for _ in range(4):
        assert not breaker.failed("a", now)
    assert breaker.failed("a", now) and breaker.ejected(now) == {"a"}
    assert breaker.ejected(now + 29.9) == {"a"} and not breaker.ejected(now + 30)
    now += 31
    assert not any(breaker.failed("a", now) for _ in range(4)) and breaker.failed("a", now)
    assert breaker.ejected(now + 59.9) == {"a"} and not breaker.ejected(now + 60)
    # a calm time takes ejections off the count again
    now += 60 + 95
    breaker.succeeded("a", now)
    assert [breaker.failed("a", now) for _ in range(5)][-1]
    assert not breaker.ejected(now + 30)


def test_never_more_than_a_share_is_ejected_but_one_always_may_be() -> None:
    breaker = ReplicaBreaker(["a", "b", "c", "d"], EjectionRules(2, 30, 300, 0.5))
    for name in ("a", "b", "c", "d"):
        breaker.failed(name, 1.0)
        breaker.failed(name, 1.0)
    assert breaker.ejected(1.0) == {"a", "b"}
    alone = ReplicaBreaker(["a"], EjectionRules(2, 30, 300, 0.5))
    alone.failed("a", 1.0)
    assert alone.failed("a", 1.0) and alone.all_ejected(1.0)
    assert alone.back_in_s(11.0) == 20.0
    assert not alone.all_ejected(31.0)


@QUICK
@given(st.lists(st.tuples(st.floats(0, 40), st.sampled_from("abcde"), st.booleans()), max_size=200))
def test_ejections_keep_the_share_and_end(steps: list[tuple[float, str, bool]]) -> None:
    rules = EjectionRules(3, 30, 120, 0.4)
    breaker, now = ReplicaBreaker("abcde", rules), 0.0
    for gap_s, name, fails in steps:
        now += gap_s
        if fails:
            breaker.failed(name, now)
        else:
            breaker.succeeded(name, now)
        assert len(breaker.ejected(now)) <= 2
    assert not breaker.ejected(now + rules.longest_s)


USUAL = IntentThresholds(0.6, 0.2)


def test_a_spike_goes_up_and_down_in_order() -> None:
    spike = SpikeController(10.0)
    seen = []
    for second in range(40):
        if spike.loaded(1.5, float(second)):
            seen.append((second, spike.level))
    assert seen == [(10, 1), (20, 2), (30, 3)]
    for second in range(40, 80):
        if spike.loaded(0.1, float(second)):
            seen.append((second, spike.level))
    assert seen[3:] == [(45, 2), (50, 1), (55, 0)]


def test_what_each_step_does() -> None:
    spike = SpikeController(10.0)
    usual = spike.thresholds(USUAL)
    assert (usual.shadow_below, usual.spill_below, usual.priority_floor) == (0.6, 0.0, 0)
    levels = [usual]
    for second in range(31):
        if spike.loaded(2.0, float(second)):
            levels.append(spike.thresholds(USUAL))
    fewer, spilled, floored = levels[1:]
    assert fewer.shadow_below < usual.shadow_below and fewer.spill_below == 0.2
    assert spilled.spill_below > fewer.spill_below and spilled.priority_floor == 0
    assert floored == spilled
    assert spike.spill_share == 0.5 and SpikeController(10.0).spill_share == 0.0


def test_load_that_goes_up_and_down_faster_than_the_time_changes_nothing() -> None:
    spike = SpikeController(10.0)
    for step in range(1000):
        assert not spike.loaded(1.5 if step % 2 else 0.1, step * 4.0)
    assert spike.level == NORMAL


@QUICK
@given(st.lists(st.tuples(st.floats(0, 6), st.floats(0, 3)), max_size=200))
def test_a_level_changes_by_one_and_only_after_its_time(steps: list[tuple[float, float]]) -> None:
    spike, now, last = SpikeController(10.0), 0.0, -100.0
    for gap_s, load in steps:
        now += gap_s
        before = spike.level
        change = spike.loaded(load, now)
        assert spike.level == before + change and NORMAL <= spike.level <= PRIORITY_FLOOR
        if change > 0:
            assert load >= HIGH_LOAD and now - last >= 5.0
        if change < 0:
            assert load < LOW_LOAD and now - last >= 5.0
        if change:
            last = now
        limits = spike.thresholds(USUAL)
        assert limits.shadow_below <= USUAL.shadow_below
        # refusals only when requests are spilled, and that only with fewer shadows
        assert spike.accepted(5, "t") == 1.0 or spike.spill_share > 0.0
        assert not spike.spill_share or limits.spill_below > USUAL.spill_below
        assert limits.spill_below <= USUAL.spill_below or limits.shadow_below < USUAL.shadow_below
