"""Replays a workload as a CUDA device runs it whose kernels read experts where they are.

As `moe/runtime/banked.py`: nothing is decided inside a step. Kernels read what has no slot from
RAM, strategies decide behind the step, and what they load is copied beside the next one. A prompt
copies what is missing ahead of itself. With all experts in slots nothing is missing.
lru and active_only decode otherwise: a step copies what it misses into slots before it computes
with it, and prompts change no slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from coterie.moe.dispatch.active_only import ActiveOnly
from coterie.moe.dispatch.base import Strategy, StrategyContext, place_misses
from coterie.moe.dispatch.lru import Lru
from coterie.moe.dispatch.table import build_strategies, has_victim_rule, placed_rows
from coterie.moe.planner.device_path import BUFFERS, DevicePath
from coterie.moe.planner.workload import Workload, tokens_of
from coterie.moe.runtime.slot_map import SlotMap
from coterie.moe.runtime.step import first_uses
from coterie.moe.runtime.travel import READ_ROWS, ExpertChances, LinkRates

if TYPE_CHECKING:
    from coterie.moe.dispatch.base import ExpertCosts
    from coterie.moe.planner.step_costs import PhaseForecast
    from coterie.moe.runtime.trace import LayerVisit, TraceStep
    from coterie.moe.store.base import ExpertGeometry, Key

Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DeviceSetup:
    """The device, the model and its slots, as a simulation assumes them."""

    geometry: ExpertGeometry
    path: DevicePath
    slots: int
    costs: ExpertCosts
    device_bytes_s: float
    # of a step, without experts
    backbone_bytes: float
    # layers of the model for each that is simulated
    every: int = 1
    # whether there are buffers for prompts; otherwise their kernels read what is missing
    streams: bool = True
    # whether KV may take slots: the device then gives none itself
    elastic: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether every expert has a slot."""
        return self.slots >= self.geometry.total


