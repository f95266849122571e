"""Replays a workload through a strategy: what would move, and how long it would take.

Calls the same `decide` as the runtime, with the same `SlotMap`, and simulates the host tier. Moves
no bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from coterie.moe.dispatch.base import Demand, ExpertCosts, Strategy, StrategyContext, Wave
from coterie.moe.dispatch.table import build_strategies, resolve_strategy
from coterie.moe.planner.device_simulation import DeviceSetup, DeviceSimulation
from coterie.moe.planner.machine import MODEL_ERROR, BackboneTimes, StepKind
from coterie.moe.planner.step_costs import (
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
    """The machine, the model and the division of memory that a simulation assumes."""

    geometry: ExpertGeometry
    tiers: TierSlots
    cost_model: CostModel
    # a step without experts; and the least time that its bytes need
    backbone: BackboneTimes
    backbone_limit_s: float = 0.0
    # where a CUDA device's kernels read experts where they are; None: layer by layer
    device: DeviceSetup | None = None
    # by kind of decode step: real seconds against predicted ones, and how far they are apart
    corrections: Mapping[StepKind, tuple[float, float]] = field(default_factory=dict)


@dataclass(slots=True)
class StrategyForecast:
    strategy: str
    tiers: TierSlots
    # the strategies that really run with these slots, fallbacks included
    runs: str
    prefill: PhaseForecast = field(default_factory=PhaseForecast)
    decode: PhaseForecast = field(default_factory=PhaseForecast)


def forecast(
    text: str, setup: SimulationSetup, load: Workload, tiers: TierSlots | None = None
) -> StrategyForecast:
    """`load` under the strategies of `text`. `tiers` are the real tiers, where the simulated ones
    are smaller."""
    runs = resolve_strategy(text, setup.geometry, setup.tiers.device)
    result = StrategyForecast(text, tiers or setup.tiers, runs)
    simulation: _Simulation | DeviceSimulation = (
        _Simulation(runs, setup, load)
        if setup.device is None
        else DeviceSimulation(runs, setup.device, load)
    )
    for index, step in enumerate(load.steps):
        outcome = result.prefill if step.phase == "prefill" else result.decode
        simulation.step(step, outcome if index >= load.warm else PhaseForecast())
    return result


class _Simulation:
    """The state of one simulated engine: strategies, slots and host tier."""

    def __init__(self, text: str, setup: SimulationSetup, load: Workload) -> None:
        self.setup, self.cost_model = setup, setup.cost_model
        self.slots, self.host_tier = (
            SlotMap(setup.tiers.device),
            SimulatedHostTier(setup.tiers.host),
        )
        can_run = setup.tiers.host > 0
        share = setup.tiers.host / setup.geometry.total
        costs = self.cost_model.profile.costs().with_host(share, setup.tiers.shared)
        context = StrategyContext(setup.geometry, self.slots, load.heatmap, costs, can_run)
        self.prefill, self.decode = build_strategies(text, context)
        self.both = tuple(dict.fromkeys((self.prefill, self.decode)))
        for strategy in self.both:
            strategy.start()
        # an expert pinned on the device has no copy in host memory
        hot, shared = load.heatmap.hottest(setup.geometry.total), setup.tiers.shared
        self.host_tier.fill(key for key in hot if shared or not self.slots.is_pinned(key))

    def step(self, step: TraceStep, outcome: PhaseForecast) -> None:
        strategy = self.prefill if step.phase == "prefill" else self.decode
        before = outcome.seconds, outcome.limit_s, outcome.read
        one_call = self._runs_in_one_call(strategy)
        groups = strategy.groups() if step.phase == "prefill" and not one_call else None
        # a group is computed while it is loaded: its time is the longer of the two
        loaded_s = 0.0
        for group, visit in step.visits(groups):
            if group is not None:
                outcome.seconds = max(outcome.seconds, loaded_s)
                loaded_s = outcome.seconds + self._load(strategy.load_group(group), outcome)
            self._layer(strategy, visit.demand, outcome, one_call)
        outcome.seconds = max(outcome.seconds, loaded_s)
        if step.phase == "decode":
            # between tokens, as the engine does
            for each in self.both:
                self._load(each.update(), outcome)
        _end_step(step, self.setup, outcome, one_call)
        self._correct(step, outcome, before, one_call)

    def _correct(
        self,
        step: TraceStep,
        outcome: PhaseForecast,
        before: tuple[float, float, int],
        one_call: bool,
    ) -> None:
        """What real runs have shown of such steps; no step is faster than its bytes allow."""
        seconds, limit_s, read = before
        taken, ratio, error = outcome.seconds - seconds, 1.0, MODEL_ERROR
        if step.phase == "decode":
            kind: StepKind = "from disk" if outcome.read > read else "in memory"
            ratio, error = self.setup.corrections.get(
                "one call" if one_call else kind, (ratio, error)
            )
        if ratio != 1.0:
            taken = max(taken * ratio, min(taken, outcome.limit_s - limit_s))
            outcome.seconds = seconds + taken
        outcome.error_s += taken * error

    def _runs_in_one_call(self, strategy: Strategy) -> bool:
        """As `resident.find_resident`: nothing more to decide, and all bytes in one memory."""
        tiers, total = self.setup.tiers, self.setup.geometry.total
        if self.setup.backbone.express is None or not strategy.settled():
            return False
        if all(each.settled() for each in self.both):
            return max(tiers.host, tiers.device) >= total
        if tiers.shared:
            return True
        # an expert that stays on the device for good has no copy in host memory
        pinned = tiers.device >= total or any(map(self.slots.is_pinned, self.slots.keys()))
        return tiers.host >= total and not pinned

    def _layer(
        self, strategy: Strategy, demand: Demand, outcome: PhaseForecast, one_call: bool
    ) -> None:
        first = first_uses(self.slots, demand)
        waves = strategy.decide(demand)
        counted = [wave_counts(wave, demand, self.host_tier) for wave in waves]
        if one_call:
            outcome.add_resident(counted, self.cost_model)
        else:
            outcome.add(counted, self.cost_model)
            outcome.seconds += self.cost_model.layer_s(counted)
        classes = classify(demand, waves, first)
        outcome.hits += len(classes.hits)
        outcome.prefetch_hits += len(classes.early)
        outcome.misses += len(classes.misses)
        outcome.host_runs += len(classes.host)

    def _load(self, loads: Sequence[tuple[Key, int]], outcome: PhaseForecast) -> float:
        """Loads in the background; returns the seconds until the last one is done."""
        from_disk = sum(not self.host_tier.take(key) for key, _ in loads)
        return outcome.add_background(
            WaveCounts((), (), (), len(loads) - from_disk, from_disk), self.cost_model
        )


def optimum(setup: SimulationSetup, load: Workload) -> StrategyForecast:
    """A bound, not a strategy. No strategy hits more often than Belady's algorithm, which knows the
    future. None is faster than running every expert on the faster of host and device, without call
    overhead, at the same time as the reads that even both tiers together cannot avoid."""
    result = StrategyForecast(BELADY, setup.tiers, BELADY)
    both = min(setup.geometry.total, setup.tiers.device + setup.tiers.host)
    for phase, outcome in (("prefill", result.prefill), ("decode", result.decode)):
        steps = [step for step in load.steps if step.phase == phase]
        warm = sum(step.phase == phase for step in load.steps[: load.warm])
        hits, misses = _belady(setup, steps, warm, setup.tiers.device)
        outcome.hits, outcome.misses = hits, misses
        if setup.device is not None:
            _add_best_on_device(setup.device, steps[warm:], phase, outcome)
            continue
        outcome.read = _belady(setup, steps, warm, both)[1]
        _add_best(setup, steps[warm:], outcome)
    return result


def _add_best_on_device(
    device: DeviceSetup, steps: Sequence[TraceStep], phase: str, outcome: PhaseForecast
) -> None:
    """The misses of the optimum, the same number in every layer; nothing is copied beside steps."""
    path, layers = device.path, len(device.geometry.layers)
    chunks = [chunk for step in steps for chunk in step.chunks]
    outcome.steps = len(steps)
    each = outcome.misses / max(1, len(chunks) * layers)
    missing, nothing, top_k = [each] * layers, [0.0] * layers, device.geometry.top_k
    for chunk in chunks:
        tokens = tokens_of(chunk, top_k)
        used = sum(len(visit.demand.experts) for visit in chunk)
        step_bytes = device.backbone_bytes + used * path.record_bytes
        outcome.tokens += tokens
        if phase == "prefill":
            outcome.seconds += path.prompt_s(tokens, missing, nothing, top_k)
            limit_s = path.prompt_limit_s(each * layers, step_bytes, device.device_bytes_s)
        else:
            outcome.seconds += path.decode_s(tokens, missing, top_k)
            limit_s = path.decode_limit_s(each * layers, step_bytes, device.device_bytes_s)
        outcome.limit_s += limit_s


def _belady(
    setup: SimulationSetup, steps: Sequence[TraceStep], warm: int, slots: int
) -> tuple[int, int]:
    """Hits and misses of the steps after the first `warm`."""
    found = []
    for part in (steps, steps[:warm]):
        trace = Trace(setup.geometry, max(1, len(part)))
        trace.steps.extend(part)
        found.append(belady(trace, slots))
    whole, before = found
    demands = (whole.hits + whole.misses) - (before.hits + before.misses)
    hits = max(0, whole.hits - before.hits)
    return hits, demands - hits


def _add_best(setup: SimulationSetup, steps: Sequence[TraceStep], outcome: PhaseForecast) -> None:
    costs, backbone = setup.cost_model, setup.backbone
    running = 0.0
    for step in steps:
        for _, visit in step.visits():
            running += costs.best_s(visit.demand.counts)
            outcome.limit_s += costs.limit_s(WaveCounts(resident=visit.demand.counts))
        curves = [backbone.walk, *([backbone.express] if backbone.express else [])]
        outcome.steps += 1
        for chunk in step.chunks:
            tokens = tokens_of(chunk, setup.geometry.top_k)
            outcome.tokens += tokens
            outcome.seconds += min(curve.at(tokens) for curve in curves)
            outcome.limit_s += setup.backbone_limit_s
    outcome.seconds += max(running, outcome.read * costs.profile.read.each_s)
    outcome.limit_s = min(outcome.limit_s, outcome.seconds)


def _end_step(
    step: TraceStep, setup: SimulationSetup, outcome: PhaseForecast, one_call: bool = False
) -> None:
    outcome.steps += 1
    outcome.one_call_steps += one_call
    backbone = setup.backbone
    curve = backbone.express if one_call and backbone.express else backbone.walk
    for chunk in step.chunks:
        tokens = tokens_of(chunk, setup.geometry.top_k)
        outcome.tokens += tokens
        outcome.seconds += curve.at(tokens)
        outcome.limit_s += setup.backbone_limit_s


# an upload costs as much as computing two rows on the host
NEUTRAL = ExpertCosts(upload_s=2e-3, device_run_s=1e-4, host_run_s=1e-3)


@dataclass(frozen=True, slots=True)
class ReplaySetup:
    """The machine that a replay assumes."""

    num_slots: int
    heatmap: Heatmap | None = None
    costs: ExpertCosts = NEUTRAL
    host_can_run: bool = True
    deterministic: bool = False
    # off, protect or prefetch: how predictions in the trace are used
    predict: str = "off"


@dataclass(slots=True)
class ReplayCounts:
    """Demands by outcome, moved experts, and waves."""

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
        """Without prefetch hits."""
        return self.hits / self.demands if self.demands else 0.0


@dataclass(slots=True)
class ReplayResult:
    """`total.moves` are the moves that demands caused; the others have counters of their own."""

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


def replay(text: str, trace: Trace, setup: ReplaySetup) -> ReplayResult:
    """Strategy `text` (names as the CLI takes them) over the whole trace, from empty slots."""
    slots = SlotMap(setup.num_slots)
    context = StrategyContext(
        trace.geometry, slots, setup.heatmap, setup.costs, setup.host_can_run, setup.deterministic
    )
    prefill, decode = build_strategies(
        resolve_strategy(text, trace.geometry, setup.num_slots), context
    )
    both = tuple(dict.fromkeys((prefill, decode)))
    result = ReplayResult()
    result.start_moves = sum(len(strategy.start()) for strategy in both)
    for step in trace.steps:
        _replay_step(prefill if step.phase == "prefill" else decode, step, setup, result)
        result.steps[step.phase] = result.steps.get(step.phase, 0) + 1
        if step.phase == "decode":
            # between tokens, as the engine does
            result.update_moves += sum(len(strategy.update()) for strategy in both)
    return result


def _replay_step(
    strategy: Strategy, step: TraceStep, setup: ReplaySetup, result: ReplayResult
) -> None:
    groups = strategy.groups() if step.phase == "prefill" else None
    visits = list(step.visits(groups))
    for index, (group, visit) in enumerate(visits):
        if groups is not None and group is not None:
            result.group_moves += len(strategy.load_group(group))
        if setup.predict != "off" and index + 1 < len(visits):
            following = visits[index + 1][1]
            strategy.protect(following.demand.layer, following.predicted)
            if setup.predict == "prefetch" and following.predicted:
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
    """Hits and misses of the optimum. A prompt in chunks may run chunk by chunk or layer by layer;
    the better of the two counts."""
    orders = [_sets(trace, by_layer=False)]
    if any(len(step.chunks) > 1 for step in trace.steps):
        orders.append(_sets(trace, by_layer=True))
    return max((_optimum(order, num_slots) for order in orders), key=lambda counts: counts.hits)


def _sets(trace: Trace, by_layer: bool) -> list[list[Key]]:
    """Experts that are needed together, in order of time."""
    single = tuple((layer,) for layer in trace.geometry.layers)
    sets = []
    for step in trace.steps:
        for _, visit in step.visits(single if by_layer and step.phase == "prefill" else None):
            layer = visit.demand.layer
            sets.append([(layer, expert) for expert in visit.demand.experts])
    return sets


def _optimum(sets: Sequence[Sequence[Key]], num_slots: int) -> ReplayCounts:
    following = _next_uses(sets)
    counts = ReplayCounts()
    # the next use of every resident; the heap (latest first) may have outdated entries
    resident = _first_used(sets, num_slots)
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


def _first_used(sets: Sequence[Sequence[Key]], limit: int) -> dict[Key, int]:
    """The experts that are needed first, with the index of that set."""
    first: dict[Key, int] = {}
    for index, asked in enumerate(sets):
        for key in asked:
            first.setdefault(key, index)
        if len(first) >= limit:
            break
    return dict(list(first.items())[:limit])


def _next_uses(sets: Sequence[Sequence[Key]]) -> list[list[int]]:
    """For every demand, the index of the next set with the same expert."""
    later: dict[Key, int] = {}
    never = len(sets)
    uses: list[list[int]] = []
    for index in range(len(sets) - 1, -1, -1):
        uses.append([later.get(key, never) for key in sets[index]])
        later.update(dict.fromkeys(sets[index], index))
    return uses[::-1]
