"""What a finished request says about itself: speed, and what its experts cost. Plain values.

The same names in response metadata, `coterie run --report` and its JSON.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from coterie.core.dispatch import ExpertUsage
from coterie.core.events import Finished, Timings, Usage

DIGITS = 6


def speed(usage: Usage, timings: Timings, num_choices: int = 1) -> dict[str, float]:
    """Seconds and tokens per second; a rate that was not measured is 0."""
    prompt = usage.prompt_tokens - usage.cached_tokens
    # the first token of each choice belongs to the prefill
    drawn = usage.completion_tokens - num_choices
    return {
        "queue_s": round(timings.queue_s, DIGITS),
        "prefill_s": round(timings.prefill_s, DIGITS),
        "prefill_tok_s": _rate(prompt, timings.prefill_s),
        "ttft_s": round(timings.first_token_s, DIGITS),
        "decode_s": round(timings.decode_s, DIGITS),
        "decode_tok_s": _rate(drawn, timings.decode_s),
    }


def expert_facts(experts: ExpertUsage) -> dict[str, Any]:
    """`ExpertUsage`'s own names, and the share of demands that found no device slot filled."""
    values = {
        name: round(value, DIGITS) if isinstance(value, float) else value
        for name, value in asdict(experts).items()
    }
    return values | {"fallback_rate": round(experts.fallback_rate, DIGITS)}


def metadata(finished: Finished) -> dict[str, Any]:
    """The `coterie` field of an answer; nothing where neither routed experts nor adapters ran."""
    if finished.experts is None and not finished.adapters:
        return {}
    choices = len(finished.choices)
    facts: dict[str, Any] = {"timings": speed(finished.usage, finished.timings, choices)}
    if finished.experts is not None:
        facts["experts"] = expert_facts(finished.experts)
    if finished.adapters:
        facts["adapters"] = [asdict(adapter) for adapter in finished.adapters]
    return {"coterie": facts}


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 and count > 0 else 0.0
