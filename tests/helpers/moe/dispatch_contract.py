"""The contract every expert strategy keeps, as plain functions over the strategy table.

    python -m tests.helpers.moe.dispatch_contract [--device cuda] [--full]

runs without pytest and prints a table of cases. Promise 1 (docs/exactness.md): in fp32 the same
greedy tokens as the all-resident model and logits within 1e-4; in lower precision bitwise equal
where the same kernel and shape class run (the native CPU path), otherwise teacher-forced logits
within TOLERANCE, the same argmax wherever the top-2 gap exceeds twice it, and the rate of
divergence reported. Teacher-forced means tokens and, for a MoE, routes: a near tie between two
experts may go the other way in another precision, which is counted and reported.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor

from coterie.core.errors import CoterieError
from coterie.kernels.cpu.build import native
from coterie.moe.dispatch.table import STRATEGIES
from tests.helpers.moe import contract_faults, contract_moves, contract_overlap
from tests.helpers.moe.dispatched_model import (
    PROMPTS,
    DispatchedModel,
    Routes,
    Setting,
    expect_weights_error,
)
from tests.helpers.moe.tiny_moe import ARCHITECTURES, EXPERTS, LAYERS, checkpoint_of

FP32_TOLERANCE = 1e-4
# absolute, of logits whose standard deviation is about 1.2
TOLERANCE = {"bf16": 0.1, "int8": 0.1}
CAPACITIES = (1, 3, 12, LAYERS * EXPERTS)
CHUNKS = (1, 7, 16, 64)
DTYPES = ("fp32", "bf16", "int8")
BACKINGS = ("disk", "ram")
# strategies that compute on the host need one place there (adaptive can do without, but is to use
# it); the others read past it
ONE_HOST_SLOT = {name for name, kind in STRATEGIES.items() if kind.runs_on_host} | {"adaptive"}


@dataclass(frozen=True)
class Case:
    architecture: str
    strategy: str
    capacity: int
    chunk: int
    dtype: str
    backing: str
    batched: bool

    def __str__(self) -> str:
        rows = "batched" if self.batched else "single"
        parts = (self.architecture, self.strategy, self.capacity, self.chunk, self.dtype)
        return "-".join(map(str, (*parts, self.backing, rows)))

    def setting(self, device: str) -> Setting:
        alone = self.strategy in ONE_HOST_SLOT
        host = "100%" if self.backing == "ram" else "0.01%" if alone else "0"
        path = checkpoint_of(self.architecture)
        return Setting(path, self.strategy, self.capacity, host, self.dtype, device)

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        return PROMPTS if self.batched else PROMPTS[:1]


def all_cases() -> list[Case]:
    """Every combination, in an order whose beginning is as mixed as its end."""
    axes = (ARCHITECTURES, STRATEGIES, CAPACITIES, CHUNKS, DTYPES, BACKINGS, (False, True))
    cases = [Case(*values) for values in product(*axes)]
    random.Random(5).shuffle(cases)
    return cases


def covering_cases() -> list[Case]:
    """Each architecture under each strategy once; each strategy at every capacity, chunk size,
    precision, backing and batching."""
    cases = []
    for row, strategy in enumerate(STRATEGIES):
        for column, architecture in enumerate(ARCHITECTURES):
            n = row + column
            cases.append(
                Case(
                    architecture,
                    strategy,
                    CAPACITIES[n % 4],
                    CHUNKS[(column + row // 4) % 4],
                    DTYPES[n % 3],
                    BACKINGS[column % 2],
                    bool((column + row) % 2),
                )
            )
    return cases


@cache
def reference(
    architecture: str, dtype: str, chunk: int, batched: bool, device: str
) -> tuple[Tensor, Tensor, Routes]:
    """The all-resident model: no load, no wave, no choice."""
    everything = LAYERS * EXPERTS
    strategy = "cpu_only" if device == "cpu" else "persistent"
    setting = Setting(checkpoint_of(architecture), strategy, everything, "100%", dtype, device)
    with DispatchedModel(setting) as dispatched:
        routes = dispatched.record_routes()
        return *dispatched.generate(PROMPTS if batched else PROMPTS[:1], chunk), routes


def keeps_promise_one(case: Case, device: str = "cpu") -> str:
    """Raises AssertionError, or says how near it came."""
    known = reference(case.architecture, case.dtype, case.chunk, case.batched, device)
    expected, tokens, routes = known
    with DispatchedModel(case.setting(device)) as dispatched:
        _within_budget(dispatched, case)
        same_kernel = device == "cpu" and native() is not None
        exact = same_kernel or case.dtype == "fp32"
        strayed = [] if exact else dispatched.follow(routes)
        logits, own = dispatched.generate(case.prompts, case.chunk, None if exact else tokens)
        _within_budget(dispatched, case)
    error = float((logits - expected).abs().max())
    if same_kernel:
        assert torch.equal(logits, expected), f"not bitwise equal: off by {error:.2e}"
        return "bitwise"
    if case.dtype == "fp32":
        assert torch.equal(own, tokens), "other greedy tokens"
        assert error <= FP32_TOLERANCE, f"off by {error:.2e}"
        return f"within {error:.1e}"
    routed = f"{sum(strayed) / len(strayed):.1%} of routes"
    return _near(logits, expected, TOLERANCE[case.dtype]) + f", {routed}"


def _near(logits: Tensor, expected: Tensor, tolerance: float) -> str:
    error = float((logits - expected).abs().max())
    assert error <= tolerance, f"off by {error:.3f}, tolerance {tolerance}"
    top = expected.topk(2).values
    clear = top[..., 0] - top[..., 1] > 2 * tolerance
    same = logits.argmax(-1) == expected.argmax(-1)
    assert bool(same[clear].all()), "another token where the choice was clear"
    return f"within {error:.1e}, diverged {float((~same).float().mean()):.1%} of tokens"


def _within_budget(dispatched: DispatchedModel, case: Case) -> None:
    parts, total = dispatched.runtime.parts, LAYERS * EXPERTS
    slot = parts.store.slot_bytes
    slots = 0 if case.strategy == "cpu_only" else min(case.capacity, total)
    assert parts.device.budget_bytes <= slots * slot
    assert len(parts.device.keys()) <= slots
    host = {"100%": parts.store.expert_bytes, "0.01%": slot, "0": 0}[dispatched.setting.host]
    # in one memory both together are what counts, and no expert is held twice
    one = parts.device.device.type == "cpu"
    assert parts.host.budget_bytes <= host + one * slots * slot
    held = parts.host.budget_bytes + parts.device.budget_bytes
    assert held <= (min(host + slots * slot, total * slot) if one else host + slots * slot)
    assert parts.host.used_bytes <= parts.host.budget_bytes


def fails_cleanly(strategy: str, device: str = "cpu") -> str:
    """A broken read is a typed error; nothing stays in use; the next request is answered right."""
    case = Case("qwen3_moe", strategy, 3, 7, "fp32", "disk", batched=True)
    with DispatchedModel(case.setting(device)) as dispatched:
        # a strategy that needs no reads after its start is broken there: see faults.py
        for survived in (0, 1, 5):
            dispatched.disk.reads_until_fault = survived
            expect_weights_error(lambda: dispatched.generate(case.prompts, case.chunk))
            dispatched.disk.reads_until_fault = None
            dispatched.runtime.check()
        logits, tokens = dispatched.generate(case.prompts, case.chunk)
    expected, expected_tokens, _ = reference("qwen3_moe", "fp32", 7, True, device)
    assert torch.equal(tokens, expected_tokens)
    assert float((logits - expected).abs().max()) <= FP32_TOLERANCE
    return "3 faults, then right"


def order_changes_nothing(strategy: str, device: str = "cpu") -> str:
    """Reads that end in any order, guesses that come too late or not at all: the same logits."""
    case = Case("olmoe", strategy, 5, 16, "fp32", "disk", batched=True)
    expected, tokens, _ = reference("olmoe", "fp32", 16, True, device)
    with DispatchedModel(replace(case.setting(device), predict="prefetch")) as dispatched:
        dispatched.disk.jitter_s = 0.004
        for _ in range(2):
            logits, own = dispatched.generate(case.prompts, case.chunk)
            assert torch.equal(own, tokens)
            assert float((logits - expected).abs().max()) <= FP32_TOLERANCE
    return "2 times the same"


def checks(device: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """Everything that is not a case of promise 1, by name."""
    for strategy in STRATEGIES:
        yield f"fault-{strategy}", partial(fails_cleanly, strategy, device)
        yield f"order-{strategy}", partial(order_changes_nothing, strategy, device)
        yield f"invariants-{strategy}", partial(contract_moves.invariants, strategy, device)
    for module in (contract_moves, contract_faults, contract_overlap):
        for name, check in module.CHECKS.items():
            yield name, partial(check, device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--full", action="store_true", help="every combination")
    parser.add_argument("--only", default="", help="names that contain this")
    options = parser.parse_args()
    device = options.device
    cases = all_cases() if options.full else covering_cases()
    named: list[tuple[str, Callable[[], str]]] = [
        (str(case), partial(keeps_promise_one, case, device)) for case in cases
    ]
    named += checks(device)
    failed = done = 0
    begin = time.perf_counter()
    for name, check in named:
        if options.only not in name:
            continue
        done += 1
        started = time.perf_counter()
        try:
            said = check()
        except (AssertionError, CoterieError, RuntimeError, KeyError) as problem:
            failed += 1
            said = f"FAIL {type(problem).__name__}: {problem}"
        print(f"{name:56} {time.perf_counter() - started:5.1f} s  {said}", flush=True)
    verdict = "FAIL" if failed else "PASS"
    seconds = time.perf_counter() - begin
    print(f"{verdict}: {done - failed} of {done} on {device} in {seconds:.0f} s")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
