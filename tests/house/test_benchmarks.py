"""Benchmarks of `make bench` still run: nothing else calls them when an interface moves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.models.tiny import tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "benchmarks.serving.engine_step": ("--sequences", "2", "--steps", "3"),
    "benchmarks.serving.gateway_cpu": ("--streams", "2", "--tokens", "4", "--rounds", "1"),
    "benchmarks.ensemble.overhead": ("--rate", "25", "--seconds", "2", "--rounds", "1"),
}


@pytest.mark.parametrize(
    "name",
    [
        "benchmarks.serving.engine_step",
        pytest.param("benchmarks.serving.gateway_cpu", marks=pytest.mark.full),
        pytest.param("benchmarks.ensemble.overhead", marks=pytest.mark.full),
    ],
)
def test_it_runs(name: str) -> None:
    model = ("--model", str(tiny_checkpoint("llama"))) if name.endswith("gateway_cpu") else ()
    done = subprocess.run(
        [sys.executable, "-m", name, *SMALL[name], *model],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "|" in done.stdout or "{" in done.stdout


@pytest.mark.full
def test_a_short_soak(tmp_path: Path) -> None:
    """One kill and two reloads, every kind of client, nothing lost and nothing different."""
    command = [sys.executable, "-m", "benchmarks.serving.soak", "--json", str(tmp_path / "json")]
    command += ["--minutes", "0.3", "--kill-every", "8", "--reload-every", "6", "--load", "1"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert json.loads((tmp_path / "json").read_text())["totals"]["ended"] > 20
