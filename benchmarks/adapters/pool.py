"""Many adapters, few slots: latency under a skewed stream, and memory over many loads.

    python -m benchmarks.adapters.pool [--registered 500] [--slots 16] [--requests 300]
        [--rate 6] [--loads 5000] [--parts stream,memory] [--json FILE]

stream: requests arrive at random (Poisson) and pick their adapter by Zipf's law from 4 x `slots`
adapters, then from all that are registered. The same arrivals run with room for every adapter and
with room for `slots`; the p95 of arrival to last token is compared. memory: resident
set after every fifth of `loads` loads through a pool of four slots.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.adapters.cpu import Bench
from benchmarks.adapters.random_adapters import adapter_bytes, fill_library
from benchmarks.peers import files
from benchmarks.peers.protocol import prompt_ids
from coterie.core.events import Failed, Finished
from coterie.core.plan import AdapterChoice
from coterie.models.base import read_spec
from coterie.models.spec import ModelSpec
from coterie.weights.checkpoint import open_checkpoint
from coterie.weights.home import home

MODULES = ("q_proj", "v_proj")
RANK = 8
PROMPT_TOKENS, OUTPUT_TOKENS = 24, 12
GOAL = 1.5


def arrivals(
    count: int, rate: float, choices: Sequence[AdapterChoice], seed: int
) -> list[tuple[float, AdapterChoice]]:
    """(seconds, adapter), by Poisson and Zipf."""
    draw = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(len(choices))]
    at, stream = 0.0, []
    for _ in range(count):
        at += draw.expovariate(rate)
        stream.append((at, draw.choices(choices, weights)[0]))
    return stream


def serve(bench: Bench, stream: Sequence[tuple[float, AdapterChoice]]) -> list[float]:
    """Seconds from each arrival to its end."""
    engine, begin = bench.host.engine, time.perf_counter()
    arrived: dict[str, float] = {}
    spent, position = [], 0
    while position < len(stream) or engine.has_work():
        now = time.perf_counter() - begin
        while position < len(stream) and stream[position][0] <= now:
            at, choice = stream[position]
            prompt = prompt_ids(PROMPT_TOKENS, position)
            arrived[bench.add([choice], OUTPUT_TOKENS, prompt)] = at
            position += 1
        if not engine.has_work():
            time.sleep(max(0.0, min(0.005, stream[position][0] - now)))
            continue
        for event in engine.step():
            if isinstance(event, Failed):
                raise RuntimeError(event.message)
            if isinstance(event, Finished):
                spent.append(time.perf_counter() - begin - arrived[event.request_id])
    return spent


def p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def run_stream(args: argparse.Namespace, spec: ModelSpec, library: Path) -> dict[str, Any]:
    choices = fill_library(library, spec, args.registered, RANK, MODULES)
    size = adapter_bytes(spec, RANK, MODULES)
    model = files.gguf("Q4_1")
    rooms = {"all fit": len(choices), f"{args.slots} slots": args.slots}
    benches = {
        name: Bench(model, library, args.threads, "mixed", count * size + size // 2)
        for name, count in rooms.items()
    }
    found: dict[str, Any] = {}
    for label, used in ((f"{4 * args.slots} adapters", 4 * args.slots), ("all", len(choices))):
        times: dict[str, list[float]] = {name: [] for name in rooms}
        for turn in range(args.rounds):
            stream = arrivals(args.requests, args.rate, choices[:used], turn)
            for name, bench in benches.items():
                times[name] += serve(bench, stream)
        row = {name: (statistics.median(spent), p95(spent)) for name, spent in times.items()}
        ratio = row[f"{args.slots} slots"][1] / row["all fit"][1]
        found[label] = {"seconds (p50, p95)": row, "p95 ratio": ratio}
        print(f"{label}: " + ", ".join(
            f"{name} p50 {mid * 1e3:.0f} ms p95 {high * 1e3:.0f} ms"
            for name, (mid, high) in row.items()
        ) + f"; ratio {ratio:.2f} (goal {GOAL})")  # fmt: skip
    found["pool"] = benches[f"{args.slots} slots"].host.engine.stats()
    for bench in benches.values():
        bench.host.close()
    return found


def run_memory(args: argparse.Namespace, spec: ModelSpec, library: Path) -> dict[str, Any]:
    choices = fill_library(library, spec, 32, RANK, MODULES)
    size = adapter_bytes(spec, RANK, MODULES)
    bench = Bench(files.gguf("Q4_1"), library, args.threads, "mixed", 4 * size + size // 2)
    process, sizes = psutil.Process(), []
    for number in range(args.loads):
        bench.add([choices[number % len(choices)]], 1, [1, 2, 3])
        while bench.host.engine.has_work():
            bench.host.engine.step()
        if (number + 1) % max(1, args.loads // 5) == 0:
            sizes.append(process.memory_info().rss)
            print(f"{number + 1} loads: {sizes[-1] / 1e6:.0f} MB", file=sys.stderr)
    bench.host.close()
    grown = sizes[-1] - sizes[0]
    print(f"{args.loads} loads: resident set {grown / 1e6:+.1f} MB after the first fifth")
    return {"rss": sizes}


PARTS = {"stream": run_stream, "memory": run_memory}


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    spec = read_spec(open_checkpoint(files.gguf("Q4_1")))
    library = home() / "bench" / "adapters"
    record = {name: PARTS[name](args, spec, library) for name in args.parts.split(",")}
    if args.json:
        args.json.write_text(json.dumps(record, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--registered", type=int, default=500)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--loads", type=int, default=5000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parts", default="stream,memory")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
