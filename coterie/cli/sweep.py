"""`coterie sweep`: what a mixture of experts does with less memory, and with other experts."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from coterie.cli.options import add_model, count, fetch
from coterie.cli.terminal import nbytes, note, show, table

if TYPE_CHECKING:
    from coterie.moe.runtime.trace import Trace

HELP = "measure a mixture of experts at several capacities, and with other experts"
EPILOG = """\
examples:
  coterie sweep ./moe                         hits, tok/s at 100, 50, 25, 12.5%
  coterie sweep ./moe --capacities 96,48,1 --strategies lru --host-budget 0
  coterie sweep ./moe --strategies all --capacities 25%
  coterie sweep ./moe --active 1,2,4 --capacities 25%         experts per token
  coterie sweep ./moe --experts 16,32 --capacities 8         experts in a layer
  coterie sweep ./moe --neurons 128,256 --capacities 25%      size of an expert
  coterie sweep ./moe --json > sweep.json

% of full: backbone and device slots, of the memory of the whole model. best:
the hits of a cache that knows the future. Every run answers the same prompt
with the slots of a fresh start; runs take turns, medians are shown.

--active, --experts and --neurons write smaller copies of the model into a
temporary folder (TMPDIR), one at a time. Nothing is trained again: they show
speed and memory, not quality.
"""

CAPACITIES = ["100%", "50%", "25%", "12.5%"]
STRATEGIES_SHOWN = ["lru", "adaptive"]
PROMPT = "The harbour was quiet that morning, and the old clerk opened his ledger to write:"
# as in the published capacity table of DWR-Transformer
SAMPLING = {"temperature": 0.8, "top_p": 0.9, "seed": 0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class SweepCase:
    """Slots, as they were asked for: a number, or a share of all experts."""

    variant: str
    strategy: str
    capacity: str


@dataclass(frozen=True, slots=True)
class SweepRun:
    slots: int
    device_bytes: int
    # of the unchanged model, all experts included
    share: float
    hit_rate: float
    read_bytes: float
    tokens_s: float
    first_token_s: float


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add = parser.add_argument
    add(
        "--capacities",
        type=capacities,
        default=CAPACITIES,
        metavar="A,B",
        help="experts on the device, or shares of all (default: 100%%,50%%,25%%,12.5%%)",
    )
    add(
        "--strategies",
        type=words,
        default=STRATEGIES_SHOWN,
        metavar="A,B",
        help="or all (default: lru,adaptive)",
    )
    add(
        "--host-budget",
        default="100%",
        metavar="SIZE",
        help="RAM for experts; 0 = misses read the disk",
    )
    add("--context", type=count, metavar="N", help="tokens of prompt plus output")
    for name, of in (("active", "experts per token"), ("experts", "experts in a layer")):
        add(f"--{name}", type=counts, default=[], metavar="A,B", help=f"ablation: {of}")
    add("--neurons", type=counts, default=[], metavar="A,B", help="ablation: size of an expert")
    add("--prompt", default=PROMPT, metavar="TEXT")
    add("--tokens", type=count, default=64, metavar="N", help="tokens of the answer")
    add("--repeat", type=count, default=3, metavar="N", help="takes the median")
    add("--json", action="store_true", help="print JSON")


def words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def counts(text: str) -> list[int]:
    return [count(part) for part in words(text)]


def capacities(text: str) -> list[str]:
    for part in words(text):
        value = part.removesuffix("%")
        try:
            fits = 0 < float(value) <= 100 if part.endswith("%") else int(value) > 0
        except ValueError:
            fits = False
        if not fits:
            raise argparse.ArgumentTypeError(
                f"'{part}' must be a number of experts, or a share such as 25%"
            )
    return words(text)


def execute(args: argparse.Namespace) -> int:
    from coterie.models.carve.variant import ModelVariant, moe_of, write_variant
    from coterie.weights.checkpoint import open_checkpoint

    model = fetch(args.model)
    checkpoint = open_checkpoint(model)
    moe_of(checkpoint)
    strategies = _strategies(args.strategies)
    variants = [ModelVariant()]
    variants += [ModelVariant(active=value) for value in args.active]
    variants += [ModelVariant(experts=value) for value in args.experts]
    variants += [ModelVariant(width=value) for value in args.neurons]
    rows: list[dict[str, Any]] = []
    full = 0
    for variant in variants:
        with tempfile.TemporaryDirectory(prefix="coterie-sweep-") as folder:
            path = model
            if variant != ModelVariant():
                note(f"writing the model with {variant}")
                write_variant(checkpoint, variant, path := Path(folder) / "model")
            found = _measured(args, path, str(variant), strategies, full)
            full = full or found[0]["full_bytes"]
            rows += found
    report = {"model": str(args.model or "default"), "full_bytes": full, "runs": rows}
    return show(args, report, _table(report))


def _strategies(asked: Sequence[str]) -> list[str]:
    from coterie.moe.dispatch.table import STRATEGIES, parse_strategy

    names = list(STRATEGIES) if asked == ["all"] else list(asked)
    for name in names:
        parse_strategy(name)
    return names


def _measured(
    args: argparse.Namespace, path: Path, variant: str, strategies: list[str], full: int
) -> list[dict[str, Any]]:
    """One model at every capacity: rounds take turns, so that a slow minute hits all alike."""
    cases = [SweepCase(variant, name, size) for size in args.capacities for name in strategies]
    taken: dict[SweepCase, list[SweepRun]] = {case: [] for case in cases}
    best: dict[str, float] = {}
    for turn in range(args.repeat):
        for case in cases:
            note(f"{variant}: {case.strategy} at {case.capacity}, {turn + 1} of {args.repeat}")
            traces = not best
            run, full, optimum = _run(args, path, case, full, traced=traces)
            taken[case].append(run)
            best = best or optimum
    return [
        {**asdict(case), **_middle(runs), "best_hit_rate": best[case.capacity], "full_bytes": full,
         "all_tokens_s": [run.tokens_s for run in runs]}
        for case, runs in taken.items()
    ]  # fmt: skip


def _run(
    args: argparse.Namespace, path: Path, case: SweepCase, full: int, *, traced: bool
) -> tuple[SweepRun, int, dict[str, float]]:
    """One answer with empty slots; with `traced` also the best hits at each capacity."""
    from coterie.workers.embedded import LLM

    with LLM(
        str(path),
        dtype=args.dtype or "auto",
        device=args.device or "auto",
        threads=args.threads or 0,
        kv_bytes=args.kv_bytes or 0,
        context=args.context or 0,
        max_sequences=1,
        moe={
            "strategy": case.strategy,
            "device_budget" if case.capacity.endswith("%") else "cache_capacity": (
                case.capacity if case.capacity.endswith("%") else int(case.capacity)
            ),
            "host_budget": args.host_budget,
            "warmup": "none",
        },
    ) as llm:
        with llm.traced() if traced else nullcontext() as trace:
            [done] = llm.generate(args.prompt, max_tokens=args.tokens, **SAMPLING)
        info, usage = llm.info, done.moe
        assert info.experts is not None and usage is not None
        # on a CPU both tiers may be one memory: what the slots would take on a device counts
        slot_bytes = info.experts.expert_bytes / info.experts.count
        device = info.weight_bytes + round(info.experts.device_slots * slot_bytes)
        full = full or info.weight_bytes + info.experts.expert_bytes
        run = SweepRun(
            slots=info.experts.device_slots,
            device_bytes=device,
            share=device / full,
            hit_rate=(usage.device_hits + usage.prefetch_hits) / max(1, usage.demands),
            read_bytes=usage.read_bytes,
            tokens_s=len(done.token_ids) / (done.timings.prefill_s + done.timings.decode_s),
            first_token_s=done.timings.first_token_s or 0.0,
        )
        best = {} if trace is None else _best(trace, args.capacities, info.experts.count)
        return run, full, best


def _best(trace: Trace, sizes: Sequence[str], total: int) -> dict[str, float]:
    from coterie.moe.planner.simulate import belady

    return {size: belady(trace, _slots(size, total)).hit_rate for size in sizes}


def _slots(size: str, total: int) -> int:
    return max(1, int(total * float(size[:-1]) / 100)) if size.endswith("%") else int(size)


def _middle(runs: Sequence[SweepRun]) -> dict[str, float]:
    return {name: median(getattr(run, name) for run in runs) for name in asdict(runs[0])}


def _table(report: dict[str, Any]) -> str:
    headers = (
        "model",
        "strategy",
        "experts",
        "device",
        "% of full",
        "hits",
        "best",
        "tok/s",
        "read",
    )
    rows = [
        (
            row["variant"],
            row["strategy"],
            f"{row['slots']:.0f} ({row['capacity']})"
            if "%" in row["capacity"]
            else row["capacity"],
            nbytes(row["device_bytes"]),
            f"{100 * row['share']:.0f}%",
            f"{100 * row['hit_rate']:.1f}%",
            f"{100 * row['best_hit_rate']:.1f}%",
            f"{row['tokens_s']:.1f}",
            nbytes(row["read_bytes"]),
        )
        for row in report["runs"]
    ]
    return table(headers, rows, words=("strategy",))
