"""adaptive: keeps what a contest of memories ranks highest, and moves only what pays.

Members hold their slots by score; guests pass through a few scratch slots because they must run
now. Where the host can compute, a miss that would not pay for its upload runs there instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from coterie.moe.dispatch.adaptive.election import Contest
from coterie.moe.dispatch.adaptive.miss_costs import Lanes
from coterie.moe.dispatch.adaptive.slots import Seats
from coterie.moe.dispatch.adaptive.wave_builder import Turns, Walk
from coterie.moe.dispatch.base import Demand, Scene, Strategy, Wave
from coterie.moe.dispatch.hot_cached_static import as_they_lie, spread_evenly
from coterie.moe.dispatch.pace import Clock
from coterie.moe.dispatch.repin import Repin
from coterie.moe.store.geometry import Key

Loads = tuple[tuple[Key, int], ...]


class Adaptive(Strategy):
    name = "adaptive"

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        geometry = scene.geometry
        width = geometry.num_experts
        self._base = {layer: index * width for index, layer in enumerate(geometry.layers)}
        heat = scene.heatmap
        prior = [0.0] * (len(self._base) * width) if heat is None else heat.counts.ravel().tolist()
        self._contest = Contest(len(self._base), width, scene.slots.num_slots, prior)
        self._seats = Seats(scene.geometry, scene.slots, self._contest.leader)
        self._lanes = Lanes(scene)
        self._clock = Clock()
        # where no upload pays for itself, but costs nothing either: live counts, between tokens
        self._repin = Repin(scene, scene.slots.num_slots, pin=False)
        self._free = scene.costs.upload_s == 0.0 and not scene.deterministic
        self._walk = Walk()
        # what a layer to come was predicted to ask for
        self._protected: dict[int, frozenset[int]] = {}

    def start(self) -> Loads:
        """The hottest; without a heatmap the first of every layer, unless all fit (they then come
        as they are asked for)."""
        scene, slots = self.scene, self.scene.slots
        if scene.heatmap is None:
            few = slots.num_slots < scene.geometry.total
            keys = spread_evenly(scene.geometry, slots.free()) if few else []
        else:
            keys = scene.heatmap.hottest(slots.free())
        loads = tuple((key, slots.place(key)) for key in keys if key not in slots)
        for key, _ in loads:
            self._repin.own(key)
        return loads

    def observe(self, rows: npt.NDArray[np.int64]) -> None:
        if not self._lanes.uploads_pay:
            self._repin.saw_step(rows)

    def groups(self) -> tuple[tuple[int, ...], ...] | None:
        """Layer by layer: a long prompt's chunks then share what a layer loads."""
        if self.scene.slots.num_slots >= self.scene.geometry.total:
            return None
        return tuple((layer,) for layer in self.scene.geometry.layers)

    def settled(self) -> bool:
        return not self._lanes.uploads_pay or super().settled()

    def decide(self, demand: Demand) -> Sequence[Wave]:
        if not self._lanes.uploads_pay:
            self._repin.saw(demand)
            return as_they_lie(self.scene.slots, demand)
        base, seats = self._base[demand.layer], self._seats
        asked = [base + expert for expert in demand.experts]
        self._remember(demand, base // self.scene.geometry.num_experts, asked)
        seats.refresh()
        if self._protected:
            self._protected.pop(demand.layer, None)
            seats.protected = frozenset().union(*self._protected.values())
        absent = seats.use(asked)
        self._clock.saw(len(asked), len(absent))
        chunked = self._walk.chunked(demand)
        if not absent:
            return (Wave(device=demand.experts),)
        here = [expert for expert in asked if expert not in absent]
        turns = Turns([expert - base for expert in here], set(here))
        scratch = self._lanes.scratch(demand.phase, chunked)
        counts = dict(zip(asked, demand.counts, strict=True))
        rows = {expert: counts[expert] for expert in absent}
        self._lanes.begin(rows.values(), chunked)
        self._place(rows, scratch, turns)
        return turns.waves()

    def _remember(self, demand: Demand, index: int, asked: Sequence[int]) -> None:
        """A prompt's rows are as many visits; a batch of sequences is one."""
        if demand.phase == "prefill":
            rows = max(1, sum(demand.counts) // self.scene.geometry.top_k)
            self._contest.read(index, asked, demand.counts, rows)
        else:
            self._contest.saw(index, asked)

    def _place(self, rows: dict[int, int], scratch: int, turns: Turns) -> None:
        """Misses by score: those that lead a member by enough become members, the others run on
        the host or as guests, in further waves when the scratch slots are taken."""
        seats, lanes, leader = self._seats, self._lanes, self._contest.leader
        for expert in sorted(rows, key=lambda expert: (-leader.value(expert), expert)):
            lead = lanes.lead(leader.policy.margin)
            loaded = lead is not None and seats.admit(expert, lead, scratch, turns.busy)
            if not loaded and not lanes.prefers_host():
                loaded = seats.invite(expert, scratch, turns.busy)
                if not loaded and not lanes.hosting:
                    turns.next_wave()
                    loaded = seats.invite(expert, scratch, ())
                    if not loaded and seats.protected:
                        # a guess gives way to what must run
                        seats.protected = frozenset()
                        loaded = seats.invite(expert, scratch, ())
            if loaded:
                lanes.upload(rows[expert])
                turns.load(expert, seats.keys[expert], seats.slot_of(expert))
            else:
                turns.host.append(seats.keys[expert][1])

    @property
    def replaced(self) -> int:
        return self._seats.replaced

    @property
    def updates(self) -> int:
        return self._clock.rounds + self._repin.updates

    def update(self) -> Loads:
        """A token has passed; when it is time, a bounded step towards the leader's ranking."""
        if not self._lanes.uploads_pay:
            return self._repin.update() if self._free else ()
        if self._contest.tick():
            self._seats.rank_by(self._contest.leader)
        if not self._clock.due():
            return ()
        self._seats.refresh()
        scratch = self._lanes.scratch("decode", chunked=False)
        loads = self._seats.promote(scratch, self._clock.pace.budget)
        self._clock.done(len(loads))
        return loads

    def protect(self, layer: int, experts: Sequence[int]) -> None:
        base = self._base[layer]
        self._protected[layer] = frozenset(base + expert for expert in experts)

    def prefetch(self, layer: int, experts: Sequence[int]) -> Loads:
        """As guests: a wrong guess costs link time and a scratch slot, no more."""
        if not self._lanes.uploads_pay:
            return ()
        base, seats = self._base[layer], self._seats
        seats.refresh()
        scratch = self._lanes.scratch("decode", chunked=False)
        expected = frozenset(base + expert for expert in experts)
        loads = []
        for expert in sorted(expected):
            key = seats.keys[expert]
            if key not in self.scene.slots and seats.invite(expert, scratch, expected, early=True):
                loads.append((key, seats.slot_of(expert)))
        return tuple(loads)
