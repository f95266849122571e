"""What leaves the system. Every accepted request ends in exactly one `Finished` or `Failed`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from coterie.core.moe import USAGE_FIELDS, MoeUsage
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
    # only of a mixture-of-experts model
    moe: MoeUsage | None = None
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


def moe_facts(usage: MoeUsage) -> dict[str, Any]:
    """`MoeUsage`'s own names, and the share of demands that found no device slot filled."""
    values = {name: getattr(usage, name) for name in USAGE_FIELDS}
    return {
        **{n: round(v, DIGITS) if isinstance(v, float) else v for n, v in values.items()},
        "fallback_rate": round(usage.fallback_rate, DIGITS),
        "layers": [
            {"layer": layer, "demands": demands, "hits": hits}
            for layer, demands, hits in usage.layers
        ],
    }


def metadata(finished: Finished) -> dict[str, Any]:
    """The `coterie` field of an answer."""
    return {"coterie": facts_of(finished)}


def facts_of(finished: Finished) -> dict[str, Any]:
    """Where the time of a request went; its MoE experts and its adapters, where it had any."""
    choices = len(finished.choices)
    facts: dict[str, Any] = {"timings": speed(finished.usage, finished.timings, choices)}
    if finished.moe is not None:
        facts["experts"] = moe_facts(finished.moe)
    if finished.adapters:
        facts["adapters"] = [asdict(adapter) for adapter in finished.adapters]
        facts["adapter_bytes"] = finished.adapter_bytes
    if finished.unfinished:
        # choices that were cut before their grammar let them end
        facts["unfinished"] = list(finished.unfinished)
    return facts


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 and count > 0 else 0.0


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """Of one answer. `validator` names who looked: json, json_schema, python, a command's name ...

    An answer that nobody can judge has no result, which is not a valid one.
    """

    valid: bool
    validator: str
    error: str | None = None
    duration_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class InferenceMetrics:
    """Everything measured about one request. Times in milliseconds; `submitted_at` and the like are
    seconds since 1970, so that the stages of several requests can be laid side by side."""

    job_id: str
    submitted_at: float
    router_latency_ms: float
    expert_load_latency_ms: float
    inference_latency_ms: float
    total_latency_ms: float
    # name@version, in order of composition
    experts_used: tuple[str, ...]
    num_experts: int
    # KV blocks of this request at its longest, and its adapters; not shared weights. 0 where it
    # ended without its engine's last word
    vram_peak_mb: float
    input_tokens: int
    output_tokens: int
    tokens_per_second: float
    success: bool
    error: str | None
    # None = nobody judged it
    validation_passed: bool | None
    finish_reason: str = ""
    task_type: str = ""
    specialist: str = ""
    cached_tokens: int = 0
    queue_ms: float = 0.0
    first_token_ms: float = 0.0
    routed_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0
    # as the caller named its own user
    user_id: str = ""
    # what its noise was drawn from; the same request with it gets the same answer
    seed: int = 0


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """What /v1/infer answers, by whatever road: whole, at a stream's end, or as a job's result."""

    job_id: str
    text: str
    tokens_generated: int
    # names without versions, in order of composition
    experts_used: tuple[str, ...]
    latency_ms: float
    # stop, length, timeout or abort
    finish_reason: str
    model: str
    task_type: str
    confidence: float
    # what could not be done as wished
    degraded: tuple[str, ...] = ()
    # the caller's own, or the one that was drawn: with it the same request is answered the same
    seed: int = 0
    validation: ValidationResult | None = None
    metrics: InferenceMetrics | None = None
    # where the time went: `timings`, and of a mixture `experts`; as `coterie` on the vendors' APIs
    telemetry: Mapping[str, Any] | None = None
    # ExpertPlan, when it was asked for
    plan: Mapping[str, Any] | None = None
