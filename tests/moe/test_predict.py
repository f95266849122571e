"""Predictions: two measures, and a switch that knows when it loses."""

from __future__ import annotations

import pytest

from coterie.core.errors import ConfigError
from coterie.moe.runtime.predict import PredictionTracker


def play(predictor: PredictionTracker, right: int, of: int, times: int) -> None:
    for _ in range(times):
        predictor.predict(3, range(of))
        predictor.ask(3, range(of - right, 2 * of - right))


def test_overlap_and_exact_match_are_told_apart() -> None:
    predictor = PredictionTracker()
    play(predictor, 4, 4, 1)
    play(predictor, 2, 4, 1)
    predictor.ask(5, (1, 2))
    report = predictor.report()
    assert report["predictions"] == 2
    assert report["slot_overlap"] == 0.75 and report["exact_match"] == 0.5


def test_useless_prefetches_switch_themselves_off_and_say_why() -> None:
    predictor = PredictionTracker("auto")
    play(predictor, 4, 4, 200)
    for _ in range(100):
        predictor.fetch(4, 400)
        predictor.used(1)
    assert predictor.protects and not predictor.prefetches
    report = predictor.report()
    assert "useful prefetches" in str(report["why_off"])
    assert report["wasted_bytes"] == 300 * 100
    # after a rest it tries again
    play(predictor, 4, 4, 2000)
    assert predictor.prefetches and predictor.report()["why_off"] == ""


def test_useful_prefetches_stay_on() -> None:
    predictor = PredictionTracker("auto")
    play(predictor, 4, 4, 200)
    for _ in range(200):
        predictor.fetch(4, 400)
        predictor.used(3)
    assert predictor.prefetches


def test_blind_guesses_are_not_even_used_to_protect() -> None:
    predictor = PredictionTracker("auto")
    play(predictor, 1, 8, 100)
    assert not predictor.protects and not predictor.prefetches
    assert "slot overlap" in str(predictor.report()["why_off"])


@pytest.mark.parametrize(
    ("mode", "protects", "prefetches"),
    [("off", False, False), ("protect", True, False), ("prefetch", True, True)],
)
def test_a_fixed_mode_is_kept(mode: str, protects: bool, prefetches: bool) -> None:
    predictor = PredictionTracker(mode)
    play(predictor, 1, 8, 100)
    assert (predictor.protects, predictor.prefetches) == (protects, prefetches)


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(ConfigError):
        PredictionTracker("perhaps")


def test_a_link_that_is_never_idle_ends_prefetches() -> None:
    predictor = PredictionTracker("auto")
    play(predictor, 4, 4, 200)
    for _ in range(300):
        predictor.link(idle=False)
    assert predictor.protects and not predictor.prefetches
    assert "idle link 0%" in str(predictor.report()["why_off"])
