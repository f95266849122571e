"""Carries decisions out on slots that are just labels, and complains about impossible ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from coterie.moe.dispatch.base import Demand, ExpertCosts, Strategy, StrategyContext
from coterie.moe.dispatch.table import build_strategies
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.runtime.slot_map import SlotMap
from coterie.moe.store.base import ExpertGeometry, Key

COSTS = ExpertCosts(upload_s=2e-3, device_run_s=1e-4, host_run_s=1e-3)


@dataclass
class Simulator:
    geometry: ExpertGeometry
    text: str
    num_slots: int
    heatmap: Heatmap | None = None
    options: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = SlotMap(self.num_slots)
        context = StrategyContext(self.geometry, self.slots, self.heatmap, COSTS, **self.options)
        self.prefill, self.decode = build_strategies(self.text, context)
        self.content: dict[int, Key] = {}
        # every expert moved after the start, and every expert run on the host
        self.moved: list[Key] = []
        self.hosted: list[Key] = []
        for strategy in self.strategies():
            self._load(strategy.start())
        self.started = list(self.moved)
        self.moved.clear()

    def strategies(self) -> list[Strategy]:
        return list(dict.fromkeys((self.prefill, self.decode)))

    def step(self, phase: str, *chunks: Mapping[int, Iterable[int]]) -> None:
        """Chunks of a prompt, or one token: the experts that each layer asks for."""
        strategy = self.prefill if phase == "prefill" else self.decode
        groups = strategy.groups() if phase == "prefill" else None
        for index, layers in enumerate(groups or (self.geometry.layers,)):
            if groups is not None:
                self._load(strategy.load_group(index))
            for chunk in chunks:
                for layer in layers:
                    self.ask(strategy, phase, layer, chunk[layer])
        for each in self.strategies():
            self._load(each.update())

    def ask(self, strategy: Strategy, phase: str, layer: int, experts: Iterable[int]) -> None:
        wanted = tuple(sorted(experts))
        pinned = self.slots.pinned()
        ran: list[int] = []
        for wave in strategy.decide(Demand(layer, phase, wanted, (1,) * len(wanted))):
            self._fill(wave.load)
            for expert in wave.device:
                assert (layer, expert) in self.content.values(), "runs from a slot it is not in"
            ran += [*wave.device, *wave.host]
            self.hosted += [(layer, expert) for expert in wave.host]
        assert tuple(sorted(ran)) == wanted, "every expert runs exactly once"
        assert pinned == self.slots.pinned(), "pins do not move while a layer runs"
        self._agrees()

    def _load(self, loads: Iterable[tuple[Key, int]]) -> None:
        self._fill(loads)
        self._agrees()

    def _fill(self, loads: Iterable[tuple[Key, int]]) -> None:
        loads = list(loads)
        taken = [slot for _, slot in loads]
        assert len(set(taken)) == len(taken), "two experts for one slot"
        assert all(0 <= slot < self.num_slots for slot in taken)
        for key, slot in loads:
            for other in [s for s, lies in self.content.items() if lies == key and s != slot]:
                del self.content[other]
            self.content[slot] = key
            self.moved.append(key)

    def _agrees(self) -> None:
        for slot in range(self.num_slots):
            key = self.slots.key_at(slot)
            assert key in (None, self.content.get(slot)), "believes what was never loaded"
        assert len(self.slots.keys()) <= self.num_slots
