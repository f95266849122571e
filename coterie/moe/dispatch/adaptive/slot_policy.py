"""Which experts are in the slots under `adaptive`: ranked ones by score, temporary ones in a few
scratch slots.

A ranked expert is evicted only for one that leads it; temporary ones are evicted in the order in
which they were loaded. Experts are numbers here (layer index * num_experts + expert).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from coterie.moe.dispatch.adaptive.scores import DecayedScores, ScoreRanking
from coterie.moe.runtime.slot_map import SlotMap
from coterie.moe.store.base import ExpertGeometry, Key


class SlotPolicy:
    def __init__(self, geometry: ExpertGeometry, slots: SlotMap, scores: DecayedScores) -> None:
        self.slots = slots
        # predicted for later layers: evicted last
        self.protected: frozenset[int] = frozenset()
        self.keys: list[Key] = [
            (layer, expert) for layer in geometry.layers for expert in range(geometry.num_experts)
        ]
        self._number = {key: number for number, key in enumerate(self.keys)}
        self._scores = scores
        self._ranked = ScoreRanking(scores)
        # in the order in which they were loaded
        self._temporary: dict[int, None] = {}
        # `slots.changes` at this object's own last change
        self._known_changes = -1
        # ranked experts that were evicted for one with a higher score
        self.replaced = 0

    def refresh(self) -> None:
        """Take in changes that others made to the slots (the other phase, a failed read): every
        expert in a slot is then ranked."""
        if self._known_changes != self.slots.changes:
            self._ranked.members = {self._number[key] for key in self.slots.by_age()}
            self._ranked.rank_by(self._scores)
            self._temporary.clear()
            self._known_changes = self.slots.changes

    def rank_by(self, scores: DecayedScores) -> None:
        self._scores = scores
        self._ranked.rank_by(scores)

    def use(self, asked: Sequence[int]) -> list[int]:
        """Record that a step needs these; returns those that are absent. A temporary expert that
        leads the lowest ranked one becomes ranked in its place, which moves no bytes."""
        keys, temporary = self.keys, self._temporary
        absent = self.slots.use([keys[expert] for expert in asked])
        if temporary:
            for expert in asked:
                if expert in temporary:
                    self._promote_temporary(expert)
        return [self._number[key] for key in absent] if absent else []

    def _promote_temporary(self, expert: int) -> None:
        lowest = self._ranked.lowest(self.protected)
        if lowest is None or not self._leads(expert, lowest, self._scores.policy.margin):
            return
        self._ranked.remove(lowest)
        del self._temporary[expert]
        self._temporary[lowest] = None
        self._ranked.add(expert)

    def admit(
        self, expert: int, lead: float, scratch: int, busy: Collection[int], early: bool = False
    ) -> bool:
        """Place `expert` as a ranked one, if there is room or if it leads the lowest by `lead`."""
        ranked = self._ranked
        if len(ranked.members) < self.slots.movable - scratch:
            if not self._free_slot(busy):
                return False
        else:
            lowest = ranked.lowest(self._unevictable(busy))
            if lowest is None or not self._leads(expert, lowest, lead):
                return False
            self.replaced += 1
            ranked.remove(lowest)
            if self._free_slot(busy):
                self._temporary[lowest] = None
            else:
                self.slots.evict(self.keys[lowest])
        self.slots.place(self.keys[expert], early=early)
        ranked.add(expert)
        self._known_changes = self.slots.changes
        return True

    def add_temporary(
        self, expert: int, scratch: int, busy: Collection[int], early: bool = False
    ) -> bool:
        """Place `expert` in a scratch slot. While fewer than `scratch` are in use, the lowest
        ranked expert is evicted for it."""
        if not self._free_slot(busy):
            if len(self._temporary) >= scratch:
                return False
            lowest = self._ranked.lowest(self._unevictable(busy))
            if lowest is None:
                return False
            self._ranked.remove(lowest)
            self.slots.evict(self.keys[lowest])
        self.slots.place(self.keys[expert], early=early)
        self._temporary[expert] = None
        self._known_changes = self.slots.changes
        return True

    def promote(self, scratch: int, budget: int) -> tuple[tuple[Key, int], ...]:
        """Load absent experts that clearly lead ranked ones: the highest, at most `budget`."""
        lowest, scores = self._ranked.lowest(), self._scores
        if lowest is None:
            return ()
        lead = 2.0 * scores.policy.margin + 1.0
        rising = [
            (-scores.value(expert), expert)
            for expert in scores.above(scores.value(lowest) + lead)
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

    def _leads(self, expert: int, other: int, lead: float) -> bool:
        return self._scores.value(expert) > self._scores.value(other) + lead

    def _free_slot(self, busy: Collection[int]) -> bool:
        """Whether a slot is free, if need be after evicting the oldest temporary expert."""
        if self.slots.free():
            return True
        unevictable = self._unevictable(busy)
        victim = next((each for each in self._temporary if each not in unevictable), None)
        if victim is None:
            return False
        del self._temporary[victim]
        self.slots.evict(self.keys[victim])
        return True

    def _unevictable(self, busy: Collection[int]) -> Collection[int]:
        return self.protected.union(busy) if self.protected else busy
