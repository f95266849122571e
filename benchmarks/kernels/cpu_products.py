"""Products with matrices as a CPU keeps them: times, shares of the limits, errors.

    python -m benchmarks.kernels.cpu_products [--kinds q4_k,int4] [--rows 1,8,512] [--threads 1]
                                              [--shapes 2048x2048] [--json FILE]

One run, rounds interleaved, medians. One row is bound by memory: several matrices take turns, which
together are larger than the caches, and the share is of what a sum reads. Many rows are bound by
arithmetic: GFLOP/s, beside torch's fp32 and bf16 products. The error is that of the product against
fp64, relative to the largest output.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import torch

from coterie.kernels.cpu.build import native
from coterie.kernels.cpu.layers import PackedLinear
from coterie.weights.kinds import BLOCK_KINDS
from coterie.weights.quantize import dense
from tests.helpers.kernels.kernel_inputs import weight

KINDS = ("fp32", "bf16", "int8", "int4", *BLOCK_KINDS)
TORCH = {"torch fp32": torch.float32, "torch bf16": torch.bfloat16}
COPIED_BYTES, ROUNDS = 128 << 20, 9


def cell(kind: str, rows: int, shape: tuple[int, int]) -> tuple[Callable[[], object], int]:
    """A product of `rows`, whose matrices take turns, and the bytes of one of them."""
    height, width = shape
    if kind in TORCH:
        dtype = TORCH[kind]
        factor, x = torch.randn(height, width).to(dtype), torch.randn(rows, width).to(dtype)
        return lambda: torch.nn.functional.linear(x, factor), factor.nbytes
    made = [PackedLinear([weight(kind, height, width)])]
    while rows == 1 and len(made) * made[0].nbytes < COPIED_BYTES:
        made.append(PackedLinear([weight(kind, height, width)]))
    x, turn = torch.randn(rows, width), cycle(made)
    return lambda: next(turn)(x), made[0].nbytes


def error_of(kind: str, shape: tuple[int, int], rows: int) -> float:
    stored = weight(kind, *shape)
    x = torch.randn(rows, shape[1])
    want = x.double() @ dense(stored).double().T
    return float((PackedLinear([stored])(x) - want).abs().max() / want.abs().max())


def timed(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds; each round makes about 20 ms of every call."""
    counts, taken = {}, {name: list[float]() for name in calls}
    for name, call in calls.items():
        call()
        begin = time.perf_counter()
        call()
        counts[name] = max(1, int(0.02 / (time.perf_counter() - begin)))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(counts[name]):
                call()
            taken[name].append((time.perf_counter() - begin) / counts[name])
    return {name: statistics.median(found) for name, found in taken.items()}


def measured(
    shape: tuple[int, int], rows: int, kinds: tuple[str, ...]
) -> Iterator[dict[str, object]]:
    cells = {kind: cell(kind, rows, shape) for kind in (*TORCH, *kinds)}
    stream = torch.ones(COPIED_BYTES // 4)
    calls: dict[str, Callable[[], object]] = {kind: call for kind, (call, _) in cells.items()}
    seconds = timed(calls | {"read": stream.sum})
    bandwidth = stream.nbytes / seconds["read"]
    for kind, (_, nbytes) in cells.items():
        flops = 2 * rows * shape[0] * shape[1]
        found: dict[str, object] = {
            "shape": "x".join(map(str, shape)),
            "rows": rows,
            "kind": kind,
            "us": round(seconds[kind] * 1e6, 1),
            "gflops": round(flops / seconds[kind] / 1e9, 1),
            "share_of_bandwidth": round(nbytes / seconds[kind] / bandwidth, 3),
            "to_fp32": round(seconds["fp32"] / seconds[kind], 2) if "fp32" in seconds else None,
        }
        if kind in KINDS:
            found["error"] = error_of(kind, shape, min(rows, 32))
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rows", default="1,8,64,512")
    parser.add_argument("--shapes", default="2048x2048")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    library = native()
    if library is None:
        parser.error("there is no compiler here, and so no native products")
    torch.set_num_threads(options.threads)
    print(f"{library.isa}, {options.threads} threads; rows at a time, medians of {ROUNDS}")
    found = []
    for text in options.shapes.split(","):
        height, width = map(int, text.split("x"))
        for rows in map(int, options.rows.split(",")):
            for one in measured((height, width), rows, tuple(options.kinds.split(","))):
                found.append(one)
                print("  ".join(f"{value!s:>10}" for value in one.values()), flush=True)
    if options.json:
        facts = {"isa": library.isa, "threads": options.threads, "cells": found}
        options.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
