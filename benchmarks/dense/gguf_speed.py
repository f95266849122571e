"""GGUF files on this CPU: Coterie and llama.cpp on the same files, rounds interleaved.

    python -m benchmarks.dense.gguf_speed [MODEL ...] [--mixes Q4_K_M,Q6_K] [--rounds 3]
        [--threads 2] [--cases decode] [--cpu-time] [--json FILE]

MODEL: see `benchmarks.peers.quantised_files`, which makes the mixes. Both programs load one file at
a time. llama.cpp has flash attention, a mapped file, fp16 keys and values, and those of its batch
sizes and cache layouts that a trial before the rounds finds fastest. Coterie is asked twice in
every round: how far the two medians lie apart is the noise.

Ratios are medians over the rounds of Coterie's rate over llama.cpp's. The limit of decoding is the
bytes of the file that one step reads over the read bandwidth measured before each case; of experts
only one stream's bytes are known.

--cpu-time: for a busy machine. One thread each, and seconds are processor time of the process that
computes, of the read bandwidth too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.dense.cpu import System, measure, worker
from benchmarks.limits import read_bandwidth
from benchmarks.peers.protocol import CPU_TIME, median
from benchmarks.peers.quantised_files import MIXES, MODELS, has_experts, mixed, token_bytes

CASES: dict[str, dict[str, Any]] = {
    "decode 1 stream": {"op": "decode", "prompt": 32, "tokens": 64},
    "decode 8 streams": {"op": "decode", "prompt": 32, "tokens": 32, "streams": 8},
    "decode 32 streams": {"op": "decode", "prompt": 32, "tokens": 16, "streams": 32},
    "prefill 512": {"op": "prefill", "prompt": 512},
    "prefill 2,048": {"op": "prefill", "prompt": 2048},
}
OURS, AGAIN, PEER = "coterie", "coterie again", "llama.cpp"
FLASH_ATTENTION = "1"
TOO_SLOW_TOK_S = 0.1


@dataclass
class FileRates:
    """What one file gave: system -> case -> tokens per second of every round."""

    file_bytes: int
    token_bytes: int
    has_experts: bool
    settings: dict[str, Any] = field(default_factory=dict)
    bandwidths: list[float] = field(default_factory=list)
    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def rate(self, system: str, case: str) -> float | None:
        values = self.rates.get(system, {}).get(case)
        return median(values) if values else None

    def ratio(self, case: str) -> float | None:
        """Over llama.cpp in the same round."""
        pairs = zip(
            self.rates.get(OURS, {}).get(case, []),
            self.rates.get(PEER, {}).get(case, []),
            strict=False,
        )
        found = [ours / peer for ours, peer in pairs]
        return median(found) if found else None

    def noise(self, case: str) -> float | None:
        first, second = self.rate(OURS, case), self.rate(AGAIN, case)
        return abs(first / second - 1) if first and second else None

    def share(self, system: str, case: str) -> float | None:
        """Of the limit."""
        streams = CASES[case].get("streams", 1)
        rate = self.rate(system, case)
        if not rate or CASES[case]["op"] != "decode" or (self.has_experts and streams > 1):
            return None
        return rate / streams * self.token_bytes / median(self.bandwidths)


def measure_file(
    path: Path, cases: dict[str, Any], rounds: int, threads: int, bandwidth: Callable[[], float]
) -> FileRates:
    found = FileRates(path.stat().st_size, token_bytes(path), has_experts(path))
    count = str(threads)
    ours = System(OURS, "", worker("coterie", str(path), "auto", count), TOO_SLOW_TOK_S)
    peer_command = worker("llamacpp", str(path), FLASH_ATTENTION, count)
    peer = System(PEER, "", peer_command, TOO_SLOW_TOK_S)
    again = System(AGAIN, "", [])
    try:
        for system in (ours, peer):
            system.start()
            print(f"{path.name} {system.name}: {system.problem or 'ready'}", file=sys.stderr)
        # the same process
        again.process, again.problem = ours.process, ours.problem
        if not peer.problem:
            found.settings = peer.request({"op": "choose"}) or {}
        found.bandwidths = measure([ours, peer, again], rounds, cases, bandwidth)
    finally:
        for system in (ours, peer):
            system.stop()
    for system in (ours, peer, again):
        found.rates[system.name] = system.rates
        if system.problem:
            found.problems[system.name] = system.problem
    return found


def table(files: dict[str, FileRates], cases: Sequence[str]) -> str:
    lines = [
        "| file | case | Coterie, tok/s | llama.cpp, tok/s | ratio | share of the limit, both "
        "| noise |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, file in files.items():
        for case in cases:
            cells = [_text(file.rate(OURS, case), ".1f"), _text(file.rate(PEER, case), ".1f")]
            cells.append(_text(file.ratio(case), ".2f"))
            shares = (_text(file.share(system, case), ".0%") for system in (OURS, PEER))
            cells.append(", ".join(shares))
            cells.append(_text(file.noise(case), ".1%"))
            lines.append(f"| {name} | {case} | " + " | ".join(cells) + " |")
    for name, file in files.items():
        lines.append(
            f"\n{name}: {file.file_bytes / 1e6:,.0f} MB, {file.token_bytes / 1e6:,.0f} MB a token; "
            f"read bandwidth {median(file.bandwidths) / 1e9:.1f} GB/s"
        )
        lines += [f"{system}: {problem}" for system, problem in file.problems.items()]
    return "\n".join(lines)


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--mixes", default=",".join(MIXES))
    parser.add_argument("--cases", default="", help="whose name contains one of these, by comma")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every figure there")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, by processor time")
    args = parser.parse_args()
    bandwidth: Callable[[], float] = read_bandwidth
    if args.cpu_time:
        args.threads = 1
        torch.set_num_threads(1)
        os.environ[CPU_TIME] = "1"
        bandwidth = partial(read_bandwidth, clock=time.process_time)
    cases = {
        name: case
        for name, case in CASES.items()
        if any(part in name for part in args.cases.split(","))
    }
    files: dict[str, FileRates] = {}
    for model in args.models:
        for mix in args.mixes.split(","):
            path = mixed(model, mix, args.threads)
            name = f"{Path(model).stem} {mix}"
            files[name] = measure_file(path, cases, args.rounds, args.threads, bandwidth)
            print(table({name: files[name]}, list(cases)), file=sys.stderr)
            if args.json:
                _write(args.json, files, args)
    print(table(files, list(cases)))


def _write(path: Path, files: dict[str, FileRates], args: argparse.Namespace) -> None:
    record = {
        "machine": platform.machine(),
        "rounds": args.rounds,
        "threads": args.threads,
        "clock": "processor time" if args.cpu_time else "wall",
        "cases": CASES,
        "files": {name: asdict(file) for name, file in files.items()},
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
