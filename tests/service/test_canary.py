"""service/canary.py: the evidence is valid for every true rate, and the test decides rightly."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.service.canary import (
    PROMOTED,
    ROLLED_BACK,
    RUNNING,
    CanarySpec,
    CanaryTest,
    _Block,
)
from coterie.service.slo.evidence import whole

SPEC = CanarySpec("adapter", "sql", "new", "old", 0.05, "sql@2")
shares = st.floats(0.02, 0.98)


def decided(
    rng: random.Random, new: float, old: float, share: float, most: int = 400
) -> CanaryTest:
    test = CanaryTest(SPEC, 0.0, max_judged=most)
    while test.outcome == RUNNING:
        is_new = rng.random() < share
        test.judged(is_new, whole(rng.random() < (new if is_new else old)), 1.0)
    return test


@settings(max_examples=40, deadline=None)
@given(shares, shares, shares, shares, st.integers(0, 8), st.sampled_from([0.0, -0.05, -0.2]))
def test_evidence_does_not_grow_on_average_while_the_hypothesis_is_true(
    new: float, old: float, true_new: float, true_old: float, count: int, offset: float
) -> None:
    """For any estimates and any true rates inside the hypothesis, over all outcomes of a block."""
    is_worse_test = offset == 0.0
    # the estimates lie outside of the hypothesis, the true rates inside
    if is_worse_test:
        new, old = min(new, old - 0.01), max(new + 0.01, old)
        true_new, true_old = max(true_new, true_old), min(true_new, true_old)
    else:
        new = max(new, old + offset + 0.01)
        true_new = min(true_new, true_old + offset)
    if not (0 < new < 1 and 0 < old < 1 and true_new >= 0):
        return
    mean = 0.0
    for new_valid in (0, 1):
        for old_valid in range(count + 1):
            chance = (true_new if new_valid else 1 - true_new) * math.comb(count, old_valid)
            chance *= true_old**old_valid * (1 - true_old) ** (count - old_valid)
            mean += chance * math.exp(_Block(new_valid, old_valid, count).gain(new, old, offset))
    assert mean <= 1 + 1e-6


def test_a_canary_that_is_as_good_is_promoted_and_a_worse_one_rolled_back() -> None:
    rng = random.Random(7)
    good = [decided(rng, 0.95, 0.95, 0.2, 1000).outcome for _ in range(8)]
    bad = [decided(rng, 0.6, 0.95, 0.2) for _ in range(8)]
    assert good.count(PROMOTED) >= 6
    assert all(test.outcome == ROLLED_BACK for test in bad)
    # and soon: the share of callers that met it is small
    assert sum(test.figures()["candidate_judged"] for test in bad) / len(bad) < 40


@pytest.mark.full
@pytest.mark.parametrize(
    ("new", "old", "wrong"),
    [
        (0.9, 0.9, ROLLED_BACK),
        (0.6, 0.6, ROLLED_BACK),
        (0.85, 0.9, PROMOTED),
        (0.5, 0.55, PROMOTED),
    ],
)
def test_errors_are_below_alpha(new: float, old: float, wrong: str) -> None:
    """150 tests each. A rollback at the end of an undecided test is none of the two errors."""
    rng = random.Random(11)
    errors = 0
    for _ in range(150):
        test = decided(rng, new, old, 0.3, 300)
        figures = test.figures()
        by_evidence = figures["evidence_worse"] >= figures["needed"]
        errors += test.outcome == wrong and (wrong == PROMOTED or by_evidence)
    assert errors / 150 <= 0.05


def test_an_undecided_test_ends_with_a_rollback() -> None:
    test = CanaryTest(SPEC, 0.0, max_judged=30)
    # nobody to compare with: no evidence either way
    ended = [test.judged(True, whole(step % 2 == 0), float(step)) for step in range(30)]
    assert ended == [False] * 29 + [True]
    assert test.outcome == ROLLED_BACK and test.figures()["candidate_judged"] == 30
    assert not test.judged(True, whole(True), 31.0)


def test_a_test_goes_on_after_a_restart() -> None:
    rng, test = random.Random(3), CanaryTest(SPEC, 5.0)
    for _ in range(200):
        test.judged(rng.random() < 0.2, whole(rng.random() < 0.9), 6.0)
    copy = CanaryTest.restored(test.saved())
    assert copy.figures() == test.figures()
    for _ in range(50):
        is_new, answer = rng.random() < 0.2, whole(rng.random() < 0.9)
        assert test.judged(is_new, answer, 7.0) == copy.judged(is_new, answer, 7.0)
    assert copy.figures() == test.figures()


def test_a_canary_takes_its_share_and_always_the_same_requests() -> None:
    taken = [SPEC.takes(f"request-{number}") for number in range(4000)]
    assert 0.03 < sum(taken) / len(taken) < 0.07
    assert taken == [SPEC.takes(f"request-{number}") for number in range(4000)]
