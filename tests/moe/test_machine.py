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
from coterie.moe.planner import measure, timing
from coterie.moe.planner.cost_curve import CostCurve
from coterie.moe.planner.machine import (
    BackboneTimes,
    Machine,
    MeasurementMark,
    RealRatio,
    TransferCost,
)
from coterie.moe.planner.measure import ComputeTarget, curve_of
from coterie.moe.planner.overhead import ZeroExpertStore, measure_overhead
from tests.helpers.moe.planner_cases import machine


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # compiled kernels stay where they are: their folder is not this one
    monkeypatch.setattr(kept, "state_dir", lambda: tmp_path / "state")
    return tmp_path


def test_disturbed_measurements_make_no_cost_negative() -> None:
    curve, call_s = curve_of([24e-6, 40e-6, 80e-6, 200e-6], 10e-6, 8)
    assert call_s == pytest.approx(8e-6) and curve.at(1) == pytest.approx(2e-6)
    # the call of one expert was held up, and so were those of one row
    curve, call_s = curve_of([60e-6, 6e-6, 30e-6, 150e-6], 50e-6, 8)
    assert 0 < call_s <= 3e-6 and min(curve.seconds) > 0
    assert list(curve.seconds) == sorted(curve.seconds)


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
    monkeypatch.setattr(timing, "PATIENCE_S", 0.3)
    store = ZeroExpertStore()
    place = measure.ComputeTarget("cpu", torch.get_num_threads())
    said: list[str] = []
    first = measure.ensure_measured(store, place, say=said.append)
    assert "measuring this machine, once, about" in said[0]
    # a machine that others use is told in a second line
    told = len(said)
    assert told == 1 or "the measurement was disturbed" in said[1]
    assert measure.ensure_measured(store, place, say=said.append) == first and len(said) == told
    again = measure.ensure_measured(store, place, again=True, say=said.append)
    assert sum("measuring this machine" in line for line in said) == 2
    name = measure.profile_name(store, place)
    mark = again.marks[kept.profile_mark(name)]
    assert mark.at > first.marks[kept.profile_mark(name)].at or again.profiles == first.profiles
    profile = first.profiles[name]
    assert profile.record_bytes == store.slot_bytes
    assert profile.host.rows == measure.ROWS and min(profile.host.seconds) > 0
    assert profile.read.each_s > 0 and profile.link.each_s > 0
    assert 1e8 < first.dram_bytes_s < 1e13
    assert set(mark.spreads) >= {"read", "link", "run"} and min(mark.spreads.values()) >= 0


