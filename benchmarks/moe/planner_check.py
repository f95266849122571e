"""Compares the planner with reality: saves its predictions first, then runs every strategy.

The trace is recorded with all experts resident. The runs use the same warm-up text (its heatmap is
all that is known at the start), are measured on other texts, and have memory budgets that were not
used for calibration. Rounds are interleaved; the median counts.

    python -m benchmarks.moe.planner_check MODEL [--budgets 12%,25%] [--disk lru] [--json FILE]
    python3 -m benchmarks.moe.planner_check --gpu [--json FILE]    # 12 runs, random weights
    python3 -m benchmarks.moe.planner_check --gpu --smoke          # tiny, on the CPU
    python -m benchmarks.moe.planner_check --beside 0,1,2,4 [--cases 0,5] [--json FILE]
                                    # the choice beside so many busy loops: 12 cases, 15 minutes
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from coterie.core.moe import MoeSettings, MoeUsage
from coterie.models.base import CausalLM, load_model
from coterie.models.build.moe import MoeRequirements
from coterie.models.plan_inputs import NoExperts, PlanInputs, SingleSequenceRun, open_plan_inputs
from coterie.moe.dispatch.table import STRATEGIES
from coterie.moe.planner.auto import known_costs
from coterie.moe.planner.machine import to_json
from coterie.moe.planner.plan import PlanRow, forecast_row
from coterie.moe.planner.workload import Workload
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.runtime.runtime import ExpertRuntime, open_experts
from coterie.moe.runtime.trace import Trace
from coterie.weights.checkpoint import open_checkpoint

ALLOWED = 0.25


@dataclass(frozen=True, slots=True)
class Config:
    strategy: str
    budget: str
    host: str

    def settings(self) -> MoeSettings:
        return MoeSettings(
            strategy=self.strategy,
            device_budget=self.budget,
            host_budget=self.host,
            predict="off",
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of the prompt and of every token after it: the same tokens in every round."""

    prefill_s: float
    decode_s: tuple[float, ...]
    hit_rate: float


class Switch:
    """Experts that can be exchanged under one loaded backbone."""

    def __init__(self, wanted: MoeRequirements) -> None:
        self.current: ExpertRuntime | NoExperts = NoExperts(wanted.geometry())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current, name)


class Bench:
    def __init__(self, prospect: PlanInputs, args: argparse.Namespace) -> None:
        self.prospect, self.args = prospect, args
        self.switch: Switch | None = None
        self.model = self._load()

    def _load(self) -> CausalLM:
        def place(wanted: MoeRequirements) -> Any:
            self.switch = Switch(wanted)
            return self.switch

        prospect = self.prospect
        return load_model(
            prospect.checkpoint, dtype=prospect.dtype, device=prospect.device, experts=place
        )

    def open(self, config: Config, heatmap: Heatmap | None) -> ExpertRuntime:
        """A runtime with its own store, because a runtime closes its store."""
        prospect = self.prospect
        store = open_plan_inputs(prospect.checkpoint, prospect.dtype, prospect.device).store
        runtime = open_experts(
            store,
            config.settings(),
            device=prospect.device,
            heatmap=heatmap,
            costs=known_costs(store, prospect.device),
        )
        assert self.switch is not None
        self.switch.current = runtime
        return runtime

    def request(self, seed: int) -> Measured:
        """One prompt and a forced answer."""
        args, draw = self.args, random.Random(seed)
        vocab = self.model.spec.vocab
        solo = SingleSequenceRun(self.model, args.prompt + args.decode + 1)
        prompt = [draw.randrange(vocab) for _ in range(args.prompt)]
        prefill_s = solo.step(prompt, "prefill")
        self.model.take_usage()
        decode_s, hits, demands = [], 0, 0
        for _ in range(args.decode):
            decode_s.append(solo.step([draw.randrange(vocab)], "decode"))
            usage = self._between()
            used_slots = usage.device_hits + usage.prefetch_hits
            hits += used_slots
            demands += used_slots + usage.device_misses + usage.host_runs
        return Measured(prefill_s, tuple(decode_s), hits / demands)

    def _between(self) -> MoeUsage:
        """What an engine does between tokens."""
        taken = self.model.take_usage()
        assert taken is not None and self.switch is not None
        self.switch.update()
        return taken[0]

    def _settle(self, runtime: ExpertRuntime) -> None:
        """Wait for reads in the background after a warm-up: they belong to no token."""
        parts, deadline = runtime.parts, time.monotonic() + 60
        if parts.host.complete and parts.strategies["decode"].settled():
            while runtime.resident("decode") is None and time.monotonic() < deadline:
                self._between()
                time.sleep(0.02)

    def record(self) -> Trace:
        """Requests with all experts resident: the first to warm up, the others are counted."""
        runtime = self.open(Config("cpu_only", "", "100%"), None)
        trace = runtime.trace = Trace(self.prospect.store.geometry)
        for seed in range(self.args.requests + 1):
            self.request(seed)
        runtime.close()
        return trace

    def measure(self, config: Config, heatmap: Heatmap, requests: int) -> Measured:
        """The warm-up of the trace, then so many other texts."""
        runtime = self.open(config, heatmap)
        try:
            self.request(0)
            self._settle(runtime)
            taken = [self.request(1001 + seed) for seed in range(requests)]
        finally:
            runtime.close()
        return Measured(
            sum(one.prefill_s for one in taken),
            tuple(second for one in taken for second in one.decode_s),
            statistics.mean(one.hit_rate for one in taken),
        )


