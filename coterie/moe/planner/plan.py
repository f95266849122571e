"""Predicts the speed of each strategy on this machine, before anything is loaded, and chooses one.

Replays a workload through every strategy and estimates its time. Chooses by prefill first: the
fastest prefill, then the fastest decode among the pairs that do not slow it down. Reads no weights,
measures nothing and does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from coterie.core.errors import ConfigError
from coterie.core.moe import MoeSettings
from coterie.core.settings import parse_bytes
from coterie.moe.dispatch.table import STRATEGIES, both_phases, strategy_classes
from coterie.moe.planner.cost_curve import CostCurve
from coterie.moe.planner.device_simulation import DeviceSetup
from coterie.moe.planner.machine import STEP_KINDS, BackboneTimes, Machine
from coterie.moe.planner.simulate import (
    BELADY,
    SimulationSetup,
    StrategyForecast,
    forecast,
    optimum,
)
from coterie.moe.planner.step_costs import CostModel, PhaseForecast
from coterie.moe.planner.workload import Workload
from coterie.moe.runtime.budget import (
    AUTO_SHARE,
    ExpertSizes,
    TierNeeds,
    TierSlots,
    fits_bank,
    size_tiers,
    with_buffers,
)
from coterie.moe.store.base import ExpertGeometry

# predictions closer than this are the same speed
SAME = 0.03
# prompts may be so much slower than the fastest, where measurements cannot tell them apart
MOST_SAME = 0.05
# demands that `choose` replays through each strategy, over all divisions
QUICK = 300
QUICK_LAYERS = 12


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """The sizes of a model that a plan needs."""

    geometry: ExpertGeometry
    sizes: ExpertSizes
    # read once per step: all weights except the routed experts
    backbone_bytes: int = 0
    kv_token_bytes: int = 0
    # tokens of one context, whose KV is reserved before any expert
    context: int = 0
    # a step without experts; None = estimated from its bytes
    backbone: BackboneTimes | None = None
    # the precision of the experts; "" = not known
    kind: str = ""

    @property
    def kv_bytes(self) -> int:
        return self.context * self.kv_token_bytes


@dataclass(frozen=True, slots=True)
class MemoryDivision:
    """One way to divide the memory: the budgets as a user would write them."""

    settings: MoeSettings
    # what is free; which tiers are needed depends on the strategy
    needs: TierNeeds

    def tiers(self, text: str, sizes: ExpertSizes) -> TierSlots | None:
        """The slots that the runtime would give `text`; None where it would refuse."""
        kinds = strategy_classes(text)
        needs = replace(
            self.needs,
            device=any(kind.needs_device for kind in kinds),
            host=any(kind.runs_on_host for kind in kinds),
        )
        try:
            return size_tiers(self.settings, sizes, needs)
        except ConfigError:
            return None

    def reads_in_place(self, tiers: TierSlots, sizes: ExpertSizes) -> bool:
        """Whether RAM holds all experts, so that a device reads from there what has no slot."""
        beside = not self.needs.one_memory and tiers.host >= sizes.total > tiers.device
        return beside and fits_bank(self.settings, sizes, self.needs)

    def kv_room(self, experts: TierSlots, slot_bytes: int) -> int:
        """Bytes on the device that experts leave for KV."""
        text = self.settings.device_budget
        taken = self.needs.graph_bytes
        taken += 0 if experts.shared else experts.device * slot_bytes
        if text and not text.endswith("%") and not self.settings.cache_capacity:
            return max(0, parse_bytes(text, "device_budget") - taken)
        if self.needs.one_memory:
            taken += experts.host * slot_bytes
        return max(0, int(self.needs.free_device_bytes * AUTO_SHARE) - taken)


def divisions(settings: MoeSettings, needs: TierNeeds) -> list[MemoryDivision]:
    """The budgets as given. Where none is given and both tiers are in one memory, also a division
    with all of it for device slots: no expert is then stored twice."""
    found = [MemoryDivision(settings, needs)]
    given = settings.device_budget or settings.host_budget or settings.cache_capacity
    if needs.one_memory and not given:
        whole = f"{int(needs.free_device_bytes * AUTO_SHARE)}B"
        only_device = replace(settings, device_budget=whole, host_budget="0B")
        found.append(MemoryDivision(only_device, needs))
    return found


@dataclass(frozen=True, slots=True)
class PlanRow:
    strategy: str
    # as given ("" = automatic)
    device_budget: str
    host_budget: str
    device_slots: int
    host_slots: int
    device_bytes: int
    host_bytes: int
    # experts that are in neither tier
    disk_bytes: int
    prefill_hit_rate: float
    decode_hit_rate: float
    prefill_tokens_s: float
    decode_tokens_s: float
    # the limit that the moved bytes set, and the predicted share of it
    decode_limit_tokens_s: float
    decode_share: float
    prefill_limit_tokens_s: float
    moved_bytes_per_token: float
    read_bytes_per_token: float
    kv_tokens: int
    # whether decoding runs all layers in one call: there is nothing to decide or to move
    one_call: bool
    # whether a GPU's kernels read what has no slot from RAM
    in_place: bool
    # the strategies that really run with these slots: some fall back
    runs: str = ""
    # by how much the measurements of the machine leave each speed open
    prefill_spread: float = 0.0
    decode_spread: float = 0.0
    # by how much each prediction may be off in all
    prefill_error: float = 0.0
    decode_error: float = 0.0

    @property
    def least_prefill_tokens_s(self) -> float:
        """If all costs are as large as their measurements allow."""
        return self.prefill_tokens_s / (1 + self.prefill_spread)

    @property
    def least_decode_tokens_s(self) -> float:
        return self.decode_tokens_s / (1 + self.decode_spread)

    @property
    def falls_back(self) -> bool:
        return bool(self.runs) and self.runs != both_phases(self.strategy)


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """`device_budget` and `host_budget` are "" where the given (or the automatic) ones apply."""

    strategy: str
    reason: str
    device_budget: str = ""
    host_budget: str = ""


@dataclass(frozen=True, slots=True)
class PlacedTiers:
    tiers: TierSlots
    # slots that are buffers for prompts, beside the others
    buffers: int = 0
    # a GPU's kernels read from RAM what has no slot
    in_place: bool = False
    # KV may take slots
    elastic: bool = False


@dataclass(frozen=True, slots=True)
class PlanCase:
    """Everything that a plan is made from."""

    model: PlannedModel
    machine: Machine
    # the key of the record's profile in the machine
    profile: str
    load: Workload

    # replay only every n-th layer, with tiers smaller by the same factor: faster, nearly the same
    every: int = 1

    def setup(
        self,
        tiers: TierSlots,
        in_place: bool = False,
        streams: bool = True,
        elastic: bool = False,
    ) -> SimulationSetup:
        """`in_place`: a GPU's kernels read from RAM what has no slot; `streams`: prompts have
        buffers to copy it to; `elastic`: KV may take slots."""
        model, machine, part = self.model, self.machine, self.every
        profile = machine.profiles[self.profile]
        costs = CostModel(machine, profile, tiers.host > 0, tiers.shared)
        least_s = model.backbone_bytes / machine.device_bytes_s
        times = backbone_times(model, machine).scaled(1 / part)
        slots = TierSlots(self._slots(tiers.device), self._slots(tiers.host), tiers.shared)
        device = self._device(tiers, slots, in_place, streams)
        device = device and replace(device, elastic=elastic)
        shown = {
            kind: (machine.correction(self.profile, kind), machine.model_error(self.profile, kind))
            for kind in STEP_KINDS
        }
        return SimulationSetup(
            self.load.geometry, slots, costs, times, least_s / part, device, shown
        )

    def slowest(self) -> PlanCase:
        """With every cost as large as its measurement allows."""
        machine, model = self.machine.slowest(self.profile), self.model
        if model.backbone is not None:
            model = replace(model, backbone=machine.backbones.get(self.profile, model.backbone))
        return replace(self, machine=machine, model=model)

    def _device(
        self, tiers: TierSlots, slots: TierSlots, in_place: bool, streams: bool
    ) -> DeviceSetup | None:
        model, machine = self.model, self.machine
        path = machine.device_paths.get(self.profile)
        if path is None or not (in_place or tiers.device >= model.sizes.total):
            return None
        return DeviceSetup(
            self.load.geometry,
            path.thinned(self.every),
            slots.device,
            machine.profiles[self.profile].costs().with_host(1.0),
            machine.device_bytes_s,
            model.backbone_bytes / self.every,
            self.every,
            streams,
        )

    def placed(self, division: MemoryDivision, text: str) -> PlacedTiers | None:
        """The slots of `text`, without those that are buffers for prompts."""
        tiers, sizes = division.tiers(text, self.model.sizes), self.model.sizes
        if tiers is None:
            return None
        known = self.profile in self.machine.device_paths
        if not known or not division.reads_in_place(tiers, sizes):
            return PlacedTiers(tiers)
        most = 2 * self.model.geometry.num_experts
        count, buffers = with_buffers(division.settings, tiers.device, most)
        elastic = division.settings.elastic_memory
        return PlacedTiers(replace(tiers, device=count), buffers, in_place=True, elastic=elastic)

    def _slots(self, count: int) -> int:
        """The same share of the replayed experts; all of them when `count` is all."""
        return -(-count * self.load.geometry.total // self.model.geometry.total)

    def quick(self, demands: int) -> PlanCase:
        """The same with fewer layers and a part of the workload."""
        every = max(1, len(self.model.geometry.layers) // QUICK_LAYERS)
        load = self.load.thinned(every).shortened(demands)
        return replace(self, load=load, every=every)


def plan(case: PlanCase, divided: Sequence[MemoryDivision]) -> list[PlanRow]:
    """For every division a row per strategy and useful pair, and one for Belady's optimum."""
    rows = []
    for division in divided:
        outcomes = _forecasts(case, division, 3)
        made = _rows(case, division, outcomes)
        placed = [each for _, each in outcomes]
        most = max(placed, key=lambda each: each.tiers.device, default=PlacedTiers(TierSlots(0, 0)))
        if most.tiers.device:
            best = optimum(_setup(case, most), case.load)
            made.append(_bound(_row(case, division, best, most), made))
        rows += made
    return rows


