"""Hit rate and speed of every strategy against capacity, on a carved model and real text.

    coterie carve --out smollm2-moe
    python -m benchmarks.dispatch_sweep smollm2-moe [--capacities 1,12.5%,25%,50%,75%,100%]
        [--strategies lru,adaptive] [--rounds 3] [--host 100%] [--json FILE] [--markdown FILE]

A trace is recorded from held-out text (a prompt, then its real continuation token by token), the
heatmap that pins follow from calibration text. First every strategy and Belady's optimum are
replayed over the trace: the same numbers every time. Then each runs for real, with and without
prediction, rounds interleaved, medians. A prefetch hit, the first use of something loaded because
it was predicted, is never counted as a hit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.protocol import median
from coterie.core.dispatch import DispatchSettings, ExpertUsage
from coterie.experts.belady import belady
from coterie.experts.dispatch.base import Costs
from coterie.experts.dispatch.table import STRATEGIES
from coterie.experts.heatmap import Heatmap
from coterie.experts.replay import Stage, replay
from coterie.experts.runtime import ExpertRuntime, open_experts
from coterie.experts.store import ExpertNames, Store, open_store
from coterie.experts.trace import Trace
from coterie.models.base import CausalLM, load_model
from coterie.models.carve_texts import calibration, held_out
from coterie.models.experts import ExpertsWanted
from coterie.models.pace import NoExperts, Solo
from coterie.models.tokenizer import load_tokenizer
from coterie.weights.checkpoint import open_checkpoint

CAPACITIES = "1,12.5%,25%,50%,75%,100%"
OURS, BEST_MINUS = "adaptive", 0.01


@dataclass(frozen=True, slots=True)
class Case:
    strategy: str
    slots: int
    # off or prefetch
    predict: str


@dataclass(frozen=True, slots=True)
class Result:
    hit_rate: float
    prefetch_rate: float
    # of demands that were computed on the host instead
    host_rate: float = 0.0
    tok_s: float = 0.0


class Swap:
    """Stands where a model's experts stand, and hands everything to whichever runtime is in."""

    def __init__(self, wanted: ExpertsWanted) -> None:
        self.wanted = wanted
        self.current: ExpertRuntime | NoExperts = NoExperts(wanted.geometry())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current, name)

    def store(self) -> Store:
        """Opened anew: a runtime closes its own."""
        wanted = self.wanted
        return open_store(
            wanted.checkpoint,
            wanted.geometry(),
            ExpertNames(wanted.moe.parts),
            wanted.dtype,
            hidden=wanted.hidden,
            intermediate=wanted.moe.intermediate,
            gated=wanted.moe.gated,
        )


