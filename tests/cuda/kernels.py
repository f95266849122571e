"""Kernels against their torch twins on the device.

The cases of tests/kernels/test_triton*.py run in Triton's interpreter elsewhere; here each file
runs in a process of its own, compiled, on the device:

    python3 -m tests.cuda.kernels FILE      # prints one JSON object {case: [error, tolerance]}
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from tests.cuda.suite import ROOT, Check, NotHere

# others check what the compiler makes, for which no device is needed
FILES = [
    file
    for file in sorted((ROOT / "tests" / "kernels").glob("test_triton*.py"))
    if "\ndef measure(" in file.read_text(encoding="utf-8")
]
TOLERANCE = 1e-5
# bf16 has three bits less than fp16, which stands for it in the interpreter
BF16_FACTOR = 8


def checks(device: str) -> Iterator[Check]:
    for file in FILES:
        name = f"kernels/{file.stem}"
        yield Check(name, name, partial(_run_file, file, device))
    yield Check("attention", "kernels/attention sizes", partial(_attention, device))
    for kind in ("bf16", "int8", "int4"):
        yield Check(
            "host", f"kernels/experts in RAM {kind}", partial(_in_host_memory, kind, device)
        )
    yield Check("attention", "kernels/attention of prompts", partial(_prompts, device))
    for name in _adapter_cases():
        yield Check("adapters", f"adapters/{name}", partial(_adapters, name, device))


def _run_file(file: Path, device: str) -> str:
    if device == "cpu":
        raise NotHere("needs CUDA; the interpreter runs these cases in tests/kernels")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda.kernels", str(file)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, " ".join(done.stderr.strip().splitlines()[-3:])[-500:]
    found: dict[str, tuple[float, float]] = json.loads(done.stdout.splitlines()[-1])
    wrong = {case: error for case, (error, limit) in found.items() if not error <= limit}
    assert not wrong, f"{len(wrong)} of {len(found)} wrong: {wrong}"
    worst = max(found, key=lambda case: found[case][0] / (found[case][1] or 1))
    return f"{len(found)} cases, the worst {worst}: {found[worst][0]:.2g}"


def run_here(file: Path, device: str) -> dict[str, tuple[float, float]]:
    """A test file's cases in this process, with tensors on `device` instead of the CPU."""
    torch.set_default_device(device)
    torch.Generator = partial(torch.Generator, device)  # type: ignore[misc, assignment]
    module: Any = types.ModuleType(file.stem)
    module.__file__ = str(file)
    source = file.read_text(encoding="utf-8").replace('"cpu"', f'"{device}"')
    with pytest_or_stand_in():
        exec(compile(source, str(file), "exec"), module.__dict__)
    tolerances = getattr(module, "TOLERANCE", {})
    cases = list(dict.fromkeys((*module.CASES, *getattr(module, "MORE", ()))))
    if device != "cpu":
        # the interpreter has no bf16
        halves = [case for case in cases if case.endswith("/float16")]
        cases += [case.replace("/float16", "/bfloat16") for case in halves]

    def limit(case: str) -> float:
        kind = case.rsplit("/", 1)[-1]
        if kind == "bfloat16" and kind not in tolerances and "float16" in tolerances:
            return BF16_FACTOR * float(tolerances["float16"])
        return float(tolerances.get(kind, TOLERANCE))

    found: dict[str, float] = module.measure(cases)
    return {case: (error, limit(case)) for case, error in found.items()}


@contextmanager
def pytest_or_stand_in() -> Iterator[None]:
    """Test files import pytest, which the device's machine may not have: their cases need none of
    it."""
    try:
        import_module("pytest")
    except ImportError:
        sys.modules["pytest"] = _StandIn()
    yield


class _StandIn(types.ModuleType):
    """Any attribute is a decorator that changes nothing, and has any attribute itself."""

    def __init__(self) -> None:
        super().__init__("pytest")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return import_module if name == "importorskip" else _StandIn()

    def __call__(self, *given: Any, **_: Any) -> Any:
        return given[0] if len(given) == 1 and inspect.isfunction(given[0]) else self


