"""A workload replayed through a strategy and priced: what would move, and how long it would take.

Calls the same `decide` as the runtime, over the same bookkeeping, with the host tier replayed
beside it. Moves no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from coterie.moe.dispatch.base import Demand, ExpertCosts, Strategy, StrategyContext, Wave
from coterie.moe.dispatch.table import build_strategies, resolve_strategy
from coterie.moe.planner.machine import (
    BackboneTimes,
    CostModel,
    PhaseForecast,
    SimulatedHostTier,
    WaveCounts,
    wave_counts,
)
from coterie.moe.planner.workload import Workload, tokens_of
from coterie.moe.runtime.budget import TierSlots
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.runtime.slot_map import SlotMap
from coterie.moe.runtime.step import DemandClasses, classify, first_uses
from coterie.moe.runtime.trace import Trace, TraceStep
from coterie.moe.store.base import ExpertGeometry, Key

BELADY = "belady"


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """A machine, a model and a division of the memory."""

    geometry: ExpertGeometry
    tiers: TierSlots
    prices: CostModel
    # a step without experts; and what its bytes need at best
    backbone: BackboneTimes
    backbone_limit_s: float = 0.0


@dataclass(slots=True)
class StrategyForecast:
    strategy: str
    tiers: TierSlots
    # what it comes to with these slots: fallbacks applied
    runs: str
    prefill: PhaseForecast = field(default_factory=PhaseForecast)
    decode: PhaseForecast = field(default_factory=PhaseForecast)


def forecast(
    text: str, outlook: SimulationSetup, load: Workload, tiers: TierSlots | None = None
) -> StrategyForecast:
    """`load` under the strategies of `text`. `tiers`: what to call the outlook's, if it stands for
    larger ones."""
    runs = resolve_strategy(text, outlook.geometry, outlook.tiers.device)
    result = StrategyForecast(text, tiers or outlook.tiers, runs)
    walk = _Simulation(runs, outlook, load)
    for index, step in enumerate(load.steps):
        outcome = result.prefill if step.phase == "prefill" else result.decode
        walk.step(step, outcome if index >= load.warm else PhaseForecast())
    return result


class _Simulation:
    """One engine's life: strategies, slots and host tier, step after step."""

    def __init__(self, text: str, outlook: SimulationSetup, load: Workload) -> None:
        self.outlook, self.prices = outlook, outlook.prices
        self.slots, self.shelf = (
            SlotMap(outlook.tiers.device),
            SimulatedHostTier(outlook.tiers.host),
        )
        can_run = outlook.tiers.host > 0
        share = outlook.tiers.host / outlook.geometry.total
        costs = self.prices.profile.costs().with_host(share, outlook.tiers.shared)
        context = StrategyContext(outlook.geometry, self.slots, load.heatmap, costs, can_run)
        self.prefill, self.decode = build_strategies(text, context)
        self.both = tuple(dict.fromkeys((self.prefill, self.decode)))
        for strategy in self.both:
            strategy.start()
        # what is pinned on the device has no second copy
        hot, shared = load.heatmap.hottest(outlook.geometry.total), outlook.tiers.shared
        self.shelf.fill(key for key in hot if shared or not self.slots.is_pinned(key))

    def step(self, step: TraceStep, outcome: PhaseForecast) -> None:
        strategy = self.prefill if step.phase == "prefill" else self.decode
        rides = self._rides(strategy)
        groups = strategy.groups() if step.phase == "prefill" and not rides else None
        # a group is computed while it is loaded: the longer of the two is its time
        arrives_s = 0.0
        for group, visit in step.walk(groups):
            if group is not None:
                outcome.seconds = max(outcome.seconds, arrives_s)
                arrives_s = outcome.seconds + self._load(strategy.load_group(group), outcome)
            self._layer(strategy, visit.demand, outcome, rides)
        outcome.seconds = max(outcome.seconds, arrives_s)
        if step.phase == "decode":
            # as the engine: between tokens
            for each in self.both:
                self._load(each.update(), outcome)
        _end_step(step, self.outlook, outcome, rides)

    def _rides(self, strategy: Strategy) -> bool:
        """As `resident.find_resident`: nothing left to decide, and all bytes in one memory."""
        tiers, total = self.outlook.tiers, self.outlook.geometry.total
        if self.outlook.backbone.express is None or not strategy.settled():
            return False
        if all(each.settled() for each in self.both):
            return max(tiers.host, tiers.device) >= total
        if tiers.shared:
            return True
        # what the device holds for good has no copy in host memory
        pinned = tiers.device >= total or any(map(self.slots.is_pinned, self.slots.keys()))
        return tiers.host >= total and not pinned

    def _layer(
        self, strategy: Strategy, demand: Demand, outcome: PhaseForecast, rides: bool
    ) -> None:
        first = first_uses(self.slots, demand)
        waves = strategy.decide(demand)
        turns = [wave_counts(wave, demand, self.shelf) for wave in waves]
        if rides:
            outcome.add_resident(turns, self.prices)
        else:
            outcome.add(turns, self.prices)
            outcome.seconds += self.prices.layer_s(turns)
        classes = classify(demand, waves, first)
        outcome.hits += len(classes.hits)
        outcome.prefetch_hits += len(classes.early)
        outcome.misses += len(classes.misses)
        outcome.host_runs += len(classes.host)

    def _load(self, loads: Sequence[tuple[Key, int]], outcome: PhaseForecast) -> float:
        """Loads that run beside computing; seconds until the last has arrived."""
        from_disk = sum(not self.shelf.take(key) for key, _ in loads)
        return outcome.add_beside(
            WaveCounts((), (), (), len(loads) - from_disk, from_disk), self.prices
        )


