"""adaptive: keeps the experts with the highest scores, and moves an expert only when that pays.

Several score policies compete; the one whose cache would hit most often ranks the experts. Ranked
experts keep their slots by score. Temporary ones use a few scratch slots because they must run now.
Where the host can compute, a miss whose upload would not pay runs on the host instead.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from coterie.moe.dispatch.adaptive.in_place import InPlacePlacement
from coterie.moe.dispatch.adaptive.scores import PolicyElection
from coterie.moe.dispatch.adaptive.slot_policy import SlotPolicy
from coterie.moe.dispatch.base import Demand, Strategy, StrategyContext, Wave
from coterie.moe.dispatch.hot_cached_static import run_in_place, spread_evenly
from coterie.moe.dispatch.repin import LiveRepin, UpdateTimer
from coterie.moe.store.base import Key

Loads = tuple[tuple[Key, int], ...]


class Adaptive(Strategy):
    name = "adaptive"

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        geometry = context.geometry
        width = geometry.num_experts
        self._base = {layer: index * width for index, layer in enumerate(geometry.layers)}
        heat = context.heatmap
        prior = [0.0] * (len(self._base) * width) if heat is None else heat.counts.ravel().tolist()
        self._election = PolicyElection(len(self._base), width, context.slots.num_slots, prior)
        self._slot_policy = SlotPolicy(context.geometry, context.slots, self._election.leader)
        self._miss_costs = MissCosts(context)
        self._timer = UpdateTimer()
        # used where no upload pays, but uploads cost nothing: live counts, between tokens
        self._repin = LiveRepin(context, context.slots.num_slots, pin=False)
        self._uploads_free = context.costs.upload_s == 0.0 and not context.deterministic
        self._chunks = ChunkDetector()
        self._in_place = InPlacePlacement(context) if context.in_place_bytes else None
        # experts that later layers are predicted to need
        self._protected: dict[int, frozenset[int]] = {}

    def start(self) -> Loads:
        """The hottest experts. If nothing is known: whole layers where the device reads the others
        in place; elsewhere the first experts of every layer, unless all fit: they are then loaded
        at first use."""
        context, slots = self.context, self.context.slots
        if context.known is not None:
            keys = context.known.hottest(slots.free())
        elif self._in_place is not None:
            keys = self._in_place.whole_layers(slots.free())
        else:
            few = slots.num_slots < context.geometry.total
            keys = spread_evenly(context.geometry, slots.free()) if few else []
        loads = tuple((key, slots.place(key)) for key in keys if key not in slots)
        for key, _ in loads:
            self._repin.own(key)
        return loads

    def observe(self, rows: npt.NDArray[np.int64]) -> None:
        if not self._miss_costs.uploads_pay:
            self._repin.count_step(rows)

    def groups(self) -> tuple[tuple[int, ...], ...] | None:
        """One layer in each group, so that all chunks of a long prompt share a layer's loads."""
        if self.context.slots.num_slots >= self.context.geometry.total:
            return None
        return tuple((layer,) for layer in self.context.geometry.layers)

    def settled(self) -> bool:
        if self._in_place is not None:
            return super().settled()
        return not self._miss_costs.uploads_pay or super().settled()

    def worth(self) -> npt.NDArray[np.float64] | None:
        return None if self._in_place is None else self._in_place.worth()

    def decide_behind(self, rows: npt.NDArray[np.int64], phase: str) -> Loads | None:
        return None if self._in_place is None else tuple(self._in_place.step(rows, phase))

    def decide(self, demand: Demand) -> Sequence[Wave]:
        if not self._miss_costs.uploads_pay:
            self._repin.count(demand)
            return run_in_place(self.context.slots, demand)
        base, slot_policy = self._base[demand.layer], self._slot_policy
        asked = [base + expert for expert in demand.experts]
        self._record(demand, base // self.context.geometry.num_experts, asked)
        slot_policy.refresh()
        if self._protected:
            self._protected.pop(demand.layer, None)
            slot_policy.protected = frozenset().union(*self._protected.values())
        absent = slot_policy.use(asked)
        self._timer.count(len(asked), len(absent))
        chunked = self._chunks.chunked(demand)
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

    def _record(self, demand: Demand, index: int, asked: Sequence[int]) -> None:
        """Each row of a prompt counts as one visit; a batch of decoded rows is one visit."""
        if demand.phase == "prefill":
            rows = max(1, sum(demand.counts) // self.context.geometry.top_k)
            self._election.record_prompt(index, asked, demand.counts, rows)
        else:
            self._election.record_use(index, asked)

    def _place(self, rows: dict[int, int], scratch: int, waves: WaveBuilder) -> None:
        """Place the misses, highest score first. A miss that leads a ranked expert by enough takes
        its slot. The others run on the host or from scratch slots, in further waves when all
        scratch slots are in use."""
        slot_policy, miss_costs, leader = self._slot_policy, self._miss_costs, self._election.leader
        for expert in sorted(rows, key=lambda expert: (-leader.value(expert), expert)):
            lead = miss_costs.lead(leader.policy.margin)
            loaded = lead is not None and slot_policy.admit(expert, lead, scratch, waves.busy)
            if not loaded and not miss_costs.prefers_host():
                loaded = slot_policy.add_temporary(expert, scratch, waves.busy)
                if not loaded and not miss_costs.can_use_host:
                    waves.next_wave()
                    loaded = slot_policy.add_temporary(expert, scratch, ())
                    if not loaded and slot_policy.protected:
                        # what must run now may evict what was only predicted
                        slot_policy.protected = frozenset()
                        loaded = slot_policy.add_temporary(expert, scratch, ())
            if loaded:
                miss_costs.upload(rows[expert])
                waves.load(expert, slot_policy.keys[expert], slot_policy.slot_of(expert))
            else:
                waves.host.append(slot_policy.keys[expert][1])

    @property
    def replaced(self) -> int:
        return self._slot_policy.replaced if self._in_place is None else self._in_place.replaced

    @property
    def updates(self) -> int:
        placed = 0 if self._in_place is None else self._in_place.updates
        return self._timer.rounds + self._repin.updates + placed

    def update(self) -> Loads:
        """Called after each token. When an update is due, load a bounded number of experts that
        the leading policy ranks higher than residents."""
        if self._in_place is not None:
            return ()
        if not self._miss_costs.uploads_pay:
            return self._repin.update() if self._uploads_free else ()
        if self._election.tick():
            self._slot_policy.rank_by(self._election.leader)
        if not self._timer.due():
            return ()
        self._slot_policy.refresh()
        scratch = self._miss_costs.scratch("decode", chunked=False)
        loads = self._slot_policy.promote(scratch, self._timer.schedule.budget)
        self._timer.done(len(loads))
        return loads

    def protect(self, layer: int, experts: Sequence[int]) -> None:
        base = self._base[layer]
        self._protected[layer] = frozenset(base + expert for expert in experts)

    def prefetch(self, layer: int, experts: Sequence[int]) -> Loads:
        """Into scratch slots: a wrong prediction costs only link time and a scratch slot."""
        if not self._miss_costs.uploads_pay:
            return ()
        base, slot_policy = self._base[layer], self._slot_policy
        slot_policy.refresh()
        scratch = self._miss_costs.scratch("decode", chunked=False)
        expected = frozenset(base + expert for expert in experts)
        loads = []
        for expert in sorted(expected):
            key = slot_policy.keys[expert]
            if key not in self.context.slots and slot_policy.add_temporary(
                expert, scratch, expected, early=True
            ):
                loads.append((key, slot_policy.slot_of(expert)))
        return tuple(loads)


# expected hits of a newly loaded expert until its eviction, for each use by which it leads
_HITS_PER_LEAD = 2.5
# if the device saves less than this share of the host's time, no move is worth its cost
_LEAST_SAVING = 0.05


class MissCosts:
    """Decides from measured costs whether a miss is uploaded or runs on the host."""

    def __init__(self, context: StrategyContext) -> None:
        costs = context.costs
        self._context = context
        # too few slots for one row: residents stay for good, all other experts run on the host
        few = context.slots.num_slots <= context.geometry.top_k
        self.can_use_host = context.host_can_run and (few or not context.deterministic)
        self._upload_s = costs.upload_s
        self._host_s = costs.host_run_s
        self._saved_s = costs.host_run_s + costs.read_s - costs.device_run_s
        worthwhile = self._saved_s > _LEAST_SAVING * costs.host_run_s
        self.uploads_pay = not self.can_use_host or (worthwhile and not context.deterministic)
        self._link_busy_s = self._host_busy_s = 0.0
        self._row_s = self._host_s

    def scratch(self, phase: str, chunked: bool) -> int:
        """How many slots temporary experts may use. A prompt needs many experts of a layer at
        once, and a prompt in chunks needs them again for each chunk."""
        slots, geometry = self._context.slots.movable, self._context.geometry
        least = 1 if slots < 32 else 2
        if self.can_use_host and self._upload_s >= self._host_s:
            least = 0
        few = min(max(least, slots // 64), geometry.top_k, max(1, slots // 2))
        if not self.uploads_pay or phase != "prefill":
            return few
        return min(geometry.num_experts, slots if chunked else max(few, slots // 4))

    def begin(self, rows: Collection[int], chunked: bool) -> None:
        """Start a layer whose misses have these rows per expert. All of them count as the host's
        work until `upload` takes one away. With a prompt in chunks the host would run them at
        least twice."""
        self._link_busy_s = 0.0
        self._row_s = self._host_s * (2 if chunked else 1)
        self._host_busy_s = self._row_s * sum(rows)

    def lead(self, margin: float) -> float | None:
        """By how much an expert must lead a ranked one to be uploaded in its place; None = never.
        The margin is enough when it must be loaded anyway, or when the host is busy for longer;
        otherwise the upload has to pay."""
        if not self.can_use_host:
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
        """Whether one more upload would end after the host has computed all remaining misses."""
        if not self.can_use_host:
            return False
        return not self.uploads_pay or self._host_busy_s <= self._link_busy_s + self._upload_s


class WaveBuilder:
    """Collects waves. The open wave uses the `busy` experts (by number)."""

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
        """Close the open wave: its experts have run, so their slots may be used again."""
        if self._device:
            self._closed.append(Wave(tuple(self._loads), tuple(self._device)))
        self._loads, self._device = [], []
        self.busy.clear()

    def waves(self) -> list[Wave]:
        """All waves. The first one has the host's experts, so that the host starts at once."""
        self.next_wave()
        first, *others = self._closed or [Wave()]
        return [Wave(first.load, first.device, tuple(self.host)), *others]


class ChunkDetector:
    """Detects a prompt whose chunks all run through one layer before the next layer."""

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
