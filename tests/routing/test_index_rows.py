"""The index finds what a plain comparison with every row finds."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.routing.match.matcher import AdapterIndex

ROWS = 500
DIM = 32


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    found = np.random.default_rng(3).standard_normal((ROWS, DIM)).astype(np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def test_the_nearest_come_first_and_none_is_missed(rows: np.ndarray) -> None:
    index = AdapterIndex(rows)
    for vector in rows[:20] + 0.3 * rows[20:40]:
        alike = rows @ vector
        wanted = np.argsort(-alike)[:7]
        found = index.search(vector, 7)
        assert [row for row, _ in found] == wanted.tolist()
        assert [value for _, value in found] == pytest.approx(alike[wanted].tolist(), abs=1e-6)


def test_equal_rows_come_in_their_order(rows: np.ndarray) -> None:
    index = AdapterIndex(np.repeat(rows[:1], 6, axis=0))
    assert [row for row, _ in index.search(rows[0], 6)] == [0, 1, 2, 3, 4, 5]
    assert [row for row, _ in index.search(rows[0], 3)] == [0, 1, 2]
    # wherever they stand
    doubled = AdapterIndex(np.concatenate([rows, rows[::-1]]))
    for row in range(20):
        assert [found for found, _ in doubled.search(rows[row], 2)] == [row, 2 * ROWS - 1 - row]


def test_no_more_than_there_are(rows: np.ndarray) -> None:
    assert len(AdapterIndex(rows[:3]).search(rows[0], 30)) == 3
    assert AdapterIndex(rows[:0]).search(rows[0], 30) == []


def test_a_large_index_is_a_graph_that_agrees(rows: np.ndarray) -> None:
    pytest.importorskip("usearch")
    exact, graph = AdapterIndex(rows), AdapterIndex(rows, max_exact=100)
    hits = 0
    for vector in rows[:50] + 0.2 * rows[50:100]:
        found = graph.search(vector, 5)
        assert found[0][1] == pytest.approx(float(rows[found[0][0]] @ vector), abs=1e-3)
        hits += len({row for row, _ in found} & {row for row, _ in exact.search(vector, 5)})
    assert hits >= 0.9 * 5 * 50