def workload_of(trace: Trace, requests: int) -> Workload:
    """The workload for the planner: at the start only the first request is known."""
    steps = tuple(trace.steps)
    warm = len(steps) // (requests + 1)
    seen = Trace(trace.geometry)
    seen.steps.extend(steps[:warm])
    return Workload(trace.geometry, steps, warm, "recorded trace", seen.heatmap())


def configs(args: argparse.Namespace) -> list[Config]:
    names = args.strategies.split(",") if args.strategies else list(STRATEGIES)
    budgets = args.budgets.split(",")
    resident = [Config(name, budget, "100%") for budget in budgets for name in names]
    return resident + [
        Config(name, budget, args.disk_host)
        for budget in budgets
        for name in (args.disk.split(",") if args.disk else ())
    ]


def predict(bench: Bench, wanted: Sequence[Config], load: Workload) -> dict[Config, PlanRow]:
    """The planner's prediction for each configuration, from the trace only."""
    prospect = bench.prospect
    case = prospect.case(prospect.machine(), load)
    rows = {}
    for config in wanted:
        [division] = prospect.memory_divisions(config.settings(), 0)
        row = forecast_row(case, division, config.strategy)
        if row is not None:
            rows[config] = row
    return rows


def main() -> None:
    args = _arguments()
    if args.gpu:
        from benchmarks.moe import planner_gpu

        sys.exit(planner_gpu.check(args, _note))
    if args.beside:
        from benchmarks.moe import planner_beside

        sys.exit(planner_beside.check(args, _note))
    torch.set_num_threads(args.threads or torch.get_num_threads())
    prospect = open_plan_inputs(open_checkpoint(args.model), args.dtype, args.device)
    machine = prospect.machine(again=True, say=_note)
    bench = Bench(prospect, args)
    _note("recording a trace at full residency")
    load = workload_of(bench.record(), args.requests)
    rows = predict(bench, configs(args), load)
    saved = {
        "machine": to_json(machine),
        "saved_at": time.time(),
        "predicted": [{**asdict(config), **asdict(row)} for config, row in rows.items()],
    }
    args.save.write_text(json.dumps(saved, indent=1))
    _note(f"predictions of {len(rows)} configurations saved in {args.save}; now the real runs")
    taken: dict[Config, list[Measured]] = {config: [] for config in rows}
    for turn in range(args.rounds):
        for config in rows:
            taken[config].append(bench.measure(config, load.heatmap, args.requests))
        _note(f"round {turn + 1} of {args.rounds} done")
    bench.model.close()
    report = [compare(config, rows[config], taken[config], args) for config in rows]
    show(report)
    if args.json:
        result = {**saved, "rounds": args.rounds, "compared": report}
        args.json.write_text(json.dumps(result, indent=1))
    worst = max(abs(row["decode_ratio"] - 1) for row in report)
    print(f"\nworst decode error {100 * worst:.0f}% (allowed {100 * ALLOWED:.0f}%)")
    sys.exit(worst > ALLOWED)


