"""Contexts that grow and shrink while KV and experts share one memory (`--elastic-memory`).

    python3 -m benchmarks.moe.growth --seconds 180               # Qwen3-30B-A3B's shape, int4, CUDA
    python3 -m benchmarks.moe.growth --seconds 60 --experts bf16 --layers 12 --json FILE
    python3 -m benchmarks.moe.growth --smoke                     # tiny, on the CPU

Clients send one request after the other; their prompts become longer, up to `--longest` tokens, and
shorter again, all of them together, one cycle every `--cycle` seconds. A line for each twelfth of
the run: tok/s, the slabs that KV has, slabs traded, the experts' hit rate, and memory. At the end:
the peak by torch.cuda.max_memory_allocated, what of it is neither weights nor the shared memory,
and whether anything grew after the first cycle. FAILED if the peak exceeds the budget, if memory
grew, or if nothing was traded. Random weights are made in memory.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.gpu_runs import SAMPLED, Stream, Streams, free_memory, tokenizer_of
from benchmarks.random_models import SHAPES, make_model, make_prompts, tiny
from coterie.core.lane import LaneConfig
from coterie.core.moe import MoeSettings
from coterie.engine.engine import Engine
from coterie.models.base import CausalLM
from coterie.moe.runtime.memory_trade import MemoryTrade
from coterie.moe.runtime.runtime import ExpertRuntime

SHAPE = "Qwen3-30B-A3B"
OUTPUT = 64
# of the run, after which nothing may grow, and by how much it may all the same
WARM, SLACK_BYTES = 0.34, 32 * 2**20
LINES = 12


@dataclass
class GrowthSample:
    """At one moment: seconds, tokens so far, slabs and memory."""

    second: float
    tokens: int
    kv_slabs: int
    traded: int
    hits: int
    demands: int
    allocated: int
    peak: int
    resident: int


@dataclass
class GrowthRun:
    samples: list[GrowthSample] = field(default_factory=list)
    requests: int = 0
    failed: list[str] = field(default_factory=list)


def elastic_engine(
    model: CausalLM, streams: int, step_tokens: int = 2048, context: int = 0
) -> tuple[Engine, MemoryTrade]:
    """An engine whose KV may take all that experts lend."""
    trade = model.memory_trade
    assert trade is not None
    lane = LaneConfig(
        name="m",
        num_blocks=trade.layout.num_blocks,
        context=context or model.spec.max_positions,
        block_size=trade.layout.kv.block_size,
        max_queue=max(2 * streams, 16),
        max_sequences=streams,
        max_step_tokens=max(step_tokens, streams),
        prefix_cache=False,
    )
    return Engine(model, tokenizer_of(model.spec.vocab), [lane]), trade


def prompt_length(second: float, cycle: float, longest: int) -> int:
    """Of a request that is sent at this moment: from short to `longest` and back."""
    wave = 0.5 - 0.5 * math.cos(2 * math.pi * second / cycle)
    return max(4, round(longest * wave))


def grow(
    model: CausalLM, engine: Engine, trade: MemoryTrade, options: argparse.Namespace
) -> GrowthRun:
    """Run the clients for a time."""
    found, clients = GrowthRun(), Streams(engine)
    begin, told, done = time.perf_counter(), 0.0, 0
    running: list[Stream] = []
    while (second := time.perf_counter() - begin) < options.seconds:
        while len(clients.running) < options.streams:
            length = prompt_length(second, options.cycle, options.longest)
            ids = make_prompts(model.spec.vocab, [length], seed=found.requests)[0]
            running.append(clients.send(ids, OUTPUT, SAMPLED))
            found.requests += 1
        clients.step()
        ended = [stream for stream in running if len(stream.tokens) == OUTPUT]
        done += OUTPUT * len(ended)
        running = [stream for stream in running if len(stream.tokens) < OUTPUT]
        if second >= told:
            told += options.seconds / (4 * LINES)
            tokens = done + sum(len(stream.tokens) for stream in running)
            found.samples.append(_sample(model, trade, second, tokens))
    clients.drain()
    engine.check()
    found.samples.append(_sample(model, trade, time.perf_counter() - begin, done))
    return found


def _sample(model: CausalLM, trade: MemoryTrade, second: float, tokens: int) -> GrowthSample:
    total = cast(ExpertRuntime, model.experts).telemetry.total()
    hits = total.device_hits + total.prefetch_hits
    cuda = model.device.type == "cuda"
    return GrowthSample(
        second,
        tokens,
        len(trade.lent),
        trade.taken + trade.returned,
        hits,
        hits + total.device_misses + total.host_runs,
        torch.cuda.memory_allocated() if cuda else 0,
        torch.cuda.max_memory_allocated() if cuda else 0,
        _resident_bytes(),
    )


def _resident_bytes() -> int:
    """RAM of this process."""
    words = Path("/proc/self/statm").read_text().split()
    return int(words[1]) * resource.getpagesize()


def lines(samples: list[GrowthSample]) -> list[str]:
    told = []
    count = min(LINES, len(samples) - 1)
    for number in range(count):
        first = samples[number * (len(samples) - 1) // count]
        last = samples[(number + 1) * (len(samples) - 1) // count]
        rate = (last.tokens - first.tokens) / max(1e-9, last.second - first.second)
        hits = (last.hits - first.hits) / max(1, last.demands - first.demands)
        told.append(
            f"{last.second:6.0f} s {rate:8.1f} tok/s {last.kv_slabs:6d} KV slabs "
            f"{last.traded - first.traded:6d} traded {hits:6.1%} hits "
            f"{last.allocated / 1e9:8.3f} GB device {last.resident / 1e9:7.2f} GB RAM"
        )
    return told


def judge(found: GrowthRun, trade: MemoryTrade, budget: int) -> dict[str, Any]:
    """The figures, and what is wrong with them. `budget`: of the device's memory, 0 = none."""
    samples, failed = found.samples, found.failed
    warm = [each for each in samples if each.second <= WARM * samples[-1].second] or samples[:1]
    # the most that was held at any time of the first cycle, and of all that followed
    held = max(each.allocated for each in warm), max(each.allocated for each in samples)
    ram = max(each.resident for each in warm), samples[-1].resident
    peaks = warm[-1].peak, samples[-1].peak
    if held[1] > held[0] + SLACK_BYTES:
        failed.append(f"{(held[1] - held[0]) / 1e6:.0f} MB more on the device than at first")
    if ram[1] > ram[0] + 8 * SLACK_BYTES:
        failed.append(f"{(ram[1] - ram[0]) / 1e6:.0f} MB more RAM than at first")
    if budget and peaks[1] > budget:
        failed.append(f"the peak of {peaks[1]:,} bytes exceeds the budget of {budget:,}")
    if not trade.taken or not trade.returned:
        failed.append(f"{trade.taken} slabs taken and {trade.returned} returned")
    return {
        "requests": found.requests,
        "tok_s": samples[-1].tokens / samples[-1].second,
        "taken": trade.taken,
        "returned": trade.returned,
        "most_kv_slabs": max(each.kv_slabs for each in samples),
        "slabs": trade.layout.num_slabs,
        "peak_bytes": peaks[1],
        "peak_bytes_first_third": peaks[0],
        "budget_bytes": budget,
        "held_growth_bytes": held[1] - held[0],
        "ram_growth_bytes": ram[1] - ram[0],
        "failed": failed,
    }


