"""The cost of adapters on this CPU: throughput of a mixed batch against the base model and PEFT.

    python -m benchmarks.adapters.cpu [--rounds 3] [--threads 2] [--rank 16] [--adapters 16]
        [--streams 32] [--tokens 32] [--modules all|qv] [--only coterie] [--json FILE]

Every stream decodes greedily after a prompt of 32 random tokens; stream i uses adapter i modulo
the number of adapters. Base, mixed and grouped batches are interleaved; medians of decode tokens
per second, each as a share of the base of the same system. The limit beside the cost: bytes of the
adapters in the batch over the bandwidth measured in the same run. PEFT runs the same adapters in
one batch with `adapter_names` on transformers in fp32.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.adapters.random_adapters import ALL_LINEAR, adapter_bytes, fill_library
from benchmarks.dense.cpu import System, worker
from benchmarks.limits import read_bandwidth
from benchmarks.peers import files
from benchmarks.peers.protocol import median, prompt_ids
from coterie.core.adapters import AdapterSettings
from coterie.core.events import Delta, Failed
from coterie.core.lane import LaneConfig
from coterie.core.plan import AdapterChoice, Assignment, Rejected
from coterie.core.request import Limits, Sampling
from coterie.models.base import read_spec
from coterie.weights.checkpoint import open_checkpoint
from coterie.weights.home import home
from coterie.workers.contract import WorkerSpec
from coterie.workers.host import EngineHost, build_engine

PROMPT_TOKENS = 32
MODULES = {"all": ALL_LINEAR, "qv": ("q_proj", "v_proj")}
GOAL = 0.75


class Bench:
    """One engine, stepped by the benchmark."""

    def __init__(self, model: Path, library: Path, threads: int, batching: str, room: int) -> None:
        spec = WorkerSpec(
            name="bench",
            model=str(model),
            lanes=(LaneConfig("bench", max_sequences=64, prefix_cache=False, context=2048),),
            threads=threads,
            kv_bytes=10**9,
            device="cpu",
            adapters=AdapterSettings(device_bytes=room, batching=batching),
            library=str(library),
        )
        self.host: EngineHost = build_engine(spec)
        self._count = 0

    def add(self, adapters: Sequence[AdapterChoice], tokens: int, prompt: Sequence[int]) -> str:
        self._count += 1
        verdict = self.host.engine.add(
            Assignment(
                request_id=f"r{self._count}",
                lane="bench",
                prompt_ids=tuple(prompt),
                sampling=Sampling(temperature=0.0, top_p=1.0, n=1, num_beams=1, seed=0),
                limits=Limits(max_tokens=tokens, ignore_eos=True),
                adapters=tuple(adapters),
                session=f"s{self._count}",
                tenant="bench",
                deadline=None,
                arrived_at=time.monotonic(),
            )
        )
        if isinstance(verdict, Rejected):
            raise RuntimeError(verdict.reason)
        return f"r{self._count}"

    def decode_rate(self, stacks: Sequence[Sequence[AdapterChoice]], tokens: int) -> float:
        """Tokens per second of all streams together, from the last first token on."""
        engine, waiting = self.host.engine, set()
        for number, stack in enumerate(stacks):
            waiting.add(self.add(stack, tokens + 1, prompt_ids(PROMPT_TOKENS, number)))
        counted, begin = 0, 0.0
        while engine.has_work():
            for event in engine.step():
                if isinstance(event, Failed):
                    raise RuntimeError(event.message)
                if not isinstance(event, Delta):
                    continue
                if waiting:
                    waiting.discard(event.request_id)
                    begin = time.perf_counter()
                elif begin:
                    counted += len(event.token_ids)
        return counted / (time.perf_counter() - begin)


def coterie_rates(args: argparse.Namespace, library: Path, choices: list[AdapterChoice]) -> Any:
    model = files.gguf("Q4_1")
    room = 2 * args.adapters * args.adapter_bytes + 10**8
    benches = {
        batching: Bench(model, library, args.threads, batching, room)
        for batching in ("mixed", "grouped")
    }
    none: list[tuple[AdapterChoice, ...]] = [()] * args.streams
    each = [(choices[i % args.adapters],) for i in range(args.streams)]
    one = [(choices[0],)] * args.streams
    rates: dict[str, list[float]] = {}
    cases: list[tuple[str, str, Sequence[tuple[AdapterChoice, ...]]]] = [
        ("base", "mixed", none),
        (f"{args.adapters} adapters, mixed", "mixed", each),
        (f"{args.adapters} adapters, grouped", "grouped", each),
        ("one adapter", "mixed", one),
    ]
    for bench in benches.values():
        bench.decode_rate(each, 4)
    for turn in range(args.rounds):
        for name, batching, stacks in cases[turn % 4 :] + cases[: turn % 4]:
            rate = benches[batching].decode_rate(stacks, args.tokens)
            rates.setdefault(name, []).append(rate)
            print(f"round {turn + 1} coterie {name}: {rate:.1f}", file=sys.stderr)
    for bench in benches.values():
        bench.host.close()
    return rates


def peft_rates(args: argparse.Namespace, library: Path, choices: list[AdapterChoice]) -> Any:
    """The rates of PEFT in its own process: in every round the base, then the mixed batch."""
    folders = [str(library / choice.digest) for choice in choices]
    base = str(files.safetensors_directory())
    command = worker("peft", base, str(args.threads), *folders)
    system = System("peft fp32", "fp32", command, too_slow_tok_s=0.5)
    rates: dict[str, list[float]] = {}
    system.start()
    if system.problem:
        return {"problem": system.problem}
    shared = {"streams": args.streams, "prompt": PROMPT_TOKENS, "tokens": min(args.tokens, 8)}
    for turn in range(args.rounds):
        for name, mixed in (("base", False), (f"{args.adapters} adapters, mixed", True)):
            rate = system.ask({"op": "batch", "mixed": mixed, "seed": turn, **shared})
            if rate is not None:
                rates.setdefault(name, []).append(rate)
            print(f"round {turn + 1} peft {name}: {rate}", file=sys.stderr)
    system.stop()
    return rates or {"problem": system.problem}


def table(record: dict[str, Any]) -> str:
    lines = ["| system | case | tok/s | of its base |", "|---|---|---|---|"]
    for system in ("coterie int4", "peft fp32"):
        rates = record.get(system)
        if rates is None:
            continue
        if "problem" in rates:
            lines.append(f"| {system} | {rates['problem']} | - | - |")
            continue
        base = median(rates["base"])
        for case, values in rates.items():
            lines.append(
                f"| {system} | {case} | {median(values):.1f} | {median(values) / base:.0%} |"
            )
    return "\n".join(lines)


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    spec = read_spec(open_checkpoint(files.gguf("Q4_1")))
    modules = MODULES[args.modules]
    args.adapter_bytes = adapter_bytes(spec, args.rank, modules)
    library = home() / "bench" / "adapters"
    choices = fill_library(library, spec, args.adapters, args.rank, modules)
    bandwidth = read_bandwidth()
    record: dict[str, Any] = {"adapter_bytes": args.adapter_bytes, "bandwidth": bandwidth}
    if "coterie" in args.only:
        record["coterie int4"] = coterie_rates(args, library, choices)
    if "peft" in args.only:
        record["peft fp32"] = peft_rates(args, library, choices)
    print(table(record))
    least_ms = args.adapters * args.adapter_bytes / bandwidth * 1e3
    print(
        f"\n{args.adapters} adapters of rank {args.rank} on {args.modules} modules: "
        f"{args.adapter_bytes / 1e6:.1f} MB each in bf16; read once per step they take "
        f"{least_ms:.1f} ms at {bandwidth / 1e9:.1f} GB/s. Goal: {GOAL:.0%} of base."
    )
    if args.json:
        args.json.write_text(json.dumps(record, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--modules", choices=MODULES, default="all")
    parser.add_argument("--only", default="coterie,peft")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
