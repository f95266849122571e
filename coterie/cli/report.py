"""`--report`: what an answer cost, as plain values and as lines that fit a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from coterie.cli.terminal import facts, nbytes
from coterie.core.telemetry import expert_facts, speed

if TYPE_CHECKING:
    from coterie.core.dispatch import ExpertUsage
    from coterie.core.events import Timings, Usage
    from coterie.workers.embedded import LLM


def report(
    llm: LLM, usage: Usage, timings: Timings, experts: ExpertUsage | None, load_s: float
) -> dict[str, Any]:
    """`experts` are the request's own counts, `tiers` what happened since the model was loaded."""
    told: dict[str, Any] = {"speed": speed(usage, timings) | {"load_s": round(load_s, 6)}}
    told["weight_bytes"] = llm.info.weight_bytes
    told["kv_bytes"] = llm.info.kv_bytes
    standing = llm.expert_report()
    if experts is not None and standing is not None:
        told |= {"experts": expert_facts(experts), "tiers": standing}
    return told


def render(told: Mapping[str, Any]) -> str:
    rates = told["speed"]
    memory = f"weights {nbytes(told['weight_bytes'])}, KV {nbytes(told['kv_bytes'])}"
    lines = [
        ("prefill", f"{rates['prefill_tok_s']:.1f} tok/s in {seconds(rates['prefill_s'])}"),
        ("ttft", f"{seconds(rates['ttft_s'])} after {seconds(rates['load_s'])} of loading"),
        ("decode", f"{rates['decode_tok_s']:.1f} tok/s in {seconds(rates['decode_s'])}"),
    ]
    if "experts" in told:
        lines += _experts(told["experts"], told["tiers"])
        memory += (
            f", experts {nbytes(_held(told['tiers']))} of {nbytes(told['tiers']['expert_bytes'])}; "
            f"saved {nbytes(told['tiers']['memory_saved_bytes'])}"
        )
    return facts([*lines, ("memory", memory)])


def _held(standing: Mapping[str, Any]) -> float:
    return float(sum(tier["budget_bytes"] for tier in standing["tiers"].values()))


def _experts(used: Mapping[str, Any], standing: Mapping[str, Any]) -> list[tuple[str, str]]:
    device, host = standing["tiers"]["device"], standing["tiers"]["host"]
    guessed = [("guesses", _guesses(standing["prediction"]))]
    times = ("routing", "lookup", "compute", "stall")
    return [
        ("strategy", str(standing["strategy"])),
        *([("fallback", str(standing["fallback"]))] if standing["fallback"] else []),
        (
            "device",
            f"{device['slots']} slots; hits {used['device_hits']}, ahead {used['prefetch_hits']}, "
            f"misses {used['device_misses']}; {nbytes(used['moved_bytes'])} moved in, "
            f"{device['evictions']} evictions",
        ),
        (
            "host",
            f"{host['slots']} slots; hits {used['host_hits']}, misses {used['host_misses']}, "
            f"computed here {used['host_runs']}; {nbytes(used['read_bytes'])} read from disk, "
            f"{host['evictions']} evictions",
        ),
        # several reads are under way at once: their seconds may exceed the clock's
        ("time", ", ".join(f"{name} {seconds(used[f'{name}_s'])}" for name in times)),
        ("io", f"{seconds(used['io_s'])} in all reads and copies, beside the above"),
        (
            "changes",
            f"updates {standing['dcu_calls']}, swaps {standing['swaps']}, "
            f"fallback rate {100 * used['fallback_rate']:.1f}%",
        ),
        *(guessed if standing["prediction"]["predictions"] else []),
        *_unused(standing["prediction"]),
    ]


def _unused(known: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was asked for by name and has no effect."""
    asked = known["mode"] in ("protect", "prefetch") and not known["protecting"]
    return [("guesses", f"{known['mode']} not used: {known['why_off']}")] if asked else []


def _guesses(known: Mapping[str, Any]) -> str:
    """How the next layer's experts were foretold, and what that was used for."""
    why = f"; off: {known['why_off']}" if known["why_off"] else ""
    return (
        f"{100 * known['slot_overlap']:.0f}% of experts, {100 * known['exact_match']:.0f}% of "
        f"layers exactly; {known['prefetched']} fetched ahead, {known['useful_prefetches']} of "
        f"them used{why}"
    )


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"
