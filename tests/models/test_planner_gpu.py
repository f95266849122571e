"""The planner's check on a GPU, tiny and on the CPU: predictions are on disk before the runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.moe import planner_gpu
from benchmarks.moe.planner_gpu import GpuBench, GpuConfig, configs


def test_there_are_twelve_configurations_on_a_slice() -> None:
    wanted, bench = configs(), GpuBench.of(smoke=False, layers=12)
    assert len(set(wanted)) == 12
    assert {(each.kind, each.what) for each in wanted} == {
        (kind, what) for kind in ("bf16", "int4") for what in ("decode", "prefill")
    }
    assert bench.layers_of(GpuConfig("bf16", "25", "decode")) == 12
    assert bench.layers_of(GpuConfig("bf16", "100", "decode")) == 24


@pytest.mark.full
def test_predictions_are_saved_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, run = tmp_path / "predicted.json", planner_gpu.run_model
    seen: list[dict[str, Any]] = []

    def watched(bench: GpuBench, wanted: list[GpuConfig]) -> Any:
        seen.append(json.loads(saved.read_text()))
        return run(bench, wanted)

    monkeypatch.setattr(planner_gpu, "run_model", watched)
    given = argparse.Namespace(smoke=True, layers=12, save=saved, json=tmp_path / "all.json")
    assert planner_gpu.check(given, lambda text: None) == 0
    assert len(seen) == 8 and all(each == seen[0] for each in seen)
    compared = json.loads(given.json.read_text())["compared"]
    assert len(compared) == len(seen[0]["predicted"]) == 12
    for name, row in compared.items():
        assert row["predicted"] == seen[0]["predicted"][name]["predicted"] > 0
        assert row["measured"] > 0 and row["ratio"] > 0