# (query rows, context lengths) of one step
BATCHES = {
    "decode": ([1] * 5, [1, 17, 300, 1024, 64]),
    "decode one": ([1], [4000]),
    "decode many": ([1] * 256, [200 + i for i in range(256)]),
    "prefill": ([1, 130, 700], [1, 130, 700]),
    "prefix": ([64, 33, 1, 250], [500, 33, 900, 1000]),
}
HEADS = [(9, 3, 64), (16, 8, 128)]
OTHER_HEADS = [(32, 4, 128), (8, 1, 256), (4, 2, 80)]
ATTENTION_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@contextmanager
def _poisoned() -> Iterator[None]:
    """Make torch.empty return NaN, so that an element that is never written is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _attention(device: str) -> str:
    """Sizes that the interpreter is too slow for; every variant takes seconds to compile, so not
    all combinations with the other head shapes are tried."""
    if device == "cpu":
        raise NotHere("needs CUDA")
    from benchmarks.gpu_runs import make_batch
    from coterie.kernels.reference import layers as reference
    from coterie.kernels.triton.attention import paged_attention

    kinds = ATTENTION_TOLERANCE
    cases = [(dtype, batch, heads) for dtype in kinds for batch in BATCHES for heads in HEADS]
    cases += [(torch.bfloat16, name, each) for name in ("decode", "prefix") for each in OTHER_HEADS]
    torch.manual_seed(11)
    worst: dict[torch.dtype, float] = {}
    for dtype, name, (heads, kv_heads, dim) in cases:
        rows, contexts = BATCHES[name]
        batch, blocks = make_batch(rows, contexts, device)
        q = torch.randn((sum(rows), heads, dim), device=device).to(dtype)
        kv = torch.randn((2, blocks, kv_heads, 16, dim), device=device).to(dtype)
        with _poisoned():
            got = paged_attention(q, kv, batch, dim**-0.5).double()
        want = reference.paged_attention(q.float(), kv.float(), batch, dim**-0.5).double()
        error = ((got - want).norm() / want.norm()).item()
        assert error < kinds[dtype], f"{dtype} {name} {heads}x{kv_heads}x{dim}: {error}"
        worst[dtype] = max(error, worst.get(dtype, 0.0))
    return f"{len(cases)} cases, " + ", ".join(f"{k}: {error:.1g}" for k, error in worst.items())


def _in_host_memory(kind: str, device: str) -> str:
    """Half of the experts are in pinned RAM, at offsets that lead out of the pool: the same bits,
    in a captured step too."""
    if device == "cpu":
        raise NotHere("needs CUDA")
    from coterie.kernels.device_record import UNIT_BYTES, DeviceRecord
    from coterie.kernels.triton import expert_gemv as pairs
    from coterie.kernels.triton.expert_groups import run_experts_many
    from coterie.kernels.triton.sizes import pair_sizes

    experts, top_k, record = 16, 4, DeviceRecord(kind, 256, 128)
    size = record.nbytes
    # bytes of which no number is infinite
    base = torch.randint(0, 60, (experts * size,), dtype=torch.uint8, device=device)
    places = torch.arange(experts, device=device) * (size // UNIT_BYTES)
    pinned = base[experts // 2 * size :].cpu().pin_memory()
    away, rest = divmod(pinned.data_ptr() - base.data_ptr(), UNIT_BYTES)
    assert rest == 0
    outside = places.clone()
    outside[experts // 2 :] = away + places[: experts // 2]
    lost = base.clone()
    lost[experts // 2 * size :] = 255
    everywhere = pairs.ExpertPool(base, places, record)
    for rows in (1, 3, 16, 40, 200):
        x = torch.randn((rows, record.hidden), device=device).bfloat16()
        ids = torch.rand((rows, experts), device=device).argsort(dim=1)[:, :top_k]

        def run(pool: pairs.ExpertPool, rows: int = rows, x: Any = x, ids: Any = ids) -> Any:
            routed = pairs.RoutedRows.empty(rows, top_k, device)
            routed.ids.copy_(ids)
            routed.places.copy_(pool.places[ids])
            routed.weights.fill_(0.25)
            hidden = torch.zeros_like(x)
            if rows > 3:
                run_experts_many(x, routed, pool, hidden)
                return hidden
            acts = torch.zeros((rows * top_k, record.intermediate), device=device).bfloat16()
            pairs.pair_gate_up(x, routed, pool, acts, pair_sizes(record))
            pairs.pair_down(acts, routed, pool, hidden, pair_sizes(record))
            return hidden

        want = run(everywhere)
        # the pool's own bytes of these experts are not numbers: nothing may read them
        base.copy_(lost)
        away_pool = pairs.ExpertPool(base, outside, record)
        got = run(away_pool)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(away_pool)
        graph.replay()
        torch.cuda.synchronize()
        base[experts // 2 * size :] = pinned.to(device)
        assert torch.isfinite(want.float()).all() and want.float().abs().sum() > 0
        assert torch.equal(want, got) and torch.equal(want, captured), f"{rows} rows differ"
    return f"1 to 200 rows, offset {away * UNIT_BYTES:#x}"


# steps with long prompts, whole ones and later parts, behind other rows and between them
PROMPTS = {
    "whole": ([1, 130, 700], [9, 130, 700]),
    "later": ([1, 1, 300], [50, 60, 2400]),
    "all of it later": ([256], [2304]),
    "both": ([1, 200, 1, 150], [7, 1260, 30, 150]),
}


def _prompts(device: str) -> str:
    """Prompts through cuDNN beside rows of the paged kernel."""
    if device == "cpu":
        raise NotHere("needs CUDA")
    from benchmarks.gpu_runs import make_batch
    from coterie.kernels.batch import FRESH_ROWS
    from coterie.kernels.reference import layers as reference
    from coterie.kernels.triton import prompt_attention as module

    torch.manual_seed(13)
    worst, dtype = 0.0, torch.bfloat16
    for name, (rows, contexts) in PROMPTS.items():
        for heads, kv_heads, dim in ((32, 4, 128), (6, 2, 64)):
            assert module.has_parts(heads, kv_heads, dim, dtype, 0)
            batch, blocks = make_batch(rows, contexts, device)
            bounds = [0, *accumulate(rows)]
            later = [
                (bounds[i], bounds[i + 1], i, contexts[i] - rows[i])
                for i in range(len(rows))
                if FRESH_ROWS <= rows[i] < contexts[i]
            ]
            batch = replace(batch, continued=tuple(later))
            count, room = len(batch.positions), module.rows_behind(batch)
            q = torch.randn((count + room, heads, dim), device=device).to(dtype)
            kv = torch.randn((2, blocks, kv_heads, 16, dim), device=device).to(dtype)
            own = kv[:, batch.slots // 16, :, batch.slots % 16].transpose(0, 1)
            pad = (0, 0, 0, 0, 0, room)
            keys = torch.nn.functional.pad(own, pad).contiguous()
            paged = module.paged_rows(batch)
            got = module.prompt_attention(q, keys, kv, batch, paged, dim**-0.5).double()
            want = reference.paged_attention(q[:count].float(), kv.float(), batch, dim**-0.5)
            want = want.view(count, -1).double()
            error = ((got - want).norm() / want.norm()).item()
            assert error < ATTENTION_TOLERANCE[dtype], f"{name} {heads}x{kv_heads}x{dim}: {error}"
            worst = max(worst, error)
    return f"{len(PROMPTS)} steps: {worst:.1g}"


def _adapter_cases() -> list[str]:
    from benchmarks.adapters.gpu_models import CHECKS

    return list(CHECKS)


def _adapters(name: str, device: str) -> str:
    if device == "cpu":
        raise NotHere("needs CUDA")
    from benchmarks.adapters.gpu_models import CHECKS, Setting, check_error

    case, limit = CHECKS[name]
    error = check_error(Setting(smoke=False), *case)
    assert error < limit, f"relative error of logits {error:.2g}, at most {limit}"
    return f"{error:.2g}"


if __name__ == "__main__":
    print(json.dumps(run_here(Path(sys.argv[1]), "cuda")))
