"""Which experts a model's gates chose, step by step: recorded live, kept in a file, replayed.

The choice does not depend on placement, so a trace recorded under one strategy is valid for all.
The file has numpy's format, without pickled objects.
"""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from coterie.core.errors import WeightsError
from coterie.moe.dispatch.base import Demand
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.store.base import ExpertGeometry

PHASES = ("prefill", "decode")
LayerGroups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class LayerVisit:
    """A demand, and the experts predicted for it one layer earlier (empty: no prediction)."""

    demand: Demand
    predicted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TraceStep:
    """A forward pass. A long prompt runs in chunks: chunks[c] is one pass through the layers."""

    phase: str
    chunks: tuple[tuple[LayerVisit, ...], ...]

    def visits(self, groups: LayerGroups | None = None) -> Iterator[tuple[int | None, LayerVisit]]:
        """Visits in the order in which they run. The first visit of a group has its number."""
        if groups is None:
            for chunk in self.chunks:
                for visit in chunk:
                    yield None, visit
            return
        for index, group in enumerate(groups):
            first: int | None = index
            for chunk in self.chunks:
                for visit in chunk:
                    if visit.demand.layer in group:
                        yield first, visit
                        first = None


class Trace:
    """The last `limit` steps."""

    def __init__(self, geometry: ExpertGeometry, limit: int = 65536) -> None:
        self.geometry = geometry
        self.steps: deque[TraceStep] = deque(maxlen=limit)
        self._open: list[list[LayerVisit]] = []
        self._visits: dict[int, int] = {}
        self._hints: dict[int, tuple[int, ...]] = {}

    def hint(self, layer: int, predicted: Sequence[int]) -> None:
        """These experts are predicted for the next visit of `layer`."""
        self._hints[layer] = tuple(predicted)

    def record(self, demand: Demand) -> None:
        """A layer that is visited again in the same step belongs to the next chunk."""
        chunk = self._visits.get(demand.layer, 0)
        self._visits[demand.layer] = chunk + 1
        if chunk == len(self._open):
            self._open.append([])
        self._open[chunk].append(LayerVisit(demand, self._hints.pop(demand.layer, ())))

    def end_step(self) -> None:
        if self._open:
            phases = {visit.demand.phase for chunk in self._open for visit in chunk}
            phase = "prefill" if "prefill" in phases else "decode"
            self.steps.append(TraceStep(phase, tuple(map(tuple, self._open))))
        self._open, self._visits, self._hints = [], {}, {}

    def heatmap(self) -> Heatmap:
        heat = Heatmap(self.geometry)
        for step in self.steps:
            for _, visit in step.visits():
                heat.add(visit.demand.layer, visit.demand.experts, visit.demand.counts)
        return heat

    def save(self, path: Path, *, fingerprint: str) -> None:
        """Replace the file in one step, so that it is never incomplete."""
        visits: list[tuple[int, ...]] = []
        experts: list[int] = []
        counts: list[int] = []
        predicted: list[int] = []
        for number, step in enumerate(self.steps):
            for place, chunk in enumerate(step.chunks):
                for visit in chunk:
                    demand = visit.demand
                    sizes = len(demand.experts), len(visit.predicted)
                    phase = PHASES.index(demand.phase)
                    visits.append((number, phase, place, demand.layer, *sizes))
                    experts.extend(demand.experts)
                    counts.extend(demand.counts)
                    predicted.extend(visit.predicted)
        body = io.BytesIO()
        np.savez_compressed(
            body,
            fingerprint=np.array(fingerprint),
            layers=np.array(self.geometry.layers, dtype=np.int32),
            visits=np.array(visits, dtype=np.int32).reshape(-1, 6),
            experts=np.array(experts, dtype=np.int32),
            counts=np.array(counts, dtype=np.int32),
            predicted=np.array(predicted, dtype=np.int32),
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            draft.write_bytes(body.getvalue())
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path, geometry: ExpertGeometry, *, fingerprint: str) -> Trace:
        try:
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            visits = arrays["visits"].tolist()
            experts, counts = arrays["experts"].tolist(), arrays["counts"].tolist()
            predicted, layers = arrays["predicted"].tolist(), arrays["layers"].tolist()
            found = str(arrays["fingerprint"])
        except (OSError, KeyError, ValueError, BadZipFile, EOFError) as error:
            raise WeightsError(f"{path}: not a readable trace: {error}") from error
        if found != fingerprint or tuple(layers) != geometry.layers:
            raise WeightsError(f"{path}: trace of other experts ({found}, not {fingerprint})")
        if max((*experts, *predicted), default=0) >= geometry.num_experts:
            raise WeightsError(f"{path}: trace of more than {geometry.num_experts} experts")
        trace = cls(geometry, limit=max(65536, len(visits)))
        step, at, hinted = 0, 0, 0
        for number, phase, _, layer, size, hints in visits:
            if number != step:
                trace.end_step()
                step = number
            trace.hint(layer, predicted[hinted : hinted + hints])
            picked = slice(at, at + size)
            trace.record(
                Demand(layer, PHASES[phase], tuple(experts[picked]), tuple(counts[picked]))
            )
            at, hinted = at + size, hinted + hints
        trace.end_step()
        return trace
