"""A model's experts inside a worker: opened with what earlier runs counted, closed with what this
one did.

Between the settings and `moe/runtime/runtime.py`; the only place where a heatmap's file, the
planner's choice and a runtime meet. Knows no requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from coterie.models.experts import ExpertsWanted, store_of
from coterie.moe.planner.auto import chooser, known_costs
from coterie.moe.runtime.runtime import ExpertRuntime, open_experts
from coterie.moe.runtime.trace import Trace
from coterie.workers.base import ExpertInfo
from coterie.workers.warmup import HeatmapFile, heatmap_path, refine

if TYPE_CHECKING:
    from coterie.core.dispatch import DispatchSettings
    from coterie.engine.engine import Engine, LaneConfig
    from coterie.models.text.tokenizer import Tokenizer
    from coterie.moe.runtime.heatmap import Heatmap
    from coterie.moe.store.geometry import Geometry


class ExpertHost:
    """`open` is a `models.experts.ExpertsFactory`."""

    def __init__(self, model: Path, settings: DispatchSettings, kv_bytes: int) -> None:
        self._model, self._settings, self._kv_bytes = model, settings, kv_bytes
        self._heatmap: HeatmapFile | None = None
        self.runtime: ExpertRuntime | None = None

    def open(self, wanted: ExpertsWanted) -> ExpertRuntime:
        settings = self._settings
        store = store_of(wanted, settings.reads)
        try:
            known = self._known(store.geometry, store.lineage)
            runtime = open_experts(
                store,
                settings,
                device=wanted.device,
                kv_bytes=self._kv_bytes,
                heatmap=known,
                costs=known_costs(store, wanted.device),
                chooser=chooser,
            )
        except BaseException:
            store.close()
            raise
        if self._heatmap is not None:
            runtime.heatmap = self._heatmap.live
        self.runtime = runtime
        return runtime

    def _known(self, geometry: Geometry, lineage: tuple[str, ...]) -> Heatmap | None:
        """Nothing is loaded or counted without a warm-up."""
        settings = self._settings
        if settings.warmup == "none":
            return None
        path = heatmap_path(self._model, lineage[-1], settings.workload)
        self._heatmap = HeatmapFile(path, lineage, settings.workload)
        return self._heatmap.load(geometry)

    @property
    def walks_groups(self) -> bool:
        """Whether a whole prompt must come in one step."""
        return self.runtime is not None and self.runtime.groups("prefill") is not None

    def refine(self, engine: Engine, tokenizer: Tokenizer, lane: LaneConfig) -> None:
        """The hybrid warm-up, when it was asked for."""
        if self._settings.warmup == "hybrid":
            refine(engine, tokenizer, lane.name, lane.max_context)

    def record(self) -> None:
        """Keep which experts every step asks for, from now on."""
        if self.runtime is not None:
            self.runtime.trace = Trace(self.runtime.geometry)

    def save_trace(self, path: Path) -> None:
        runtime = self.runtime
        if runtime is not None and runtime.trace is not None:
            runtime.trace.save(path, fingerprint=runtime.parts.store.fingerprint)

    def facts(self) -> ExpertInfo | None:
        if self.runtime is None:
            return None
        parts = self.runtime.parts
        geometry, store = parts.store.geometry, parts.store
        active = len(geometry.layers) * geometry.top_k / max(1, geometry.total)
        return ExpertInfo(
            strategy=parts.strategy,
            count=geometry.total,
            device_slots=parts.device.num_slots,
            host_slots=parts.host.num_slots,
            expert_bytes=store.expert_bytes,
            held_bytes=parts.device.budget_bytes + parts.host.budget_bytes,
            token_bytes=int(store.expert_bytes * active),
            fallback=parts.fallback,
        )

    def tend(self) -> None:
        if self._heatmap is not None:
            self._heatmap.tend()

    def close(self) -> None:
        if self._heatmap is not None:
            self._heatmap.save()
        if self.runtime is not None:
            self.runtime.close()
