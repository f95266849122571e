"""Who sits in the slots under `adaptive`: members by score, guests in a few scratch slots.

A member leaves only for a newcomer that leads it; guests leave in the order they came. Experts are
numbers here (layer index * num_experts + expert).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from coterie.moe.dispatch.adaptive.scores import DecayedScores, ScoreRanking
from coterie.moe.runtime.slot_map import SlotMap
from coterie.moe.store.base import ExpertGeometry, Key


class SlotPolicy:
    def __init__(self, geometry: ExpertGeometry, slots: SlotMap, memory: DecayedScores) -> None:
        self.slots = slots
        # predicted for a layer to come: they leave last
        self.protected: frozenset[int] = frozenset()
        self.keys: list[Key] = [
            (layer, expert) for layer in geometry.layers for expert in range(geometry.num_experts)
        ]
        self._number = {key: number for number, key in enumerate(self.keys)}
        self._memory = memory
        self._members = ScoreRanking(memory)
        # in the order they came
        self._guests: dict[int, None] = {}
        self._seen = -1
        # members that a newcomer pushed out
        self.replaced = 0

    def refresh(self) -> None:
        """Somebody else (another phase, a failed read) changed the slots: all are members now."""
        if self._seen != self.slots.changes:
            self._members.members = {self._number[key] for key in self.slots.by_age()}
            self._members.rank_by(self._memory)
            self._guests.clear()
            self._seen = self.slots.changes

    def rank_by(self, memory: DecayedScores) -> None:
        self._memory = memory
        self._members.rank_by(memory)

    def use(self, asked: Sequence[int]) -> list[int]:
        """A step asks for these. Answers who of them is absent; a guest that deserves it changes
        places with the lowest member, which moves nothing."""
        keys, guests = self.keys, self._guests
        absent = self.slots.use([keys[expert] for expert in asked])
        if guests:
            for expert in asked:
                if expert in guests:
                    self._promote_guest(expert)
        return [self._number[key] for key in absent] if absent else []

    def _promote_guest(self, expert: int) -> None:
        lowest = self._members.lowest(self.protected)
        if lowest is None or not self._leads(expert, lowest, self._memory.policy.margin):
            return
        self._members.remove(lowest)
        del self._guests[expert]
        self._guests[lowest] = None
        self._members.add(expert)

    def admit(
        self, expert: int, lead: float, scratch: int, busy: Collection[int], early: bool = False
    ) -> bool:
        """Make `expert` a member, if there is a seat or if it leads the lowest one by `lead`."""
        members = self._members
        if len(members.members) < self.slots.movable - scratch:
            if not self._free_slot(busy):
                return False
        else:
            lowest = members.lowest(self._shielded(busy))
            if lowest is None or not self._leads(expert, lowest, lead):
                return False
            self.replaced += 1
            members.remove(lowest)
            if self._free_slot(busy):
                self._guests[lowest] = None
            else:
                self.slots.evict(self.keys[lowest])
        self.slots.place(self.keys[expert], early=early)
        members.add(expert)
        self._seen = self.slots.changes
        return True

    def invite(self, expert: int, scratch: int, busy: Collection[int], early: bool = False) -> bool:
        """Make `expert` a guest; a member leaves for it while there are fewer than `scratch`."""
        if not self._free_slot(busy):
            if len(self._guests) >= scratch:
                return False
            lowest = self._members.lowest(self._shielded(busy))
            if lowest is None:
                return False
            self._members.remove(lowest)
            self.slots.evict(self.keys[lowest])
        self.slots.place(self.keys[expert], early=early)
        self._guests[expert] = None
        self._seen = self.slots.changes
        return True

    def promote(self, scratch: int, budget: int) -> tuple[tuple[Key, int], ...]:
        """Load the absent experts that clearly lead members: the highest, `budget` at most."""
        lowest, memory = self._members.lowest(), self._memory
        if lowest is None:
            return ()
        lead = 2.0 * memory.policy.margin + 1.0
        rising = [
            (-memory.value(expert), expert)
            for expert in memory.above(memory.value(lowest) + lead)
            if self.keys[expert] not in self.slots
        ]
        chosen = [
            expert
            for _, expert in sorted(rising)[:budget]
            if self.admit(expert, lead, scratch, (), early=True)
        ]
        return tuple((self.keys[expert], self.slot_of(expert)) for expert in chosen)

    def slot_of(self, expert: int) -> int:
        slot = self.slots.slot_of(self.keys[expert])
        assert slot is not None
        return slot

    def _leads(self, expert: int, member: int, lead: float) -> bool:
        return self._memory.value(expert) > self._memory.value(member) + lead

    def _free_slot(self, busy: Collection[int]) -> bool:
        """A free slot, or one that the guest who came first leaves."""
        if self.slots.free():
            return True
        shielded = self._shielded(busy)
        leaving = next((guest for guest in self._guests if guest not in shielded), None)
        if leaving is None:
            return False
        del self._guests[leaving]
        self.slots.evict(self.keys[leaving])
        return True

    def _shielded(self, busy: Collection[int]) -> Collection[int]:
        return self.protected.union(busy) if self.protected else busy
