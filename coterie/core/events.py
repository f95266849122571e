"""What leaves the system. Every accepted request ends in exactly one `Finished` or `Failed`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from coterie.core.dispatch import USAGE_FIELDS, MoeUsage
from coterie.core.outcome import InferenceMetrics, ValidationResult
from coterie.core.plan import AdapterChoice


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    # its name: its text, or `bytes:\\x..` where its bytes are no text by themselves
    text: str
    # the token's bytes; a token may hold part of a character
    data: bytes
    logprob: float
    # (token id, name, bytes, logprob), most likely first
    top: tuple[tuple[int, str, bytes, float], ...] = ()
    # 1 = nothing was likelier; 0 = not asked for
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    # prompt tokens whose KV was reused
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    # prompt tokens behind the reused ones that the same prompt would reuse from now on
    stored_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. `first_token_s` counts from arrival, `decode_s` from first to last token."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0
    num_preemptions: int = 0
    # of queue_s: passed over because its adapters were not in place
    load_s: float = 0.0
    # of queue_s: checking what the answer is held to; the gateway fills it in
    grammar_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Started:
    """The first step that computes this request was scheduled."""

    request_id: str
    replica: str
    prompt_tokens: int
    cached_tokens: int
    # only when sampling.prompt_logprobs was asked; the first token has none
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    # most tokens of a choice, and the prompt as it runs; the gateway fills in both
    max_tokens: int | None = None
    prompt_ids: tuple[int, ...] = ()
    # prompt tokens that become reusable with this request
    stored_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one choice.

    Sent for every token, also when the text is still held back (a possible stop string, half a
    character): `text` is then empty. Text already sent is never taken back. The last delta of a
    choice carries its finish_reason: stop, length, timeout or abort.
    """

    request_id: str
    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    # the stop string or stop token id that ended the choice
    stop_match: str | int | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    request_id: str
    # finish_reason per choice
    choices: tuple[str, ...]
    usage: Usage
    timings: Timings
    # only of a model with routed experts
    experts: MoeUsage | None = None
    # KV blocks that its sequences held when they ended, shared ones once
    kv_blocks: int = 0
    # what its adapters took where the model runs
    adapter_bytes: int = 0
    # what the request ran on, in order; the gateway fills it in from the plan
    adapters: tuple[AdapterChoice, ...] = ()
    # of the first choice; the gateway fills in both
    validation: ValidationResult | None = None
    metrics: InferenceMetrics | None = None
    # choices whose text was cut before their grammar let it end
    unfinished: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    request_id: str
    code: str
    message: str
    retry_after_s: float | None = None


Event = Started | Delta | Finished | Failed


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


def moe_facts(experts: MoeUsage) -> dict[str, Any]:
    """`MoeUsage`'s own names, and the share of demands that found no device slot filled."""
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
        facts["experts"] = moe_facts(finished.experts)
    if finished.adapters:
        facts["adapters"] = [asdict(adapter) for adapter in finished.adapters]
        facts["adapter_bytes"] = finished.adapter_bytes
    if finished.unfinished:
        # choices that were cut before their grammar let them end
        facts["unfinished"] = list(finished.unfinished)
    return facts


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 and count > 0 else 0.0
