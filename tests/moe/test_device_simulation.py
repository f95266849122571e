"""A GPU whose kernels read experts where they are: hits, times, rows of a plan, and advice."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from coterie.core.moe import MoeSettings
from coterie.moe.dispatch.base import Demand
from coterie.moe.dispatch.table import STRATEGIES
from coterie.moe.planner import machine as machine_file
from coterie.moe.planner.advice import advise, with_smaller_experts
from coterie.moe.planner.cost_curve import CostCurve
from coterie.moe.planner.device_simulation import DeviceSimulation
from coterie.moe.planner.machine import Machine
from coterie.moe.planner.plan import (
    MemoryDivision,
    PlanCase,
    PlanRow,
    choose_in_place,
    forecast_row,
    pick,
    plan,
)
from coterie.moe.planner.simulate import BELADY, forecast
from coterie.moe.planner.step_costs import PhaseForecast
from coterie.moe.planner.workload import Workload, workload_from_heatmap
from coterie.moe.runtime.budget import ExpertSizes, TierSlots
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.runtime.trace import LayerVisit, TraceStep
from coterie.moe.store.base import ExpertGeometry
from tests.helpers.moe.planner_cases import GEOMETRY, MB, PATH, case, needs, on_gpu, skewed


def way(share: str, host: str = "100%", free: int = 4000 * MB) -> MemoryDivision:
    settings = MoeSettings(device_budget=share, host_budget=host)
    return MemoryDivision(settings, needs(free, one_memory=False))


def row(text: str, share: str, made: PlanCase | None = None, host: str = "100%") -> PlanRow:
    found = forecast_row(made or on_gpu(), way(share, host), text)
    assert found is not None
    return found


def uniform(geometry: ExpertGeometry = GEOMETRY, tokens: int = 64) -> Workload:
    load = workload_from_heatmap(
        Heatmap(geometry, np.ones((len(geometry.layers), geometry.num_experts))), "even", tokens
    )
    return replace(load, heatmap=Heatmap(geometry))


def test_all_on_the_device_is_a_captured_step() -> None:
    made = row("persistent", "100%")
    # 4 layers and the rest
    assert made.decode_tokens_s == pytest.approx(1 / 5e-4)
    assert made.one_call and not made.in_place and made.decode_hit_rate == 1.0
    # 64 rows in 4 layers of 1 ms
    assert made.prefill_tokens_s == pytest.approx(64 / 4.1e-3)
    # 8 experts of 10 MB and 20 MB of backbone at 1 TB/s
    assert made.decode_limit_tokens_s == pytest.approx(1 / 100e-6)


def test_without_slots_every_expert_is_read_but_those_in_the_buffers_of_a_prompt() -> None:
    made = row("cpu_only", "0%")
    assert made.in_place and not made.one_call and made.device_slots == 0
    # the last two of four layers stay on the device: 2 layers of 2 missing experts
    assert made.decode_hit_rate == pytest.approx(0.5)
    assert made.decode_tokens_s == pytest.approx(1 / (5e-4 + 4e-3))
    # 4 experts of 10 MB over link and CPU
    assert made.decode_limit_tokens_s == pytest.approx(25e9 / 40e6)
    # 16 experts of 10 MB in each layer at 20 GB/s, then the last layer's 1 ms
    assert made.prefill_tokens_s == pytest.approx(64 / (4 * 8e-3 + 1e-3 + 1e-4))
    assert made.prefill_limit_tokens_s == pytest.approx(64 / 32e-3)


def test_prompts_without_buffers_read_what_they_choose() -> None:
    whole = on_gpu().setup(TierSlots(0, GEOMETRY.total), in_place=True, streams=False)
    read = forecast("cpu_only", whole, skewed())
    assert read.decode.hit_rate == 0.0
    streamed = forecast("cpu_only", replace(whole, device=None), skewed())
    assert read.prefill.seconds != streamed.prefill.seconds


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_every_strategy_runs_in_place_and_more_slots_are_faster(name: str) -> None:
    made = on_gpu(skewed(power=0.8))
    rates = []
    for share in ("25%", "75%"):
        found = row(name, share, made)
        assert found.in_place and 0 < found.decode_share <= 1.0 + 1e-9
        assert 0 <= found.decode_hit_rate < 1
        rates.append(found.decode_tokens_s)
    assert rates[1] >= rates[0] * 0.97


def test_pinned_experts_hit_as_often_as_their_share() -> None:
    geometry = ExpertGeometry(tuple(range(24)), 64, 8)
    made = on_gpu(uniform(geometry))
    sizes = ExpertSizes(geometry.total, 10 * MB, 10 * MB * geometry.total)
    made = replace(made, model=replace(made.model, geometry=geometry, sizes=sizes))
    found = forecast_row(made, way("25%", free=40_000 * MB), "hot_cached_static")
    assert found is not None and found.in_place
    # a quarter in slots, and two of 24 layers in buffers
    assert found.decode_hit_rate == pytest.approx(0.25 + 0.75 * 2 / 24, abs=0.05)


@pytest.mark.parametrize("name", ["lru", "active_only"])
def test_a_step_that_places_its_misses_copies_each_once_and_without_the_cpu(name: str) -> None:
    made = row(name, "25%", on_gpu(uniform()))
    misses = 8 * (1 - made.decode_hit_rate)
    # 10 MB each, at the 20 GB/s of copies
    assert made.moved_bytes_per_token == pytest.approx(misses * 10 * MB)
    assert made.decode_tokens_s == pytest.approx(1 / (5e-4 + misses * 0.5e-3))
    pinned = row("hot_cached_static", "25%", on_gpu(uniform()))
    assert made.moved_bytes_per_token > 1.5 * pinned.moved_bytes_per_token
    # the CPU would have computed a part of what is read
    fast = replace(PATH, cpu_bytes_s=60e9, missing=CostCurve((1, 2), (1.5e-4, 3e-4)))
    made, pinned = (row(each, "25%", on_gpu(uniform(), fast)) for each in (name, pinned.strategy))
    assert made.decode_tokens_s < pinned.decode_tokens_s


@pytest.mark.parametrize(("rows", "places"), [(128, True), (129, False)])
def test_steps_of_too_many_rows_place_nothing(rows: int, places: bool) -> None:
    """The kernel places 256 pairs: 128 rows of 2 experts."""
    setup = on_gpu().setup(TierSlots(16, GEOMETRY.total), in_place=True, streams=True).device
    assert setup is not None
    simulation, outcome = DeviceSimulation("lru", setup, skewed()), PhaseForecast()
    demands = (Demand(layer, "decode", (3, 5), (rows, rows)) for layer in GEOMETRY.layers)
    step = TraceStep("decode", (tuple(LayerVisit(demand, ()) for demand in demands),))
    for _ in range(3):
        simulation.step(step, outcome)
    assert (outcome.hits, outcome.misses) == ((16, 8) if places else (0, 24))
    assert outcome.moved == outcome.misses


def test_a_step_reads_what_gets_no_slot_and_keeps_what_it_uses() -> None:
    """One slot for each layer, whose steps use two experts: nothing is copied in waves."""
    setup = on_gpu().setup(TierSlots(4, GEOMETRY.total), in_place=True, streams=True).device
    assert setup is not None
    simulation = DeviceSimulation("active_only", setup, skewed())
    seconds = []
    for used in ((3, 5), (3, 5), (5, 7), (3, 9)):
        outcome = PhaseForecast()
        demands = (Demand(layer, "decode", used, (1, 1)) for layer in GEOMETRY.layers)
        step = TraceStep("decode", (tuple(LayerVisit(demand, ()) for demand in demands),))
        simulation.step(step, outcome)
        seconds.append((outcome.hits, outcome.seconds))
    # 0.5 ms a copy, 1 ms a read, in each of 4 layers: 3 stays until 5 takes its slot
    copy_s, read_s = 4 * 0.5e-3, 4 * 1e-3
    both = 5e-4 + copy_s + read_s
    expected = [(0, both), (4, 5e-4 + read_s), (0, both), (0, both)]
    assert [hits for hits, _ in seconds] == [hits for hits, _ in expected]
    assert [each for _, each in seconds] == pytest.approx([each for _, each in expected])


def test_where_kv_may_take_slots_no_step_places_its_misses() -> None:
    """What lru loads is then copied beside the next step, as with other strategies."""
    moved = []
    for elastic in (False, True):
        settings = MoeSettings(device_budget="25%", host_budget="100%", elastic_memory=elastic)
        made = forecast_row(
            on_gpu(uniform()), MemoryDivision(settings, needs(one_memory=False)), "lru"
        )
        assert made is not None and made.in_place
        misses = 8 * (1 - made.decode_hit_rate) * 10 * MB
        moved.append(made.moved_bytes_per_token / misses)
    assert moved[0] == pytest.approx(1.0) and moved[1] > 1.5


def test_a_layer_misses_what_lost_its_slot_earlier_in_the_step() -> None:
    """Two slots for four layers of two experts: only the last layer's are there behind a step."""
    setup = on_gpu().setup(TierSlots(2, GEOMETRY.total), in_place=True, streams=True).device
    assert setup is not None
    simulation, outcome = DeviceSimulation("lru", setup, skewed()), PhaseForecast()
    demands = (Demand(layer, "decode", (3, 5), (1, 1)) for layer in GEOMETRY.layers)
    step = TraceStep("decode", (tuple(LayerVisit(demand, ()) for demand in demands),))
    for _ in range(2):
        simulation.step(step, outcome)
    assert (outcome.hits, outcome.misses, outcome.moved) == (0, 16, 16)
    assert outcome.seconds == pytest.approx(2 * (5e-4 + 8 * 0.5e-3))


