"""Traces: chunks are told apart, files come back, foreign ones are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coterie.core.errors import WeightsError
from coterie.moe.dispatch.base import Demand
from coterie.moe.runtime.trace import Trace
from coterie.moe.store.base import ExpertGeometry
from tests.helpers.moe.routing_traces import make

GEOMETRY = ExpertGeometry((1, 2), 8, 2)


def visits(
    trace: Trace, groups: tuple[tuple[int, ...], ...] | None = None
) -> list[tuple[int, int]]:
    return [
        (visit.demand.layer, visit.demand.experts[0])
        for step in trace.steps
        for _, visit in step.visits(groups)
    ]


@pytest.mark.parametrize(
    "order", [[(1, 0), (2, 0), (1, 1), (2, 1)], [(1, 0), (1, 1), (2, 0), (2, 1)]]
)
def test_a_trace_does_not_depend_on_the_walk_it_was_recorded_under(
    order: list[tuple[int, int]],
) -> None:
    trace = Trace(GEOMETRY)
    for layer, chunk in order:
        trace.record(Demand(layer, "prefill", (chunk,), (1,)))
    trace.end_step()
    assert visits(trace) == [(1, 0), (2, 0), (1, 1), (2, 1)]
    assert visits(trace, ((1,), (2,))) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    begins = [begin for begin, _ in trace.steps[0].visits(((1,), (2,)))]
    assert begins == [0, None, 1, None]


def test_a_saved_trace_comes_back(tmp_path: Path) -> None:
    trace = make("mixed", GEOMETRY, 12, prompts=5)
    trace.hint(1, (3, 4))
    trace.record(Demand(1, "decode", (3, 5), (1, 1)))
    trace.end_step()
    trace.save(tmp_path / "trace.npz", fingerprint="f")
    back = Trace.load(tmp_path / "trace.npz", GEOMETRY, fingerprint="f")
    assert list(back.steps) == list(trace.steps)
    assert back.steps[-1].chunks[0][0].predicted == (3, 4)
    assert np.array_equal(back.heatmap().counts, trace.heatmap().counts)


def test_only_the_last_steps_are_kept() -> None:
    trace = Trace(GEOMETRY, limit=3)
    for number in range(5):
        trace.record(Demand(1, "decode", (number,), (1,)))
        trace.end_step()
    assert visits(trace) == [(1, 2), (1, 3), (1, 4)]


def test_foreign_and_broken_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    make("uniform", GEOMETRY, 3).save(path, fingerprint="f")
    for geometry, fingerprint in (
        (GEOMETRY, "g"),
        (ExpertGeometry((1, 3), 8, 2), "f"),
        (ExpertGeometry((1, 2), 2, 2), "f"),
    ):
        with pytest.raises(WeightsError):
            Trace.load(path, geometry, fingerprint=fingerprint)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(WeightsError):
        Trace.load(path, GEOMETRY, fingerprint="f")
    with pytest.raises(WeightsError):
        Trace.load(tmp_path / "none", GEOMETRY, fingerprint="f")
