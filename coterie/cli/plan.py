"""`coterie plan`: the speed of every strategy on this machine, before a model is loaded."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.options import add_elastic, add_model, budget, count, fetch, strategy
from coterie.cli.specialist import add_specialist, use_specialist
from coterie.cli.terminal import facts, nbytes, note, table
from coterie.core.errors import ConfigError
from coterie.core.moe import MoeSettings
from coterie.core.settings import parse_bytes

if TYPE_CHECKING:
    from coterie.models.plan_inputs import PlanInputs
    from coterie.moe.planner.machine import Machine
    from coterie.moe.planner.plan import MemoryDivision, PlanCase, PlanChoice, PlannedModel, PlanRow

HELP = "show what each strategy would give for a model with experts"
EPILOG = """\
examples:
  coterie plan ./Qwen3-30B-A3B                  with the memory that is free now
  coterie plan ./Qwen3-30B-A3B --device-budget 6GB --context 8192
  coterie plan ./model --device-budget 25% --host-budget 50% --trace run.npz
  coterie plan ./model --json --save plan.json  for scripts; keeps what it says

columns: memory (device + host experts), hits (decode demands met from a device
slot), prefill and decode in predicted tok/s, limit (decode tok/s if disk, link,
CPU and device moved the same bytes at their full rates), of it (the predicted
share), KV (tokens that still fit). Strategies within 3% of each other share a
line, fastest first. The machine is measured once; no expert stays loaded.
"faster" says what to buy or to change. The flags give this very plan again.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_specialist(parser)
    add = parser.add_argument
    add("--strategy", type=strategy, metavar="NAME", help="plan for this one instead of choosing")
    add("--context", type=count, metavar="N", help="tokens whose KV is reserved first")
    add("--device-budget", type=budget, metavar="SIZE", help="6GB, or a share such as 25%%")
    add("--host-budget", type=budget, metavar="SIZE", help="RAM for experts; 0 = none")
    add("--cache-capacity", type=count, metavar="N", help="experts on the device")
    add_elastic(parser)
    add("--trace", type=Path, metavar="FILE", help="a recorded trace to replay")
    add("--workload", default="default", metavar="NAME", help="whose heatmap to draw from")
    add("--json", action="store_true", help="print JSON")
    add("--save", type=Path, metavar="FILE", help="also write the JSON to FILE")
    add("--remeasure", action="store_true", help="measure this machine again")


def execute(args: argparse.Namespace) -> int:
    args = use_specialist(args)
    path = fetch(args.model)
    document = make(path, args)
    text = json.dumps(document, indent=1)
    if args.save:
        args.save.write_text(text + "\n")
    print(text if args.json else render(document))
    return 0