def test_a_plan_for_the_device_has_a_bound_and_buffers() -> None:
    rows = plan(on_gpu(), [way("25%")])
    assert {each.strategy for each in rows} >= {*STRATEGIES, BELADY}
    [bound] = [each for each in rows if each.strategy == BELADY]
    others = [each for each in rows if each.strategy != BELADY]
    assert bound.decode_tokens_s >= max(each.decode_tokens_s for each in others)
    lru = next(each for each in others if each.strategy == "lru")
    # 16 slots, and two buffers of a layer's 16 experts
    assert lru.device_slots == 16 and lru.device_bytes == 48 * 10 * MB
    # in bytes the buffers are taken from the budget
    some = row("lru", "401MB")
    assert some.device_slots == 40 - 32 and some.device_bytes == 400 * MB


def test_experts_on_disk_walk_layer_by_layer() -> None:
    made = row("lru", "25%", host="50%")
    assert not made.in_place and made.disk_bytes > 0
    plain = case("gpu", device_bytes_s=1e12)
    assert row("lru", "25%", plain, host="50%").decode_tokens_s == made.decode_tokens_s


def test_auto_keeps_adaptive_unless_another_is_clearly_faster() -> None:
    assert choose_in_place(on_gpu(uniform()), way("25%")) in ("adaptive", "hot_cached_static")
    rows = plan(on_gpu(), [way("25%")])
    assert pick(rows).strategy in {each.strategy for each in rows}
    assert choose_in_place(on_gpu(), way("100%")) == "adaptive"


