"""Which expert is in which device slot, which ones are pinned, and when each was used.

It only records: it moves no bytes and chooses no victim. Every operation is O(1), because
strategies call them while a layer waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, KeysView, Sequence

from coterie.core.errors import InternalError
from coterie.moe.store.base import Key


class SlotMap:
    """A slot holds one expert or is free. Pinned experts are in no order of use."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 0:
            raise InternalError(f"{num_slots} slots")
        # those that are not withdrawn, and all
        self.num_slots = self.most_slots = num_slots
        # grows with every change of the slots or of the pins
        self.changes = 0
        # loaded before they were needed, and not used since
        self.prefetched: set[Key] = set()
        self._slots: dict[Key, int] = {}
        self._keys: list[Key | None] = [None] * num_slots
        # lowest slot first
        self._free = list(range(num_slots - 1, -1, -1))
        self._pins: set[Key] = set()
        self._clock = 0
        self._used: dict[Key, int] = {}
        # unpinned, least recently used first: of all layers, and of each
        self._order: OrderedDict[Key, None] = OrderedDict()
        self._layers: dict[int, OrderedDict[Key, None]] = {}

    def slot_of(self, key: Key) -> int | None:
        return self._slots.get(key)

    def key_at(self, slot: int) -> Key | None:
        return self._keys[slot]

    def __contains__(self, key: Key) -> bool:
        return key in self._slots

    def free(self) -> int:
        return len(self._free)

    def free_slots(self) -> list[int]:
        """The last of them is the next one that `place` gives."""
        return list(self._free)

    def keys(self) -> KeysView[Key]:
        return self._slots.keys()

    def place(self, key: Key, *, early: bool = False) -> int:
        """Give `key` a free slot. `early`: no step needs it yet."""
        if key in self._slots:
            raise InternalError(f"expert {key} already lies in a slot")
        if not self._free:
            raise InternalError("no free slot")
        self.changes += 1
        slot = self._free.pop()
        self._slots[key] = slot
        self._keys[slot] = key
        if early:
            self.prefetched.add(key)
        self._clock += 1
        self._used[key] = self._clock
        self._add_to_order(key)
        return slot

    def assign(self, by_age: Sequence[tuple[Key, int]], free: Sequence[int]) -> None:
        """Others have changed the slots: these experts are in them, least recently used first, and
        none is pinned."""
        for key in list(self._slots):
            self.forget(key)
        # `place` gives the last one
        self._free = [slot for _, slot in reversed(by_age)]
        for key, _ in by_age:
            self.place(key)
        self._free = list(free)

    def evict(self, key: Key) -> int:
        """Remove an unpinned expert; its slot is the next one that `place` gives."""
        if key in self._pins:
            raise InternalError(f"expert {key} is pinned")
        return self._drop(key)

    def forget(self, key: Key) -> None:
        """Remove `key`, pinned or not, because its bytes were not loaded."""
        if key in self._slots:
            self.unpin(key)
            self._drop(key)

    def _drop(self, key: Key) -> int:
        self.changes += 1
        slot = self._slots.pop(key)
        self._keys[slot] = None
        self._free.append(slot)
        del self._used[key]
        del self._order[key]
        del self._layers[key[0]][key]
        self.prefetched.discard(key)
        return slot

    def withdraw(self, slots: Iterable[int]) -> None:
        """Use these slots no longer, until `restore`: their experts are forgotten, even pinned."""
        gone = set(slots)
        for key in [self._keys[slot] for slot in gone]:
            if key is not None:
                self.forget(key)
        self._free = [slot for slot in self._free if slot not in gone]
        self.num_slots -= len(gone)
        self.changes += 1

    def restore(self, slots: Iterable[int]) -> None:
        back = sorted(slots, reverse=True)
        self._free = back + self._free
        self.num_slots += len(back)
        self.changes += 1

    def pin(self, key: Key) -> None:
        """Make sure that `key` is not evicted."""
        if key not in self._slots:
            raise InternalError(f"expert {key} lies in no slot")
        if key not in self._pins:
            self.changes += 1
            self._pins.add(key)
            del self._order[key]
            del self._layers[key[0]][key]

    def unpin(self, key: Key) -> None:
        if key in self._pins:
            self.changes += 1
            self._pins.remove(key)
            self._add_to_order(key)

    def _add_to_order(self, key: Key) -> None:
        self._order[key] = None
        layer = self._layers.get(key[0])
        if layer is None:
            layer = self._layers[key[0]] = OrderedDict()
        layer[key] = None

    def is_pinned(self, key: Key) -> bool:
        return key in self._pins

    def pinned(self) -> frozenset[Key]:
        return frozenset(self._pins)

    @property
    def movable(self) -> int:
        """Slots without a pinned expert."""
        return self.num_slots - len(self._pins)

    def touch(self, key: Key) -> None:
        """`key` is used now."""
        self.use((key,))

    def use(self, keys: Iterable[Key]) -> list[Key]:
        """Mark those that are in a slot as used now; returns the others."""
        absent = []
        slots, used, pins, clock = self._slots, self._used, self._pins, self._clock
        for key in keys:
            if key not in slots:
                absent.append(key)
                continue
            clock += 1
            used[key] = clock
            if key not in pins:
                self._order.move_to_end(key)
                self._layers[key[0]].move_to_end(key)
        self._clock = clock
        return absent

    def age(self, key: Key) -> int:
        """Uses of any expert since `key` was used."""
        return self._clock - self._used[key]

    def by_age(self) -> KeysView[Key]:
        """Unpinned experts, least recently used first."""
        return self._order.keys()

    def layer_by_age(self, layer: int) -> KeysView[Key]:
        """The same for one layer."""
        return self._layers.setdefault(layer, OrderedDict()).keys()
