"""The contract suite under pytest: a covering sample, and every combination behind `full`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.helpers.moe import dispatch_contract, tiny_moe

CASES = dispatch_contract.covering_cases()
CHECKS = dict(dispatch_contract.checks("cpu"))


# `make test` runs every third one
SLICE = [
    pytest.param(case, id=str(case), marks=pytest.mark.full if place % 3 else ())
    for place, case in enumerate(CASES)
]


@pytest.mark.parametrize("case", SLICE)
def test_promise_one(case: dispatch_contract.Case) -> None:
    dispatch_contract.keeps_promise_one(case)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_check(check: Callable[[], str]) -> None:
    check()


def test_sample_covers_every_value_of_every_strategy() -> None:
    for strategy in dispatch_contract.STRATEGIES:
        mine = [case for case in CASES if case.strategy == strategy]
        assert {case.architecture for case in mine} == set(tiny_moe.ARCHITECTURES)
        assert {case.capacity for case in mine} == set(dispatch_contract.CAPACITIES)
        assert {case.chunk for case in mine} == set(dispatch_contract.CHUNKS)
        assert {case.dtype for case in mine} == set(dispatch_contract.DTYPES)
        assert {case.backing for case in mine} == set(dispatch_contract.BACKINGS)
        assert {case.batched for case in mine} == {False, True}


@pytest.mark.parametrize("architecture", tiny_moe.ARCHITECTURES)
def test_checkpoints_have_the_names_transformers_writes(architecture: str) -> None:
    from safetensors import safe_open

    from tests.helpers.models.tiny import tiny_checkpoint

    def names(path: object) -> set[str]:
        with safe_open(f"{path}/model.safetensors", "pt") as file:
            return set(file.keys())

    assert names(tiny_moe.checkpoint_of(architecture)) == names(tiny_checkpoint(architecture))


# threads and their staging, torch's pools: what a process grows by beside its budget
CONSTANT_BYTES = 24 * 2**20


@pytest.mark.parametrize(
    "strategy",
    ["adaptive", *(pytest.param(name, marks=pytest.mark.full) for name in ("lru", "cpu_only"))],
)
def test_experts_eight_times_the_budget_run_from_disk(strategy: str) -> None:
    command = [sys.executable, "-m", "tests.helpers.moe.bigger_than_ram", strategy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["expert_bytes"] >= 8 * found["budget_bytes"]
    assert found["grown_bytes"] <= found["budget_bytes"] + CONSTANT_BYTES
    # around the backbone's pages the kernel reads ahead, as far as the disk's setting says
    limit = 2 * 2**20 + found["read_ahead_bytes"]
    assert found["cached_bytes"] <= limit, "experts left in the page cache"
    assert found["misses"] > 64, "more than the budget holds came from disk"
    if not found["direct"]:
        pytest.skip("the file system has no direct reads: the kernel does not count them")
    assert abs(found["kernel_read_bytes"] - found["read_bytes"]) <= 2**20


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("strategy", dispatch_contract.STRATEGIES)
@pytest.mark.parametrize("architecture", tiny_moe.ARCHITECTURES)
def test_every_combination(architecture: str, strategy: str) -> None:
    failed = []
    for case in dispatch_contract.all_cases():
        if (case.architecture, case.strategy) == (architecture, strategy):
            try:
                dispatch_contract.keeps_promise_one(case)
            except AssertionError as problem:
                failed.append(f"{case}: {problem}")
    assert not failed, "\n".join(failed[:20])