def _bound(best: PlanRow, rows: Sequence[PlanRow]) -> PlanRow:
    """Raise the optimum to the best row: background loads can hide a read that it counts."""
    prefill = max([best.prefill_tokens_s, *(row.prefill_tokens_s for row in rows)])
    decode = max([best.decode_tokens_s, *(row.decode_tokens_s for row in rows)])
    limit = max(best.decode_limit_tokens_s, decode)
    return replace(
        best,
        prefill_tokens_s=prefill,
        decode_tokens_s=decode,
        decode_limit_tokens_s=limit,
        decode_share=decode / limit if limit else 0.0,
    )


def forecast_row(case: PlanCase, division: MemoryDivision, text: str) -> PlanRow | None:
    """The row of one strategy; None where it would be refused."""
    each = _forecast(case, division, text)
    return _rows(case, division, [each])[0] if each else None


def choose(case: PlanCase, divided: Sequence[MemoryDivision]) -> PlanChoice:
    """What `--strategy auto` runs. Takes well under a second: it replays a part of the workload
    and no optimum."""
    short = case.quick(QUICK // len(divided))
    return pick(
        row
        for division in divided
        for row in _rows(short, division, _forecasts(short, division, 2))
    )


def choose_in_place(case: PlanCase, division: MemoryDivision) -> str:
    """The strategy where a GPU's kernels read from RAM what has no slot: adaptive, unless another
    one is clearly faster at decoding and no slower at prompts."""
    short = case.quick(QUICK)
    made = [row for name in STRATEGIES if (row := forecast_row(short, division, name)) is not None]
    usual = next((row for row in made if row.strategy == "adaptive"), None)
    if usual is None:
        return "adaptive"
    floor = usual.prefill_tokens_s * (1 - SAME)
    able = [row for row in made if row.prefill_tokens_s >= floor and not row.falls_back]
    best = max(able, key=lambda row: row.decode_tokens_s, default=usual)
    clearly = best.decode_tokens_s > usual.decode_tokens_s * (1 + SAME)
    return best.strategy if clearly else usual.strategy


def pick(rows: Iterable[PlanRow]) -> PlanChoice:
    """Prefill first; then decode, among the rows whose prefill is as fast. What counts is the least
    speed that the measurements of the machine allow: where predictions overlap, the row whose worst
    case is best."""
    real = [row for row in rows if row.strategy != BELADY]
    if not real:
        raise ConfigError("no strategy fits these budgets", param="device_budget")
    fastest = max(real, key=lambda row: row.least_prefill_tokens_s)
    apart = min(max(SAME, fastest.prefill_spread), MOST_SAME)
    floor = fastest.least_prefill_tokens_s * (1 - apart)
    equal = [row for row in real if row.least_prefill_tokens_s >= floor]
    quickest = max(row.least_decode_tokens_s for row in equal)
    near = [row for row in equal if row.least_decode_tokens_s >= quickest * (1 - SAME)]
    # among equals prefer the one that uses least memory, then one that does not fall back, then
    # a single name, then the one that loses least of the two speeds
    best = min(
        near,
        key=lambda row: (
            row.device_bytes + row.host_bytes,
            row.falls_back,
            "+" in row.strategy,
            -_of_best(row.least_prefill_tokens_s, fastest.least_prefill_tokens_s)
            - _of_best(row.least_decode_tokens_s, quickest),
        ),
    )
    return PlanChoice(best.strategy, _reason(best, real), best.device_budget, best.host_budget)


def _of_best(speed: float, best: float) -> float:
    return speed / best if best > 0 else 1.0


def _reason(best: PlanRow, rows: Sequence[PlanRow]) -> str:
    off = f" ±{best.decode_error:.0%}" if best.decode_error else ""
    decode = f"{best.decode_tokens_s:.1f} tok/s{off}"
    if best.prefill_tokens_s <= 0:
        return f"{best.strategy}: no prompt in the trace, so the fastest decode alone ({decode})"
    slower = max((r.prefill_tokens_s for r in rows if r.strategy != best.strategy), default=0.0)
    faster = max(rows, key=lambda row: row.decode_tokens_s)
    first = "as fast as any" if slower >= best.prefill_tokens_s * (1 - SAME) else "the fastest"
    if slower * (1 - MOST_SAME) > best.prefill_tokens_s:
        first = "the best in its worst case"
    text = (
        f"{best.strategy}: its prefill is {first} ({best.prefill_tokens_s:.0f} tok/s), and with "
        f"that its decode is within {SAME:.0%} of the fastest ({decode})"
    )
    if faster.decode_tokens_s > best.decode_tokens_s * (1 + SAME):
        text += (
            f"; {faster.strategy} would decode at {faster.decode_tokens_s:.1f} but prefill at "
            f"{faster.prefill_tokens_s:.0f}"
        )
    return text


def as_json(rows: Sequence[PlanRow], choice: PlanChoice) -> dict[str, Any]:
    return {"rows": [asdict(row) for row in rows], "choice": asdict(choice)}


def backbone_times(model: PlannedModel, machine: Machine) -> BackboneTimes:
    """The measured times, or an estimate: the backbone's bytes at the device's read rate."""
    if model.backbone is not None:
        return model.backbone
    seconds = model.backbone_bytes / machine.device_bytes_s
    return BackboneTimes(CostCurve((1, 64), (seconds, seconds * 4)))


def _forecasts(
    case: PlanCase, division: MemoryDivision, best: int
) -> list[tuple[StrategyForecast, PlacedTiers]]:
    """Each strategy alone, then pairs of the best at prefill and the best at decode."""
    singles = [each for name in STRATEGIES if (each := _forecast(case, division, name))]
    # a strategy that falls back to another one is not paired
    own = [each for each, _ in singles if each.strategy in each.runs]
    prefills = sorted(own, key=lambda each: -each.prefill.tokens_s)[:best]
    decodes = sorted(own, key=lambda each: -each.decode.tokens_s)[:best]
    pairs = [
        _forecast(case, division, f"{first.strategy}+{second.strategy}")
        for first in prefills
        for second in decodes
        if first.strategy != second.strategy
    ]
    return singles + [each for each in pairs if each]


def _forecast(
    case: PlanCase, division: MemoryDivision, text: str
) -> tuple[StrategyForecast, PlacedTiers] | None:
    placed = case.placed(division, text)
    if placed is None:
        return None
    return forecast(text, _setup(case, placed), case.load, placed.tiers), placed


def _setup(case: PlanCase, placed: PlacedTiers) -> SimulationSetup:
    return case.setup(placed.tiers, placed.in_place, placed.buffers > 0, placed.elastic)


def _rows(
    case: PlanCase,
    division: MemoryDivision,
    outcomes: Iterable[tuple[StrategyForecast, PlacedTiers]],
) -> list[PlanRow]:
    """With what the measurements leave open: where that is much, everything is forecast again with
    the largest costs."""
    spread = case.machine.spread(case.profile)
    worst = case.slowest() if spread > SAME else None
    return [_with_errors(_row(case, division, *each), each, worst, spread) for each in outcomes]


def _with_errors(
    row: PlanRow,
    each: tuple[StrategyForecast, PlacedTiers],
    worst: PlanCase | None,
    spread: float,
) -> PlanRow:
    outcome, placed = each
    prefill = decode = spread
    if worst is not None:
        slow = forecast(outcome.strategy, _setup(worst, placed), worst.load, placed.tiers)
        prefill = _slowed(outcome.prefill, slow.prefill)
        decode = _slowed(outcome.decode, slow.decode)
    return replace(
        row,
        prefill_spread=prefill,
        decode_spread=decode,
        prefill_error=outcome.prefill.error + prefill,
        decode_error=outcome.decode.error + decode,
    )


def _slowed(usual: PhaseForecast, slow: PhaseForecast) -> float:
    return max(0.0, usual.tokens_s / slow.tokens_s - 1) if slow.tokens_s else 0.0


def _row(
    case: PlanCase, division: MemoryDivision, outcome: StrategyForecast, placed: PlacedTiers
) -> PlanRow:
    model, part = case.model, case.every
    sizes = model.sizes
    tiers = outcome.tiers
    in_memory = min(tiers.device + tiers.host, sizes.total)
    with_room = replace(tiers, device=tiers.device + placed.buffers)
    room = division.kv_room(with_room, sizes.slot_bytes)
    return PlanRow(
        strategy=outcome.strategy,
        device_budget=division.settings.device_budget,
        host_budget=division.settings.host_budget,
        device_slots=tiers.device,
        host_slots=tiers.host,
        device_bytes=0 if tiers.shared else with_room.device * sizes.slot_bytes,
        host_bytes=min(tiers.host * sizes.slot_bytes, sizes.expert_bytes),
        disk_bytes=sizes.expert_bytes * (sizes.total - in_memory) // max(1, sizes.total),
        prefill_hit_rate=outcome.prefill.hit_rate,
        decode_hit_rate=outcome.decode.hit_rate,
        prefill_tokens_s=outcome.prefill.tokens_s / part,
        decode_tokens_s=outcome.decode.tokens_s / part,
        decode_limit_tokens_s=outcome.decode.limit_tokens_s / part,
        decode_share=_share(outcome.decode),
        prefill_limit_tokens_s=outcome.prefill.limit_tokens_s / part,
        moved_bytes_per_token=part * _per_token(outcome.decode.moved, outcome.decode, sizes),
        read_bytes_per_token=part * _per_token(outcome.decode.read, outcome.decode, sizes),
        kv_tokens=room // model.kv_token_bytes if model.kv_token_bytes else 0,
        one_call=outcome.decode.one_call_steps > 0,
        in_place=placed.in_place,
        runs=outcome.runs,
    )


def _share(outcome: PhaseForecast) -> float:
    return outcome.tokens_s / outcome.limit_tokens_s if outcome.limit_s else 0.0


def _per_token(records: int, outcome: PhaseForecast, sizes: ExpertSizes) -> float:
    return records * sizes.slot_bytes / max(1, outcome.tokens)
