"""The planner's arithmetic against cases worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coterie.moe.dispatch.base import Demand, Wave
from coterie.moe.dispatch.table import STRATEGIES
from coterie.moe.planner.cost_curve import CostCurve
from coterie.moe.planner.machine import BackboneTimes, Machine, TransferCost
from coterie.moe.planner.simulate import ReplaySetup, forecast, optimum, replay
from coterie.moe.planner.step_costs import (
    CostModel,
    PhaseForecast,
    SimulatedHostTier,
    WaveCounts,
    wave_counts,
)
from coterie.moe.planner.workload import Workload
from coterie.moe.runtime.budget import TierSlots
from coterie.moe.runtime.trace import Trace
from tests.helpers.moe.planner_cases import GEOMETRY, case, machine, skewed


def prices(device: str = "cpu", *, host_tier: bool = True, **changes: object) -> CostModel:
    known = machine(device, **changes)
    return CostModel(known, known.profiles["p"], host_tier)


@pytest.mark.parametrize(
    ("device", "turn", "seconds"),
    [
        # 4 residents of 1 row, 2 ms each
        ("cpu", WaveCounts(resident=(1, 1, 1, 1)), 8e-3),
        # a row curve: 4 rows take 5 ms on the host
        ("cpu", WaveCounts(host=(4, 1)), 7e-3),
        # on a CPU both sides share the cores; a device of its own hides the shorter side
        ("cpu", WaveCounts(resident=(1,), host=(1,)), 4e-3),
        ("gpu", WaveCounts(resident=(1,), host=(1,)), 2e-3),
        # copies hide behind computing, then computing behind copies: 20 of them, and the last runs
        ("cpu", WaveCounts(resident=(1,) * 4, loaded=(1,), from_host=1), 10e-3),
        ("gpu", WaveCounts(resident=(1,), loaded=(1,) * 20, from_host=20), 21e-3),
        # the disk is the longest chain: 3 reads, the last one's copy, its run
        ("cpu", WaveCounts(resident=(1,), loaded=(1, 1, 1), from_disk=3), 34e-3),
        ("cpu", WaveCounts(host=(1, 1), host_reads=2), 20e-3),
    ],
)
def test_a_turn_takes_its_longest_chain(device: str, turn: WaveCounts, seconds: float) -> None:
    assert prices(device).wave_s(turn) == pytest.approx(seconds)


def test_without_a_host_tier_nothing_is_copied_twice() -> None:
    turn = WaveCounts(loaded=(1, 1), from_disk=2)
    assert prices(host_tier=True).wave_s(turn) == pytest.approx(24e-3)
    assert prices(host_tier=False).wave_s(turn) == pytest.approx(22e-3)


def test_processor_time_of_copies_is_taken_from_computing() -> None:
    known = machine()
    profile = known.profiles["p"]
    moved = {
        "p": _with_link(known, TransferCost(profile.link.each_s, profile.link.alone_s, core_s=4e-3))
    }
    turn = WaveCounts(resident=(1,) * 8, loaded=(1,), from_host=1)
    # 9 runs of 2 ms, and 4 ms of one core of two
    assert prices(profiles=moved).wave_s(turn) == pytest.approx(20e-3)


def test_a_load_that_nobody_waits_for_costs_less() -> None:
    known = prices(load_s=3e-3, beside_s=1e-3)
    # 2 ms of running, then 3 ms for the one that is asked for and 1 ms for each other
    turn = WaveCounts(loaded=(1,), from_host=3)
    assert known.wave_s(turn) == pytest.approx(7e-3)
    record = replace(known.profile, load_s=4e-3)
    assert replace(known, profile=record).wave_s(turn) == pytest.approx(8e-3)


def test_a_layer_with_two_sides_costs_the_runtime_more() -> None:
    known = prices(layer_s=1e-4, both_s=2e-4)
    assert (
        known.layer_s([WaveCounts(host=(1,))]) == known.layer_s([WaveCounts(resident=(1,))]) == 1e-4
    )
    assert known.layer_s([WaveCounts(resident=(1,)), WaveCounts(host=(1,))]) == pytest.approx(3e-4)


def test_the_limit_counts_bytes_only() -> None:
    turn = WaveCounts(resident=(1, 1), loaded=(1,), host=(1,), from_host=1)
    # 30 MB of slots and 10 MB of host memory through 10 GB/s
    assert prices().limit_s(turn) == pytest.approx(4e-3)
    # a device reads its own memory ten times faster; the host's 20 MB (one is sent) are longer
    assert prices("gpu").limit_s(turn) == pytest.approx(2e-3)
    assert prices().limit_s(WaveCounts(loaded=(1,), from_disk=1)) == pytest.approx(10e-3)


def test_a_shelf_keeps_what_was_asked_last() -> None:
    shelf = SimulatedHostTier(2)
    asked = [(0, 1), (0, 2), (0, 1), (0, 3), (0, 2), (0, 3)]
    assert [shelf.take(key) for key in asked] == [False, False, True, False, False, True]
    assert not any(SimulatedHostTier(0).take((0, 1)) for _ in range(2))


def test_a_wave_becomes_numbers() -> None:
    shelf = SimulatedHostTier(1)
    shelf.fill([(3, 7)])
    wave = Wave(load=(((3, 7), 0), ((3, 8), 1)), device=(6, 7, 8), host=(9,))
    demand = Demand(3, "prefill", (6, 7, 8, 9), (1, 2, 3, 4))
    expected = WaveCounts((1,), (2, 3), (4,), from_host=1, from_disk=1, host_reads=1)
    assert wave_counts(wave, demand, shelf) == expected


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_a_forecast_counts_what_a_replay_counts(name: str) -> None:
    load = skewed()
    outlook = case().setup(TierSlots(16, GEOMETRY.total))
    everything = forecast(name, outlook, _all_counted(load))
    trace = Trace(GEOMETRY)
    trace.steps.extend(load.steps)
    costs = machine().profiles["p"].costs().with_host(1.0)
    stage = ReplaySetup(16, load.heatmap, costs, deterministic=False)
    replayed = replay(name, trace, stage)
    for phase, outcome in (("prefill", everything.prefill), ("decode", everything.decode)):
        counts = replayed.phases[phase]
        assert (outcome.hits, outcome.misses, outcome.host_runs) == (
            counts.hits,
            counts.misses,
            counts.host_runs,
        )
    assert everything.prefill.moved + everything.decode.moved == replayed.moves


def test_a_step_is_its_layers_and_the_backbone() -> None:
    """cpu_only, everything in RAM: 4 layers of 2 experts at 2 ms, 5 ms for the rest."""
    outlook = case().setup(TierSlots(0, GEOMETRY.total))
    decode = forecast("cpu_only", outlook, skewed()).decode
    assert decode.tokens_s == pytest.approx(1 / 21e-3)
    assert decode.host_runs == decode.demands and decode.moved == decode.read == 0
    # 8 experts of 10 MB and 20 MB of backbone through 10 GB/s
    assert decode.limit_tokens_s == pytest.approx(100)


def test_a_step_with_nothing_left_to_decide_is_priced_as_one_call() -> None:
    """Everything in RAM and at rest: no runtime between layers, 3 ms beside 16 ms of experts."""
    subject = replace(
        case().model, backbone=BackboneTimes(CostCurve((1,), (5e-3,)), CostCurve((1,), (3e-3,)))
    )
    known = replace(case(layer_s=1e-3, both_s=1e-3), model=subject)
    whole, half = TierSlots(16, GEOMETRY.total), TierSlots(16, GEOMETRY.total // 2)

    def rides(text: str, tiers: TierSlots) -> tuple[bool, bool, float]:
        each = forecast(text, known.setup(tiers), skewed())
        assert each.prefill.one_call_steps in (0, each.prefill.steps)
        return each.prefill.one_call_steps > 0, each.decode.one_call_steps > 0, each.decode.tokens_s

    for name in ("cpu_only", "hot_cached_static", "adaptive"):
        assert rides(name, whole) == (True, True, pytest.approx(1 / 19e-3))
    assert rides("persistent", TierSlots(GEOMETRY.total, 0))[:2] == (True, True)
    # strategies that move, experts on disk, and pins that have no copy in RAM walk
    for name in ("lru", "active_only", "static_pin", "chunked", "layer_grouped", "persistent"):
        assert rides(name, whole)[:2] == (False, False)
    assert rides("cpu_only", half)[:2] == (False, False)
    assert rides("cpu_only+lru", whole)[:2] == (True, False)
    assert rides("cpu_only+static_pin", whole)[:2] == (False, False)
    # 4 layers of the runtime's own time on the walk
    walked = forecast("cpu_only", case(layer_s=1e-3).setup(whole), skewed()).decode
    assert walked.tokens_s == pytest.approx(1 / 25e-3) and not walked.one_call_steps


def test_no_strategy_hits_more_than_the_optimum() -> None:
    load = skewed()
    outlook = case().setup(TierSlots(16, GEOMETRY.total))
    best = optimum(outlook, load).decode.hit_rate
    reached = [forecast(name, outlook, load).decode.hit_rate for name in STRATEGIES]
    assert best > 0.5 and max(reached) <= best + 0.02


def test_less_host_memory_means_more_reads_and_less_speed() -> None:
    outlooks = [case().setup(TierSlots(8, host)) for host in (64, 32, 16)]
    decodes = [forecast("lru", each, skewed()).decode for each in outlooks]
    assert decodes[0].read == 0 < decodes[1].read < decodes[2].read
    assert decodes[0].tokens_s > decodes[1].tokens_s > decodes[2].tokens_s


def test_an_empty_outcome_divides_by_nothing() -> None:
    assert (
        PhaseForecast().tokens_s
        == PhaseForecast().limit_tokens_s
        == PhaseForecast().hit_rate
        == 0.0
    )


def _with_link(known: Machine, link: TransferCost) -> object:
    return replace(known.profiles["p"], link=link)


def _all_counted(load: Workload) -> Workload:
    return replace(load, warm=0)