class DeviceSimulation:
    """The state of one simulated engine."""

    def __init__(self, text: str, setup: DeviceSetup, load: Workload) -> None:
        self.setup, geometry = setup, setup.geometry
        self._slots = SlotMap(setup.slots)
        size = 0 if setup.is_whole else setup.path.record_bytes
        context = StrategyContext(
            geometry, self._slots, load.heatmap, setup.costs, in_place_bytes=size
        )
        self._prefill, self._decode = build_strategies(text, context)
        self._both = tuple(dict.fromkeys((self._prefill, self._decode)))
        # rows of steps that place what they miss; 0: none does
        self._placed_rows = 0
        known = has_victim_rule(self._prefill, self._decode, setup.slots * setup.every)
        if known and not setup.elastic:
            self._placed_rows = placed_rows(geometry.top_k)
        for strategy in self._both:
            strategy.start()
        shape = len(geometry.layers), geometry.num_experts
        self._row = {layer: row for row, layer in enumerate(geometry.layers)}
        self._chances = ExpertChances(*shape, geometry.top_k)
        path = setup.path
        self._rates = LinkRates(path.copy_bytes_s, path.read_bytes_s)
        # [layers, experts]: what steps find in slots; and what was decided since, by step
        self._found = self._in_slots()
        self._decided = [self._found]
        # experts that are copied once a step has decoded, since the last prompt
        self._waiting = 0
        # the last layers of a prompt stay in its buffers; of fewer layers, a part of them
        self._near = np.zeros(shape, dtype=bool)

    def step(self, step: TraceStep, outcome: PhaseForecast) -> None:
        strategy = self._prefill if step.phase == "prefill" else self._decode
        outcome.steps += 1
        # a prompt in several chunks runs chunk by chunk
        for chunk in step.chunks:
            rows = self._rows(chunk)
            tokens = tokens_of(chunk, self.setup.geometry.top_k)
            outcome.tokens += tokens
            if self.setup.is_whole:
                self._run_whole(rows, tokens, step.phase, outcome)
                continue
            self._publish()
            if step.phase == "prefill":
                self._prompt(rows, tokens, outcome)
                if not self._placed_rows:
                    # if another prompt follows, that takes it out of its own copies
                    self._waiting = self._decide(strategy, chunk, rows, step.phase)
                    self._decided = [self._in_slots()]
            elif self._placed_rows:
                self._decoded_in_slots(chunk, rows, tokens, outcome)
            else:
                self._decoded(strategy, chunk, rows, tokens, outcome)
            self._chances.observe(rows)
        outcome.one_call_steps += self.setup.is_whole

    def _run_whole(self, rows: Rows, tokens: int, phase: str, outcome: PhaseForecast) -> None:
        used = int((rows > 0).sum())
        nothing = [0.0] * len(rows)
        top_k, path = self.setup.geometry.top_k, self.setup.path
        if phase == "prefill":
            outcome.seconds += path.prompt_s(tokens, nothing, nothing, top_k)
        else:
            outcome.seconds += path.decode_s(tokens, nothing, top_k)
        outcome.limit_s += path.decode_limit_s(0, self._step_bytes(used), self.setup.device_bytes_s)
        outcome.hits += used

    def _decoded(
        self,
        strategy: Strategy,
        chunk: Sequence[LayerVisit],
        rows: Rows,
        tokens: int,
        outcome: PhaseForecast,
    ) -> None:
        path, used = self.setup.path, rows > 0
        missing = (used & ~(self._found | self._near)).sum(axis=1)
        count, asked = int(missing.sum()), int(used.sum())
        copied = self._decide(strategy, chunk, rows, "decode") + self._waiting
        self._waiting = 0
        for each in self._both:
            copied += len(each.update())
        self._decided.append(self._in_slots())
        outcome.seconds += path.decode_s(
            tokens, missing.tolist(), self.setup.geometry.top_k, copied
        )
        self._count(count, asked, count + copied, outcome)

    def _decoded_in_slots(
        self, chunk: Sequence[LayerVisit], rows: Rows, tokens: int, outcome: PhaseForecast
    ) -> None:
        """What is missing crosses the link once, without the CPU, and has its slot at once, where
        there is one; a step of too many rows only reads it."""
        path, asked = self.setup.path, int((rows > 0).sum())
        top_k = self.setup.geometry.top_k
        if tokens <= self._placed_rows:
            missing, copied = self._place(chunk)
            read = (missing - copied).tolist()
            outcome.seconds += path.copied_s(tokens, int(copied.sum()), read, top_k)
        else:
            missing = ((rows > 0) & ~self._in_slots()).sum(axis=1)
            outcome.seconds += path.decode_s(tokens, missing.tolist(), top_k)
        self._decided = [self._in_slots()]
        count = int(missing.sum())
        self._count(count, asked, count, outcome)

    def _place(self, chunk: Sequence[LayerVisit]) -> tuple[Rows, Rows]:
        """By layer: experts that are missing when it runs (a layer before it may have taken their
        slots), and those of them that are copied to slots."""
        assert isinstance(self._decode, Lru | ActiveOnly)
        missing, copied = (np.zeros(len(self._row), dtype=np.int64) for _ in range(2))
        for visit in chunk:
            layer = visit.demand.layer
            used = [(layer, expert) for expert in visit.demand.experts]
            missing[self._row[layer]] = sum(key not in self._slots for key in used)
            placed = place_misses(self._slots, used, self._decode.decode_room)
            copied[self._row[layer]] = len(placed)
        return missing, copied

    def _count(self, missing: int, asked: int, moved: int, outcome: PhaseForecast) -> None:
        outcome.limit_s += self.setup.path.decode_limit_s(
            missing, self._step_bytes(asked), self.setup.device_bytes_s
        )
        outcome.hits += asked - missing
        outcome.misses += missing
        outcome.moved += moved

    def _prompt(self, rows: Rows, tokens: int, outcome: PhaseForecast) -> None:
        """What is missing is copied ahead, or read where that is faster."""
        path, used = self.setup.path, rows > 0
        ahead = np.zeros(rows.shape, dtype=bool)
        if self.setup.streams:
            wanted = self._chances.copied_ahead(tokens, path.kind, self._rates)
            ahead = wanted & self._present() & ~self._found
        read = used & ~self._found & ~ahead
        reads = np.maximum(1, rows // READ_ROWS[path.kind]) * read
        copied_by_layer, read_by_layer = ahead.sum(axis=1), reads.sum(axis=1)
        top_k, count = self.setup.geometry.top_k, int(ahead.sum()) + int(reads.sum())
        outcome.seconds += path.prompt_s(
            tokens, copied_by_layer.tolist(), read_by_layer.tolist(), top_k
        )
        asked = int(used.sum())
        outcome.limit_s += path.prompt_limit_s(
            count, self._step_bytes(asked), self.setup.device_bytes_s
        )
        missed = int((used & ~self._found).sum())
        outcome.hits += asked - missed
        outcome.misses += missed
        outcome.moved += count
        kept = round(BUFFERS / self.setup.every)
        self._near[:] = False
        if kept and ahead.any():
            self._near[-kept:] = ahead[-kept:]

    def _decide(
        self, strategy: Strategy, chunk: Sequence[LayerVisit], rows: Rows, phase: str
    ) -> int:
        """Behind a step; returns how many experts are copied to slots for later ones."""
        if strategy.settled():
            strategy.observe(rows)
            return 0
        whole = strategy.decide_behind(rows, phase)
        if whole is not None:
            return len(whole)
        before = self._in_slots()
        loads: dict[int, Key] = {}
        count = 0
        for visit in chunk:
            first_uses(self._slots, visit.demand)
            for wave in strategy.decide(visit.demand):
                count += len(wave.load)
                loads.update((slot, key) for key, slot in wave.load)
        if strategy.loads_again:
            return count
        slot_of = self._slots.slot_of
        wanted = [key for slot, key in loads.items() if slot_of(key) == slot]
        return sum(not before[self._row[layer], expert] for layer, expert in wanted)

    def _publish(self) -> None:
        """What was decided behind the last step but one is in its slot now, unless it has lost it;
        copies of the last decision still run."""
        now = self._decided[-1]
        self._found = self._decided[-2 if len(self._decided) > 1 else -1] & now
        self._decided = self._decided[-2:]

    def _in_slots(self) -> Mask:
        mask = np.zeros((len(self._row), self.setup.geometry.num_experts), dtype=bool)
        keys = list(self._slots.keys())
        if keys:
            mask[[self._row[layer] for layer, _ in keys], [expert for _, expert in keys]] = True
        return mask

    def _present(self) -> Mask:
        geometry = self.setup.geometry
        mask = np.ones((len(self._row), geometry.num_experts), dtype=bool)
        for layer, expert in geometry.absent:
            mask[self._row[layer], expert] = False
        return mask

    def _rows(self, chunk: Sequence[LayerVisit]) -> Rows:
        rows = np.zeros((len(self._row), self.setup.geometry.num_experts), dtype=np.int64)
        for visit in chunk:
            demand = visit.demand
            rows[self._row[demand.layer], list(demand.experts)] = demand.counts
        return rows

    def _step_bytes(self, experts: int) -> float:
        return self.setup.backbone_bytes + experts * self.setup.path.record_bytes
