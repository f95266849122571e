"""The program that tries the planner's choice beside busy loops: its cases and its judgement."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.moe import planner_beside
from benchmarks.moe.planner_beside import MODELS, RealSpeed, candidates, cases, ratios, rivals
from benchmarks.moe.random_moe import Shape


def test_every_number_of_loops_meets_every_model_and_other_budgets() -> None:
    made = cases([0, 1, 2, 4])
    assert [case.number for case in made] == list(range(12))
    assert Counter(case.loops for case in made) == dict.fromkeys((0, 1, 2, 4), 3)
    for loops in (0, 1, 2, 4):
        own = [case for case in made if case.loops == loops]
        assert {case.model for case in own} == set(MODELS)
        assert len({(case.budget, case.host) for case in own}) == 3


def test_a_choice_is_judged_at_prompts_first() -> None:
    speeds = {"a": RealSpeed(100, 10), "b": RealSpeed(99, 20), "c": RealSpeed(80, 90)}
    assert ratios("b", speeds) == (0.99, 1.0)
    assert ratios("a", speeds) == (1.0, 0.5)
    # decoding faster than a choice that is better at prompts is no reason to fail it
    assert ratios("c", speeds)[0] == 0.8


def test_the_choice_and_its_rivals_run_again() -> None:
    speeds = {"a": RealSpeed(100, 10), "b": RealSpeed(99, 20), "c": RealSpeed(80, 90)}
    assert rivals("a", speeds) == ["a", "b"]
    assert rivals("b", speeds) == ["b", "a"]
    assert rivals("c", speeds) == ["c", "a"]


def test_pairs_are_tried_too_and_the_bound_never() -> None:
    rows = [
        {"strategy": name, "prefill_tokens_s": speed, "decode_tokens_s": 1.0}
        for name, speed in (
            ("belady", 9),
            ("lru", 5),
            ("lru+a", 1),
            ("a+b", 4),
            ("c+d", 3),
            ("e+f", 2),
        )
    ]
    found = candidates({"rows": rows, "choice": {"strategy": "lru+a"}})
    assert found == ["lru", "a+b", "c+d", "e+f", "lru+a"]


@pytest.mark.full
def test_a_case_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One loop beside a tiny model; the speeds of a busy machine are not judged here."""
    tiny = Shape(2, 8, 2, 64, 32, 4, 2, 16, 320, 128, skew=0.5)
    monkeypatch.setattr(planner_beside, "MODELS", {"tiny": tiny})
    said: list[str] = []
    args = argparse.Namespace(
        beside="0,1", cases="1", threads=0, folder=tmp_path, json=tmp_path / "out.json",
        prompt=16, decode=4, requests=1, rounds=1, busy=True,
    )  # fmt: skip
    before = dict(os.environ)
    status = planner_beside.check(args, said.append)
    assert os.environ == before
    [row] = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert row["loops"] == 1 and row["choice"] in row["speeds"]
    assert status == int(not row["passed"])
    assert 0 < row["prefill_of_best"] <= 1 and row["decode_error"] > 0
    assert all(value > 0 for value in row["busy_us"].values())
