"""Finds the rows that are most like a vector: exactly up to 50,000 rows, by usearch beyond.

Rows are vectors of unit length; similarity is their cosine. Immutable. Knows no adapter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import MissingDependency

MAX_EXACT_ROWS = 50_000


class AdapterIndex:
    def __init__(self, rows: NDArray[np.float32], max_exact: int = MAX_EXACT_ROWS) -> None:
        self._rows = np.ascontiguousarray(rows, np.float32)
        self._graph = _graph(self._rows) if len(rows) > max_exact else None

    def __len__(self) -> int:
        return len(self._rows)

    def search(self, vector: NDArray[np.float32], k: int) -> list[tuple[int, float]]:
        """The `k` rows nearest to `vector` with their similarities, nearest first."""
        k = min(k, len(self._rows))
        if k <= 0:
            return []
        if self._graph is not None:
            found = self._graph.search(vector, k)
            pairs = zip(found.keys.tolist(), found.distances.tolist(), strict=True)
            return [(int(row), 1.0 - distance) for row, distance in pairs]
        # a BLAS may add up a row in another order in another place: equal rows would differ
        alike = np.einsum("ij,j->i", self._rows, vector)
        least = np.partition(alike, -k)[-k]
        best = np.flatnonzero(alike >= least)
        # equal similarities in order of rows: the same request gives the same plan
        best = best[np.argsort(-alike[best], kind="stable")][:k]
        return [(int(row), float(alike[row])) for row in best]


def _graph(rows: NDArray[np.float32]) -> Any:
    try:
        from usearch.index import Index
    except ImportError as error:
        raise MissingDependency(
            f"an index of {len(rows)} rows needs usearch: pip install usearch"
        ) from error
    graph = Index(ndim=rows.shape[1], metric="ip", dtype="f32")
    graph.add(np.arange(len(rows)), rows)
    return graph
