"""Budgets as users write them, and the slots they come to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coterie.core.errors import ConfigError
from coterie.core.moe import MoeSettings
from coterie.moe.runtime.budget import (
    ExpertSizes,
    TierNeeds,
    TierSlots,
    graph_room,
    size_tiers,
)

SLOT = 1_000_000
SIZES = ExpertSizes(total=64, slot_bytes=SLOT, expert_bytes=60 * SLOT)
NEEDS = TierNeeds(
    device=True, host=False, free_device_bytes=20 * SLOT, free_host_bytes=200 * SLOT, kv_bytes=SLOT
)


def slots(needs: TierNeeds = NEEDS, **settings: object) -> TierSlots:
    return size_tiers(MoeSettings(strategy="lru", **settings), SIZES, needs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "device"),
    [
        ({"device_budget": "10MB"}, 9),  # one context's KV comes first
        ({"device_budget": "25%"}, 16),
        ({"device_budget": "0.1%"}, 1),
        ({"device_budget": "1GB"}, 64),
        ({"cache_capacity": 7}, 7),
        ({"cache_capacity": 700}, 64),
        ({"cache_capacity": 7, "device_budget": "10MB"}, 7),
    ],
)
def test_device_slots(settings: dict[str, Any], device: int) -> None:
    assert slots(**settings).device == device


@pytest.mark.parametrize(
    ("budget", "host"),
    [("0", 0), ("3MB", 3), ("50%", 32), ("59999999", 59), ("60MB", 64), ("100%", 64), ("", 64)],
)
def test_host_slots(budget: str, host: int) -> None:
    """All fit as soon as their own sizes do, though slots are as large as the largest."""
    assert slots(cache_capacity=4, host_budget=budget).host == host


def test_nothing_is_kept_twice_when_the_device_holds_all() -> None:
    assert slots(cache_capacity=64) == TierSlots(64, 0)


@pytest.mark.parametrize(
    ("free", "budget", "room"),
    [
        (100 * SLOT, "", 4 * SLOT),
        (85 * SLOT, "", 0),  # 80% of it hold all experts and the KV, but not the graphs too
        (100 * SLOT, "69MB", 4 * SLOT),
        (100 * SLOT, "68MB", 0),
        (100 * SLOT, "100%", 4 * SLOT),
        (100 * SLOT, "50%", 4 * SLOT),  # the others are read from RAM
    ],
)
def test_graphs_are_reserved_for_where_steps_are_captured(
    free: int, budget: str, room: int
) -> None:
    settings = MoeSettings(strategy="persistent", device_budget=budget)
    needs = replace(NEEDS, free_device_bytes=free, one_memory=False)
    if budget == "50%":
        few = replace(needs, free_host_bytes=60 * SLOT)
        assert graph_room(settings, SIZES, few, 4 * SLOT) == 0
    assert graph_room(settings, SIZES, needs, 4 * SLOT) == room
    assert graph_room(settings, SIZES, replace(needs, one_memory=True), 4 * SLOT) == 0
    taken = size_tiers(settings, SIZES, replace(needs, graph_bytes=room))
    assert taken.device == (32 if budget == "50%" else 64)


def test_ram_is_shared_where_the_device_is_ram() -> None:
    needs = TierNeeds(
        device=True, host=True, free_device_bytes=50 * SLOT, free_host_bytes=50 * SLOT, kv_bytes=0
    )
    found = slots(needs)
    assert (found.device + found.host) * SLOT <= 40 * SLOT


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"device_budget": "1500KB"}, "device_budget"),
        ({"device_budget": "120%"}, "device_budget"),
        ({"device_budget": "x%"}, "device_budget"),
        ({"cache_capacity": 1, "host_budget": "-1%"}, "host_budget"),
    ],
)
def test_what_cannot_hold_an_expert_is_refused(settings: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as refused:
        slots(**settings)
    assert refused.value.param == param


def test_computing_on_the_host_needs_a_place_there() -> None:
    needs = TierNeeds(device=False, host=True, free_device_bytes=0, free_host_bytes=200 * SLOT)
    assert slots(needs, host_budget="1MB") == TierSlots(0, 1)
    with pytest.raises(ConfigError, match="computes on the host"):
        slots(needs, host_budget="0")
