"""Heatmaps: what they rank, and which files they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from coterie.core.errors import WeightsError
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.store.base import ExpertGeometry

GEOMETRY = ExpertGeometry((0, 3), 4, 2, frozenset({(3, 3)}))


def example() -> Heatmap:
    heat = Heatmap(GEOMETRY)
    heat.add(0, (1, 2), (5, 1))
    heat.add(3, (0, 1, 2), (2, 2, 2.5))
    return heat


def test_the_hottest_come_first_and_pruned_ones_never() -> None:
    heat = example()
    assert heat.hottest(4) == [(0, 1), (3, 2), (3, 0), (3, 1)]
    assert len(heat.hottest(99)) == GEOMETRY.total and (3, 3) not in heat.hottest(99)
    assert heat.hottest_of(0) == [1, 2, 0, 3]


def test_skew_tells_one_favourite_from_an_even_spread() -> None:
    heat = Heatmap(GEOMETRY, np.array([[9.0, 0, 0, 0], [1, 1, 1, 0]]))
    assert heat.skew(0) == pytest.approx(1.0) and heat.skew(3) == pytest.approx(0.0)
    assert Heatmap(GEOMETRY).skew(0) == 0.0


def test_a_saved_heatmap_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "heat.json"
    example().save(path, fingerprint="f", workload="code")
    back = Heatmap.load(path, GEOMETRY, lineage=("f",), workload="code")
    assert np.array_equal(back.counts, example().counts)
    assert [entry.name for entry in path.parent.iterdir()] == ["heat.json"]


@pytest.mark.parametrize(
    ("fingerprint", "workload", "geometry", "word"),
    [
        ("g", "code", GEOMETRY, "fingerprint"),
        ("f", "chat", GEOMETRY, "workload"),
        ("f", "code", ExpertGeometry((0, 1), 4, 2), "layers"),
        ("f", "code", ExpertGeometry((0, 3), 8, 2), "num_experts"),
    ],
)
def test_a_foreign_heatmap_is_refused(
    tmp_path: Path, fingerprint: str, workload: str, geometry: ExpertGeometry, word: str
) -> None:
    example().save(tmp_path / "h", fingerprint="f", workload="code")
    with pytest.raises(WeightsError, match=word):
        Heatmap.load(tmp_path / "h", geometry, lineage=(fingerprint,), workload=workload)


@pytest.mark.parametrize(
    "counts", [None, "x", [[1, 2]], [[-1, 0, 0, 0]] * 2, [[float("nan"), 0, 0, 0]] * 2]
)
def test_broken_counts_are_refused(tmp_path: Path, counts: object) -> None:
    path = tmp_path / "h"
    example().save(path, fingerprint="f", workload="code")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"counts": counts}))
    with pytest.raises(WeightsError):
        Heatmap.load(path, GEOMETRY, lineage=("f",), workload="code")


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "h").write_text(text)
    with pytest.raises(WeightsError):
        Heatmap.load(tmp_path / "h", GEOMETRY, lineage=("f",), workload="code")
    with pytest.raises(WeightsError):
        Heatmap.load(tmp_path / "none", GEOMETRY, lineage=("f",), workload="code")