def test_what_was_measured_is_kept(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_file, "state_dir", lambda: tmp_path)
    known: Machine = on_gpu().machine
    machine_file.save(known)
    assert machine_file.load(known.identity) == known


def advice(share: str, made: PlanCase | None = None) -> str:
    made, division = made or on_gpu(), way(share)
    chosen = pick(plan(made, [division]))
    found = forecast_row(made, division, chosen.strategy)
    assert found is not None
    text = advise(made, division, found)
    assert "\n" not in text and ". " not in text
    return text


def test_too_few_slots_ask_for_device_memory() -> None:
    made = on_gpu()
    made = replace(made, model=replace(made.model, kind="int4"))
    text = advice("25%", made)
    wanted = (
        r"the (link|CPU) .* is the bottleneck: (\d+\.\d) (GB|MB) more device memory, which holds "
        r"(\d+% of the|all) experts, would give about (\d+) tok/s instead of (\d+)$"
    )
    found = re.fullmatch(wanted, text)
    assert found, text
    # the figures are those of the plan itself
    share = found[4].removesuffix(" of the").replace("all", "100%")
    best = max(row(name, share, made).decode_tokens_s for name in STRATEGIES)
    assert float(found[5]) == pytest.approx(best, rel=0.01)
    assert float(found[5]) > 1.25 * float(found[6])


def test_all_on_the_device_asks_for_smaller_experts_or_another_gpu() -> None:
    assert advice("100%").startswith("the GPU itself is the bottleneck, and neither more memory")


def test_a_slow_link_and_a_slow_cpu_are_told_apart() -> None:
    fast_cpu = replace(PATH, cpu_bytes_s=50e9, read_bytes_s=5e9)
    slow_cpu = replace(PATH, cpu_bytes_s=1e9, read_bytes_s=20e9)
    assert advice("0%", on_gpu(path=fast_cpu)).startswith("the CPU with its RAM")
    assert advice("0%", on_gpu(path=slow_cpu)).startswith("the link between RAM and GPU")


def test_on_a_cpu_the_disk_asks_for_ram_and_ram_for_smaller_experts() -> None:
    made = case()
    made = replace(made, model=replace(made.model, kind="bf16"))
    settings = MoeSettings(device_budget="0%", host_budget="25%")
    disk = MemoryDivision(settings, needs(4000 * MB))
    chosen = pick(plan(made, [disk]))
    found = forecast_row(made, disk, chosen.strategy)
    assert found is not None
    text = advise(made, disk, found)
    assert text.startswith("the disk is the bottleneck: "), text
    assert "0.5 GB more RAM for experts" in text
    whole = MemoryDivision(MoeSettings(device_budget="0%", host_budget="100%"), needs(4000 * MB))
    found = forecast_row(made, whole, "cpu_only")
    assert found is not None
    text = advise(made, whole, found)
    assert text.startswith("the CPU with its RAM is the bottleneck: int4 experts would give"), text
    # 4 layers of 2 experts at 2 ms each, 5 ms beside them; int4 takes 20 of 64 bytes
    told = float(text.split("about ")[1].split()[0])
    assert told == pytest.approx(1 / (5e-3 + 16e-3 * 20 / 64), rel=0.02)
    small = replace(made, model=replace(made.model, kind="int4"))
    assert "neither more memory nor smaller experts" in advise(small, whole, found)


def test_smaller_experts_are_smaller_everywhere() -> None:
    made = with_smaller_experts(on_gpu(), "int4", 0.25)
    assert made.model.sizes.slot_bytes == 2_500_000 and made.model.kind == "int4"
    profile, path = made.machine.profiles["p"], made.machine.device_paths["p"]
    assert profile.link.each_s == pytest.approx(0.25e-3) and path.record_bytes == 2_500_000
    assert path.missing.at(1) == pytest.approx(0.25e-3)
