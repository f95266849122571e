"""How often every expert was used: counted live or in warm-up, kept as JSON between runs.

A file belongs to one set of experts (fingerprint) and one workload; a file of another one is
refused with a typed error. The caller chooses its path.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.core.errors import WeightsError
from coterie.moe.store.base import ExpertGeometry, Key
from coterie.weights.files import read_json

_VERSION = 1


class Heatmap:
    """counts[i, e]: rows that layer `geometry.layers[i]` sent to expert e."""

    def __init__(
        self, geometry: ExpertGeometry, counts: npt.NDArray[np.float64] | None = None
    ) -> None:
        shape = (len(geometry.layers), geometry.num_experts)
        if counts is None:
            counts = np.zeros(shape)
        if counts.shape != shape:
            raise WeightsError(f"a heatmap of shape {counts.shape} for experts {shape}")
        self.geometry = geometry
        self.counts = counts
        self._row = {layer: index for index, layer in enumerate(geometry.layers)}

    def add(self, layer: int, experts: Sequence[int], counts: Sequence[float]) -> None:
        row = self.counts[self._row[layer]]
        for expert, count in zip(experts, counts, strict=True):
            row[expert] += count

    def count(self, key: Key) -> float:
        return float(self.counts[self._row[key[0]], key[1]])

    def total(self) -> float:
        return float(self.counts.sum())

    def hottest(self, limit: int) -> list[Key]:
        """The most used experts of all layers; equal counts go by layer and index."""
        present = np.ones(self.counts.shape, dtype=bool)
        for layer, expert in self.geometry.absent:
            present[self._row[layer], expert] = False
        flat = np.where(present, self.counts, -1.0).ravel()
        order = np.argsort(-flat, kind="stable")[: min(limit, int(present.sum()))]
        width = self.geometry.num_experts
        return [(self.geometry.layers[i // width], i % width) for i in order.tolist()]

    def hottest_of(self, layer: int) -> list[int]:
        """A layer's experts, most used first."""
        row = self.counts[self._row[layer]]
        return sorted(self.geometry.present(layer), key=lambda expert: (-row[expert], expert))

    def skew(self, layer: int) -> float:
        """0 when the layer uses all experts equally, near 1 when it uses one: 1 minus the entropy
        of its counts divided by that of equal counts."""
        row = self.counts[self._row[layer]]
        present = len(self.geometry.present(layer))
        if row.sum() <= 0 or present < 2:
            return 0.0
        share = row[row > 0] / row.sum()
        return float(1.0 + (share * np.log(share)).sum() / np.log(present))

    def save(self, path: Path, *, fingerprint: str, workload: str) -> None:
        """Replace the file in one step, so that it is never incomplete."""
        document = {
            "version": _VERSION,
            "fingerprint": fingerprint,
            "workload": workload,
            "layers": list(self.geometry.layers),
            "num_experts": self.geometry.num_experts,
            "counts": [[round(value, 4) for value in row] for row in self.counts.tolist()],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            draft.write_text(json.dumps(document))
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def load(
        cls, path: Path, geometry: ExpertGeometry, *, lineage: Sequence[str], workload: str
    ) -> Heatmap:
        """Counts of these experts, or of those they were made from (`lineage`: fingerprints, these
        experts' own last). A gate chooses the same experts under the same numbers; experts that
        were removed since have no count."""
        document = _document(path)
        if document.get("fingerprint") not in lineage:
            raise WeightsError(
                f"{path}: heatmap of another fingerprint: {_shown(document.get('fingerprint'))}, "
                f"not {lineage[-1]!r}"
            )
        expected = {
            "version": _VERSION,
            "workload": workload,
            "layers": list(geometry.layers),
            "num_experts": geometry.num_experts,
        }
        for field, value in expected.items():
            if document.get(field) != value:
                raise WeightsError(
                    f"{path}: heatmap of another {field}: {_shown(document.get(field))}, "
                    f"not {value!r}"
                )
        try:
            counts = np.asarray(document["counts"], dtype=np.float64)
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(f"{path}: heatmap without usable counts") from error
        if not np.isfinite(counts).all() or (counts < 0).any():
            raise WeightsError(f"{path}: heatmap counts must be finite and not negative")
        known = cls(geometry, counts)
        for layer, expert in geometry.absent:
            known.counts[known._row[layer], expert] = 0.0
        return known


def _document(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except WeightsError as error:
        raise WeightsError(f"not a readable heatmap: {error.message}") from error


def _shown(value: Any) -> str:
    return repr(value)[:80] if isinstance(value, str | int | float | None) else type(value).__name__
