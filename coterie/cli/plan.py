"""`coterie plan`: what every strategy would give on this machine, before a model is loaded."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.options import add_model, budget, count, fetch
from coterie.cli.terminal import facts, nbytes, note, table
from coterie.core.dispatch import DispatchSettings

if TYPE_CHECKING:
    from coterie.experts.machine import Machine
    from coterie.experts.planner import Choice, PlanRow
    from coterie.models.prospect import Prospect

HELP = "show what each strategy would give for a model with experts"
EPILOG = """\
examples:
  coterie plan ./Qwen3-30B-A3B                        with the memory that is free now
  coterie plan ./Qwen3-30B-A3B --device-budget 6GB --context 8192
  coterie plan ./model --device-budget 25% --host-budget 50% --trace run.npz
  coterie plan ./model --json --save plan.json        for scripts; keeps the prediction

columns: hits (decode demands met from a device slot), prefill and decode in predicted tok/s, of
limit (what the bytes that must move allow at the measured rates), KV (tokens that still fit).
The machine is measured once; no expert stays loaded. belady knows the future: a bound, no choice.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add = parser.add_argument
    add("--context", type=count, metavar="N", help="tokens whose KV is reserved first")
    add("--device-budget", type=budget, metavar="SIZE", help="6GB, or a share such as 25%%")
    add("--host-budget", type=budget, metavar="SIZE", help="RAM for experts; 0 = none")
    add("--cache-capacity", type=count, metavar="N", help="experts on the device")
    add("--trace", type=Path, metavar="FILE", help="a recorded trace to replay")
    add("--workload", default="default", metavar="NAME", help="whose heatmap to draw from")
    add("--json", action="store_true", help="print JSON")
    add("--save", type=Path, metavar="FILE", help="also write the JSON to FILE")
    add("--remeasure", action="store_true", help="measure this machine again")


def execute(args: argparse.Namespace) -> int:
    path = fetch(args.model)
    document = make(path, args)
    text = json.dumps(document, indent=1)
    if args.save:
        args.save.write_text(text + "\n")
    print(text if args.json else render(document))
    return 0


