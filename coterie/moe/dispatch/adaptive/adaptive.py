"""adaptive: keeps what a contest of memories ranks highest, and moves only what pays.

Members hold their slots by score; guests pass through a few scratch slots because they must run
now. Where the host can compute, a miss that would not pay for its upload runs there instead.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from coterie.moe.dispatch.adaptive.scores import PolicyElection
from coterie.moe.dispatch.adaptive.slot_policy import SlotPolicy
from coterie.moe.dispatch.base import Demand, Strategy, StrategyContext, Wave
from coterie.moe.dispatch.hot_cached_static import run_in_place, spread_evenly
from coterie.moe.dispatch.repin import LiveRepin, UpdateTimer
from coterie.moe.store.base import Key

Loads = tuple[tuple[Key, int], ...]


class Adaptive(Strategy):
    name = "adaptive"

    def __init__(self, scene: StrategyContext) -> None:
        super().__init__(scene)
        geometry = scene.geometry
        width = geometry.num_experts
        self._base = {layer: index * width for index, layer in enumerate(geometry.layers)}
        heat = scene.heatmap
        prior = [0.0] * (len(self._base) * width) if heat is None else heat.counts.ravel().tolist()
        self._election = PolicyElection(len(self._base), width, scene.slots.num_slots, prior)
        self._slot_policy = SlotPolicy(scene.geometry, scene.slots, self._election.leader)
        self._miss_costs = MissCosts(scene)
        self._clock = UpdateTimer()
        # where no upload pays for itself, but costs nothing either: live counts, between tokens
        self._repin = LiveRepin(scene, scene.slots.num_slots, pin=False)
        self._free = scene.costs.upload_s == 0.0 and not scene.deterministic
        self._walk = ChunkDetector()
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
        if not self._miss_costs.uploads_pay:
            self._repin.saw_step(rows)

    def groups(self) -> tuple[tuple[int, ...], ...] | None:
        """Layer by layer: a long prompt's chunks then share what a layer loads."""
        if self.scene.slots.num_slots >= self.scene.geometry.total:
            return None
        return tuple((layer,) for layer in self.scene.geometry.layers)

    def settled(self) -> bool:
        return not self._miss_costs.uploads_pay or super().settled()

    def decide(self, demand: Demand) -> Sequence[Wave]:
        if not self._miss_costs.uploads_pay:
            self._repin.saw(demand)
            return run_in_place(self.scene.slots, demand)
        base, slot_policy = self._base[demand.layer], self._slot_policy
        asked = [base + expert for expert in demand.experts]
        self._remember(demand, base // self.scene.geometry.num_experts, asked)
        slot_policy.refresh()
        if self._protected:
            self._protected.pop(demand.layer, None)
            slot_policy.protected = frozenset().union(*self._protected.values())
        absent = slot_policy.use(asked)
        self._clock.saw(len(asked), len(absent))
        chunked = self._walk.chunked(demand)
        if not absent:
            return (Wave(device=demand.experts),)
        here = [expert for expert in asked if expert not in absent]
        waves = WaveBuilder([expert - base for expert in here], set(here))
        scratch = self._miss_costs.scratch(demand.phase, chunked)
        counts = dict(zip(asked, demand.counts, strict=True))
        rows = {expert: counts[expert] for expert in absent}
        self._miss_costs.begin(rows.values(), chunked)
        self._place(rows, scratch, waves)
        return waves.waves()

    def _remember(self, demand: Demand, index: int, asked: Sequence[int]) -> None:
        """A prompt's rows are as many visits; a batch of sequences is one."""
        if demand.phase == "prefill":
            rows = max(1, sum(demand.counts) // self.scene.geometry.top_k)
            self._election.read(index, asked, demand.counts, rows)
        else:
            self._election.saw(index, asked)

    def _place(self, rows: dict[int, int], scratch: int, waves: WaveBuilder) -> None:
        """Misses by score: those that lead a member by enough become members, the others run on
        the host or as guests, in further waves when the scratch slots are taken."""
        slot_policy, miss_costs, leader = self._slot_policy, self._miss_costs, self._election.leader
        for expert in sorted(rows, key=lambda expert: (-leader.value(expert), expert)):
            lead = miss_costs.lead(leader.policy.margin)
            loaded = lead is not None and slot_policy.admit(expert, lead, scratch, waves.busy)
            if not loaded and not miss_costs.prefers_host():
                loaded = slot_policy.invite(expert, scratch, waves.busy)
                if not loaded and not miss_costs.hosting:
                    waves.next_wave()
                    loaded = slot_policy.invite(expert, scratch, ())
                    if not loaded and slot_policy.protected:
                        # a guess gives way to what must run
                        slot_policy.protected = frozenset()
                        loaded = slot_policy.invite(expert, scratch, ())
            if loaded:
                miss_costs.upload(rows[expert])
                waves.load(expert, slot_policy.keys[expert], slot_policy.slot_of(expert))
            else:
                waves.host.append(slot_policy.keys[expert][1])

    @property
    def replaced(self) -> int:
        return self._slot_policy.replaced

    @property
    def updates(self) -> int:
        return self._clock.rounds + self._repin.updates

    def update(self) -> Loads:
        """A token has passed; when it is time, a bounded step towards the leader's ranking."""
        if not self._miss_costs.uploads_pay:
            return self._repin.update() if self._free else ()
        if self._election.tick():
            self._slot_policy.rank_by(self._election.leader)
        if not self._clock.due():
            return ()
        self._slot_policy.refresh()
        scratch = self._miss_costs.scratch("decode", chunked=False)
        loads = self._slot_policy.promote(scratch, self._clock.pace.budget)
        self._clock.done(len(loads))
        return loads

    def protect(self, layer: int, experts: Sequence[int]) -> None:
        base = self._base[layer]
        self._protected[layer] = frozenset(base + expert for expert in experts)

    def prefetch(self, layer: int, experts: Sequence[int]) -> Loads:
        """As guests: a wrong guess costs link time and a scratch slot, no more."""
        if not self._miss_costs.uploads_pay:
            return ()
        base, slot_policy = self._base[layer], self._slot_policy
        slot_policy.refresh()
        scratch = self._miss_costs.scratch("decode", chunked=False)
        expected = frozenset(base + expert for expert in experts)
        loads = []
        for expert in sorted(expected):
            key = slot_policy.keys[expert]
            if key not in self.scene.slots and slot_policy.invite(
                expert, scratch, expected, early=True
            ):
                loads.append((key, slot_policy.slot_of(expert)))
        return tuple(loads)


# hits that a newcomer is good for, before it has to leave again, per use by which it leads
_HITS_PER_LEAD = 2.5
# a device that saves less than this share of the host's time is not worth any move
_WORTHWHILE = 0.05


class MissCosts:
    def __init__(self, scene: StrategyContext) -> None:
        costs = scene.costs
        self._scene = scene
        # slots too few for one row: those who are in stay for good, all others run on the host
        few = scene.slots.num_slots <= scene.geometry.top_k
        self.hosting = scene.host_can_run and (few or not scene.deterministic)
        self._upload_s = costs.upload_s
        self._host_s = costs.host_run_s
        self._saved_s = costs.host_run_s + costs.read_s - costs.device_run_s
        worthwhile = self._saved_s > _WORTHWHILE * costs.host_run_s
        self.uploads_pay = not self.hosting or (worthwhile and not scene.deterministic)
        self._link_busy_s = self._host_busy_s = 0.0
        self._row_s = self._host_s

    def scratch(self, phase: str, chunked: bool) -> int:
        """Slots through which guests pass. A prompt asks for much of a layer at once, and a prompt
        in chunks asks for it again."""
        slots, geometry = self._scene.slots.movable, self._scene.geometry
        least = 1 if slots < 32 else 2
        if self.hosting and self._upload_s >= self._host_s:
            least = 0
        few = min(max(least, slots // 64), geometry.top_k, max(1, slots // 2))
        if not self.uploads_pay or phase != "prefill":
            return few
        return min(geometry.num_experts, slots if chunked else max(few, slots // 4))

    def begin(self, rows: Collection[int], chunked: bool) -> None:
        """A layer's misses, as rows per expert: all on the host until they are taken off it. A
        prompt in chunks would ask the host for them at least twice."""
        self._link_busy_s = 0.0
        self._row_s = self._host_s * (2 if chunked else 1)
        self._host_busy_s = self._row_s * sum(rows)

    def lead(self, margin: float) -> float | None:
        """By how much a newcomer must lead a member to be uploaded; None: never. Little when it is
        loaded anyway or the host is busy longer anyway; else the upload has to pay for itself."""
        if not self.hosting:
            return margin
        if not self.uploads_pay:
            return None
        if self._link_busy_s + self._upload_s <= self._host_busy_s:
            return margin
        return max(margin, self._upload_s / (self._saved_s * _HITS_PER_LEAD))

    def upload(self, rows: int) -> None:
        self._link_busy_s += self._upload_s
        self._host_busy_s -= self._row_s * rows

    def prefers_host(self) -> bool:
        """Would one more upload finish after the host is done with all that is left?"""
        if not self.hosting:
            return False
        return not self.uploads_pay or self._host_busy_s <= self._link_busy_s + self._upload_s


class WaveBuilder:
    """Waves in the making. `busy` experts (by number) are used by the open wave."""

    def __init__(self, device: list[int], busy: set[int]) -> None:
        self.busy = busy
        self.host: list[int] = []
        self._device = device
        self._loads: list[tuple[Key, int]] = []
        self._closed: list[Wave] = []

    def load(self, number: int, key: Key, slot: int) -> None:
        self._loads.append((key, slot))
        self._device.append(key[1])
        self.busy.add(number)

    def next_wave(self) -> None:
        """What the open wave holds has run: its slots may be used again."""
        if self._device:
            self._closed.append(Wave(tuple(self._loads), tuple(self._device)))
        self._loads, self._device = [], []
        self.busy.clear()

    def waves(self) -> list[Wave]:
        """All of them; the host works from the first one on."""
        self.next_wave()
        first, *others = self._closed or [Wave()]
        return [Wave(first.load, first.device, tuple(self.host)), *others]


class ChunkDetector:
    """Tells whether a prompt's chunks pass through one layer after another."""

    def __init__(self) -> None:
        self._layer = -1
        self._chunked = False

    def chunked(self, demand: Demand) -> bool:
        if demand.phase != "prefill" or demand.layer < self._layer:
            self._chunked = False
        elif demand.layer == self._layer:
            self._chunked = True
        self._layer = demand.layer if demand.phase == "prefill" else -1
        return self._chunked
