"""What is measured once is kept, used again, and measured anew when it no longer holds."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.moe.planner import machine as kept
from coterie.moe.planner import measure
from coterie.moe.planner.cost_curve import CostCurve
from coterie.moe.planner.machine import BackboneTimes, Machine
from coterie.moe.planner.measure import ZeroExpertStore, measure_overhead
from tests.helpers.moe.planner_cases import machine


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # compiled kernels stay where they are: their folder is not this one
    monkeypatch.setattr(kept, "state_dir", lambda: tmp_path / "state")
    return tmp_path


def test_a_curve_is_straight_between_points_and_goes_on_beyond() -> None:
    curve = CostCurve((1, 5, 9), (1.0, 3.0, 11.0))
    assert [curve.at(rows) for rows in (0, 1, 3, 5, 7, 9, 10)] == [1, 1, 2, 3, 7, 11, 13]
    assert CostCurve((4,), (2.0,)).at(100) == 2.0


def test_a_kept_machine_is_the_same_after_a_round_trip(home: Path) -> None:
    curve = CostCurve((1,), (0.5,))
    known = (
        machine()
        .with_backbone("walks", BackboneTimes(curve))
        .with_backbone("p", BackboneTimes(curve, curve))
    )
    path = kept.save(known)
    assert path.is_relative_to(home)
    assert kept.load(known.identity) == known
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("field", ["cpu", "cores", "device", "torch", "kernels"])
def test_a_changed_machine_is_stale(home: Path, field: str) -> None:
    known = machine()
    kept.save(known)
    changed: dict[str, Any] = {field: 16 if field == "cores" else "another"}
    other = replace(known.identity, **changed)
    assert kept.load(other) is None
    assert kept.stale(known, other) == f"{field} changed"


def test_age_version_and_damage_make_it_stale(home: Path) -> None:
    old = replace(machine(), measured_at=time.time() - kept.STALE_AFTER_S - 1)
    path = kept.save(old)
    assert kept.load(old.identity) is None
    path.write_text(json.dumps({**kept.to_json(machine()), "version": kept.VERSION + 1}))
    assert kept.load(old.identity) is None
    path.write_text("{half a file")
    assert kept.load(old.identity) is None


def test_measuring_happens_once_and_again_when_asked(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "COLD_BYTES", 1 << 20)
    monkeypatch.setattr(measure, "_DRAM_BYTES", 1 << 22)
    store = ZeroExpertStore()
    place = measure.ComputeTarget("cpu", torch.get_num_threads())
    said: list[str] = []
    first = measure.ensure_measured(store, place, say=said.append)
    assert len(said) == 1 and "measuring this machine, once, about" in said[0]
    assert measure.ensure_measured(store, place, say=said.append) == first and len(said) == 1
    again = measure.ensure_measured(store, place, again=True, say=said.append)
    assert len(said) == 2 and again.measured_at > first.measured_at
    profile = first.profiles[measure.profile_name(store, place)]
    assert profile.record_bytes == store.slot_bytes
    assert profile.host.rows == measure.ROWS and min(profile.host.seconds) > 0
    assert profile.read.each_s > 0 and profile.link.each_s > 0
    assert 1e8 < first.dram_bytes_s < 1e13
    assert measure.lower_quartile([4.0, 1.0, 3.0, 2.0, 9.0]) == 2.0


def test_a_new_kind_of_record_is_measured_beside_the_old(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "measure_machine", lambda who, place: _named(who))
    monkeypatch.setattr(measure, "measure_profile", lambda store, place: machine().profiles["p"])
    small, large, place = ZeroExpertStore(), ZeroExpertStore(), measure.ComputeTarget("cpu", 2)
    large.fingerprint = "another"
    measure.ensure_measured(small, place)
    both = measure.ensure_measured(large, place)
    assert len(both.profiles) == 2


def test_the_runtime_has_a_cost_of_its_own() -> None:
    spent = measure_overhead("cpu")
    assert 1e-6 < spent.layer_s < 0.2 and 0 <= spent.load_s < 0.2 and 0 <= spent.both_s < 0.2
    assert 0 <= spent.beside_s <= spent.load_s


def test_costs_say_where_a_miss_comes_from() -> None:
    profile = machine().profiles["p"]
    some, none, all_of_them = (profile.costs().with_host(share) for share in (0.5, 0.0, 1.0))
    assert (some.upload_s, some.read_s) == (profile.link.each_s, profile.read.each_s)
    assert none.upload_s == profile.read.each_s
    assert (all_of_them.upload_s, all_of_them.read_s) == (profile.link.each_s, 0.0)


def _named(who: kept.MachineIdentity) -> Machine:
    return replace(machine(), identity=who, profiles={})


def test_more_rows_never_take_less_than_none() -> None:
    """Measured beside other work, the last point may lie below the one before it."""
    curve = CostCurve((1, 64, 128), (1.0, 5.0, 3.0))
    assert curve.at(96) == 4.0
    assert curve.at(128) == curve.at(10_000) == 3.0
    assert CostCurve((1, 2), (1.0, 3.0)).at(4) == 7.0