def test_a_new_kind_of_record_is_measured_beside_the_old(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(store: ZeroExpertStore, place: ComputeTarget, known: Machine | None) -> Machine:
        made = known or _named(measure.identity(place))
        return made.with_profile(measure.profile_name(store, place), machine().profiles["p"])  # type: ignore[arg-type]

    monkeypatch.setattr(measure, "measure", measured)
    small, large, place = ZeroExpertStore(), ZeroExpertStore(), ComputeTarget("cpu", 2)
    large.fingerprint = "another"
    measure.ensure_measured(small, place)
    both = measure.ensure_measured(large, place)
    assert len(both.profiles) == 2


def marked(
    reason: str = "", age_s: float = 0.0, read_s: float = 10e-3, backbone_s: float = 1.0
) -> Machine:
    """The machine of the helpers, all of whose parts were measured like this."""
    mark = MeasurementMark(time.time() - age_s, {"read": 0.2}, reason)
    plain = replace(machine(), measured_at=mark.at, marks={kept.MACHINE: mark})
    profile = replace(plain.profiles["p"], read=TransferCost(read_s, 12e-3))
    times = BackboneTimes(CostCurve((1,), (backbone_s,)))
    return plain.with_profile("p", profile, mark).with_backbone("p", times, mark)


def test_a_disturbed_measurement_never_replaces_a_sound_one(home: Path) -> None:
    kept.store(marked())
    after = kept.store(replace(marked("others", read_s=1.0, backbone_s=9.0), layer_s=7.0))
    assert after.profiles["p"].read.each_s == 10e-3 and after.layer_s == 0.0
    assert after.backbones["p"].walk.seconds == (1.0,) and after.disturbed("p") == ""
    assert kept.load(after.identity) == after
    # nor one that is too old to be used without another try
    kept.save(marked(age_s=kept.STALE_AFTER_S + 1))
    assert kept.load(after.identity) is None
    assert kept.store(marked("others", read_s=1.0)).profiles["p"].read.each_s == 10e-3
    # a sound one replaces both
    assert kept.store(marked(read_s=3e-3)).profiles["p"].read.each_s == 3e-3


def test_a_disturbed_measurement_lives_for_minutes_and_says_so(home: Path) -> None:
    made = kept.store(marked("other processes used 90% of the processors"))
    known = kept.load(made.identity)
    assert known is not None and "used 90%" in known.disturbed("p")
    kept.save(marked("others", age_s=kept.DISTURBED_FOR_S + 1))
    assert kept.load(made.identity) is None
    assert "disturbed: others" in kept.stale(
        marked("others", age_s=kept.DISTURBED_FOR_S + 1), made.identity
    )
    # a part alone ends too, and the sound rest stays
    path_mark = MeasurementMark(time.time() - kept.DISTURBED_FOR_S - 1, {}, "others")
    sound = marked()
    kept.save(replace(sound, marks={**sound.marks, kept.profile_mark("p"): path_mark}))
    rest = kept.load(sound.identity)
    assert rest is not None and not rest.profiles and rest.backbones


def test_every_cost_is_larger_in_the_worst_case() -> None:
    spreads = {
        "read": 0.5,
        "link": 0.1,
        "run": 0.2,
        "runtime": 1.0,
        "memory": 0.25,
        "backbone": 3.0,
    }
    mark = MeasurementMark(time.time(), spreads)
    parts = (kept.MACHINE, kept.profile_mark("p"), kept.backbone_mark("p"))
    usual = replace(
        machine().with_backbone("p", BackboneTimes(CostCurve((1,), (2.0,)))),
        layer_s=1e-3,
        marks=dict.fromkeys(parts, mark),
    )
    worst, before = usual.slowest("p"), usual.profiles["p"]
    record = worst.profiles["p"]
    assert record.read.each_s == pytest.approx(1.5 * before.read.each_s)
    assert record.link.alone_s == pytest.approx(1.1 * before.link.alone_s)
    assert record.host.at(4) == pytest.approx(1.2 * before.host.at(4))
    assert worst.layer_s == 2e-3 and worst.dram_bytes_s == pytest.approx(8e9)
    # no cost is taken to be more than twice as large
    assert worst.backbones["p"].walk.seconds == (4.0,)
    assert usual.spread("p") == 1.0


def test_real_steps_correct_within_bounds_and_are_forgotten_with_their_figures(home: Path) -> None:
    known = marked().with_real("p", {"one call": RealRatio(1.4, 0.1, 40)})
    assert known.correction("p", "one call") == 1.4 and known.correction("p", "from disk") == 1.0
    assert known.model_error("p", "one call") == pytest.approx(0.1)
    assert known.model_error("p", "from disk") == kept.MODEL_ERROR
    wild = known.with_real("p", {"from disk": RealRatio(30.0, 5.0, 64)})
    assert wild.correction("p", "from disk") == kept.MOST_RATIO
    assert wild.model_error("p", "from disk") == kept.MODEL_ERROR
    later = known.with_real("p", {"one call": RealRatio(1.0, 0.1, 40)})
    assert later.correction("p", "one call") == pytest.approx(1.2)
    kept.store(known)
    assert kept.store(marked("others", backbone_s=5.0)).real == known.real
    assert not kept.store(marked(backbone_s=5.0)).real


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