def optimum(outlook: SimulationSetup, load: Workload) -> StrategyForecast:
    """A bound, no strategy: nobody hits more than Belady's choice of victims, which knows the
    future, and nobody is faster than every expert on the side that runs it sooner, without a call's
    own cost, beside the reads that even both tiers together cannot avoid."""
    result = StrategyForecast(BELADY, outlook.tiers, BELADY)
    both = min(outlook.geometry.total, outlook.tiers.device + outlook.tiers.host)
    for phase, outcome in (("prefill", result.prefill), ("decode", result.decode)):
        steps = [step for step in load.steps if step.phase == phase]
        warm = sum(step.phase == phase for step in load.steps[: load.warm])
        hits, misses = _belady(outlook, steps, warm, outlook.tiers.device)
        outcome.hits, outcome.misses = hits, misses
        outcome.read = _belady(outlook, steps, warm, both)[1]
        _price_best(outlook, steps[warm:], outcome)
    return result


def _belady(
    outlook: SimulationSetup, steps: Sequence[TraceStep], warm: int, slots: int
) -> tuple[int, int]:
    """Hits and misses of the steps behind the first `warm`."""
    found = []
    for part in (steps, steps[:warm]):
        trace = Trace(outlook.geometry, max(1, len(part)))
        trace.steps.extend(part)
        found.append(belady(trace, slots))
    whole, before = found
    demands = (whole.hits + whole.misses) - (before.hits + before.misses)
    hits = max(0, whole.hits - before.hits)
    return hits, demands - hits


def _price_best(
    outlook: SimulationSetup, steps: Sequence[TraceStep], outcome: PhaseForecast
) -> None:
    prices, pace = outlook.prices, outlook.backbone
    running = 0.0
    for step in steps:
        for _, visit in step.walk():
            running += prices.best_s(visit.demand.counts)
            outcome.limit_s += prices.limit_s(WaveCounts(resident=visit.demand.counts))
        curves = [pace.walk, *([pace.express] if pace.express else [])]
        outcome.steps += 1
        for chunk in step.chunks:
            tokens = tokens_of(chunk, outlook.geometry.top_k)
            outcome.tokens += tokens
            outcome.seconds += min(curve.at(tokens) for curve in curves)
            outcome.limit_s += outlook.backbone_limit_s
    outcome.seconds += max(running, outcome.read * prices.profile.read.each_s)
    outcome.limit_s = min(outcome.limit_s, outcome.seconds)


def _end_step(
    step: TraceStep, outlook: SimulationSetup, outcome: PhaseForecast, rides: bool = False
) -> None:
    outcome.steps += 1
    outcome.rides += rides
    pace = outlook.backbone
    curve = pace.express if rides and pace.express else pace.walk
    for chunk in step.chunks:
        tokens = tokens_of(chunk, outlook.geometry.top_k)
        outcome.tokens += tokens
        outcome.seconds += curve.at(tokens)
        outcome.limit_s += outlook.backbone_limit_s


# an upload costs as much as computing two rows on the host
NEUTRAL = ExpertCosts(upload_s=2e-3, device_run_s=1e-4, host_run_s=1e-3)