def make(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The whole plan as plain values."""
    import torch

    from coterie.experts.planner import pick, plan
    from coterie.models.prospect import open_prospect
    from coterie.weights.checkpoint import open_checkpoint

    if args.threads:
        torch.set_num_threads(args.threads)
    prospect = open_prospect(open_checkpoint(path), args.dtype or "auto", _device(args.device))
    try:
        machine = prospect.machine(again=args.remeasure, say=note)
        load = prospect.workload(args.trace, _heatmap(path, prospect, args.workload))
        case = prospect.case(machine, load, args.context or 0)
        subject = case.subject
        rows = plan(case, prospect.ways(_settings(args), subject.kv_bytes))
        choice = pick(rows)
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
        },
        "machine": _machine(machine, case.profile),
        "workload": load.source,
        **_answers(rows, choice),
    }


def _answers(rows: Sequence[PlanRow], choice: Choice) -> dict[str, Any]:
    from coterie.experts.planner import as_json

    return as_json(rows, choice)


def _machine(machine: Machine, profile: str) -> dict[str, Any]:
    from coterie.experts.machine import to_json

    document = to_json(machine)
    used = {"profile": document["profiles"][profile], "profile_name": profile}
    return {k: v for k, v in document.items() if k not in ("profiles", "backbones")} | used


def _settings(args: argparse.Namespace) -> DispatchSettings:
    return DispatchSettings(
        device_budget=args.device_budget or "",
        host_budget=args.host_budget or "",
        cache_capacity=args.cache_capacity or 0,
    )


def _device(wanted: str | None) -> str:
    import torch

    if wanted in (None, "auto"):
        return "cuda" if torch.cuda.is_available() else "cpu"
    return str(wanted)


def _heatmap(path: Path, prospect: Prospect, workload: str) -> Any:
    from coterie.workers.warmup import HeatmapFile, heatmap_path

    lineage = prospect.store.lineage
    file = HeatmapFile(heatmap_path(path, lineage[-1], workload), lineage, workload)
    return file.load(prospect.store.geometry)


def render(document: dict[str, Any]) -> str:
    return "\n\n".join(
        (
            facts(_facts(document)),
            *(_table(document, rows) for rows in _by_budget(document["rows"])),
            _choice(document["choice"]),
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
    backbone = "measured" if model["backbone_measured"] else "estimated from its bytes"
    return [
        ("model", f"{model['architecture']}, {model['layers']} layers, top {model['top_k']}"),
        (
            "experts",
            f"{model['experts']} of {nbytes(record)}, {nbytes(model['expert_bytes'])} in all",
        ),
        ("backbone", f"{nbytes(model['backbone_bytes'])} read per step, {backbone}"),
        ("KV", f"{nbytes(model['kv_bytes'])} reserved for {model['context']} tokens"),
        ("machine", f"{machine['identity']['device']}: {', '.join(rates)}"),
        ("workload", document["workload"]),
    ]


def _by_budget(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """One table per way of dividing the memory."""
    tables: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        tables.setdefault((row["device_budget"], row["host_budget"]), []).append(row)
    return list(tables.values())


def _table(document: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    chosen = document["choice"]
    headers = ("strategy", "device", "host", "disk", "hits", "prefill", "decode", "limit", "KV")
    lines: list[tuple[str, ...]] = []
    for row in _worth_showing(rows):
        taken = all(row[k] == chosen[k] for k in ("strategy", "device_budget", "host_budget"))
        first, plus, second = row["strategy"].partition("+")
        lines.append((f"{'>' if taken else ' '}{first}{plus}", *_cells(row)))
        if plus:
            lines.append((f"   {second}", *[""] * (len(headers) - 1)))
    first = rows[0]
    title = f"device {first['device_budget'] or 'auto'}, host {first['host_budget'] or 'auto'}"
    return f"{title}\n{table(headers, lines)}{_one_call(rows)}"


def _one_call(rows: Sequence[dict[str, Any]]) -> str:
    """Which of them are spared the way through the runtime at every layer."""
    names = [row["strategy"] for row in rows if row["one_call"] and "+" not in row["strategy"]]
    if not names:
        return ""
    return "\n" + facts([("one call", f"{', '.join(names)}: nothing moves, all layers at once")])


def _worth_showing(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All strategies; of the pairs (all are in the JSON) the best three."""
    pairs = [row for row in rows if "+" in row["strategy"]]
    pairs.sort(key=lambda row: (-row["prefill_tokens_s"], -row["decode_tokens_s"]))
    return [row for row in rows if "+" not in row["strategy"] or row in pairs[:3]]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        _size(row["device_bytes"]),
        _size(row["host_bytes"]),
        _size(row["disk_bytes"]),
        f"{100 * row['decode_hit_rate']:.0f}%",
        _rate(row["prefill_tokens_s"]),
        _rate(row["decode_tokens_s"]),
        f"{100 * row['decode_share']:.0f}%",
        _count(row["kv_tokens"]),
    )


def _size(value: float) -> str:
    for unit, scale in (("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= scale:
            return f"{value / scale:.{1 if value < 10 * scale else 0}f}{unit}"
    return "-"


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _count(value: int) -> str:
    if value >= 10_000_000:
        return f"{value / 1e6:.0f}M"
    return f"{value / 1000:.0f}K" if value >= 10_000 else str(value)


def _choice(choice: dict[str, Any]) -> str:
    lines = [("choice", choice["reason"])]
    flags = [f"--strategy {choice['strategy']}"]
    flags += [f"--device-budget {choice['device_budget']}"] if choice["device_budget"] else []
    flags += [f"--host-budget {choice['host_budget']}"] if choice["host_budget"] else []
    lines.append(("flags", " ".join(flags)))
    return facts(lines)