def make(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The whole plan as plain values."""
    from coterie.models.base import read_spec
    from coterie.models.plan_inputs import open_plan_inputs
    from coterie.moe.planner.advice import advise
    from coterie.moe.planner.plan import pick, plan
    from coterie.weights.checkpoint import open_checkpoint
    from coterie.workers.device import device_of, use_threads

    if args.threads:
        use_threads(args.threads)
    device, checkpoint = device_of(args.device or "auto"), open_checkpoint(path)
    if args.context:
        # refuses what a server would
        read_spec(checkpoint, args.context)
    prospect = open_plan_inputs(checkpoint, args.dtype or "auto", device)
    try:
        machine = prospect.machine(again=args.remeasure, say=note)
        load = prospect.workload(args.trace, _heatmap(path, prospect, args.workload))
        case = prospect.case(machine, load, args.context or 0)
        subject = case.model
        reserve = _graph_reserve(prospect)
        ways = prospect.memory_divisions(_settings(args), subject.kv_bytes, reserve)
        rows = plan(case, ways)
        choice = _asked(args.strategy, case, ways, rows) or pick(rows)
        taken = _taken(rows, choice)
        advice = advise(case, _way(ways, taken), taken)
    finally:
        prospect.store.close()
    return {
        "made_at": time.time(),
        "model": {
            "path": str(path),
            "architecture": prospect.spec.architecture,
            "experts": subject.sizes.total,
            "layers": len(subject.geometry.layers),
            "top_k": subject.geometry.top_k,
            "expert_bytes": subject.sizes.expert_bytes,
            "record_bytes": subject.sizes.slot_bytes,
            "backbone_bytes": subject.backbone_bytes,
            "backbone_measured": subject.backbone is not None,
            "context": subject.context,
            "kv_bytes": subject.kv_bytes,
            # 0 where not all experts fit beside them: nothing is captured then
            "graph_bytes": ways[0].needs.graph_bytes,
        },
        "machine": _machine(machine, case.profile),
        "workload": load.source,
        **_answers(rows, choice),
        "advice": advice,
        "flags": _flags(args, subject, taken),
    }


def _graph_reserve(prospect: PlanInputs) -> int:
    """What `coterie serve` reserves for captured graphs, with adapters and a lane as it has by
    default."""
    from coterie.core.lane import LaneConfig
    from coterie.workers.host import graph_reserve

    lanes = (LaneConfig("plan", max_step_tokens=0),)
    given = prospect.spec, prospect.checkpoint, prospect.dtype, prospect.device
    return graph_reserve(*given, lanes, adapters=True)


def _answers(rows: Sequence[PlanRow], choice: PlanChoice) -> dict[str, Any]:
    from coterie.moe.planner.plan import as_json

    return as_json(rows, choice)


def _asked(
    text: str | None, case: PlanCase, ways: Sequence[MemoryDivision], rows: list[PlanRow]
) -> PlanChoice | None:
    """The requested strategy with the better of its divisions; its row is added to the others."""
    from coterie.moe.planner.plan import SAME, PlanChoice, forecast_row

    if text in (None, "auto"):
        return None
    made = [row for way in ways if (row := forecast_row(case, way, str(text))) is not None]
    if not made:
        raise ConfigError(f"{text} does not fit these budgets", param="strategy")
    rows += [row for row in made if row.strategy not in {each.strategy for each in rows}]
    floor = max(row.prefill_tokens_s for row in made) * (1 - SAME)
    best = max((r for r in made if r.prefill_tokens_s >= floor), key=lambda r: r.decode_tokens_s)
    return PlanChoice(best.strategy, f"{text}, as asked for", best.device_budget, best.host_budget)


def _taken(rows: Sequence[PlanRow], choice: PlanChoice) -> PlanRow:
    wanted = choice.strategy, choice.device_budget, choice.host_budget
    return next(row for row in rows if (row.strategy, row.device_budget, row.host_budget) == wanted)


def _way(ways: Sequence[MemoryDivision], row: PlanRow) -> MemoryDivision:
    """The division that a row was made for."""
    wanted = row.device_budget, row.host_budget
    pairs = ((each, each.settings) for each in ways)
    return next(each for each, s in pairs if (s.device_budget, s.host_budget) == wanted)


def _flags(args: argparse.Namespace, subject: PlannedModel, row: PlanRow) -> list[str]:
    """Flags that give this plan again, and run it: those that were given, and otherwise the chosen
    shares of all experts."""
    total = subject.sizes.total
    given = {
        "--strategy": row.strategy,
        "--device-budget": args.device_budget,
        "--cache-capacity": args.cache_capacity,
        "--host-budget": args.host_budget,
        "--context": subject.context,
        "--dtype": args.dtype,
        "--device": args.device,
        "--threads": args.threads,
        "--workload": None if args.workload == "default" else args.workload,
    }
    if not args.device_budget and not args.cache_capacity and row.device_slots:
        given["--device-budget"] = share_of(row.device_slots, total)
    if not args.host_budget:
        given["--host-budget"] = share_of(row.host_slots, total)
    flags = [f"{name} {value}" for name, value in given.items() if value]
    return [*flags, "--elastic-memory"] if args.elastic_memory else flags


def share_of(slots: int, total: int) -> str:
    """The shortest percentage that gives this number of slots."""
    for digits in range(12):
        step = 10.0**-digits
        text = f"{math.ceil(100 * slots / total / step - 1e-9) * step:.{digits}f}%"
        if int(total * float(text[:-1]) / 100) == slots:
            return text
    return f"{100 * slots / total!r}%"


def _machine(machine: Machine, profile: str) -> dict[str, Any]:
    from coterie.moe.planner.machine import to_json

    document = to_json(machine)
    used = {
        "profile": document["profiles"][profile],
        "profile_name": profile,
        "device_path": document["device_paths"].get(profile),
        # by how much measurements leave costs open, at most; what disturbed them
        "spread": machine.spread(profile),
        "disturbed": machine.disturbed(profile),
        "real": document["real"].get(profile, {}),
    }
    others = ("profiles", "backbones", "device_paths", "marks")
    return {k: v for k, v in document.items() if k not in others} | used


def _settings(args: argparse.Namespace) -> MoeSettings:
    return MoeSettings(
        device_budget=args.device_budget or "",
        host_budget=args.host_budget or "",
        cache_capacity=args.cache_capacity or 0,
        elastic_memory=bool(args.elastic_memory),
    )


def _heatmap(path: Path, prospect: PlanInputs, workload: str) -> Any:
    from coterie.workers.warmup import HeatmapFile, heatmap_path

    lineage = prospect.store.lineage
    file = HeatmapFile(heatmap_path(path, lineage[-1], workload), lineage, workload)
    return file.load(prospect.store.geometry)


def render(document: dict[str, Any]) -> str:
    return "\n\n".join(
        (
            facts(_facts(document)),
            *(_shown(document, rows) for rows in _by_budget(document["rows"])),
            facts(
                [
                    ("choice", document["choice"]["reason"]),
                    ("faster", document["advice"]),
                    ("flags", _joined(document)),
                ]
            ),
        )
    )


def _facts(document: dict[str, Any]) -> list[tuple[str, str]]:
    model, machine = document["model"], document["machine"]
    profile = machine["profile"]
    record = model["record_bytes"]
    rates = [
        f"RAM {machine['dram_bytes_s'] / 1e9:.1f}",
        f"disk {record / profile['read']['each_s'] / 1e9:.2f}",
        f"link {record / profile['link']['each_s'] / 1e9:.1f} GB/s",
        f"expert {1e6 * profile['device']['seconds'][0]:.0f} us",
    ]
    if path := machine["device_path"]:
        link, read, cpu = (path[f"{name}_bytes_s"] / 1e9 for name in ("copy", "read", "cpu"))
        rates[2:] = [f"link {link:.1f} by copies", f"{read:.1f} by kernels", f"CPU {cpu:.1f} GB/s"]
    measured = model["backbone_measured"] or machine["device_path"] is not None
    backbone = "measured" if measured else "estimated from its bytes"
    graphs = model["graph_bytes"]
    return [
        ("model", f"{model['architecture']}, {model['layers']} layers, top {model['top_k']}"),
        (
            "experts",
            f"{model['experts']} of {nbytes(record)}, {nbytes(model['expert_bytes'])} in all",
        ),
        ("backbone", f"{nbytes(model['backbone_bytes'])} read per step, {backbone}"),
        ("KV", f"{nbytes(model['kv_bytes'])} reserved for {model['context']} tokens"),
        *([("graphs", f"{nbytes(graphs)} reserved for captured steps")] if graphs else []),
        ("machine", f"{machine['identity']['device']}: {', '.join(rates)}"),
        ("measured", _certainty(document)),
        ("workload", document["workload"]),
    ]


def _certainty(document: dict[str, Any]) -> str:
    """How far the predictions may be off, and why."""
    machine = document["machine"]
    row = next(row for row in document["rows"] if _is(row, document["choice"]))
    text = f"costs within {machine['spread']:.0%}"
    if machine["disturbed"]:
        text = f"costs within {machine['spread']:.0%}, disturbed: {machine['disturbed']}"
    steps = sum(found["steps"] for found in machine["real"].values())
    if steps:
        text += f", corrected by {steps} steps of real runs"
    return f"{text}; predictions within {row['decode_error']:.0%}"


def _by_budget(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """One table per division of the memory."""
    tables: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        tables.setdefault((row["device_budget"], row["host_budget"]), []).append(row)
    return list(tables.values())


def _shown(document: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """A table; or one line for a division of the memory that is no better than the chosen one."""
    from coterie.moe.planner.plan import SAME
    from coterie.moe.planner.simulate import BELADY

    chosen = next(row for row in document["rows"] if _is(row, document["choice"]))
    keys = ("prefill_tokens_s", "decode_tokens_s")
    real = [row for row in rows if row["strategy"] != BELADY]
    better = any(row[key] > (1 + SAME) * chosen[key] for row in real for key in keys)
    if chosen in rows or better:
        return _table(document, rows)
    return f"{_title(document, rows[0])}: nothing faster"


def _title(document: dict[str, Any], row: dict[str, Any]) -> str:
    capacity = [flag for flag in document["flags"] if flag.startswith("--cache-capacity ")]
    device = f"{capacity[0].split()[1]} experts" if capacity else _budget(row["device_budget"])
    return f"device {device}, host {_budget(row['host_budget'])}"


def _table(document: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    chosen = document["choice"]
    headers = ("strategy", "memory", "hits", "prefill", "decode", "limit", "of it", "KV")
    lines: list[tuple[str, ...]] = []
    for group in _alike(_worth_showing(rows)):
        taken = [row for row in group if _is(row, chosen)]
        names = [_named(row) for row in (taken or group[:1])]
        names += [_named(row) for row in group if row not in (taken or group[:1])]
        first, *others = _wrapped(names)
        lines.append((f"{'>' if taken else ' '}{first}", *_cells(taken[0] if taken else group[0])))
        lines += [(f"   {name}", *[""] * (len(headers) - 1)) for name in others]
    return f"{_title(document, rows[0])}\n{table(headers, lines)}{_one_call(rows)}"


def _is(row: dict[str, Any], chosen: dict[str, Any]) -> bool:
    return all(row[key] == chosen[key] for key in ("strategy", "device_budget", "host_budget"))


def _alike(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Fastest first; rows with practically equal speed are grouped, except the bound."""
    from coterie.moe.planner.plan import SAME
    from coterie.moe.planner.simulate import BELADY

    def near(a: float, b: float) -> bool:
        return abs(a - b) <= SAME * max(a, b, 1e-9)

    def order(row: dict[str, Any]) -> tuple[float, float, bool]:
        return -row["prefill_tokens_s"], -row["decode_tokens_s"], _named(row) != row["strategy"]

    ordered = sorted(rows, key=order)
    groups: list[list[dict[str, Any]]] = []
    for row in ordered:
        same = ("device_bytes", "host_bytes")
        for group in groups if row["strategy"] != BELADY else ():
            head = group[0]
            if (
                head["strategy"] != BELADY
                and near(row["prefill_tokens_s"], head["prefill_tokens_s"])
                and near(row["decode_tokens_s"], head["decode_tokens_s"])
                and all(near(row[key], head[key]) for key in same)
                and abs(row["decode_hit_rate"] - head["decode_hit_rate"]) <= SAME
            ):
                group.append(row)
                break
        else:
            groups.append([row])
    return sorted(groups, key=lambda group: group[0]["strategy"] == BELADY)


def _named(row: dict[str, Any]) -> str:
    from coterie.moe.dispatch.table import both_phases
    from coterie.moe.planner.simulate import BELADY

    name = str(row["strategy"])
    if name == BELADY:
        return "(bound)"
    return name if row["runs"] in ("", both_phases(name)) else f"{name} as {row['runs']}"


def _wrapped(names: Sequence[str]) -> list[str]:
    return [
        line.replace("+ ", "+")
        for name in names
        for line in textwrap.wrap(name.replace("+", "+ "), 26, subsequent_indent=" ")
    ]


def _budget(text: str) -> str:
    if not text:
        return "auto"
    return nbytes(parse_bytes(text, "budget")) if text.endswith("B") else text


def _joined(document: dict[str, Any]) -> str:
    return " ".join(document["flags"])


def _one_call(rows: Sequence[dict[str, Any]]) -> str:
    """The strategies that need no runtime call at every layer."""
    names = [row["strategy"] for row in rows if row["one_call"] and "+" not in row["strategy"]]
    told = []
    if names:
        told.append(("one call", f"{', '.join(names)}: nothing moves, all layers at once"))
    if any(row["in_place"] for row in rows):
        told.append(("in place", "kernels read over the link what has no slot, beside the CPU"))
    return "\n" + facts(told) if told else ""


def _worth_showing(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All strategies; of the pairs (the JSON has all of them) only the best three."""
    pairs = [row for row in rows if "+" in row["strategy"]]
    pairs.sort(key=lambda row: (-row["prefill_tokens_s"], -row["decode_tokens_s"]))
    return [row for row in rows if "+" not in row["strategy"] or row in pairs[:3]]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        _size(row["device_bytes"] + row["host_bytes"]),
        f"{100 * row['decode_hit_rate']:.0f}%",
        _rate(row["prefill_tokens_s"]),
        _rate(row["decode_tokens_s"]),
        _rate(row["decode_limit_tokens_s"]),
        f"{100 * row['decode_share']:.0f}%",
        _count(row["kv_tokens"]),
    )


def _size(value: float) -> str:
    for unit, scale in (("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= scale:
            return f"{value / scale:.{1 if value < 10 * scale else 0}f}{unit}"
    return "-"


def _rate(value: float) -> str:
    if value <= 0:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _count(value: int) -> str:
    if value >= 10_000_000:
        return f"{value / 1e6:.0f}M"
    return f"{value / 1000:.0f}K" if value >= 10_000 else str(value)
