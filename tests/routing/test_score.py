"""routing/decide.py: the three terms by hand, and what a prior is for."""

from __future__ import annotations

import random

import pytest

from coterie.core.settings import RoutingSettings
from coterie.routing.decide import PRIOR_VERDICTS, AdapterScorer, free_share, smoothed
from tests.helpers.adapters.profiles import profile


class Judged:
    def __init__(self, rates: dict[str, tuple[int, int]]) -> None:
        self.rates = rates

    def rate(self, digest: str) -> tuple[int, int]:
        return self.rates.get(digest, (0, 0))


def test_a_score_by_hand() -> None:
    """0.5 * 0.8 + 0.3 * (15 + 20 * 0.6) / (30 + 20) + 0.2 * (1 - 25/100) + 0.1 * (0.9 - 0.5)"""
    one = profile("a", quality=0.6, priority=0.9, nbytes=25)
    scorer = AdapterScorer(RoutingSettings(), Judged({one.card.digest: (15, 30)}), 0.5, 100)
    success, memory, score = scorer.scores(one, 0.8)
    assert success == pytest.approx(0.54) and memory == pytest.approx(0.75)
    assert score == pytest.approx(0.4 + 0.162 + 0.15 + 0.04)


def test_weights_are_the_settings_own() -> None:
    rng = random.Random(3)
    for _ in range(50):
        w = [rng.random() for _ in range(3)]
        settings = RoutingSettings(similarity_weight=w[0], success_weight=w[1], memory_weight=w[2])
        one = profile("a", quality=rng.random(), nbytes=rng.randint(0, 200))
        valid = rng.randint(0, 9)
        rates = Judged({one.card.digest: (valid, 9)})
        similarity = rng.random()
        success, memory, score = AdapterScorer(settings, rates, 0.5, 100).scores(one, similarity)
        terms = (similarity, success, memory)
        assert score == pytest.approx(sum(a * b for a, b in zip(w, terms, strict=True)))
        assert all(0.0 <= term <= 1.0 for term in terms)


def test_memory_never_goes_below_nothing() -> None:
    assert free_share(0, 100) == 1.0 and free_share(100, 100) == 0.0
    # the seed's term was negative here
    assert free_share(250, 100) == 0.0 and free_share(1, 0) == 0.0 and free_share(0, 0) == 0.0


def test_a_new_adapter_is_neither_buried_nor_favoured() -> None:
    usual = 0.7
    scorer = AdapterScorer(RoutingSettings(), Judged({}), usual, 100)
    # without figures of its own it stands where the fleet does
    assert scorer.scores(profile("new"), 0.0)[0] == pytest.approx(usual)
    assert scorer.scores(profile("new", quality=0.9), 0.0)[0] == pytest.approx(0.9)
    # one verdict moves it by less than a twentieth, many by all they say
    assert abs(smoothed(0, 1, usual) - usual) < 0.05 and abs(smoothed(1, 1, usual) - usual) < 0.05
    assert smoothed(900, 1000, 0.1) == pytest.approx(0.9, abs=0.02)
    # as many verdicts as the prior counts for: halfway
    assert smoothed(PRIOR_VERDICTS, PRIOR_VERDICTS, 0.5) == pytest.approx(0.75)
