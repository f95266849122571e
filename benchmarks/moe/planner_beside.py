"""The planner's choices beside busy processes: `benchmarks.moe.planner_check --beside 0,1,2,4`.

Three random models, four divisions of the memory each. For every case so many busy loops run while
`coterie plan` measures a machine that it has never seen (a state folder of its own) and chooses.
Then, without the loops, every strategy that the plan names runs in interleaved rounds. They show
the rivals: the fastest at prompts, and the fastest at decoding of those that are as fast at prompts
as the choice. Rounds of their own, longer ones, of the rivals and the choice alone, decide, because
the best of a dozen noisy figures is too good. The median of the rounds counts. A choice passes if
neither rival is over 10% faster. The judgement needs a quiet machine: what others used meanwhile is
told.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.moe.planner_check import Bench, Config, Measured
from benchmarks.moe.random_moe import Shape, write
from coterie.models.plan_inputs import PlanInputs, open_plan_inputs
from coterie.moe.planner.machine import Machine
from coterie.moe.planner.plan import SAME
from coterie.moe.planner.simulate import BELADY
from coterie.moe.planner.timing import MachineUse
from coterie.weights.checkpoint import open_checkpoint

Say = Callable[[str], None]

# a choice may be so much slower than the best
ALLOWED = 0.10
# others may use so much of the processors while the speeds are taken
QUIET = 0.05
# pairs of strategies that run beside the single ones
PAIRS = 3
# the deciding runs are so many times as long: a disk's speed changes from one second to the next
LONGER = 4
_HEADS = {"heads": 8, "kv_heads": 2, "head_dim": 64, "vocab": 4096, "positions": 1024}
MODELS = {
    "32 experts": Shape(6, 32, 4, 512, 256, **_HEADS, skew=0.5, spread=10.0),
    "8 large experts": Shape(4, 8, 2, 768, 1024, **_HEADS, skew=0.5, spread=10.0),
    "64 small experts": Shape(8, 64, 8, 256, 128, **_HEADS, skew=0.5, spread=10.0),
}
# device and host budgets
BUDGETS = (("25%", "100%"), ("25%", "25%"), ("50%", "0B"), ("12%", "50%"))


@dataclass(frozen=True, slots=True)
class ChoiceCase:
    number: int
    model: str
    budget: str
    host: str
    loops: int


@dataclass(frozen=True, slots=True)
class RealSpeed:
    """Tokens per second, the median of the rounds."""

    prefill: float
    decode: float


def cases(loops: Sequence[int]) -> list[ChoiceCase]:
    """Each number of loops beside each model, and beside different budgets."""
    return [
        ChoiceCase(row * len(BUDGETS) + at, model, *budget, loops[(row + at) % len(loops)])
        for row, model in enumerate(MODELS)
        for at, budget in enumerate(BUDGETS)
    ]


def check(args: argparse.Namespace, say: Say) -> int:
    torch.set_num_threads(args.threads or torch.get_num_threads())
    wanted = cases([int(count) for count in args.beside.split(",")])
    if args.cases:
        numbers = {int(number) for number in args.cases.split(",")}
        wanted = [case for case in wanted if case.number in numbers]
    with tempfile.TemporaryDirectory(prefix="planner-beside-") as made:
        folder = args.folder or Path(made)
        found = []
        for model in dict.fromkeys(case.model for case in wanted):
            own = [case for case in wanted if case.model == model]
            found += _check_model(model, own, folder, args, say)
    show(found)
    if args.json:
        args.json.write_text(json.dumps({"allowed": ALLOWED, "cases": found}, indent=1))
    passed = sum(row["passed"] for row in found)
    print(f"\n{passed} of {len(found)} choices within {ALLOWED:.0%} of the best")
    return int(passed < len(found))


def _check_model(
    model: str, wanted: Sequence[ChoiceCase], folder: Path, args: argparse.Namespace, say: Say
) -> list[dict[str, Any]]:
    path = folder / model.replace(" ", "_")
    if not (path / "config.json").exists():
        write(path, MODELS[model])
    with _state_folder(folder / f"{path.name}-quiet"):
        prospect = open_plan_inputs(open_checkpoint(path), "auto", "cpu")
        quiet = prospect.machine(again=True)
        bench = Bench(prospect, args)
        trace = folder / f"{path.name}.npz"
        recorded = bench.record()
        recorded.save(trace, fingerprint=prospect.store.fingerprint)
        plans = {}
        for case in wanted:
            with busy(case.loops):
                plans[case] = planned(case, path, trace)
            chosen = plans[case]["choice"]["strategy"]
            say(f"case {case.number}: {case.loops} loops beside {model}, {chosen}")
        heatmap = recorded.heatmap()
        rows = []
        for case in wanted:
            use = MachineUse()
            speeds = _run_all(bench, case, candidates(plans[case]), heatmap, args)
            chosen = plans[case]["choice"]["strategy"]
            decisive = _run_all(bench, case, rivals(chosen, speeds), heatmap, args, LONGER)
            row = _judged(case, plans[case], decisive, figures(quiet, prospect))
            tried = {key: asdict(value) for key, value in speeds.items()}
            rows.append(row | {"tried": tried, "others": use.shares()[0]})
            shares = ", ".join(
                f"{name} {each.prefill:.0f} and {each.decode:.1f}"
                for name, each in decisive.items()
            )
            say(f"case {case.number}: {'passed' if row['passed'] else 'failed'}: {shares} tok/s")
        bench.model.close()
    return rows


@contextmanager
def _state_folder(path: Path) -> Iterator[None]:
    """Where this process keeps what it measures."""
    before = os.environ.copy()
    os.environ["XDG_STATE_HOME"] = str(path)
    os.environ.pop("COTERIE_HOME", None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """So many processes that do nothing but compute."""
    code = "print(flush=True)\nwhile True: pass"
    command = [sys.executable, "-c", code]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(loops)]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


def planned(case: ChoiceCase, path: Path, trace: Path) -> dict[str, Any]:
    """What `coterie plan` says on a machine that it has not measured before."""
    command = [sys.executable, "-m", "coterie", "plan", str(path), "--json", "--trace", str(trace)]
    command += ["--device-budget", case.budget, "--host-budget", case.host, "--device", "cpu"]
    command += ["--threads", str(torch.get_num_threads())]
    with tempfile.TemporaryDirectory(prefix="planner-state-") as state:
        env = {key: value for key, value in os.environ.items() if key != "COTERIE_HOME"}
        env["XDG_STATE_HOME"] = state
        started = time.monotonic()
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"case {case.number}: coterie plan failed:\n{done.stderr}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document | {"plan_s": time.monotonic() - started}


def candidates(document: dict[str, Any]) -> list[str]:
    """The single strategies that run as themselves, the best pairs, and the choice."""
    rows = [row for row in document["rows"] if row["strategy"] != BELADY]
    singles = [row["strategy"] for row in rows if "+" not in row["strategy"]]
    pairs = [row for row in rows if "+" in row["strategy"]]
    pairs.sort(key=lambda row: (-row["prefill_tokens_s"], -row["decode_tokens_s"]))
    names = [*singles, *(row["strategy"] for row in pairs[:PAIRS])]
    return list(dict.fromkeys([*names, document["choice"]["strategy"]]))


def _run_all(
    bench: Bench,
    case: ChoiceCase,
    names: Sequence[str],
    heatmap: Any,
    args: argparse.Namespace,
    longer: int = 1,
) -> dict[str, RealSpeed]:
    requests = args.requests * longer
    configs = [Config(name, case.budget, case.host) for name in names]
    taken: dict[Config, list[Measured]] = {config: [] for config in configs}
    for _ in range(args.rounds):
        for config in configs:
            taken[config].append(bench.measure(config, heatmap, requests))
    middle = min if args.busy else statistics.median
    return {
        config.strategy: _speed(taken[config], args.prompt * requests, middle) for config in configs
    }


def _speed(
    taken: Sequence[Measured], prompt_tokens: int, middle: Callable[[Any], float]
) -> RealSpeed:
    """Of every token and prompt the median of the rounds, or on a busy machine the shortest."""
    decode_s = [middle(times) for times in zip(*(one.decode_s for one in taken), strict=True)]
    prefill_s = middle([one.prefill_s for one in taken])
    return RealSpeed(prompt_tokens / prefill_s, len(decode_s) / sum(decode_s))


def figures(machine: Machine, prospect: PlanInputs) -> dict[str, float]:
    """Microseconds of the costs that decide most."""
    profile = machine.profiles[prospect.profile_name]
    backbone = machine.backbones[prospect.profile_name]
    seconds = {
        "read": profile.read.each_s,
        "link": profile.link.each_s,
        "expert": profile.host.at(1),
        "layer": machine.layer_s,
        "step": backbone.walk.at(1),
    }
    return {name: 1e6 * value for name, value in seconds.items()}


def _judged(
    case: ChoiceCase,
    document: dict[str, Any],
    speeds: dict[str, RealSpeed],
    quiet: dict[str, float],
) -> dict[str, Any]:
    name = document["choice"]["strategy"]
    prefill, decode = ratios(name, speeds)
    row = next(row for row in document["rows"] if row["strategy"] == name)
    machine = document["machine"]
    return {
        **asdict(case),
        "choice": name,
        "predicted_decode": row["decode_tokens_s"],
        "decode_error": row["decode_error"],
        "prefill_of_best": prefill,
        "decode_of_best": decode,
        "passed": min(prefill, decode) >= 1 - ALLOWED,
        "spread": machine["spread"],
        "disturbed": machine["disturbed"],
        "plan_s": document["plan_s"],
        "predicted": {each["strategy"]: _predicted(each) for each in document["rows"]},
        "quiet_us": quiet,
        "busy_us": {
            "read": 1e6 * machine["profile"]["read"]["each_s"],
            "link": 1e6 * machine["profile"]["link"]["each_s"],
            "expert": 1e6 * machine["profile"]["host"]["seconds"][0],
            "layer": 1e6 * machine["layer_s"],
        },
        "speeds": {key: asdict(value) for key, value in speeds.items()},
    }


def rivals(name: str, speeds: dict[str, RealSpeed]) -> list[str]:
    """The choice, the fastest at prompts, and the fastest at decoding of those that are as fast at
    prompts as the choice."""
    at_prompts = max(speeds, key=lambda each: speeds[each].prefill)
    rival = _equal_at_prompts(name, speeds)
    at_decoding = max(rival, key=lambda each: speeds[each].decode)
    return list(dict.fromkeys([name, at_prompts, at_decoding]))


def _equal_at_prompts(name: str, speeds: dict[str, RealSpeed]) -> list[str]:
    least = speeds[name].prefill * (1 - SAME)
    return [each for each, speed in speeds.items() if speed.prefill >= least]


def _predicted(row: dict[str, Any]) -> dict[str, float]:
    names = ("prefill_tokens_s", "prefill_spread", "decode_tokens_s", "decode_spread")
    return {name: row[name] for name in names}


def ratios(name: str, speeds: dict[str, RealSpeed]) -> tuple[float, float]:
    """Prefill against the fastest, and decode against the fastest of those that are as fast at
    prompts as the choice."""
    own = speeds[name]
    fastest = max(each.prefill for each in speeds.values())
    best = max(speeds[each].decode for each in _equal_at_prompts(name, speeds))
    return own.prefill / fastest, own.decode / best


def show(found: Sequence[dict[str, Any]]) -> None:
    print(
        f"{'case':5}{'model':18}{'device':7}{'host':6}{'loops':6}{'choice':28}{'prefill':>8}"
        f"{'decode':>8}{'predicted':>16}{'plan s':>8}  result"
    )
    for row in found:
        predicted = f"{row['predicted_decode']:.0f} ±{row['decode_error']:.0%}"
        result = "passed" if row["passed"] else "FAILED"
        marked = ", disturbed" if row["disturbed"] else ""
        marked += f", others used {row['others']:.0%}" if row["others"] > QUIET else ""
        print(
            f"{row['number']:<5}{row['model']:18}{row['budget']:7}{row['host']:6}{row['loops']:<6}"
            f"{row['choice']:28}{row['prefill_of_best']:>8.0%}{row['decode_of_best']:>8.0%}"
            f"{predicted:>16}{row['plan_s']:>8.1f}  {result}{marked}"
        )
    print("\nprefill and decode: the choice's share of the best; times of the rounds are medians")
