"""Residency against a plain model of itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.errors import InternalError
from coterie.moe.runtime import resident
from coterie.moe.runtime.device_pool import DevicePool, ResidentExperts
from coterie.moe.runtime.resident import ResidentFinder
from coterie.moe.runtime.slot_map import SlotMap

KEYS = [(layer, expert) for layer in range(2) for expert in range(4)]
OPS = st.lists(
    st.tuples(
        st.sampled_from(["place", "evict", "touch", "pin", "unpin", "forget"]),
        st.sampled_from(KEYS),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(OPS, st.integers(0, 6))
def test_it_follows_a_list_in_order_of_use(ops: list[tuple[str, tuple[int, int]]], n: int) -> None:
    slots = SlotMap(n)
    order: list[tuple[int, int]] = []
    pins: set[tuple[int, int]] = set()
    for op, key in ops:
        here = key in order
        allowed = {
            "place": not here and len(order) < n,
            "evict": here and key not in pins,
            "pin": here,
            "touch": here,
        }.get(op, True)
        if not allowed:
            if op != "touch":
                with pytest.raises((InternalError, KeyError)):
                    getattr(slots, op)(key)
            continue
        getattr(slots, op)(key)
        if op in ("evict", "forget") and here:
            order.remove(key)
            pins.discard(key)
        if op == "place" or (op == "touch"):
            order = [*(k for k in order if k != key), key]
        if op == "pin":
            pins.add(key)
        if op == "unpin" and key in pins:
            pins.remove(key)
            order = [*(k for k in order if k != key), key]
    assert sorted(slots.keys()) == sorted(order)
    assert list(slots.by_age()) == [k for k in order if k not in pins]
    assert list(slots.layer_by_age(1)) == [k for k in order if k not in pins and k[0] == 1]
    assert slots.free() == n - len(order) and slots.movable == n - len(pins)
    taken = [slots.slot_of(key) for key in order]
    assert len(set(taken)) == len(taken)
    assert [slots.key_at(slot) for slot in taken if slot is not None] == order


def test_age_counts_uses() -> None:
    slots = SlotMap(3)
    for key in KEYS[:3]:
        slots.place(key)
    assert slots.use([KEYS[0], KEYS[5], KEYS[0]]) == [KEYS[5]]
    assert [slots.age(key) for key in KEYS[:3]] == [0, 3, 2]


def test_an_early_expert_is_early_until_it_leaves() -> None:
    slots = SlotMap(1)
    slots.place(KEYS[0], early=True)
    assert slots.prefetched == {KEYS[0]}
    slots.evict(KEYS[0])
    assert not slots.prefetched


def test_what_never_arrived_is_forgotten_even_when_pinned() -> None:
    slots = SlotMap(1)
    slots.place(KEYS[0])
    slots.pin(KEYS[0])
    slots.forget(KEYS[0])
    assert slots.free() == 1 and not slots.pinned()


def test_captured_steps_find_the_places_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """A strategy may pin experts after steps were captured, and experts may have gone and come
    back to other slots."""
    slots = SlotMap(2)
    for key in KEYS[:2]:
        slots.place(key)

    def find(parts: Any) -> DevicePool | None:
        if slots.free():
            return None
        places = torch.tensor([[slots.slot_of(key) for key in KEYS[:2]]])
        return DevicePool(places, 1, places, places, {}, cast("ResidentExperts", None))

    monkeypatch.setattr(resident, "find_device_pool", find)
    finder = ResidentFinder(cast("Any", SimpleNamespace(slots=slots)), cast("Any", None))
    with torch.inference_mode():
        first = finder.find_pool()
    assert first is not None and first.places.tolist() == [[0, 1]]
    slots.pin(KEYS[0])
    again = finder.find_pool()
    assert again is not None and again.places is first.places
    slots.unpin(KEYS[0])
    for key in KEYS[:2]:
        slots.evict(key)
    assert finder.find_pool() is None
    for key in KEYS[:2]:
        slots.place(key)
    moved = finder.find_pool()
    assert moved is not None and moved.places is first.places
    assert first.places.tolist() == [[1, 0]]