class Bench:
    """One loaded backbone under which experts are exchanged."""

    def __init__(self, model: Path, dtype: str, prompt: int, decode: int) -> None:
        self.prompt, self.decode = prompt, decode
        self.swap: Swap | None = None
        self.model = self._load(model, dtype)
        tokenizer = load_tokenizer(model)
        self.texts = [row.tolist() for rows in held_out(tokenizer).values() for row in rows]
        self.known = calibration(tokenizer, None, 8).tolist()

    def _load(self, path: Path, dtype: str) -> CausalLM:
        def place(wanted: ExpertsWanted) -> Any:
            self.swap = Swap(wanted)
            return self.swap

        return load_model(open_checkpoint(path), dtype=dtype, experts=place)

    def open(
        self, settings: DispatchSettings, heatmap: Heatmap | None = None, costs: Costs | None = None
    ) -> ExpertRuntime:
        assert self.swap is not None
        runtime = open_experts(self.swap.store(), settings, heatmap=heatmap, costs=costs)
        self.swap.current = runtime
        return runtime

    def read(self, ids: Sequence[int]) -> tuple[float, ExpertUsage]:
        """Decode seconds and decode usage of one text: a prompt, then its continuation."""
        solo = Solo(self.model, self.prompt + self.decode + 1)
        solo.step(ids[: self.prompt], "prefill")
        self._between()
        seconds, total = 0.0, ExpertUsage()
        for token in ids[self.prompt : self.prompt + self.decode]:
            seconds += solo.step([token], "decode")
            total += self._between()
        return seconds, total

    def _between(self) -> ExpertUsage:
        taken = self.model.take_usage()
        assert taken is not None and self.swap is not None
        self.swap.update()
        return taken[0]

    def record(self, texts: Iterable[Sequence[int]]) -> Trace:
        """What the routers ask for, with what the layer before would have predicted."""
        runtime = self.open(
            DispatchSettings(strategy="lru", device_budget="50%", predict="protect")
        )
        trace = runtime.trace = Trace(runtime.geometry)
        try:
            for ids in texts:
                self.read(ids)
        finally:
            runtime.close()
        return trace

    def measure(self, case: Case, heatmap: Heatmap, host: str, texts: int) -> Result:
        settings = DispatchSettings(
            strategy=case.strategy,
            cache_capacity=case.slots,
            host_budget=host,
            predict=case.predict,
            warmup="none",
        )
        runtime = self.open(settings, heatmap)
        try:
            self.read(self.known[-1])  # slots fill, threads start
            seconds, usage = 0.0, ExpertUsage()
            for ids in self.texts[:texts]:
                spent, used = self.read(ids)
                seconds, usage = seconds + spent, usage + used
        finally:
            runtime.close()
        asked = max(1, usage.demands)
        return Result(
            usage.device_hits / asked,
            usage.prefetch_hits / asked,
            usage.host_runs / asked,
            texts * self.decode / seconds,
        )


def slots_of(text: str, total: int) -> int:
    return max(1, int(total * float(text[:-1]) / 100)) if text.endswith("%") else int(text)


def decode_only(trace: Trace) -> Trace:
    picked = Trace(trace.geometry)
    picked.steps.extend(step for step in trace.steps if step.phase == "decode")
    return picked


def replays(
    trace: Trace, heatmap: Heatmap, names: Sequence[str], capacities: Sequence[int]
) -> dict[Case, Result]:
    """Every strategy over the trace, and the optimum under the name belady."""
    found = {}
    for slots in capacities:
        best = belady(trace, slots)
        found[Case("belady", slots, "off")] = Result(best.hit_rate, 0.0)
        for name in names:
            for predict in ("off", "prefetch"):
                counts = replay(name, trace, Stage(slots, heatmap, predict=predict)).total
                asked = max(1, counts.demands)
                found[Case(name, slots, predict)] = Result(
                    counts.hit_rate, counts.prefetch_hits / asked, counts.host_runs / asked
                )
    return found


def verdict(found: dict[Case, Result], total: int) -> list[str]:
    """Ours against the best of the others and against the optimum, at every capacity."""
    lines = []
    for slots in sorted({case.slots for case in found}):
        plain = {
            c.strategy: r.hit_rate
            for c, r in found.items()
            if c.slots == slots and c.predict == "off"
        }
        optimum = plain.pop("belady", 0.0)
        ours = plain.pop(OURS, None)
        if ours is None or not plain or slots >= total:
            continue
        name = max(plain, key=plain.__getitem__)
        holds = "holds" if ours >= plain[name] - BEST_MINUS else "MISSED"
        lines.append(
            f"{slots} slots: {OURS} {ours:.1%}, best other {name} {plain[name]:.1%} ({holds}), "
            f"Belady {optimum:.1%}, gap {100 * (optimum - ours):.1f} points"
        )
    return lines


