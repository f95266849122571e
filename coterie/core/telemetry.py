"""What a finished request says about itself: speed, and what its experts cost. Plain values.

The same names in response metadata, `coterie run --report` and its JSON.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from coterie.core.dispatch import USAGE_FIELDS, ExpertUsage
from coterie.core.events import Finished, Timings, Usage

DIGITS = 6


def speed(usage: Usage, timings: Timings, num_choices: int = 1) -> dict[str, float]:
    """Seconds and tokens per second; a rate that was not measured is 0. Of `queue_s`, `grammar_s`
    went to checking a response format and `adapters_s` to waiting for adapters."""
    prompt = usage.prompt_tokens - usage.cached_tokens
    # the first token of each choice belongs to the prefill
    drawn = usage.completion_tokens - num_choices
    return {
        "queue_s": round(timings.queue_s, DIGITS),
        "grammar_s": round(timings.grammar_s, DIGITS),
        "adapters_s": round(timings.load_s, DIGITS),
        "prefill_s": round(timings.prefill_s, DIGITS),
        "prefill_tok_s": _rate(prompt, timings.prefill_s),
        "ttft_s": round(timings.first_token_s, DIGITS),
        "decode_s": round(timings.decode_s, DIGITS),
        "decode_tok_s": _rate(drawn, timings.decode_s),
        "total_s": round(timings.total_s, DIGITS),
        "preemptions": timings.num_preemptions,
        "cached_tokens": usage.cached_tokens,
    }


def expert_facts(experts: ExpertUsage) -> dict[str, Any]:
    """`ExpertUsage`'s own names, and the share of demands that found no device slot filled."""
    values = {name: getattr(experts, name) for name in USAGE_FIELDS}
    return {
        **{n: round(v, DIGITS) if isinstance(v, float) else v for n, v in values.items()},
        "fallback_rate": round(experts.fallback_rate, DIGITS),
        "layers": [
            {"layer": layer, "demands": demands, "hits": hits}
            for layer, demands, hits in experts.layers
        ],
    }


def metadata(finished: Finished) -> dict[str, Any]:
    """The `coterie` field of an answer."""
    return {"coterie": facts_of(finished)}


def facts_of(finished: Finished) -> dict[str, Any]:
    """Where the time of a request went; its routed experts and its adapters, where it had any."""
    choices = len(finished.choices)
    facts: dict[str, Any] = {"timings": speed(finished.usage, finished.timings, choices)}
    if finished.experts is not None:
        facts["experts"] = expert_facts(finished.experts)
    if finished.adapters:
        facts["adapters"] = [asdict(adapter) for adapter in finished.adapters]
        facts["adapter_bytes"] = finished.adapter_bytes
    if finished.unfinished:
        # choices that were cut before their grammar let them end
        facts["unfinished"] = list(finished.unfinished)
    return facts


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 and count > 0 else 0.0