def compare(
    config: Config, row: PlanRow, taken: Sequence[Measured], args: argparse.Namespace
) -> dict[str, Any]:
    """Per token over the rounds: the median, or on a busy machine the shortest time."""
    middle = min if args.busy else statistics.median
    tokens, prompts = args.decode * args.requests, args.prompt * args.requests
    decode = tokens / sum(map(middle, zip(*(one.decode_s for one in taken), strict=True)))
    prefill = prompts / middle([one.prefill_s for one in taken])
    return {
        **asdict(config),
        "predicted_decode": row.decode_tokens_s,
        "measured_decode": decode,
        "decode_ratio": row.decode_tokens_s / decode,
        "predicted_prefill": row.prefill_tokens_s,
        "measured_prefill": prefill,
        "prefill_ratio": row.prefill_tokens_s / prefill,
        "predicted_hit_rate": row.decode_hit_rate,
        "measured_hit_rate": statistics.median(one.hit_rate for one in taken),
        "rounds_decode": [tokens / sum(one.decode_s) for one in taken],
    }


def show(report: Sequence[dict[str, Any]]) -> None:
    print(f"{'budget':7}{'host':6}{'strategy':19}{'decode tok/s':>22}{'prefill':>20}{'hits':>12}")
    for row in report:
        decode = f"{row['predicted_decode']:.1f} / {row['measured_decode']:.1f}"
        prefill = f"{row['predicted_prefill']:.0f} / {row['measured_prefill']:.0f}"
        hits = f"{100 * row['predicted_hit_rate']:.0f} / {100 * row['measured_hit_rate']:.0f}%"
        print(
            f"{row['budget']:7}{row['host']:6}{row['strategy']:19}{decode:>16}"
            f"{row['decode_ratio']:6.2f}{prefill:>14}{row['prefill_ratio']:6.2f}{hits:>12}"
        )


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check the planner against real runs.")
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--gpu", action="store_true", help="random weights on a CUDA device")
    parser.add_argument("--smoke", action="store_true", help="with --gpu: tiny, on the CPU")
    parser.add_argument("--beside", default="", help="numbers of busy loops: 0,1,2,4")
    parser.add_argument("--cases", default="", help="with --beside: numbers of cases; default: all")
    parser.add_argument("--folder", type=Path, help="with --beside: keeps the random models")
    parser.add_argument("--layers", type=int, default=12, help="with --gpu: of the model that runs")
    parser.add_argument("--budgets", default="12%,25%,50%", help="device budgets")
    parser.add_argument("--strategies", default="", help="a comma-separated list; default: all")
    parser.add_argument("--disk", default="", help="strategies to run with a small host tier too")
    parser.add_argument("--disk-host", default="25%", help="that host tier")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--requests", type=int, default=6, help="counted in every round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", action="store_true", help="others use this machine too")
    parser.add_argument("--save", type=Path, default=Path("planner_prediction.json"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.beside:
        # small requests: many strategies run
        parser.set_defaults(prompt=64, decode=16, requests=2)
        args = parser.parse_args()
    if args.model is None and not (args.gpu or args.beside):
        parser.error("name a model, --gpu or --beside")
    return args


if __name__ == "__main__":
    main()
