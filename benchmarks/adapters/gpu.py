"""The cost of adapters on one CUDA device: first correctness, then decoding speed against the base.

    python -m benchmarks.adapters.gpu [--shape NAME]... [--parts check,speed,...] [--json FILE]
                                      [--profile] [--smoke]

Random weights (shapes of SmolLM2-135M, Qwen3-0.6B and Qwen3-30B-A3B) and random adapters: 16
different ones of rank 16 on every linear module (with experts: of attention), 32 streams, stream i
with adapter i modulo 16; and one stream with one adapter. Needs torch and triton only, and about
half a minute for a shape. Base and adapted steps are interleaved; medians. `--profile` adds the
time of each kernel; `--smoke` runs the host's part on the CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.adapters.gpu_models import (
    CHECKS,
    DORA,
    SHAPES,
    Setting,
    check_error,
    decode,
    device_stack,
    make_model,
    new_caches,
    spread,
)
from benchmarks.gpu_runs import make_batch
from coterie.adapters.compose import ComposedStack, StackImage, upload_for
from coterie.adapters.residency import AdapterSlab
from coterie.kernels import batch as kernel_batch
from coterie.kernels.patch import PatchStack, Segment
from coterie.models.base import CausalLM

GOAL = 0.9


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


def speed(
    setting: Setting, model: CausalLM, stacks: list[PatchStack], parts: tuple[str, ...]
) -> dict[str, Any]:
    """A decode step of all streams and of one: only the step, and as a loop with argmax and inputs
    from the host."""
    streams, context = setting.streams, setting.context
    full = [
        device_stack(model.spec, setting.rank, seed, setting.device, torch.float32, DORA, parts)
        for seed in range(len(stacks))
    ]
    steps = {
        "base": decode(model, streams, context, ()),
        "16 adapters": decode(model, streams, context, spread(stacks, streams)),
        "16 DoRA in fp32": decode(model, streams, context, spread(full, streams)),
        "1 row of 32": decode(model, streams, context, (Segment(0, 1, stacks[0]),)),
        "one for all": decode(model, streams, context, (Segment(0, streams, stacks[0]),)),
        "base, 1 stream": decode(model, 1, context, ()),
        "1 stream": decode(model, 1, context, (Segment(0, 1, stacks[0]),)),
    }
    forward = interleaved({name: step.forward for name, step in steps.items()}, setting.device)
    looped = ("base", "16 adapters", "base, 1 stream", "1 stream")
    loops = interleaved({name: steps[name].step for name in looped}, setting.device, 5)
    return {
        "forward_s": forward,
        "loop_tok_s": {n: len(steps[n].tokens) / seconds for n, seconds in loops.items()},
        "forward_share": _shares(forward),
        "loop_share": _shares(loops),
        "captured": steps["16 adapters"].captured() and steps["1 stream"].captured(),
    }


def _shares(seconds: dict[str, float]) -> dict[str, float]:
    """Of the base with as many streams."""
    return {
        name: seconds["base, 1 stream" if name == "1 stream" else "base"] / value
        for name, value in seconds.items()
        if not name.startswith("base")
    }


def prefill(setting: Setting, model: CausalLM, stacks: list[PatchStack]) -> dict[str, Any]:
    """One prompt, without and with an adapter."""
    report = {}
    for rows in setting.prompts:
        batch, blocks = make_batch([rows], [rows], setting.device)
        batch = replace(batch, fresh=((0, rows),) if rows >= kernel_batch.FRESH_ROWS else ())
        kv = new_caches(model, blocks)
        tokens, last = batch.positions % 100, torch.tensor([rows - 1], device=setting.device)
        adapted = replace(batch, patches=(Segment(0, rows, stacks[0]),))
        works: dict[str, Callable[[], object]] = {
            "base": partial(model.compute, tokens, batch, kv, last),
            "adapted": partial(model.compute, tokens, adapted, kv, last),
        }
        with torch.inference_mode():
            report[str(rows)] = interleaved(works, setting.device, 3, 5)
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


def measure(setting: Setting, parts: list[str], shapes: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {"device": setting.name}
    if "check" in parts:
        results["check"] = check(setting)
    for name, (config, adapted) in setting.shapes.items():
        if shapes and name not in shapes:
            continue
        model = make_model(config, "bf16", setting)
        stacks = [
            device_stack(model.spec, setting.rank, seed, setting.device, parts=adapted)
            for seed in range(setting.adapters)
        ]
        works: dict[str, Callable[..., dict[str, Any]]] = {
            "speed": partial(speed, parts=adapted),
            "prefill": prefill,
            "switch": switch,
            "profile": profile,
        }
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
            shares, loops, seconds = (
                found[key] for key in ("forward_share", "loop_share", "forward_s")
            )
            lines.append(f"{part} (goal {GOAL:.0%} of base), captured: {found['captured']}")
            for name, value in seconds.items():
                told = f", {shares[name]:.1%} of base" if name in shares else ""
                told += f", loop {loops[name]:.1%}" if name in loops else ""
                lines.append(f"    {name}: {value * 1e6:.0f} us{told}")
        elif part != "device":
            lines.append(f"{part}: {json.dumps(found)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", action="append", default=[], choices=list(SHAPES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--parts", default="check,speed,prefill,switch")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    parts = given.parts.split(",") + (["profile"] if given.profile else [])
    begin = time.perf_counter()
    results = measure(Setting(given.smoke), parts, given.shape)
    results["total_s"] = round(time.perf_counter() - begin, 1)
    print(table(results))
    print(json.dumps(results))
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
