"""hot_cached_static: hot experts are in slots from the start, cold ones are computed on the host.

Both run at the same time. No step moves an expert; between tokens live counts change which experts
are pinned, a few at a time (never with `deterministic`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from coterie.moe.dispatch.base import Demand, Strategy, StrategyContext, Wave
from coterie.moe.dispatch.pins import spare_slots
from coterie.moe.dispatch.repin import LiveRepin
from coterie.moe.runtime.slot_map import SlotMap
from coterie.moe.store.base import ExpertGeometry, Key


class HotCachedStatic(Strategy):
    name = "hot_cached_static"
    runs_on_host = True

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        num_slots = context.slots.num_slots
        # the other phase's strategy needs some slots that are not pinned
        spare = spare_slots(context.geometry, num_slots) if context.paired else 0
        self._limit = max(0, num_slots - spare)
        self._repin = LiveRepin(context, self._limit, pin=True)

    def start(self) -> tuple[tuple[Key, int], ...]:
        context, slots = self.context, self.context.slots
        limit = min(self._limit, slots.free())
        if context.known is None:
            keys = spread_evenly(context.geometry, limit)
        else:
            keys = context.known.hottest(limit)
        loads = tuple((key, slots.place(key)) for key in keys if key not in slots)
        for key, _ in loads:
            self._repin.own(key)
        return loads

    @property
    def updates(self) -> int:
        return self._repin.updates

    def update(self) -> tuple[tuple[Key, int], ...]:
        return () if self.context.deterministic else self._repin.update()

    def observe(self, rows: npt.NDArray[np.int64]) -> None:
        self._repin.count_step(rows)

    def worth(self) -> npt.NDArray[np.float64]:
        return self._repin.counts

    def settled(self) -> bool:
        return True

    def decide(self, demand: Demand) -> Sequence[Wave]:
        self._repin.count(demand)
        return run_in_place(self.context.slots, demand)


def run_in_place(slots: SlotMap, demand: Demand) -> tuple[Wave]:
    """Run the experts that are in slots on the device and the others on the host."""
    layer = demand.layer
    device = tuple(e for e in demand.experts if (layer, e) in slots)
    if len(device) == len(demand.experts):
        return (Wave(device=device),)
    here = set(device)
    return (Wave(device=device, host=tuple(e for e in demand.experts if e not in here)),)


def spread_evenly(geometry: ExpertGeometry, limit: int) -> list[Key]:
    """The first expert of every layer, then the second of every layer, and so on."""
    ranked = [
        (rank, (layer, expert))
        for layer in geometry.layers
        for rank, expert in enumerate(geometry.present(layer))
    ]
    return [key for _, key in sorted(ranked)[:limit]]
