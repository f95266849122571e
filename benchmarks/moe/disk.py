"""The disk part of `moe_cpu`: a share of the experts in RAM, every miss read from disk.

Tokens are sampled at temperature 1 from a model whose routing depends on them, so that hit rates
are near the share of experts in RAM. Two limits, both measured in the run: the disk's bandwidth for
reads of an expert's size over the bytes of the run's misses (without experts that were read but not
used), and decoding with every expert in RAM. The slower one counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.limits import disk_bandwidth
from benchmarks.moe import random_moe
from benchmarks.peers.protocol import median, prompt_ids
from coterie.core.moe import USAGE_FIELDS

GOAL = 0.6
SOURCES = ("checkpoint", "packed")
_EVERY = {"strategy": "persistent", "device_budget": "100%", "predict": "off"}


@dataclass(frozen=True, slots=True)
class DiskRun:
    tok_s: float
    hit_rate: float
    # bytes of experts per token: read because of misses, and all that was read
    missed_bytes: float
    read_bytes: float
    disk_bytes_s: float
    stall_share: float
    # with every expert in RAM
    resident_tok_s: float

    @property
    def disk_tok_s(self) -> float:
        return self.disk_bytes_s / self.missed_bytes if self.missed_bytes else float("inf")

    @property
    def disk_share(self) -> float:
        return self.tok_s / self.disk_tok_s

    @property
    def share(self) -> float:
        """Share of the slower limit that was reached."""
        return self.tok_s / min(self.disk_tok_s, self.resident_tok_s)


@dataclass(frozen=True, slots=True)
class Case:
    source: str
    kind: str
    strategy: str
    predict: str

    def __str__(self) -> str:
        return f"{self.source} {self.kind} {self.strategy}, prediction {self.predict}"


def run_disk(args: argparse.Namespace, model: Path, shape: random_moe.Shape) -> dict[str, Any]:
    cases = [
        Case(source, kind, strategy, predict)
        for source in args.sources.split(",")
        for kind in args.kinds.split(",")
        for strategy in args.disk.split(",")
        for predict in args.predict.split(",")
    ]
    taken: dict[str, list[DiskRun]] = {}
    for turn in range(args.rounds):
        resident: dict[str, float] = {}
        for case in cases:
            if case.kind not in resident:
                resident[case.kind] = resident_rate(args, model, shape, case.kind, turn)
            run = disk_case(args, model, shape, case, turn, resident[case.kind])
            taken.setdefault(str(case), []).append(run)
            print(f"round {turn + 1} {case}: {run}", file=sys.stderr, flush=True)
    print("\n" + disk_table(taken, args.budget))
    return {name: [asdict(run) for run in runs] for name, runs in taken.items()}


def resident_rate(
    args: argparse.Namespace, model: Path, shape: random_moe.Shape, kind: str, turn: int
) -> float:
    with _opened(args, model, kind, _EVERY) as llm:
        prompt = prompt_ids(32, 1 + turn, shape.vocab)
        llm.generate(prompt, max_tokens=args.tokens // 2, **_sampled(turn))
        done = llm.generate(prompt, max_tokens=args.tokens + 1, **_sampled(turn + 1))[0]
        return float(args.tokens / done.timings.decode_s)


def disk_case(
    args: argparse.Namespace,
    model: Path,
    shape: random_moe.Shape,
    case: Case,
    turn: int,
    resident_tok_s: float,
) -> DiskRun:
    path = source_of(model, case)
    moe = {
        "strategy": case.strategy, "device_budget": args.budget, "predict": case.predict,
    }  # fmt: skip
    with _opened(args, path, case.kind, moe) as llm:
        # first reach the steady state, then measure the disk. The reads of a run with one token are
        # subtracted from those of the long run, so that only the reads of decoding remain (both
        # runs find the same prefix in the cache).
        prompt = prompt_ids(32, 1 + turn, shape.vocab)
        llm.generate(prompt, max_tokens=args.tokens, **_sampled(turn))
        record = read_bytes_of(llm)
        files = sorted([*path.glob("model*.safetensors"), *path.glob("experts.bin")])
        before = disk_bandwidth(files, record)
        short = llm.generate(prompt, max_tokens=1, **_sampled(turn + 1))[0].moe
        done = llm.generate(prompt, max_tokens=args.tokens + 1, **_sampled(turn + 1))[0]
        after = disk_bandwidth(files, record)
    counts = {name: getattr(done.moe, name) - getattr(short, name) for name in USAGE_FIELDS}
    hits = counts["device_hits"] + counts["prefetch_hits"]
    fetched = counts["device_misses"] + counts["prefetch_hits"]
    return DiskRun(
        tok_s=args.tokens / done.timings.decode_s,
        hit_rate=hits / max(1, hits + counts["device_misses"] + counts["host_runs"]),
        missed_bytes=fetched * record / args.tokens,
        read_bytes=max(0, counts["read_bytes"]) / args.tokens,
        disk_bytes_s=max(before, after),
        stall_share=counts["stall_s"] / done.timings.decode_s,
        resident_tok_s=resident_tok_s,
    )


def source_of(model: Path, case: Case) -> Path:
    """The model itself, or an exported copy beside it."""
    if case.source == "checkpoint":
        return model
    packed = model.with_name(f"{model.name}-packed-{case.kind}")
    if not packed.exists():
        from coterie.cli.main import main as coterie

        coterie(["store", "export", str(model), str(packed), "--dtype", case.kind])
    return packed


def read_bytes_of(llm: Any) -> int:
    """Bytes that one miss reads: the mean over all reads so far."""
    total = llm.moe_report()["total"]
    return int(total["read_bytes"] // max(1, total["host_misses"]))


def _opened(args: argparse.Namespace, path: Path, kind: str, moe: dict[str, Any]) -> Any:
    from coterie.workers.embedded import LLM

    return LLM(
        str(path), dtype=kind, threads=args.threads, context=1024, max_sequences=1,
        moe={"host_budget": "0", "warmup": "none"} | moe,
    )  # fmt: skip


def _sampled(seed: int) -> dict[str, Any]:
    return {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": seed, "ignore_eos": True}


def disk_table(taken: Mapping[str, Sequence[DiskRun]], budget: str) -> str:
    lines = [
        f"experts in RAM: {budget}, the rest on disk; medians",
        "",
        "| run | tok/s | hit rate | misses, MB per token | read, MB | disk, GB/s | stalled "
        f"| limit by disk, tok/s | share (goal {GOAL:.0%}) | all in RAM, tok/s "
        "| share of the slower limit |",
        "|---" * 11 + "|",
    ]
    for name, runs in taken.items():
        run = DiskRun(*(median([getattr(r, field) for r in runs]) for field in asdict(runs[0])))
        lines.append(
            f"| {name} | {run.tok_s:.2f} | {run.hit_rate:.1%} | {run.missed_bytes / 1e6:.0f} "
            f"| {run.read_bytes / 1e6:.0f} | {run.disk_bytes_s / 1e9:.2f} | {run.stall_share:.0%} "
            f"| {run.disk_tok_s:.2f} | {run.disk_share:.0%} | {run.resident_tok_s:.2f} "
            f"| {run.share:.0%} |"
        )
    return "\n".join(lines)
