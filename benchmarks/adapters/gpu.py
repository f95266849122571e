"""The cost of adapters on one CUDA device: first correctness, then decoding speed against the base.

    python -m benchmarks.adapters.gpu [--json FILE] [--profile] [--parts check,speed,...] [--smoke]

Random weights (shapes of SmolLM2-135M and Llama-3.2-1B) and random adapters: 16 different ones of
rank 16 on every linear module, 32 streams, stream i with adapter i modulo 16. Needs torch and
triton only, and about a minute. Base and adapted steps are interleaved; medians. `--profile` adds
the time of each kernel; part `tune` tries the kernels with other sizes; `--smoke` runs the host's
part on the CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.adapters.gpu_models import (
    CHECKS,
    Setting,
    check_error,
    decode,
    device_stack,
    make_model,
    new_caches,
    spread,
)
from benchmarks.dense.gpu_checks import make_batch
from coterie.adapters.compose import ComposedStack, StackImage, upload_for
from coterie.adapters.residency import AdapterSlab
from coterie.kernels import batch as kernel_batch
from coterie.kernels.patch import PatchStack, Segment
from coterie.models.base import CausalLM
from coterie.models.build.cuda_graph import DecodeGraphs

GOAL = 0.9
# other sizes of the kernels' programs that `tune` tries: columns of a warp, programs that share a
# part, columns of silu, sites fetched
TUNED = (
    (128, 2, 64, 7),
    (128, 2, 128, 7),
    (128, 2, 64, 0),
    (256, 1, 128, 0),
    (256, 1, 256, 0),
)


def timed(work: Callable[[], object], device: str, repeats: int) -> list[float]:
    """Seconds of each run, including the work of the device."""
    times = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return times


def interleaved(
    works: dict[str, Callable[[], object]], device: str, rounds: int = 10, repeats: int = 20
) -> dict[str, float]:
    """Median seconds of each, run in turns."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        timed(work, device, 3)
    for _ in range(rounds):
        for name, work in works.items():
            found[name] += timed(work, device, repeats)
    return {name: statistics.median(times) for name, times in found.items()}


def check(setting: Setting) -> dict[str, Any]:
    """Captured and eager decoding of every kind of patch against the torch path."""
    found = {name: check_error(setting, *case) for name, (case, _) in CHECKS.items()}
    wrong = {name: error for name, error in found.items() if not error < CHECKS[name][1]}
    if wrong:
        print(f"WRONG: {wrong}", file=sys.stderr)
    return {"errors": found, "wrong": sorted(wrong)}


def speed(setting: Setting, model: CausalLM, stacks: list[PatchStack]) -> dict[str, Any]:
    """A decode step of all streams: only the step, and as a loop with argmax and inputs from the
    host."""
    streams = setting.streams
    plain, mixed = (), spread(stacks, streams)
    few = (Segment(0, 1, stacks[0]),)
    full = [
        device_stack(model.spec, setting.rank, seed, setting.device, torch.float32)
        for seed in range(len(stacks))
    ]
    steps = {
        "base": decode(model, streams, setting.context, plain),
        "16 adapters": decode(model, streams, setting.context, mixed),
        "16 in fp32": decode(model, streams, setting.context, spread(full, streams)),
        "1 row of 32": decode(model, streams, setting.context, few),
        "one for all": decode(model, streams, setting.context, (Segment(0, streams, stacks[0]),)),
    }
    forward = interleaved({name: step.forward for name, step in steps.items()}, setting.device)
    loops = interleaved(
        {name: steps[name].step for name in ("base", "16 adapters")}, setting.device, 5
    )
    return {
        "forward_s": forward,
        "loop_tok_s": {name: streams / seconds for name, seconds in loops.items()},
        "forward_share": forward["base"] / forward["16 adapters"],
        "loop_share": loops["base"] / loops["16 adapters"],
        "captured": steps["16 adapters"].captured(),
    }


def _eager(
    model: CausalLM, tokens: Tensor, kv: list[Tensor], rows: Tensor, batch: Any, long_rows: int
) -> None:
    kernel_batch.LONG_ROWS = long_rows
    model.forward(tokens, batch, kv, rows)


def prefill(setting: Setting, model: CausalLM, stacks: list[PatchStack]) -> dict[str, Any]:
    """One prompt with one adapter, through the row kernels and through torch."""
    report = {}
    kept = kernel_batch.LONG_ROWS
    for rows in setting.prompts:
        batch, blocks = make_batch([rows], [rows], setting.device)
        kv = new_caches(model, blocks)
        tokens, last = batch.positions % 100, torch.tensor([rows - 1], device=setting.device)
        adapted = replace(batch, patches=(Segment(0, rows, stacks[0]),))
        run = partial(_eager, model, tokens, kv, last)
        works: dict[str, Callable[[], object]] = {
            "base": partial(run, batch, kept),
            "row kernels": partial(run, adapted, 10**9),
            "torch": partial(run, adapted, 1),
        }
        report[str(rows)] = interleaved(works, setting.device, 3, 5)
    kernel_batch.LONG_ROWS = kept
    return report


