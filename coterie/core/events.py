"""Events and results that are sent to callers.

Every accepted request ends in exactly one `Finished` or `Failed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from coterie.core.moe import USAGE_FIELDS, MoeUsage
from coterie.core.plan import AdapterChoice
from coterie.core.quick_init import quick_init
from coterie.core.receipt import Receipt

# In deltas of a remote server, whose token ids are not known here: a token; and the token at which
# calls of tools begin. Thoughts are between marks.
UNKNOWN_TOKEN, CALL_TOKEN = -1, -2
THOUGHT_MARKS = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    # its text, or `bytes:\\x..` if its bytes alone are not valid text
    text: str
    # the token's bytes; a token may hold part of a character
    data: bytes
    logprob: float
    # (token id, text, bytes, logprob), most likely first
    top: tuple[tuple[int, str, bytes, float], ...] = ()
    # 1 = no token was more likely; 0 = not requested
    rank: int = 0


@quick_init
@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    # prompt tokens whose KV was reused
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    # prompt tokens after the reused ones that the same prompt could reuse from now on
    stored_tokens: int = 0


@quick_init
@dataclass(frozen=True, slots=True)
class TimeSpent:
    """What a request waited for after its first step was scheduled, in seconds that do not
    overlap."""

    # computing
    device_s: float = 0.0
    # experts on their way: over the link, from disk, and those that the CPU computes beside
    link_s: float = 0.0
    disk_s: float = 0.0
    cpu_s: float = 0.0
    # scheduling and launching while no device computes, making text of tokens, sending it
    host_s: float = 0.0
    # prompts of others in its steps, and steps without it
    others_s: float = 0.0

    @property
    def total_s(self) -> float:
        experts_s = self.link_s + self.disk_s + self.cpu_s
        return self.device_s + experts_s + self.host_s + self.others_s


@quick_init
@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. `first_token_s` counts from arrival, `decode_s` from first to last token."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0
    num_preemptions: int = 0
    # part of queue_s: waiting for its adapters to be loaded
    load_s: float = 0.0
    # part of queue_s: checking the response format; the gateway fills it in
    grammar_s: float = 0.0
    # part of the others: without a worker after a crash, until its next event came
    outage_s: float = 0.0
    # after queue_s; None: its engine could not tell
    spent: TimeSpent | None = None

    @property
    def explained(self) -> float:
        """The share of total_s whose cause is known, 0 to 1."""
        spent_s = 0.0 if self.spent is None else self.spent.total_s
        known_s = self.queue_s + spent_s + self.outage_s
        return min(1.0, known_s / self.total_s) if self.total_s > 0 else 1.0


@quick_init
@dataclass(frozen=True, slots=True)
class Started:
    """The first step that computes this request was scheduled."""

    request_id: str
    replica: str
    prompt_tokens: int
    cached_tokens: int
    # only if sampling.prompt_logprobs was given; the first token has none
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    # most tokens of a choice, and the prompt that is run; the gateway fills in both
    max_tokens: int | None = None
    prompt_ids: tuple[int, ...] = ()
    # prompt tokens that become reusable with this request
    stored_tokens: int = 0
    # time.monotonic() when that step was scheduled: the event comes after it; 0 = not known
    at: float = 0.0


# a value as the others, but not frozen: one is made for every token, and that takes five times as
# long if it is frozen
@dataclass(slots=True)
class Delta:
    """New tokens of one choice.

    Sent for every token, even while its text cannot be sent yet (it may be part of a stop string,
    or of a character): `text` is then empty. Text that was sent is never withdrawn. The last delta
    of a choice has its finish_reason: stop, length, timeout or abort.
    """

    request_id: str
    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    # the stop string or stop token id that ended the choice
    stop_match: str | int | None = None


@quick_init
@dataclass(frozen=True, slots=True)
class Finished:
    request_id: str
    # finish_reason per choice
    choices: tuple[str, ...]
    usage: Usage
    timings: Timings
    # only for a mixture-of-experts model
    moe: MoeUsage | None = None
    # KV blocks that its sequences had when they ended; shared ones are counted once
    kv_blocks: int = 0
    # device memory of its adapters
    adapter_bytes: int = 0
    # the adapters it ran with, in order; the gateway fills it in from the plan
    adapters: tuple[AdapterChoice, ...] = ()
    # for the first choice; the gateway fills in both
    validation: ValidationResult | None = None
    metrics: InferenceMetrics | None = None
    # choices that ended before their grammar was complete
    unfinished: tuple[int, ...] = ()
    # who answered and why; the gateway fills it in
    receipt: Receipt | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    request_id: str
    code: str
    message: str
    retry_after_s: float | None = None


Event = Started | Delta | Finished | Failed


DIGITS = 6
ADAPTER_FIELDS = tuple(AdapterChoice.__dataclass_fields__)


def speed(usage: Usage, timings: Timings, num_choices: int = 1) -> dict[str, float]:
    """Seconds and tokens per second; a rate that was not measured is 0. `queue_s` includes
    `grammar_s` (checking a response format) and `adapters_s` (waiting for adapters)."""
    prompt = usage.prompt_tokens - usage.cached_tokens
    # the first token of each choice belongs to the prefill
    drawn = usage.completion_tokens - num_choices
    spent: dict[str, Any] = {}
    if timings.spent is not None:
        parts = {name: getattr(timings.spent, name) for name in SPENT_FIELDS}
        parts["unknown_s"] = timings.total_s * (1 - timings.explained)
        spent["spent"] = {name: round(value, DIGITS) for name, value in parts.items()}
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
        **spent,
    }


SPENT_FIELDS = tuple(item.name for item in fields(TimeSpent))


def moe_facts(usage: MoeUsage) -> dict[str, Any]:
    """The fields of `MoeUsage`, and the share of demands that no device slot could serve at
    once."""
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
    """Where the time of a request went, its MoE experts and adapters if it had any, and its
    receipt."""
    choices = len(finished.choices)
    facts: dict[str, Any] = {"timings": speed(finished.usage, finished.timings, choices)}
    if finished.moe is not None:
        facts["experts"] = moe_facts(finished.moe)
    if finished.adapters:
        facts["adapters"] = [
            {name: getattr(adapter, name) for name in ADAPTER_FIELDS}
            for adapter in finished.adapters
        ]
        facts["adapter_bytes"] = finished.adapter_bytes
    if finished.unfinished:
        # choices that ended before their grammar was complete
        facts["unfinished"] = list(finished.unfinished)
    if finished.receipt is not None:
        facts["receipt"] = finished.receipt
    return facts


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 and count > 0 else 0.0


@quick_init
@dataclass(frozen=True, slots=True)
class ValidationResult:
    """The result for one answer. `validator` is its name: json, json_schema, python, a command ...

    An answer that no validator can check has no result. That does not mean that it is valid.
    """

    valid: bool
    validator: str
    error: str | None = None
    duration_ms: float = 0.0


@quick_init
@dataclass(frozen=True, slots=True)
class InferenceMetrics:
    """All measurements of one request. Times are in milliseconds; `submitted_at` and other times of
    day are seconds since 1970, so that the stages of several requests can be compared."""

    job_id: str
    submitted_at: float
    router_latency_ms: float
    expert_load_latency_ms: float
    inference_latency_ms: float
    total_latency_ms: float
    # name@version, in order of composition
    experts_used: tuple[str, ...]
    num_experts: int
    # the most KV blocks that this request had, and its adapters; not shared weights. 0 if its
    # engine could not report them
    vram_peak_mb: float
    input_tokens: int
    output_tokens: int
    tokens_per_second: float
    success: bool
    error: str | None
    # None = not validated
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
    # the user's name as the caller sent it
    user_id: str = ""
    # the seed of its sampling; the same request with this seed gets the same answer
    seed: int = 0


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """The answer of /v1/infer: as one body, at the end of a stream, or as the result of a job."""

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
    # requests that could not be fulfilled completely
    degraded: tuple[str, ...] = ()
    # given by the caller or drawn; the same request with this seed gets the same answer
    seed: int = 0
    validation: ValidationResult | None = None
    metrics: InferenceMetrics | None = None
    # where the time went: `timings`, and `experts` for a MoE model; `coterie` on the vendors' APIs
    telemetry: Mapping[str, Any] | None = None
    # ExpertPlan, if it was requested
    plan: Mapping[str, Any] | None = None
