"""The results of the capacity sweep as tables and verdicts for docs/dispatch.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.peers.protocol import median

OURS = "adaptive"
# compared with the best other strategy: allowed loss of demand hits, share of the speed to reach
HITS_MINUS, SPEED_SHARE = 0.01, 0.95


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
    # share of demands that were computed on the host instead
    host_rate: float = 0.0
    tok_s: float = 0.0


Found = Mapping[Case, Result]


def middle(runs: Sequence[Result]) -> Result:
    columns = {name: [getattr(run, name) for run in runs] for name in asdict(runs[0])}
    return Result(**{name: median(values) for name, values in columns.items()})


def table(results: Found, total: int, what: str) -> str:
    """`what`: hits (demand hits + prefetch hits, per cent) or speed (tok/s)."""
    capacities = sorted({case.slots for case in results})
    heads = [f"{slots} ({slots / total:.1%})" for slots in capacities]
    lines = ["| Strategy | Prediction | " + " | ".join(heads) + " |"]
    lines.append("|---" * (len(heads) + 2) + "|")
    for strategy, predict in dict.fromkeys((case.strategy, case.predict) for case in results):
        cells = [results.get(Case(strategy, slots, predict)) for slots in capacities]
        shown = ["-" if cell is None else _cell(cell, what) for cell in cells]
        lines.append(f"| {strategy} | {predict} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _cell(result: Result, what: str) -> str:
    if what == "speed":
        return f"{result.tok_s:.1f}"
    early = f" + {100 * result.prefetch_rate:.1f}" if result.prefetch_rate else ""
    return f"{100 * result.hit_rate:.1f}{early}"


def hit_verdict(results: Found, total: int) -> list[str]:
    """Our strategy against the best other one and against the optimum, at capacities below 100%."""
    lines = []
    for slots in sorted({case.slots for case in results}):
        plain = _at(results, slots, "hit_rate")
        optimum, ours = plain.pop("belady", 0.0), plain.pop(OURS, None)
        if ours is None or not plain or slots >= total:
            continue
        name = max(plain, key=plain.__getitem__)
        holds = "holds" if ours >= plain[name] - HITS_MINUS else "MISSED"
        lines.append(
            f"{slots} slots: {OURS} {ours:.1%}, best other {name} {plain[name]:.1%} ({holds}), "
            f"Belady {optimum:.1%}, gap {100 * (optimum - ours):.1f} points"
        )
    return lines


def speed_verdict(results: Found) -> list[str]:
    lines = []
    for slots in sorted({case.slots for case in results}):
        plain = _at(results, slots, "tok_s")
        ours = plain.pop(OURS, None)
        if ours is None or not plain:
            continue
        name = max(plain, key=plain.__getitem__)
        share = ours / plain[name]
        holds = "holds" if share >= SPEED_SHARE else "MISSED"
        guessing = results.get(Case(OURS, slots, "prefetch"))
        more = f", with prediction {guessing.tok_s / plain[name]:.0%}" if guessing else ""
        lines.append(
            f"{slots} slots: {OURS} {ours:.1f} tok/s, best other {name} {plain[name]:.1f}: "
            f"{share:.0%} ({holds}){more}"
        )
    return lines


def _at(results: Found, slots: int, field: str) -> dict[str, float]:
    return {
        case.strategy: getattr(result, field)
        for case, result in results.items()
        if case.slots == slots and case.predict == "off"
    }
