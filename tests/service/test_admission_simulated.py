"""Admission under load with a virtual clock: promises kept, nobody starved, at any load."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from benchmarks.ensemble import simulate


def simulated(load: float, **more: Any) -> dict[str, Any]:
    given = {"specialists": 4, "replicas": 24, "lanes": 1, "tenants": 4, "seed": 3}
    given |= {"requests": 1200, "warmup": 400} | more
    return simulate.Simulation(argparse.Namespace(**given), load).run()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "CALLERS", (1, 4, 8, 12))
    monkeypatch.setattr(simulate, "CLOSED_LOOP", 200)


def check(report: dict[str, Any], goodput: float) -> None:
    assert report["miss_share"] < 0.01, report
    assert report["goodput_of_capacity"] > goodput, report
    assert report["least_served_specialist"] > 0.3, report
    if report["told_to_wait"] >= 50:
        assert report["told_and_admitted"] > 0.8, report


def test_deadlines_are_kept_under_load() -> None:
    check(simulated(0.8), 0.7)


@pytest.mark.full
@pytest.mark.parametrize("load", [0.8, 1.5])
def test_deadlines_are_kept_and_tenants_get_their_share(load: float) -> None:
    report = simulated(load, replicas=64, tenants=12, requests=6000, warmup=1000)
    check(report, 0.75 if load < 1 else 0.85)
    assert report["worst_tenant_of_due"] > 0.8, report


@pytest.mark.full
@pytest.mark.parametrize("load", [0.8, 1.5])
def test_eight_lanes_of_one_engine(load: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on two cores: one engine, whose lanes take turns."""
    monkeypatch.setattr(simulate, "TOKEN_S", 0.012)
    monkeypatch.setattr(simulate, "SEQUENCE_S", 0.001)
    monkeypatch.setattr(simulate, "PROMPT_S", 0.0008)
    report = simulated(
        load, specialists=8, lanes=8, replicas=1, tenants=1, requests=3000, warmup=300
    )
    check(report, 0.55 if load < 1 else 0.85)


@pytest.mark.full
def test_breakers_trip_and_reset_in_the_simulation() -> None:
    report = simulated(0.7, specialists=9, replicas=36, requests=16_000, warmup=1000)
    assert report["breaker_trips"] == report["wrong_specialists"] == 1, report
    assert report["breaker_resets"] == 1 and report["answered_by_fallback"] > 0.5, report
    assert report["replica_ejections"] >= 1, report