@dataclass(frozen=True, slots=True)
class ReplaySetup:
    """The machine that a replay pretends to have."""

    num_slots: int
    heatmap: Heatmap | None = None
    costs: ExpertCosts = NEUTRAL
    host_can_run: bool = True
    deterministic: bool = False
    # off, protect or prefetch: what is done with the predictions in the trace
    predict: str = "off"


@dataclass(slots=True)
class ReplayCounts:
    """Demands by outcome; `moves` and `waves` are experts and turns."""

    hits: int = 0
    prefetch_hits: int = 0
    misses: int = 0
    host_runs: int = 0
    moves: int = 0
    waves: int = 0

    def add(self, classes: DemandClasses, waves: Sequence[Wave]) -> None:
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

    total: ReplayCounts = field(default_factory=ReplayCounts)
    phases: dict[str, ReplayCounts] = field(default_factory=dict)
    layers: dict[int, ReplayCounts] = field(default_factory=dict)
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


def replay(text: str, trace: Trace, stage: ReplaySetup) -> ReplayResult:
    """Strategy `text` (names as the CLI takes them) over the whole trace, from empty slots."""
    slots = SlotMap(stage.num_slots)
    context = StrategyContext(
        trace.geometry, slots, stage.heatmap, stage.costs, stage.host_can_run, stage.deterministic
    )
    prefill, decode = build_strategies(
        resolve_strategy(text, trace.geometry, stage.num_slots), context
    )
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


def _walk(strategy: Strategy, step: TraceStep, stage: ReplaySetup, result: ReplayResult) -> None:
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
        first = first_uses(strategy.context.slots, visit.demand)
        waves = strategy.decide(visit.demand)
        classes = classify(visit.demand, waves, first)
        layer, phase = visit.demand.layer, step.phase
        for counts in (
            result.total,
            result.phases.setdefault(phase, ReplayCounts()),
            result.layers.setdefault(layer, ReplayCounts()),
        ):
            counts.add(classes, waves)


def belady(trace: Trace, num_slots: int) -> ReplayCounts:
    """Hits and misses of the optimum. A prompt in chunks may walk chunk by chunk or layer by layer;
    the better of the two counts."""
    orders = [_sets(trace, by_layer=False)]
    if any(len(step.chunks) > 1 for step in trace.steps):
        orders.append(_sets(trace, by_layer=True))
    return max((_optimum(order, num_slots) for order in orders), key=lambda counts: counts.hits)


def _sets(trace: Trace, by_layer: bool) -> list[list[Key]]:
    """Experts that are asked for together, in order of time."""
    single = tuple((layer,) for layer in trace.geometry.layers)
    sets = []
    for step in trace.steps:
        for _, visit in step.walk(single if by_layer and step.phase == "prefill" else None):
            layer = visit.demand.layer
            sets.append([(layer, expert) for expert in visit.demand.experts])
    return sets


def _optimum(sets: Sequence[Sequence[Key]], num_slots: int) -> ReplayCounts:
    following = _next_uses(sets)
    counts = ReplayCounts()
    # the valid next use of every resident; the heap (farthest first) may hold outdated entries
    resident = _first_asked(sets, num_slots)
    farthest = [(-use, key) for key, use in resident.items()]
    heapify(farthest)
    for asked, uses in zip(sets, following, strict=True):
        for key, use in zip(asked, uses, strict=True):
            if key in resident:
                counts.hits += 1
            else:
                counts.misses += 1
            resident[key] = use
            heappush(farthest, (-use, key))
        while len(resident) > num_slots:
            use, key = heappop(farthest)
            if resident.get(key) == -use:
                del resident[key]
    return counts


def _first_asked(sets: Sequence[Sequence[Key]], limit: int) -> dict[Key, int]:
    """The experts that are asked for earliest, with the index of that set."""
    first: dict[Key, int] = {}
    for index, asked in enumerate(sets):
        for key in asked:
            first.setdefault(key, index)
        if len(first) >= limit:
            break
    return dict(list(first.items())[:limit])


def _next_uses(sets: Sequence[Sequence[Key]]) -> list[list[int]]:
    """For every demand, the index of the set that asks for the same expert next."""
    later: dict[Key, int] = {}
    never = len(sets)
    uses: list[list[int]] = []
    for index in range(len(sets) - 1, -1, -1):
        uses.append([later.get(key, never) for key in sets[index]])
        later.update(dict.fromkeys(sets[index], index))
    return uses[::-1]
