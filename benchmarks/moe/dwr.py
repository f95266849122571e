"""The DWR shape (96 experts of 8.4 MB) at capacities from all experts down to one.

    python -m benchmarks.moe.dwr [MODEL] [--devices cpu,cuda] [--capacities 96,48,1] [--json FILE]

MODEL is a directory written by examples/train_dwr.py; without it random weights are used, and the
table says so. As in the published run: fp32, one LRU over all layers, misses read from disk, 100
tokens at temperature 0.8 and top-p 0.9, caches empty at the start. Rounds are interleaved, medians
shown. Published figures: DWR-Transformer, phase 3, one A100.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.protocol import median
from coterie.weights.home import home
from coterie.workers.embedded import LLM
from examples.dwr_torch import DWR, Shape
from examples.train_dwr import train_tokenizer, write

CAPACITIES = (96, 48, 32, 16, 1)
TOKENS, TEMPERATURE, TOP_P = 100, 0.8, 0.9
PROMPT = 'def main():\n    """The meaning of life is'


@dataclass(frozen=True, slots=True)
class Published:
    """Megabytes of device memory (estimated there), hit rate and speed (measured at 96 only)."""

    memory_mb: int
    hit_rate: float | None = None
    tok_s: float | None = None


SEED = {
    96: Published(1000, 0.976, 10.0),
    48: Published(611),
    32: Published(481),
    16: Published(352),
    1: Published(230),
}


@dataclass(frozen=True, slots=True)
class Case:
    device: str
    capacity: int


@dataclass(frozen=True, slots=True)
class Run:
    tok_s: float
    hit_rate: float
    read_mb: float
    stall_s: float
    backbone_mb: float
    expert_mb: float


def random_model(shape: Shape | None = None, path: Path | None = None) -> Path:
    """Random weights of the shape, written once."""
    path = path or home() / "bench" / "dwr-random"
    if not (path / "model.safetensors").exists():
        torch.manual_seed(0)
        model = DWR(shape or Shape())
        words = train_tokenizer([Path(__file__).read_text()], 512, 1_000_000)
        write(model, words, path, {"random": True})
    return path


def measure(model: Path, case: Case, args: argparse.Namespace) -> Run:
    with LLM(
        str(model),
        device=case.device,
        dtype=args.dtype,
        context=256,
        max_sequences=1,
        moe={
            "strategy": args.strategy,
            "cache_capacity": case.capacity,
            "host_budget": args.host,
            "predict": args.predict,
            "warmup": "none",
        },
    ) as llm:
        done = llm.generate(
            PROMPT,
            max_tokens=args.tokens,
            temperature=TEMPERATURE,
            top_p=TOP_P,
            seed=0,
            ignore_eos=True,
        )[0]
        report = llm.moe_report()
        assert report is not None and done.moe is not None
        usage = done.moe
        found = usage.device_hits + usage.prefetch_hits
        seconds = done.timings.prefill_s + done.timings.decode_s
        return Run(
            tok_s=args.tokens / seconds,
            hit_rate=found / max(1, usage.demands),
            read_mb=usage.read_bytes / 1e6,
            stall_s=usage.stall_s,
            backbone_mb=llm.info.weight_bytes / 1e6,
            expert_mb=report["tiers"]["device"]["budget_bytes"] / 1e6,
        )


def middle(runs: list[Run]) -> Run:
    columns = {name: [getattr(run, name) for run in runs] for name in asdict(runs[0])}
    return Run(**{name: median(values) for name, values in columns.items()})


def table(results: dict[Case, Run]) -> str:
    lines = [
        "| device | capacity | backbone + experts, MB | hit rate | tok/s | read from disk, MB | "
        "published: MB | hit rate | tok/s |",
        "|---" * 9 + "|",
    ]
    for case, run in results.items():
        seed = SEED.get(case.capacity)
        memory = f"{run.backbone_mb:.0f} + {run.expert_mb:.0f}"
        lines.append(
            f"| {case.device} | {case.capacity} | {memory} | {run.hit_rate:.1%} | {run.tok_s:.1f} "
            f"| {run.read_mb:,.0f} | {seed.memory_mb if seed else '-'} "
            f"| {f'{seed.hit_rate:.1%}' if seed and seed.hit_rate else '-'} "
            f"| {f'{seed.tok_s:.1f}' if seed and seed.tok_s else '-'} |"
        )
    return "\n".join(lines)


def origin(model: Path) -> str:
    """Where the weights come from, in words."""
    file = model / "training.json"
    notes: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if "val_loss" not in notes:
        return "random weights (no trained checkpoint was given)"
    return (
        f"trained: {notes['tokens'] / 1e6:.0f}M tokens of Python source in "
        f"{notes['seconds']:.0f} s on {notes['device']}, held-out loss {notes['val_loss']}"
    )


def main() -> None:
    args = _arguments()
    model = args.model or random_model()
    devices = args.devices.split(",")
    if not torch.cuda.is_available():
        devices = [name for name in devices if not name.startswith("cuda")]
    cases = [
        Case(device, int(capacity)) for device in devices for capacity in args.capacities.split(",")
    ]
    taken: dict[Case, list[Run]] = {case: [] for case in cases}
    for turn in range(args.rounds):
        for case in cases:
            taken[case].append(measure(model, case, args))
            print(f"round {turn + 1}: {case} {taken[case][-1]}", file=sys.stderr, flush=True)
    results = {case: middle(runs) for case, runs in taken.items()}
    print(f"{origin(model)}; {args.dtype}, {args.strategy}, host budget {args.host}\n")
    print(table(results))
    if args.json:
        record = {
            "weights": origin(model),
            "options": {k: v for k, v in vars(args).items() if not isinstance(v, Path)},
            "runs": [
                asdict(case) | asdict(run) | {"all_tok_s": [one.tok_s for one in taken[case]]}
                for case, run in results.items()
            ],
        }
        args.json.write_text(json.dumps(record, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--devices", default="cpu,cuda")
    parser.add_argument("--capacities", default=",".join(map(str, CAPACITIES)))
    parser.add_argument("--strategy", default="lru")
    parser.add_argument("--predict", default="off", help="off, protect, prefetch or auto")
    parser.add_argument("--host", default="0", help="host budget; 0 = every miss reads the disk")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
