"""Hit rate and speed of every strategy against capacity, on a carved model and real text.

    coterie carve --out smollm2-moe
    python -m benchmarks.moe.dispatch_sweep smollm2-moe [--traces DIR] [--rounds 2] [--host 100%]
        [--capacities 1,12.5%,25%,50%,75%,100%] [--live 12.5%,25%,50%,75%] [--markdown FILE]

A trace is recorded from held-out text (a prompt, then its real continuation token by token), the
heatmap that pins follow from calibration text. First every strategy and Belady's optimum are
replayed over the trace: the same numbers every time. Then each runs for real, with costs measured
on this machine, with and without prediction if the strategy uses it, rounds interleaved, medians. A
prefetch hit (the first use of an expert that was loaded because of a prediction) is not counted as
a hit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.moe.sweep_runs import Bench, Live, say
from benchmarks.moe.sweep_tables import Case, Result, hit_verdict, middle, speed_verdict, table
from coterie.moe.dispatch.base import Strategy
from coterie.moe.dispatch.table import STRATEGIES
from coterie.moe.planner.simulate import ReplaySetup, belady, replay
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.runtime.trace import Trace

CAPACITIES, LIVE = "1,12.5%,25%,50%,75%,100%", "12.5%,25%,50%,75%"
HEEDING = {name for name, kind in STRATEGIES.items() if kind.protect is not Strategy.protect}


def slots_of(text: str, total: int) -> int:
    return max(1, int(total * float(text[:-1]) / 100)) if text.endswith("%") else int(text)


def predictions(name: str) -> tuple[str, ...]:
    """The prediction settings to try: most strategies ignore predictions."""
    return ("off", "prefetch") if HEEDING.intersection(name.split("+")) else ("off",)


def decode_only(trace: Trace) -> Trace:
    picked = Trace(trace.geometry)
    picked.steps.extend(step for step in trace.steps if step.phase == "decode")
    return picked


def replays(
    trace: Trace, heatmap: Heatmap, names: Sequence[str], capacities: Sequence[int]
) -> dict[Case, Result]:
    """Replay every strategy over the trace, and the optimum under the name belady."""
    results = {}
    for slots in capacities:
        best = belady(trace, slots)
        results[Case("belady", slots, "off")] = Result(best.hit_rate, 0.0)
        for name in names:
            for predict in predictions(name):
                counts = replay(name, trace, ReplaySetup(slots, heatmap, predict=predict)).total
                asked = max(1, counts.demands)
                results[Case(name, slots, predict)] = Result(
                    counts.hit_rate, counts.prefetch_hits / asked, counts.host_runs / asked
                )
    return results


def run_live(
    bench: Bench, cases: Sequence[Case], live: Live, rounds: int
) -> dict[Case, list[Result]]:
    taken: dict[Case, list[Result]] = {case: [] for case in cases}
    for turn in range(rounds):
        for case in cases:
            taken[case].append(bench.measure(case, live))
            say(f"round {turn + 1}: {case} {taken[case][-1]}")
    return taken


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    bench = Bench(args.model, args.dtype, args.prompt)
    known, held = (
        args.traces / f"{name}-{args.texts}x{args.prompt}+{args.decode}.npz"
        if args.traces
        else None
        for name in ("calibration", "held_out")
    )
    heatmap = bench.trace(bench.known, args.decode, known).heatmap()
    trace = bench.trace(bench.texts[: args.texts], args.decode, held)
    total = trace.geometry.total
    names = args.strategies.split(",") if args.strategies else list(STRATEGIES)
    capacities = [slots_of(text, total) for text in args.capacities.split(",")]
    decode = replays(decode_only(trace), heatmap, names, capacities)
    whole = replays(trace, heatmap, names, capacities)
    parts = [
        f"{total} experts, top-{trace.geometry.top_k} of {trace.geometry.num_experts}; "
        f"{args.texts} held-out texts, {args.prompt} + {args.decode} tokens each; {args.dtype}",
        "\n### Replayed hit rate, decode steps, per cent (prefetch hits behind the plus)\n",
        table(decode, total, "hits"),
        "\n" + "\n".join(hit_verdict(decode, total)),
        "\n### Replayed hit rate, prompts and decode steps\n",
        table(whole, total, "hits"),
        "\n" + "\n".join(hit_verdict(whole, total)),
    ]
    runs: dict[Case, list[Result]] = {}
    if args.rounds:
        cases = [
            Case(name, slots_of(text, total), predict)
            for text in args.live.split(",")
            for name in names
            for predict in predictions(name)
        ]
        texts = bench.texts[: args.live_texts]
        live = Live(heatmap, bench.costs(), args.host, texts, args.live_decode)
        runs = run_live(bench, cases, live, args.rounds)
        medians = {case: middle(each) for case, each in runs.items()}
        parts += [
            f"\n### Measured hit rate, decode, per cent; host tier {args.host}; {live.costs}\n",
            table(medians, total, "hits"),
            f"\n### Measured decode, tok/s, medians of {args.rounds}\n",
            table(medians, total, "speed"),
            "\n" + "\n".join(speed_verdict(medians)),
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
            "live": [asdict(c) | {"runs": [asdict(r) for r in each]} for c, each in runs.items()],
        }
        args.json.write_text(json.dumps(record, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a carved model")
    parser.add_argument("--traces", type=Path, help="a folder that keeps the recorded traces")
    parser.add_argument("--capacities", default=CAPACITIES, help="slots, or shares of all experts")
    parser.add_argument("--strategies", default="", help="by comma; default: all")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=int, default=4, help="held-out texts of 256 tokens")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2, help="of live runs; 0 = replay only")
    parser.add_argument("--live", default=LIVE, help="capacities of the live runs")
    parser.add_argument("--live-texts", type=int, default=1)
    parser.add_argument("--live-decode", type=int, default=32)
    parser.add_argument("--host", default="100%", help="host tier; 0 reads misses from disk")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
