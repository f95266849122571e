"""A strategy over recorded choices, as it runs where a device reads misses from RAM (`banked`).

A step reads what is in no slot. Behind it the strategy decides; the step behind that one is under
way already. An expert that loses its slot is read from RAM again two steps later, one that gets a
slot is read from there three steps later. Where a kernel chooses victims inside the step
(`in_kernel`), a miss is copied once and is in its slot at once. Moves no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coterie.moe.dispatch.base import Demand, Strategy, StrategyContext
from coterie.moe.dispatch.table import build_strategies, resolve_strategy
from coterie.moe.planner.simulate import NEUTRAL, belady
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.runtime.slot_map import SlotMap
from coterie.moe.runtime.trace import LayerVisit, Trace, TraceStep
from coterie.moe.store.base import ExpertGeometry, Key

# ids of the experts that each step chose: int [steps, layers, k]
Choices = npt.NDArray[np.integer]

# steps from the one that a strategy decides about to the first that finds an expert out of its
# slot, and in its slot
LOST_AFTER, FOUND_AFTER = 2, 3
# of an int4 expert of Qwen3-30B-A3B's shape
RECORD_BYTES = 2_949_120


@dataclass(frozen=True, slots=True)
class BankCounts:
    """Of experts, over the steps that count."""

    hits: int
    misses: int
    copies: int

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)


class BankReplay:
    def __init__(
        self,
        text: str,
        geometry: ExpertGeometry,
        num_slots: int,
        heatmap: Heatmap | None = None,
        in_kernel: bool = False,
    ) -> None:
        self._geometry, self._slots, self._in_kernel = geometry, SlotMap(num_slots), in_kernel
        context = StrategyContext(
            geometry, self._slots, heatmap, NEUTRAL, in_place_bytes=RECORD_BYTES
        )
        runs = resolve_strategy(text, geometry, num_slots)
        _, self._strategy = build_strategies(runs, context)
        self._row = {layer: row for row, layer in enumerate(geometry.layers)}
        self._here = np.zeros((len(geometry.layers), geometry.num_experts), dtype=bool)
        # by slot, as far as copies were begun; and changes of `_here`, by step
        self._begun: dict[int, Key] = {}
        self._changes: dict[int, list[tuple[Key, bool]]] = {}
        self._step = 0
        for key, slot in self._strategy.start():
            self._begun[slot] = key
            self._here[self._row[key[0]], key[1]] = True

    def step(self, chosen: Choices) -> tuple[int, int, int]:
        """Hits, misses and copies of one token: chosen [layers, k]."""
        for key, there in self._changes.pop(self._step, ()):
            # a slot may have changed again since
            found = self._slots.slot_of(key) is not None
            self._here[self._row[key[0]], key[1]] = there and found
        rows = np.zeros(self._here.shape, dtype=np.int64)
        np.put_along_axis(rows, chosen.astype(np.int64), 1, axis=1)
        if self._in_kernel:
            return self._place_now(rows)
        used = rows > 0
        hits = int((used & self._here).sum())
        copies = self._move(self._decide(rows)) + self._move(self._strategy.update())
        self._step += 1
        return hits, int(used.sum()) - hits, copies

    def _place_now(self, rows: npt.NDArray[np.int64]) -> tuple[int, int, int]:
        hits = asked = 0
        for demand in self._demands(rows):
            own = [(demand.layer, expert) in self._slots for expert in demand.experts]
            hits, asked = hits + sum(own), asked + len(own)
            self._strategy.decide(demand)
        return hits, asked - hits, asked - hits

    def _demands(self, rows: npt.NDArray[np.int64]) -> Sequence[Demand]:
        found = []
        for layer, own in zip(self._geometry.layers, rows, strict=True):
            used = np.flatnonzero(own)
            found.append(Demand(layer, "decode", tuple(used.tolist()), tuple(own[used].tolist())))
        return found

    def _decide(self, rows: npt.NDArray[np.int64]) -> Sequence[tuple[Key, int]]:
        strategy: Strategy = self._strategy
        if strategy.settled():
            strategy.observe(rows)
            return ()
        whole = strategy.decide_behind(rows, "decode")
        if whole is not None:
            return whole
        loads: dict[int, Key] = {}
        again = 0
        for demand in self._demands(rows):
            for wave in strategy.decide(demand):
                again += len(wave.load)
                loads |= {slot: key for key, slot in wave.load}
        wanted = [(key, slot) for slot, key in loads.items() if self._slots.slot_of(key) == slot]
        if strategy.loads_again:
            self._again = again - len(wanted)
            return wanted
        return [(key, slot) for key, slot in wanted if self._begun.get(slot) != key]

    # copies that were lost again inside a step
    _again = 0

    def _move(self, loads: Sequence[tuple[Key, int]]) -> int:
        lost, found = (
            self._changes.setdefault(self._step + n, []) for n in (LOST_AFTER, FOUND_AFTER)
        )
        for key, slot in loads:
            before = self._begun.get(slot)
            if before is not None and before != key:
                lost.append((before, False))
            self._begun[slot] = key
            found.append((key, True))
        again, self._again = self._again, 0
        return len(loads) + again


def replay_bank(
    text: str,
    geometry: ExpertGeometry,
    chosen: Choices,
    num_slots: int,
    warm: int,
    heatmap: Heatmap | None = None,
    in_kernel: bool = False,
) -> BankCounts:
    """The steps behind the first `warm`."""
    run = BankReplay(text, geometry, num_slots, heatmap, in_kernel)
    found = np.array([run.step(each) for each in chosen])[warm:]
    hits, misses, copies = map(int, found.sum(axis=0))
    return BankCounts(hits, misses, copies)


def belady_rate(geometry: ExpertGeometry, chosen: Choices, num_slots: int, warm: int) -> float:
    """Hits of the rule that knows the future, behind the first `warm` steps."""
    counts = []
    for part in (chosen, chosen[:warm]):
        trace = Trace(geometry, max(1, len(part)))
        trace.steps.extend(_step(geometry, each) for each in part)
        counts.append(belady(trace, num_slots))
    hits, demands = (
        getattr(counts[0], name) - getattr(counts[1], name) for name in ("hits", "demands")
    )
    return max(0, hits) / max(1, demands)


def _step(geometry: ExpertGeometry, chosen: Choices) -> TraceStep:
    visits = []
    for layer, ids in zip(geometry.layers, chosen, strict=True):
        experts = tuple(sorted(ids.tolist()))
        visits.append(LayerVisit(Demand(layer, "decode", experts, (1,) * len(experts))))
    return TraceStep("decode", (tuple(visits),))


def choices_of(trace: Trace, top_k: int) -> Choices:
    """The decode steps of a recorded trace with one row each."""
    steps = [step for step in trace.steps if step.phase == "decode"]
    found = [[visit.demand.experts for _, visit in step.visits()] for step in steps]
    whole = [step for step in found if all(len(experts) == top_k for experts in step)]
    return np.array(whole, dtype=np.int64)
