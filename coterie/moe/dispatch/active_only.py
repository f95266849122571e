"""active_only: loads only experts that the gate picked and that are not in a slot already.

Decode keeps small per-layer buffers across tokens. A prompt needs far more experts of a layer than
its share of slots, so prefill may use every slot, least recently used first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from coterie.moe.dispatch.base import (
    Demand,
    Strategy,
    StrategyContext,
    Wave,
    evict_oldest,
    place_in_waves,
)
from coterie.moe.runtime.slot_map import SlotMap
from coterie.moe.store.base import ExpertGeometry, Key


class ActiveOnly(Strategy):
    name = "active_only"

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self.buffers = LayerBuffers(context.geometry, context.slots)
        self.decode_room = self.buffers.room
        self._any_slot = evict_oldest(context.slots)

    def decide(self, demand: Demand) -> Sequence[Wave]:
        room = self.decode_room if demand.phase == "decode" else self._any_slot
        return place_in_waves(self.context.slots, demand, room)


class LayerBuffers:
    """Evicts the least recently used expert of a buffer. The shares of all buffers add up to the
    slots that are not pinned."""

    def __init__(self, geometry: ExpertGeometry, slots: SlotMap) -> None:
        self._geometry = geometry
        self._slots = slots
        self._split = -1
        self._buffer: dict[int, int] = {}
        self._layers: list[list[int]] = []
        self._shares: list[int] = []

    def room(self, key: Key, busy: Collection[Key]) -> bool:
        """Free a slot of the layer's own buffer, or of a buffer that has more than its share."""
        slots = self._slots
        if self._split != slots.movable:
            self._divide(slots.movable)
        if not self._shares:
            return False
        own = self._buffer[key[0]]
        if self._size(own) < self._shares[own]:
            if slots.free():
                return True
            over = [self._size(buffer) - share for buffer, share in enumerate(self._shares)]
            own = over.index(max(over))
        victim = self._oldest(own, busy)
        if victim is not None:
            slots.evict(victim)
        return victim is not None

    def share(self, layer: int) -> int:
        """Slots of the buffer that `layer` uses."""
        self._divide(self._slots.movable)
        return self._shares[self._buffer[layer]] if self._shares else 0

    def division(self) -> tuple[list[int], list[int]]:
        """The buffer of each layer, in order; and the slots of each buffer."""
        self._divide(self._slots.movable)
        return [self._buffer[layer] for layer in self._geometry.layers], list(self._shares)

    def _divide(self, movable: int) -> None:
        layers = self._geometry.layers
        count = min(len(layers), movable)
        self._split = movable
        self._layers = [[] for _ in range(count)]
        self._buffer = {}
        for index, layer in enumerate(layers if count else ()):
            buffer = index * count // len(layers)
            self._buffer[layer] = buffer
            self._layers[buffer].append(layer)
        self._shares = [(b + 1) * movable // count - b * movable // count for b in range(count)]

    def _size(self, buffer: int) -> int:
        return sum(map(len, map(self._slots.layer_by_age, self._layers[buffer])))

    def _oldest(self, buffer: int, busy: Collection[Key]) -> Key | None:
        slots = self._slots
        firsts = (
            next((key for key in slots.layer_by_age(layer) if key not in busy), None)
            for layer in self._layers[buffer]
        )
        return max((key for key in firsts if key is not None), key=slots.age, default=None)
