"""The GPU benchmark in its tiny form: every part runs, and the engine agrees with transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full
def test_smoke(tmp_path: Path) -> None:
    root, target = Path(__file__).resolve().parents[2], tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.dense.gpu", "--smoke", "--json", str(target)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(target.read_text())
    for name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"):
        case = found["greedy"][f"{name} eager"]
        assert case["alone"] == case["together"] == case["of"] == 16
    speeds = [part for name, part in found.items() if name.startswith("speed ")]
    assert len(speeds) == 2 and all(part["4 coterie"] > 0 for part in speeds)