def _settings(options: argparse.Namespace, total: int, cuda: bool) -> MoeSettings:
    slots = max(8, int(total * options.share))
    return MoeSettings(
        strategy=options.strategy,
        cache_capacity=slots,
        # without a device experts must not all be in RAM: slots would take no memory
        host_budget="" if cuda else "30%",
        warmup="none",
        predict="off",
        elastic_memory=True,
    )


def main() -> int:
    options = _arguments()
    device = "cpu" if options.smoke else "cuda"
    cuda = device == "cuda"
    shape = dict(tiny(SHAPES[SHAPE]) if options.smoke else SHAPES[SHAPE])
    if options.layers:
        shape["num_hidden_layers"] = options.layers
    total = shape["num_hidden_layers"] * shape["num_experts"]
    kinds = {"dtype": "fp32", "experts": "fp32"} if options.smoke else {"experts": options.experts}
    free_memory()
    began = time.perf_counter()
    settings, own = _settings(options, total, cuda), 64_000 if options.smoke else options.own_kv
    model = make_model(shape, device, dispatch=settings, own_kv=own, **kinds)
    engine, trade = elastic_engine(model, options.streams)
    layout = trade.layout
    start = torch.cuda.memory_allocated() if cuda else 0
    print(
        f"{SHAPE}, {shape['num_hidden_layers']} layers, {total} experts, {options.share:.0%} of "
        f"them in slots; {layout.num_slabs} slabs of {layout.slab_bytes / 1e6:.2f} MB "
        f"({layout.slab_slots} slots or {layout.slab_blocks} blocks of {layout.kv.block_size} "
        f"tokens); KV has {layout.kv.own} blocks of its own and {layout.num_blocks} at most; "
        f"{start / 1e9:.2f} GB after the start, {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    found = grow(model, engine, trade, options)
    # what a step needs beside weights, KV and experts
    budget = start + options.step_bytes if cuda else 0
    told = judge(found, trade, budget)
    print("\n".join(lines(found.samples)))
    print(json.dumps(told))
    if options.json:
        facts = {key: value for key, value in vars(options).items() if key != "json"}
        options.json.write_text(json.dumps({"options": facts} | told, indent=1))
    print("FAILED: " + "; ".join(told["failed"]) if told["failed"] else "ok")
    model.close()
    return int(bool(told["failed"]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--cycle", type=float, default=0.0, help="default: a third of the run")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--longest", type=int, default=0, help="tokens of a prompt")
    parser.add_argument("--share", type=float, default=0.25, help="of the experts, in slots")
    parser.add_argument("--strategy", default="adaptive")
    parser.add_argument("--experts", default="int4", choices=("int4", "int8", "bf16"))
    parser.add_argument("--layers", type=int, default=0, help="fewer than the model has")
    parser.add_argument("--own-kv", type=int, default=400_000_000, help="bytes KV always has")
    parser.add_argument(
        "--step-bytes",
        type=int,
        default=3_000_000_000,
        help="the budget beside weights, KV and experts: captured graphs and one step",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU, 6 seconds")
    options = parser.parse_args()
    if options.smoke:
        options.seconds, options.share = min(options.seconds, 6.0), 0.6
        options.streams = min(options.streams, 2)
    options.longest = options.longest or (48 if options.smoke else 6000)
    options.cycle = options.cycle or options.seconds / 3
    return options


if __name__ == "__main__":
    sys.exit(main())