def table(found: dict[Case, Result], total: int, what: str) -> str:
    """`what`: hits (demand hits + prefetch hits, per cent) or speed (tok/s)."""
    capacities = sorted({case.slots for case in found})
    heads = [f"{slots} ({slots / total:.1%})" for slots in capacities]
    lines = ["| strategy | prediction | " + " | ".join(heads) + " |"]
    lines.append("|---" * (len(heads) + 2) + "|")
    rows = dict.fromkeys((case.strategy, case.predict) for case in found)
    for strategy, predict in rows:
        cells = [found.get(Case(strategy, slots, predict)) for slots in capacities]
        shown = ["-" if cell is None else _cell(cell, what) for cell in cells]
        lines.append(f"| {strategy} | {predict} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _cell(result: Result, what: str) -> str:
    if what == "speed":
        return f"{result.tok_s:.1f}"
    early = f" + {100 * result.prefetch_rate:.1f}" if result.prefetch_rate else ""
    return f"{100 * result.hit_rate:.1f}{early}"


def middle(runs: Sequence[Result]) -> Result:
    columns = {name: [getattr(run, name) for run in runs] for name in asdict(runs[0])}
    return Result(**{name: median(values) for name, values in columns.items()})


def run_live(
    bench: Bench, cases: Sequence[Case], heatmap: Heatmap, args: argparse.Namespace
) -> dict[Case, list[Result]]:
    taken: dict[Case, list[Result]] = {case: [] for case in cases}
    for turn in range(args.rounds):
        for case in cases:
            taken[case].append(bench.measure(case, heatmap, args.host, args.texts))
            print(f"round {turn + 1}: {case} {taken[case][-1]}", file=sys.stderr, flush=True)
    return taken


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    bench = Bench(args.model, args.dtype, args.prompt, args.decode)
    print("recording traces", file=sys.stderr, flush=True)
    heatmap = bench.record(bench.known).heatmap()
    trace = bench.record(bench.texts[: args.texts])
    total = trace.geometry.total
    capacities = [slots_of(text, total) for text in args.capacities.split(",")]
    names = args.strategies.split(",") if args.strategies else list(STRATEGIES)
    decode = replays(decode_only(trace), heatmap, names, capacities)
    whole = replays(trace, heatmap, names, capacities)
    parts = [
        f"{total} experts, top-{trace.geometry.top_k} of {trace.geometry.num_experts}; "
        f"{args.texts} held-out texts, {args.prompt} + {args.decode} tokens each; {args.dtype}",
        "\n### Replayed hit rate, decode steps, per cent (prefetch hits behind the plus)\n",
        table(decode, total, "hits"),
        "\n" + "\n".join(verdict(decode, total)),
        "\nWith prefill steps:\n\n" + "\n".join(verdict(whole, total)),
    ]
    live: dict[Case, list[Result]] = {}
    if args.rounds:
        cases = [
            Case(name, slots, predict)
            for slots in capacities
            for name in names
            for predict in args.predict.split(",")
        ]
        live = run_live(bench, cases, heatmap, args)
        medians = {case: middle(runs) for case, runs in live.items()}
        parts += [
            f"\n### Measured hit rate, decode, per cent; host tier {args.host}\n",
            table(medians, total, "hits"),
            f"\n### Measured decode, tok/s, medians of {args.rounds}\n",
            table(medians, total, "speed"),
        ]
    bench.model.close()
    text = "\n".join(parts) + "\n"
    print(text)
    if args.markdown:
        args.markdown.write_text(text)
    if args.json:
        record = {
            "options": {k: v for k, v in vars(args).items() if not isinstance(v, Path)},
            "replay_decode": [asdict(c) | asdict(r) for c, r in decode.items()],
            "replay_whole": [asdict(c) | asdict(r) for c, r in whole.items()],
            "live": [asdict(c) | {"runs": [asdict(r) for r in runs]} for c, runs in live.items()],
        }
        args.json.write_text(json.dumps(record, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a carved model")
    parser.add_argument("--capacities", default=CAPACITIES, help="slots, or shares of all experts")
    parser.add_argument("--strategies", default="", help="by comma; default: all")
    parser.add_argument("--predict", default="off,prefetch", help="of the live runs")
    parser.add_argument("--host", default="100%", help="host tier; 0 reads misses from disk")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=int, default=4, help="held-out texts of 256 tokens")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="0 = replay only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
