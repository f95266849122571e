"""Runs any strategy over a recorded trace without moving a byte: what would it have hit?

It asks the strategy exactly what the runtime asks, in the same order, and counts by the same rule
(`demand.py`). The same inputs give the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from coterie.moe.dispatch.base import Costs, Scene, Strategy, Wave
from coterie.moe.dispatch.table import build, resolve
from coterie.moe.runtime.demand import Classes, classify, first_uses
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.runtime.slot_map import Residency
from coterie.moe.runtime.trace import Trace, TraceStep

# an upload costs as much as computing two rows on the host
NEUTRAL = Costs(upload_s=2e-3, device_run_s=1e-4, host_run_s=1e-3)


@dataclass(frozen=True, slots=True)
class Stage:
    """The machine that a replay pretends to have."""

    num_slots: int
    heatmap: Heatmap | None = None
    costs: Costs = NEUTRAL
    host_can_run: bool = True
    deterministic: bool = False
    # off, protect or prefetch: what is done with the predictions in the trace
    predict: str = "off"


@dataclass(slots=True)
class Counts:
    """Demands by outcome; `moves` and `waves` are experts and turns."""

    hits: int = 0
    prefetch_hits: int = 0
    misses: int = 0
    host_runs: int = 0
    moves: int = 0
    waves: int = 0

    def add(self, classes: Classes, waves: Sequence[Wave]) -> None:
        self.hits += len(classes.hits)
        self.prefetch_hits += len(classes.early)
        self.misses += len(classes.misses)
        self.host_runs += len(classes.host)
        self.moves += sum(len(wave.load) for wave in waves)
        self.waves += len(waves)

    @property
    def demands(self) -> int:
        return self.hits + self.prefetch_hits + self.misses + self.host_runs

    @property
    def hit_rate(self) -> float:
        """Demand hits alone."""
        return self.hits / self.demands if self.demands else 0.0


@dataclass(slots=True)
class ReplayResult:
    """`total.moves` are the moves of demands; the others are counted where they were made."""

    total: Counts = field(default_factory=Counts)
    phases: dict[str, Counts] = field(default_factory=dict)
    layers: dict[int, Counts] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    start_moves: int = 0
    group_moves: int = 0
    # swaps between tokens, and predicted loads
    update_moves: int = 0
    prefetch_moves: int = 0

    @property
    def moves(self) -> int:
        """After the start."""
        return self.total.moves + self.group_moves + self.update_moves + self.prefetch_moves

    def moved_bytes(self, expert_bytes: int) -> int:
        return self.moves * expert_bytes


def replay(text: str, trace: Trace, stage: Stage) -> ReplayResult:
    """Strategy `text` (names as the CLI takes them) over the whole trace, from empty slots."""
    slots = Residency(stage.num_slots)
    scene = Scene(
        trace.geometry, slots, stage.heatmap, stage.costs, stage.host_can_run, stage.deterministic
    )
    prefill, decode = build(resolve(text, trace.geometry, stage.num_slots), scene)
    both = tuple(dict.fromkeys((prefill, decode)))
    result = ReplayResult()
    result.start_moves = sum(len(strategy.start()) for strategy in both)
    for step in trace.steps:
        _walk(prefill if step.phase == "prefill" else decode, step, stage, result)
        result.steps[step.phase] = result.steps.get(step.phase, 0) + 1
        if step.phase == "decode":
            # as the engine: between tokens
            result.update_moves += sum(len(strategy.update()) for strategy in both)
    return result


def _walk(strategy: Strategy, step: TraceStep, stage: Stage, result: ReplayResult) -> None:
    groups = strategy.groups() if step.phase == "prefill" else None
    visits = list(step.walk(groups))
    for index, (group, visit) in enumerate(visits):
        if groups is not None and group is not None:
            result.group_moves += len(strategy.load_group(group))
        if stage.predict != "off" and index + 1 < len(visits):
            following = visits[index + 1][1]
            strategy.protect(following.demand.layer, following.predicted)
            if stage.predict == "prefetch" and following.predicted:
                loads = strategy.prefetch(following.demand.layer, following.predicted)
                result.prefetch_moves += len(loads)
        first = first_uses(strategy.scene.slots, visit.demand)
        waves = strategy.decide(visit.demand)
        classes = classify(visit.demand, waves, first)
        layer, phase = visit.demand.layer, step.phase
        for counts in (
            result.total,
            result.phases.setdefault(phase, Counts()),
            result.layers.setdefault(layer, Counts()),
        ):
            counts.add(classes, waves)
