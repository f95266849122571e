"""Turns a layer's demand into waves: what is resident runs first, misses follow as slots allow.

Knows no policy: who has to leave is the caller's answer to `Room`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from coterie.moe.dispatch.base import Demand, Wave
from coterie.moe.runtime.slot_map import Residency
from coterie.moe.store.geometry import Key

# Make sure that a slot is free for `key` without taking one from the busy experts; False when
# that cannot be.
Room = Callable[[Key, Collection[Key]], bool]


def fill(slots: Residency, demand: Demand, room: Room) -> list[Wave]:
    """Residents and as many misses as fit run in the first wave; then what has run may leave.

    An expert for which there is no room even then (every slot pinned) runs on the host.
    """
    layer = demand.layer
    misses = slots.use((layer, expert) for expert in demand.experts)
    if not misses:
        return [Wave(device=demand.experts)]
    absent = {expert for _, expert in misses}
    device = [expert for expert in demand.experts if expert not in absent]
    busy = {(layer, expert) for expert in device}
    waves: list[Wave] = []
    load: list[tuple[Key, int]] = []
    host: list[int] = []
    for key in misses:
        fits = room(key, busy)
        if not fits and busy:
            waves.append(Wave(tuple(load), tuple(device)))
            load, device = [], []
            busy.clear()
            fits = room(key, busy)
        if not fits:
            host.append(key[1])
            continue
        load.append((key, slots.place(key)))
        device.append(key[1])
        busy.add(key)
    waves.append(Wave(tuple(load), tuple(device), tuple(host)))
    return waves


def oldest_leaves(slots: Residency) -> Room:
    """Room by least recent use over all layers."""

    def room(_: Key, busy: Collection[Key]) -> bool:
        if slots.free():
            return True
        victim = next((key for key in slots.by_age() if key not in busy), None)
        if victim is not None:
            slots.evict(victim)
        return victim is not None

    return room


def load_early(slots: Residency, keys: Collection[Key], room: Room) -> list[tuple[Key, int]]:
    """Load the absent ones of `keys` before they are asked for, as far as there is room."""
    wanted = set(keys)
    return [
        (key, slots.place(key, early=True))
        for key in keys
        if key not in slots and room(key, wanted)
    ]
