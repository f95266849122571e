"""What a strategy declares in its class is what parser, planner and runtime go by, not its name."""

from __future__ import annotations

from typing import Any

import pytest

from coterie.core.errors import ConfigError
from coterie.core.moe import MoeSettings
from coterie.moe.dispatch.base import StrategyContext
from coterie.moe.dispatch.lru import Lru
from coterie.moe.dispatch.table import (
    STRATEGIES,
    StrategyChoice,
    build_strategies,
    parse_strategy,
    resolve_strategy,
)
from coterie.moe.planner.overhead import ZeroExpertStore
from coterie.moe.planner.plan import MemoryDivision
from coterie.moe.runtime.budget import ExpertSizes, TierNeeds, TierSlots
from coterie.moe.runtime.runtime import open_experts
from coterie.moe.runtime.slot_map import SlotMap
from coterie.moe.store.base import ExpertGeometry
from tests.helpers.moe.slot_simulator import COSTS

GEOMETRY = ExpertGeometry((0, 1), 4, 2)
SIZES = ExpertSizes(8, 100, 800)
NEEDS = TierNeeds(False, False, 10**6, 10**6)


class Toy(Lru):
    name = "toy"


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> type[Toy]:
    """A class for each test, which may change what it declares."""
    own = type("OwnToy", (Toy,), {})
    monkeypatch.setitem(STRATEGIES, "toy", own)
    return own


def planned(text: str, **budgets: Any) -> TierSlots | None:
    return MemoryDivision(MoeSettings(strategy=text, **budgets), NEEDS).tiers(text, SIZES)


def test_device_slots_alone_are_enough_unless_it_says_more() -> None:
    assert planned("toy", device_budget="25%", host_budget="0") == TierSlots(2, 0)
    assert planned("toy", device_budget="0%") is None
    runtime = open_experts(
        ZeroExpertStore(), MoeSettings("toy", device_budget="25%", host_budget="0")
    )
    assert runtime.parts.device.num_slots > 0 and runtime.parts.host.budget_bytes == 0
    runtime.close()
    with pytest.raises(ConfigError, match="device_budget 0% holds no expert"):
        open_experts(ZeroExpertStore(), MoeSettings("toy", device_budget="0%"))


def test_a_strategy_that_runs_on_the_host_is_refused_without_host_slots(toy: type[Toy]) -> None:
    toy.runs_on_host = True
    for text in ("toy", "lru+toy", "toy+lru"):
        assert planned(text, device_budget="25%", host_budget="0") is None
        assert planned(text, device_budget="25%", host_budget="25%") == TierSlots(2, 2)
        with pytest.raises(ConfigError, match="computes on the host") as refused:
            open_experts(ZeroExpertStore(), MoeSettings(text, device_budget="25%", host_budget="0"))
        assert refused.value.param == "host_budget"


def test_a_strategy_that_needs_no_device_gets_no_device_slots(toy: type[Toy]) -> None:
    toy.needs_device, toy.runs_on_host = False, True
    assert planned("toy", device_budget="25%", host_budget="50%") == TierSlots(0, 4)
    # the other phase does need them
    assert planned("toy+lru", device_budget="25%", host_budget="50%") == TierSlots(2, 4)
    runtime = open_experts(ZeroExpertStore(), MoeSettings("toy", device_budget="25%"))
    assert runtime.parts.device.num_slots == 0 and runtime.parts.host.budget_bytes > 0
    runtime.close()


def test_a_number_is_taken_where_it_is_declared(toy: type[Toy]) -> None:
    others = [f"{name}:N" for name, kind in STRATEGIES.items() if kind.takes_number]
    assert "layer_grouped:N" in others and "toy:N" not in others
    with pytest.raises(ConfigError) as refused:
        parse_strategy("toy:5")
    assert refused.value.message == f"'toy:5': only {', '.join(others)} takes a number"
    toy.takes_number, toy.default_number = True, 3
    assert parse_strategy("toy") == (StrategyChoice("toy", 3),) * 2
    assert parse_strategy("lru+toy:5") == (StrategyChoice("lru"), StrategyChoice("toy", 5))
    with pytest.raises(ConfigError) as refused:
        parse_strategy("lru:2")
    assert refused.value.message == f"'lru:2': only {', '.join([*others, 'toy:N'])} takes a number"
    for wrong in ("toy:0", "toy:-1", "toy:x", "toy:"):
        with pytest.raises(ConfigError) as refused:
            parse_strategy(wrong)
        told = f"'{wrong}': toy:N takes a whole number; numbers begin at 1"
        assert refused.value.message == told
    context = StrategyContext(GEOMETRY, SlotMap(4), None, COSTS)
    prefill, decode = build_strategies("lru+toy:5", context)
    assert (prefill.context.number, decode.context.number) == (0, 5)
    assert prefill.context.paired and decode.context.paired
    alone, same = build_strategies("toy", context)
    assert alone is same and alone.context.number == 3 and not alone.context.paired


def test_another_strategy_decodes_where_it_is_declared(toy: type[Toy]) -> None:
    assert resolve_strategy("toy", GEOMETRY, 4) == "toy"
    toy.decodes_as = "layer_grouped"
    assert resolve_strategy("toy", GEOMETRY, 4) == "toy+layer_grouped:2"
    assert resolve_strategy("toy+lru", GEOMETRY, 4) == "toy+lru"


def test_too_few_slots_run_the_fallback(toy: type[Toy], monkeypatch: pytest.MonkeyPatch) -> None:
    def least_slots(cls: type[Toy], geometry: ExpertGeometry) -> int:
        return geometry.top_k + 1

    def fallback(cls: type[Toy], phase: str, geometry: ExpertGeometry, num_slots: int) -> str:
        return {"prefill": "chunked", "decode": "active_only"}[phase]

    monkeypatch.setattr(toy, "least_slots", classmethod(least_slots))
    monkeypatch.setattr(toy, "fallback", classmethod(fallback))
    assert resolve_strategy("toy", GEOMETRY, 3) == "toy"
    assert resolve_strategy("toy", GEOMETRY, 2) == "chunked+active_only"
    assert resolve_strategy("lru+toy", GEOMETRY, 2) == "lru+active_only"
    store = ZeroExpertStore()
    least = store.geometry.top_k + 1
    runtime = open_experts(store, MoeSettings("toy", cache_capacity=2, host_budget="100%"))
    told = runtime.report()
    assert told["strategy"] == "chunked+active_only" and told["asked"] == "toy"
    assert told["fallback"].startswith(f"toy needs {least} slots and has 2: running chunked")
    runtime.close()