def switch(setting: Setting, model: CausalLM, stacks: list[PatchStack]) -> dict[str, Any]:
    """The cost of a step with other stacks than the step before: stacks used earlier, and new
    ones."""
    device = torch.device(setting.device)
    rows = kernel_batch.PatchRows(setting.streams, model.spec.num_layers, device, kind=0)
    orders = [
        kernel_batch.places_of(spread(order, setting.streams), device)
        for order in (stacks, stacks[::-1])
    ]
    count = 0

    def hot() -> None:
        nonlocal count
        count += 1
        rows.fill(orders[count % 2])

    def unseen() -> None:
        stacks[0].tables.clear()
        kernel_batch.stack_record(stacks[0], device)

    found = interleaved({"other stacks": hot, "new stack": unseen}, setting.device, 2)
    nbytes = sum(patch.nbytes for patch in stacks[0].patches.values())
    host = ComposedStack(device_stack(model.spec, setting.rank, 99, "cpu").patches, None, nbytes)
    image, slab = StackImage(host), AdapterSlab(4 * nbytes, device)
    upload, block = upload_for(device, slab.nbytes), slab.reserve(image.nbytes, "a")
    if block is None:
        raise RuntimeError("the slab is too small")
    target = slab.view(block)
    copies = timed(lambda: upload.wait_for_copy(upload.copy(image, target)), setting.device, 7)
    upload.close()
    return {**found, "host to device": statistics.median(copies), "adapter_bytes": nbytes}


def tune(setting: Setting, model: CausalLM, stacks: list[PatchStack]) -> dict[str, Any]:
    """Seconds of the base's step, and of the adapted one at other sizes of its programs."""
    from coterie.kernels.triton import decoder as triton_patched

    kept = triton_patched.SLIM, triton_patched.BROAD
    works: dict[str, Callable[[], object]] = {
        "base": decode(model, setting.streams, setting.context, ()).forward
    }
    for given in TUNED:
        triton_patched.SLIM = triton_patched.BROAD = triton_patched.ProgramSizes(*given)
        other = copy(model)
        other.graphs = DecodeGraphs(model.compute, model.spec.max_positions, model.device)
        step = decode(other, setting.streams, setting.context, spread(stacks, setting.streams))
        step.forward()
        works[str(given)] = step.forward
    triton_patched.SLIM, triton_patched.BROAD = kept
    return interleaved(works, setting.device, 5)


def profile(setting: Setting, model: CausalLM, stacks: list[PatchStack]) -> dict[str, Any]:
    """Microseconds per step by kernel name."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as trace

    report: dict[str, Any] = {}
    for name, patches in (("base", ()), ("adapted", spread(stacks, setting.streams))):
        step = decode(model, setting.streams, setting.context, patches)
        step.forward()
        with trace(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(10):
                step.forward()
            torch.cuda.synchronize()
        rows = sorted(seen.key_averages(), key=lambda row: -row.device_time_total)[:14]
        report[name] = {
            row.key[:60]: [row.count // 10, round(row.device_time_total / 10, 1)] for row in rows
        }
    return report


def measure(setting: Setting, parts: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {"device": setting.name}
    if "check" in parts:
        results["check"] = check(setting)
    for name, config in setting.shapes.items():
        model = make_model(config, "bf16", setting)
        stacks = [
            device_stack(model.spec, setting.rank, seed, setting.device)
            for seed in range(setting.adapters)
        ]
        works = {"speed": speed, "prefill": prefill, "switch": switch}
        works |= {"tune": tune, "profile": profile}
        for part, work in works.items():
            if part in parts:
                begin = time.perf_counter()
                results[f"{part} {name}"] = work(setting, model, stacks)
                spent = time.perf_counter() - begin
                print(f"# {part} {name}: {spent:.1f} s", file=sys.stderr, flush=True)
    return results


def table(results: dict[str, Any]) -> str:
    lines = [f"device: {results['device']}"]
    for part, found in results.items():
        if part.startswith("speed"):
            share, loop = found["forward_share"], found["loop_share"]
            times = ", ".join(f"{k} {v * 1e6:.0f} us" for k, v in found["forward_s"].items())
            lines.append(f"{part}: {share:.1%} of base (step), {loop:.1%} (loop), goal {GOAL:.0%}")
            lines.append(f"    {times}; captured: {found['captured']}")
        elif part != "device":
            lines.append(f"{part}: {json.dumps(found)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--parts", default="check,speed,prefill,switch")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    parts = given.parts.split(",") + (["profile"] if given.profile else [])
    begin = time.perf_counter()
    results = measure(Setting(given.smoke), parts)
    results["total_s"] = round(time.perf_counter() - begin, 1)
    print(table(results))
    print(json.dumps(results))
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
