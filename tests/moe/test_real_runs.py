"""What decode steps of an engine really took corrects the machine's file."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from coterie.core.moe import MoeSettings
from coterie.moe.planner import machine as kept
from coterie.moe.planner.cost_curve import CostCurve
from coterie.moe.planner.machine import BackboneTimes, Machine, MeasurementMark
from coterie.moe.planner.measure import ComputeTarget, identity, profile_name
from coterie.moe.planner.overhead import ZeroExpertStore
from coterie.moe.planner.real_runs import kind_of, learn_from, predicted_s, real_ratios
from coterie.moe.planner.step_costs import CostModel
from coterie.moe.runtime import usage
from coterie.moe.runtime.runtime import ExpertRuntime, open_experts
from coterie.moe.runtime.step import ExpertStep
from coterie.moe.runtime.usage import SampledLayer, SampledStep, StepSampler
from tests.helpers.moe.planner_cases import machine


def known() -> Machine:
    times = BackboneTimes(CostCurve((1,), (8e-3,)), CostCurve((1,), (5e-3,)))
    return machine().with_backbone("p", times, MeasurementMark(time.time()))


def priced(
    layers: tuple[SampledLayer, ...], factor: float, *, one_call: bool = False
) -> SampledStep:
    """A step that took `factor` times its prediction."""
    made = SampledStep(0.0, one_call, layers)
    found = known()
    seconds = predicted_s(found, "p", CostModel(found, found.profiles["p"]), made)
    return replace(made, seconds=seconds * factor)


def test_a_step_is_priced_from_what_it_used() -> None:
    made, costs = known(), CostModel(known(), known().profiles["p"])
    # two experts at 2 ms in one call; 8 ms and layers of 2 ms; a read of 10 ms is waited for
    whole = SampledStep(0.0, True, (SampledLayer(2, 0, 0),))
    assert predicted_s(made, "p", costs, whole) == pytest.approx(5e-3 + 4e-3)
    walked = SampledStep(0.0, False, (SampledLayer(1, 0, 0), SampledLayer(0, 0, 1)))
    assert predicted_s(made, "p", costs, walked) == pytest.approx(8e-3 + 4e-3)
    read = SampledStep(0.0, False, (SampledLayer(0, 1, 0, loads_from_disk=1),))
    assert predicted_s(made, "p", costs, read) > 8e-3 + 10e-3
    assert [kind_of(step) for step in (whole, walked, read)] == [
        "one call",
        "in memory",
        "from disk",
    ]


def test_ratios_need_many_steps_of_a_kind() -> None:
    made = known()
    costs = CostModel(made, made.profiles["p"])
    walked = (SampledLayer(1, 0, 1),)
    steps = [priced(walked, 1.3 + 0.01 * (row % 3)) for row in range(20)]
    steps += [priced(walked, 2.0, one_call=True) for _ in range(5)]
    found = real_ratios(made, "p", costs, steps)
    assert set(found) == {"in memory"}
    assert found["in memory"].ratio == pytest.approx(1.31, abs=0.005)
    assert found["in memory"].spread < 0.02 and found["in memory"].steps == 20


@pytest.fixture
def runtime() -> ExpertRuntime:
    return open_experts(ZeroExpertStore(), MoeSettings("lru", cache_capacity=4, predict="off"))


def decode(runtime: ExpertRuntime, count: int, rows: int = 1) -> None:
    with torch.inference_mode():
        for number in range(count):
            first = 4 * number % 16
            ids = torch.arange(first, first + 4, dtype=torch.int32).repeat(rows, 1)
            weights = torch.full((rows, 4), 0.25)
            runtime.run(ExpertStep(0, "decode", torch.zeros(rows, 64), ids, weights))
            runtime.end_step()


def test_only_steps_of_one_row_that_nothing_interrupted_are_kept(
    runtime: ExpertRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    switches = SimpleNamespace(ru_nivcsw=0)
    monkeypatch.setattr(usage, "getrusage", lambda who: switches)
    runtime.sampler = StepSampler()
    try:
        decode(runtime, 5)
        # the first one has no end of a step before it
        assert len(runtime.sampler.steps) == 4
        assert all(step.layers[0].loaded == 4 for step in runtime.sampler.steps)
        decode(runtime, 3, rows=2)
        assert len(runtime.sampler.steps) == 4
        decode(runtime, 1)
        switches.ru_nivcsw = 1
        decode(runtime, 1)
        assert len(runtime.sampler.steps) == 4
        decode(runtime, 1)
        assert len(runtime.sampler.steps) == 5
        decode(runtime, 2 * StepSampler.MOST)
        assert len(runtime.sampler.steps) == StepSampler.MOST
    finally:
        runtime.close()


def test_an_engine_corrects_the_file(
    runtime: ExpertRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "state_dir", lambda: tmp_path)
    monkeypatch.setattr(usage, "getrusage", lambda who: SimpleNamespace(ru_nivcsw=0))
    store, target = runtime.parts.store, ComputeTarget("cpu", torch.get_num_threads())
    name = profile_name(store, target)
    runtime.sampler = StepSampler()
    try:
        decode(runtime, 40)
        learn_from(runtime)
        assert kept.load(identity(target)) is None, "nothing was measured, so nothing is corrected"
        made = replace(known(), identity=identity(target))
        backbone, record = made.backbones["p"], made.profiles["p"]
        made = made.with_profile(name, record).with_backbone(name, backbone)
        kept.save(made)
        decode(runtime, 40)
        learn_from(runtime)
        after = kept.load(identity(target))
        assert after is not None
        # the figures of the helpers are those of a much slower machine
        [found] = after.real[name].values()
        assert found.steps >= 16
        [kind] = after.real[name]
        assert kept.LEAST_RATIO <= after.correction(name, kind) <= kept.MOST_RATIO
        assert after.profiles[name] == record and after.backbones[name] == backbone
        assert not runtime.sampler.steps
    finally:
        runtime.close()
