"""Experts on disk beside one CUDA device: 12 layers of Qwen3-30B-A3B's shape, a quarter in RAM.

    python3 -m benchmarks.moe.gpu_disk                    # int4: 4.5 GB are written and read
    python3 -m benchmarks.moe.gpu_disk --kind bf16        # 14.5 GB
    python3 -m benchmarks.moe.gpu_disk --smoke            # tiny, on the CPU

A packed store of random weights is written to --folder and dropped from the page cache; reads are
direct where the file system allows it. The disk's bandwidth is measured before and after by reads
of an expert each, at random, as many at one time as the tier has; and by the store's own reader
alone. decode: tok/s, what was read, its share of that bandwidth, what the steps waited for. start:
when the first token of a short prompt came and when loading ended, counted from the moment at which
experts are opened, for the tier (half of the experts have slots, which are filled at start) and for
RAM that has room for all (the bank). A first round, which compiles kernels, is not counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.gpu_runs import SAMPLED, make_engine, tokenizer_of
from benchmarks.limits import disk_bandwidth
from benchmarks.random_models import SHAPES, RandomCheckpoint, RandomExperts, make_prompts, tiny
from coterie.core.events import SPENT_FIELDS, Delta, Event, Failed, Finished
from coterie.core.moe import MoeSettings
from coterie.core.plan import Admitted, Assignment
from coterie.core.request import Limits, Sampling
from coterie.engine.engine import Engine
from coterie.kernels.cpu.expert_record import weight_offset
from coterie.models.base import CausalLM, load_model
from coterie.models.build.moe import MoeRequirements
from coterie.moe.runtime import runtime as runtime_module
from coterie.moe.runtime.runtime import ExpertRuntime, open_experts
from coterie.moe.runtime.tiers import MemoryArena
from coterie.moe.runtime.transfer import depth_for
from coterie.moe.store.base import ExpertGeometry, ExpertShape
from coterie.moe.store.packed import EXPERTS_FILE, RecordLocation, StoreIndex, open_packed
from coterie.weights.checkpoint import Checkpoint

SHAPE = "Qwen3-30B-A3B"
SHORT, PROMPT = 4, 128


def write_store(
    folder: Path, geometry: ExpertGeometry, hidden: int, inner: int, kind: str
) -> float:
    """Returns the bytes per second of writing."""
    source = RandomExperts(geometry, hidden, inner, kind)
    size, keys = source.slot_bytes, geometry.keys()
    whole = torch.empty(size, dtype=torch.uint8)
    begin = time.perf_counter()
    digests: dict[bytes, str] = {}
    records = {}
    with (folder / EXPERTS_FILE).open("wb", buffering=0) as file:
        for number, key in enumerate(keys):
            source.read(key, whole)
            raw = whole.numpy().data
            name = bytes(raw[:64])
            if name not in digests:
                digests[name] = hashlib.sha256(raw).hexdigest()
            written = 0
            while written < size:
                written += file.write(raw[written:])
            records[key] = RecordLocation(number * size, size, digests[name])
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    layout = source.layout(geometry.layers[0])
    kinds = dict.fromkeys(geometry.layers, layout.kinds)
    shape = ExpertShape(hidden, inner, True)
    StoreIndex(shape, geometry, kinds, records, weight_offset(), ("random",)).save(folder)
    return len(keys) * size / (time.perf_counter() - begin)


def reader_rate(folder: Path, depth: int, device: str, total_bytes: int) -> tuple[float, bool]:
    """Bytes per second of the store's reader alone, into pinned memory, and whether its reads are
    direct. Checksums are verified before, which costs time once."""
    store = open_packed(folder)
    keys = store.geometry.keys()
    count = max(depth, min(len(keys), total_bytes // store.slot_bytes))
    chosen = [keys[(number * 7919) % len(keys)] for number in range(count)]
    arena = MemoryArena(depth * store.slot_bytes, pinned=device == "cuda")
    buffers = [arena.view(at * store.slot_bytes, store.slot_bytes) for at in range(depth)]

    def lane(number: int) -> int:
        return sum(store.read(key, buffers[number]) for key in chosen[number::depth])

    try:
        with ThreadPoolExecutor(depth) as pool:
            sum(pool.map(lane, range(depth)))
            begin = time.perf_counter()
            read = sum(pool.map(lane, range(depth)))
            return read / (time.perf_counter() - begin), store.disk.is_direct(store._file)
    finally:
        store.close()
        arena.close()


def open_model(
    config: dict[str, Any], folder: Path, device: str, settings: MoeSettings, start_s: float
) -> tuple[CausalLM, float]:
    """A model whose experts are in the store; and when they were opened."""
    opened_at = 0.0

    def opened(wanted: MoeRequirements) -> ExpertRuntime:
        nonlocal opened_at
        opened_at = time.perf_counter()
        runtime_module.START_S = start_s
        store = open_packed(folder)
        return open_experts(store, settings, device=wanted.device, kv_bytes=wanted.kv_bytes)

    weights = cast(Checkpoint, RandomCheckpoint(config, device, False))
    dtype = "bf16" if device == "cuda" else "fp32"
    model = load_model(weights, dtype=dtype, device=device, experts=opened)
    return model, opened_at


@dataclass
class Requests:
    """The ends and the times of all tokens of requests that ran together."""

    ends: list[Finished]
    times: list[list[float]]
    # behind every step: when, and the bytes read from disk so far
    reads: list[tuple[float, int]]
    # when the loads of the start had ended; 0: not yet
    loaded_at: float = 0.0

    def decoding(self) -> tuple[float, int, int]:
        """Seconds in which all streams decode (from the last first token to the first last one),
        their tokens, and the bytes read from disk."""
        first, last = max(t[0] for t in self.times), min(t[-1] for t in self.times)
        tokens = sum(first < at <= last for times in self.times for at in times)
        read = [count for at, count in self.reads if first <= at <= last]
        return last - first, tokens, read[-1] - read[0]


def run_requests(
    engine: Engine, prompts: Sequence[Sequence[int]], output: int, seed: int
) -> Requests:
    times: list[list[float]] = [[] for _ in prompts]
    found = Requests([], times, [])
    runtime = cast(ExpertRuntime, engine._lanes[0].runner._model.experts)
    for number, prompt in enumerate(prompts):
        sampling: Sampling = replace(SAMPLED, seed=seed + number)
        limits = Limits(max_tokens=output, ignore_eos=True)
        assignment = Assignment(
            f"{seed}-{number}", "m", tuple(prompt), sampling, limits, (), "", "", None,
            time.monotonic(),
        )  # fmt: skip
        verdict = engine.add(assignment)
        assert isinstance(verdict, Admitted), verdict
    while engine.has_work():
        events: Sequence[Event] = engine.step()
        now = time.perf_counter()
        for event in events:
            if isinstance(event, Failed):
                raise RuntimeError(event.message)
            if isinstance(event, Delta):
                times[int(event.request_id.split("-")[1])] += [now] * len(event.token_ids)
            elif isinstance(event, Finished):
                found.ends.append(event)
        found.reads.append((now, runtime.parts.store.disk.read_bytes))
        if not found.loaded_at and not runtime.is_loading:
            found.loaded_at = now
    return found


def decode_case(args: argparse.Namespace, model: CausalLM, streams: int) -> dict[str, Any]:
    vocab, tokens = model.spec.vocab, args.tokens
    prompt = PROMPT if args.device == "cuda" else 8
    engine = make_engine(model, tokenizer_of(vocab), streams, prompt + tokens)
    runtime = cast(ExpertRuntime, model.experts)
    runtime.wait_loaded()
    lengths = [prompt] * streams
    run_requests(engine, make_prompts(vocab, lengths, seed=1), tokens // 2, 100)
    prompts = make_prompts(vocab, lengths, seed=2)
    before = runtime.telemetry.total().as_dict()
    done = run_requests(engine, prompts, tokens, 300)
    after = runtime.telemetry.total().as_dict()
    seconds, decoded, read = done.decoding()
    counts = {name: after[name] - before[name] for name in after}
    slots = counts["device_hits"] + counts["prefetch_hits"]
    demands = slots + counts["device_misses"] + counts["host_runs"]
    looked = counts["host_hits"] + counts["host_misses"]
    timings = [end.timings for end in done.ends]
    parts = {name: sum(getattr(t.spent, name) for t in timings) for name in SPENT_FIELDS}
    total = sum(t.total_s for t in timings)
    return {
        "streams": streams,
        "tok_s": decoded / max(1e-9, seconds),
        "slot_hits": slots / max(1, demands),
        "ram_hits": counts["host_hits"] / max(1, looked),
        "read_GB": read / 1e9,
        "read_GB_s": read / max(1e-9, seconds) / 1e9,
        "missed_MB": read / max(1, decoded) / 1e6,
        "explained": min(t.explained for t in timings),
        "waits": {name: parts[name] / total for name in parts},
        "first_token_s": max(t.first_token_s for t in timings),
    }


def start_case(
    args: argparse.Namespace, config: dict[str, Any], folder: Path, settings: MoeSettings
) -> dict[str, Any]:
    """Twice: kernels are compiled in the first round."""
    found: dict[str, Any] = {}
    for _ in range(2):
        model, opened_at = open_model(config, folder, args.device, settings, args.start_wait)
        runtime = cast(ExpertRuntime, model.experts)
        try:
            begun = time.perf_counter()
            engine = make_engine(model, tokenizer_of(model.spec.vocab), 1, SHORT + args.tokens)
            prompts = make_prompts(model.spec.vocab, [SHORT], seed=3)
            done = run_requests(engine, prompts, min(16, args.tokens), 400)
            if runtime.is_loading:
                runtime.wait_loaded()
                done.loaded_at = time.perf_counter()
            gaps = [b - a for a, b in pairwise(done.times[0])]
            found = {
                "opened_s": begun - opened_at,
                "first_token_s": done.times[0][0] - opened_at,
                "loaded_s": (done.loaded_at or begun) - opened_at,
                "is_early": done.times[0][0] < done.loaded_at,
                "token_ms": 1e3 * sum(gaps) / max(1, len(gaps)),
                "explained": done.ends[0].timings.explained,
                "in_bank": runtime.parts.bank is not None,
            }
        finally:
            model.close()
    return found


def run(args: argparse.Namespace) -> dict[str, Any]:
    config = tiny(SHAPES[SHAPE]) if args.smoke else dict(SHAPES[SHAPE])
    config["num_hidden_layers"] = min(args.layers, config["num_hidden_layers"])
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    layers = tuple(range(config["num_hidden_layers"]))
    geometry = ExpertGeometry(layers, config["num_experts"], config["num_experts_per_tok"])
    with tempfile.TemporaryDirectory(prefix="coterie-disk-", dir=args.folder) as name:
        folder = Path(name)
        written = write_store(folder, geometry, hidden, inner, args.kind)
        record = (folder / EXPERTS_FILE).stat().st_size // geometry.total
        depth = depth_for(record, args.device == "cuda")
        print(
            f"{geometry.total} experts of {record / 1e6:.2f} MB written, {written / 1e9:.2f} GB/s",
            flush=True,
        )
        probe = 1 << (31 if args.device == "cuda" else 24)
        files = [folder / EXPERTS_FILE]
        raw = disk_bandwidth(files, record, depth, probe)
        alone, direct = reader_rate(folder, depth, args.device, probe)
        bandwidth = max(raw, alone)
        found: dict[str, Any] = {"direct": direct, "reader_GB_s": alone / 1e9, "cases": {}}
        print(
            f"disk {raw / 1e9:.2f} GB/s, {depth} reads at one time; the store's reader alone "
            f"{alone / 1e9:.2f} ({'direct' if direct else 'not direct'})",
            flush=True,
        )
        tier = MoeSettings(
            strategy=args.strategy, device_budget=args.slots, host_budget=args.budget,
            warmup="none", predict=args.predict,
        )  # fmt: skip
        model, _ = open_model(config, folder, args.device, tier, args.start_wait)
        try:
            for streams in args.streams:
                case = decode_case(args, model, streams)
                bandwidth = max(bandwidth, disk_bandwidth(files, record, depth, probe))
                case["disk_GB_s"] = bandwidth / 1e9
                case["share"] = case["read_GB_s"] / case["disk_GB_s"]
                found["cases"][f"decode-{streams}"] = case
                print(decode_line(case), flush=True)
        finally:
            model.close()
        half = replace(tier, device_budget="50%")
        every = replace(half, host_budget="")
        for name, settings in {"start-tier": half, "start-bank": every}.items():
            found["cases"][name] = case = start_case(args, config, folder, settings)
            print(start_line(name, case), flush=True)
    return found


def decode_line(case: dict[str, Any]) -> str:
    waits = ", ".join(f"{name.removesuffix('_s')} {v:.0%}" for name, v in case["waits"].items())
    return (
        f"decode-{case['streams']}: {case['tok_s']:.2f} tok/s; hits in slots "
        f"{case['slot_hits']:.0%}, in RAM {case['ram_hits']:.0%} of the rest; "
        f"{case['missed_MB']:.1f} MB read a token, {case['read_GB_s']:.2f} GB/s, "
        f"{case['share']:.0%} of the disk's {case['disk_GB_s']:.2f}; "
        f"explained {case['explained']:.1%}: {waits}"
    )


def start_line(name: str, case: dict[str, Any]) -> str:
    early = "before" if case["is_early"] else "NOT before"
    return (
        f"{name}{' (bank)' if case['in_bank'] else ''}: open after {case['opened_s']:.2f} s, "
        f"first token after {case['first_token_s']:.2f} s, loaded after {case['loaded_s']:.2f} s: "
        f"{early} loading ended; then {case['token_ms']:.1f} ms a token; "
        f"explained {case['explained']:.1%}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=("int4", "int8", "bf16"), default="int4")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--budget", default="25%", help="experts in RAM")
    parser.add_argument("--slots", default="10%", help="experts on the device")
    parser.add_argument("--strategy", default="adaptive")
    parser.add_argument("--predict", default="auto")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--start-wait", type=float, default=0.0, help="seconds that a start waits for its loads"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path.cwd(), help="where the store is written"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU")
    args = parser.parse_args()
    args.device = "cpu" if args.smoke else args.device
    if args.smoke:
        args.tokens, args.layers = min(args.tokens, 12), min(args.layers, 3)
    found = run(args)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
