"""The GPU benchmarks and the device suite on the CPU: programs that no other test starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(module: str, *options: str) -> str:
    command = [sys.executable, "-W", "ignore", "-m", module, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


SOME = ("bf16-decode-3-sampled", "bf16-prefill-64", "bf16-latency-3", "bf16-gap-*")


@pytest.mark.parametrize(
    ("module", "cases"),
    [
        pytest.param("benchmarks.moe.gpu", ("bf16-decode-1",), marks=pytest.mark.full),
        pytest.param("benchmarks.moe.gpu", SOME, marks=pytest.mark.full),
        pytest.param("benchmarks.moe.gpu", ("*",), marks=pytest.mark.full),
        pytest.param("benchmarks.dense.gpu", ("*",), marks=pytest.mark.full),
    ],
)
def test_cases_run(module: str, cases: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    chosen = [word for name in cases for word in ("--case", name)]
    chosen += ["--profile"] if cases == ("*",) else []
    told = run(module, "--smoke", *chosen, "--json", str(file))
    found = json.loads(file.read_text())["cases"]
    ran = {name: case for name, case in found.items() if "not run" not in case}
    assert all(case.get("tok_s", case.get("decode_tok_s", 0)) > 0 for case in ran.values())
    for name, case in ran.items():
        if "-decode-1" in name and not name.startswith("transformers") and "resident" not in name:
            assert case["experts_distinct"] == 2.0
    missing = [name for name, case in found.items() if "not run" in case]
    assert bool(missing) == (cases != ("*",)) and ("not run:" in told) == bool(missing)


@pytest.mark.full
def test_hits_behind_a_prompt(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    run("benchmarks.moe.gpu_warm", "--smoke", "--strategies", "adaptive", "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    assert [row["tokens"] for row in rows[:2]] == ["2 to 16", "17 to 32"]
    assert [row["prompt"] for row in rows] == [1] * 6 + [2] * 6
    assert all(0 < row["hit_rate"] <= 1 and row["tok_s"] > 0 for row in rows)


@pytest.mark.full
def test_without_a_case_all_are_listed() -> None:
    names = [line.split(" | ") for line in run("benchmarks.moe.gpu").splitlines()]
    assert ["bf16-decode-64", "not run"] in names and len(names) > 20


# needs no model of transformers, whose import takes seconds
SUITE = ("adapters/bf16",)
LONG_SUITE = ("qwen3_moe/", "adapters/bf16", "adapters/ia3/eager/qwen3_moe")


@pytest.mark.parametrize(
    ("chosen", "least"), [(SUITE, 0), pytest.param(LONG_SUITE, 7, marks=pytest.mark.full)]
)
def test_device_suite_without_a_device(chosen: tuple[str, ...], least: int) -> None:
    told = run("tests.cuda", "--prompts", "2", *(w for name in chosen for w in ("--only", name)))
    *lines, summary = told.splitlines()
    assert "0 FAILED" in summary and "skipped adapters/bf16" in told
    assert ("ok      adapters/ia3/eager/qwen3_moe" in told) == (chosen == LONG_SUITE)
    assert sum(line.startswith("ok") for line in lines) >= least
