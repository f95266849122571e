"""All metrics: name, kind, help, labels; and which value of an engine's stats each one shows.

Names are vLLM's where one exists, so that its dashboards and autoscalers work; otherwise they start
with `coterie_`. The number of label values is limited: tiers, phases and stages, never MoE experts.
Single adapters appear only as reported by a worker (the last 64 it loaded), by the first digits of
their digest.

An engine's `stats()` uses free names: a key that ends in `_s` is the seconds spent in that phase
since start (`schedule_s`, `run_s`, `commit_s`) and becomes `coterie_step_seconds_total`; keys in
`ENGINE_GAUGES` are current values; keys in `ENGINE_SERIES` are about MoE experts, adapters and
recoveries; any other key counts events (`steps`, `preemptions`) and becomes
`coterie_engine_events_total`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter's name is written with the suffix `_total`."""

    name: str
    kind: str  # counter | gauge | histogram
    doc: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()


_MODEL = ("model_name",)

MOE_METRICS = (
    Metric(
        "coterie_moe_demands", "counter",
        "MoE experts that layers asked for, by how they were met: from a device slot, from one "
        "filled ahead, after a move, or computed on the host.",
        ("replica", "met"),
    ),
    Metric(
        "coterie_moe_host_lookups", "counter",
        "Lookups in RAM for a move or a run on the host; a miss reads the disk.",
        ("replica", "result"),
    ),
    Metric("coterie_moe_bytes", "counter", "Bytes of MoE experts moved.", ("replica", "way")),
    Metric(
        "coterie_moe_seconds", "counter",
        "Seconds spent on MoE experts by phase; `io` overlaps with `compute`, `stall` does not; "
        "`stall_disk` and `stall_cpu` are parts of it.",
        ("replica", "phase"),
    ),
    Metric(
        "coterie_moe_changes", "counter", "Evictions, updates between tokens, and their swaps.",
        ("replica", "change"),
    ),
    Metric(
        "coterie_moe_fallbacks", "counter",
        "Since loading: allocations that failed (`shortage`), and whether less is in place than "
        "was asked for (`reduced`).",
        ("replica", "kind"),
    ),
    Metric(
        "coterie_moe_memory_bytes", "gauge",
        "Memory of each tier, and what all MoE experts would take beyond both (`saved`).",
        ("replica", "tier"),
    ),
    Metric(
        "coterie_moe_fallback_rate", "gauge",
        "Share of demands that found no device slot filled, 0 to 1.", ("replica",),
    ),
    Metric(
        "coterie_moe_layer_hit_rate", "gauge",
        "Share of demands met from device slots, over the layers.", ("replica", "layer"),
    ),
    Metric(
        "coterie_moe_slabs", "gauge",
        "Slabs of device memory that KV and experts share, by who has them.", ("replica", "owner"),
    ),
    Metric(
        "coterie_moe_slab_trades", "counter",
        "Slabs of device memory that KV took from experts and gave back.", ("replica", "to"),
    ),
    Metric(
        "coterie_moe_cpu_repeats", "counter",
        "Parts of the CPU's share of steps that were computed again because a thread was late, as "
        "one is that lost its core.", ("replica",),
    ),
)  # fmt: skip

# an engine's stat -> metric and its label after the replica
MOE_SERIES: dict[str, tuple[str, ...]] = {
    "moe_device_hits": ("coterie_moe_demands", "device_hit"),
    "moe_prefetch_hits": ("coterie_moe_demands", "prefetch_hit"),
    "moe_device_misses": ("coterie_moe_demands", "device_miss"),
    "moe_host_runs": ("coterie_moe_demands", "host_run"),
    "moe_host_hits": ("coterie_moe_host_lookups", "hit"),
    "moe_host_misses": ("coterie_moe_host_lookups", "miss"),
    "moe_moved_bytes": ("coterie_moe_bytes", "host_to_device"),
    "moe_read_bytes": ("coterie_moe_bytes", "disk_to_host"),
    "moe_routing_s": ("coterie_moe_seconds", "routing"),
    "moe_lookup_s": ("coterie_moe_seconds", "lookup"),
    "moe_io_s": ("coterie_moe_seconds", "io"),
    "moe_compute_s": ("coterie_moe_seconds", "compute"),
    "moe_stall_s": ("coterie_moe_seconds", "stall"),
    "moe_disk_s": ("coterie_moe_seconds", "stall_disk"),
    "moe_cpu_s": ("coterie_moe_seconds", "stall_cpu"),
    "moe_device_evictions": ("coterie_moe_changes", "device_eviction"),
    "moe_host_evictions": ("coterie_moe_changes", "host_eviction"),
    "moe_updates": ("coterie_moe_changes", "update"),
    "moe_swaps": ("coterie_moe_changes", "swap"),
    "moe_shortages": ("coterie_moe_fallbacks", "shortage"),
    "moe_fallbacks": ("coterie_moe_fallbacks", "reduced"),
    "moe_device_bytes": ("coterie_moe_memory_bytes", "device"),
    "moe_host_bytes": ("coterie_moe_memory_bytes", "host"),
    "moe_saved_bytes": ("coterie_moe_memory_bytes", "saved"),
    "moe_kv_slabs": ("coterie_moe_slabs", "kv"),
    "moe_expert_slabs": ("coterie_moe_slabs", "experts"),
    "moe_slabs_taken": ("coterie_moe_slab_trades", "kv"),
    "moe_slabs_returned": ("coterie_moe_slab_trades", "experts"),
    "moe_cpu_repeats": ("coterie_moe_cpu_repeats",),
    "moe_fallback_rate": ("coterie_moe_fallback_rate",),
    "moe_lowest_hit_rate": ("coterie_moe_layer_hit_rate", "lowest"),
    "moe_median_hit_rate": ("coterie_moe_layer_hit_rate", "median"),
    "moe_highest_hit_rate": ("coterie_moe_layer_hit_rate", "highest"),
}


# enough to distinguish installed adapters; a name may get a new version, a digest stays
DIGEST_DIGITS = 12

ADAPTER_METRICS = (
    Metric(
        "coterie_adapter_lookups", "counter",
        "Stacks of adapters that requests asked for, by where they were found.",
        ("replica", "tier"),
    ),
    Metric(
        "coterie_adapter_loads", "counter",
        "Adapters read from disk or found in RAM for a load, and stacks placed on the device.",
        ("replica", "tier"),
    ),
    Metric(
        "coterie_adapter_load_seconds", "counter",
        "Seconds of loading adapters by stage, beside the engine's steps.", ("replica", "stage"),
    ),
    Metric("coterie_adapter_failures", "counter", "Loads that failed.", ("replica",)),
    Metric("coterie_adapter_uses", "counter", "Times a stack was taken to run.", ("replica",)),
    Metric(
        "coterie_adapter_evictions", "counter", "Stacks or adapters that made room.",
        ("replica", "tier"),
    ),
    Metric("coterie_adapter_memory_bytes", "gauge", "Bytes held, by tier.", ("replica", "tier")),
    Metric("coterie_adapter_stacks", "gauge", "Stacks by state.", ("replica", "state")),
    Metric(
        "coterie_adapter_resident", "gauge",
        "1 while a stack with this adapter is on the device; of the adapters loaded last.",
        ("replica", "adapter"),
    ),
    Metric(
        "coterie_adapter_own_loads", "counter", "Loads of one adapter.", ("replica", "adapter")
    ),
    Metric(
        "coterie_adapter_own_load_seconds", "counter", "Seconds of one adapter's loads by stage.",
        ("replica", "adapter", "stage"),
    ),
)  # fmt: skip

# metrics with a label per adapter: rebuilt from each report of a worker
OWN_METRICS = (
    "coterie_adapter_resident",
    "coterie_adapter_own_loads",
    "coterie_adapter_own_load_seconds",
)

# an engine's stat -> metric and its label after the replica
ADAPTER_SERIES: dict[str, tuple[str, ...]] = {
    "adapter_lookups_device": ("coterie_adapter_lookups", "device"),
    "adapter_lookups_host": ("coterie_adapter_lookups", "host"),
    "adapter_lookups_disk": ("coterie_adapter_lookups", "disk"),
    "adapter_loads": ("coterie_adapter_loads", "device"),
    "adapter_loads_host": ("coterie_adapter_loads", "host"),
    "adapter_loads_disk": ("coterie_adapter_loads", "disk"),
    "adapter_load_disk_s": ("coterie_adapter_load_seconds", "disk"),
    "adapter_compose_s": ("coterie_adapter_load_seconds", "compose"),
    "adapter_place_s": ("coterie_adapter_load_seconds", "place"),
    "adapter_hits": ("coterie_adapter_uses",),
    "adapter_evictions": ("coterie_adapter_evictions", "device"),
    "adapter_host_evictions": ("coterie_adapter_evictions", "host"),
    "adapter_resident_bytes": ("coterie_adapter_memory_bytes", "device"),
    "adapter_host_bytes": ("coterie_adapter_memory_bytes", "host"),
    "adapter_resident": ("coterie_adapter_stacks", "resident"),
    "adapter_loading": ("coterie_adapter_stacks", "loading"),
    "adapter_failures": ("coterie_adapter_failures",),
}


class AdapterLoadTimes(Protocol):
    """One adapter's loads, as a worker reports them."""

    @property
    def digest(self) -> str: ...
    @property
    def resident(self) -> bool: ...
    @property
    def loads(self) -> int: ...
    @property
    def disk_s(self) -> float: ...
    @property
    def compose_s(self) -> float: ...
    @property
    def place_s(self) -> float: ...


def adapter_series(
    replica: str, loads: Iterable[AdapterLoadTimes]
) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """(metric, labels, value) for every adapter that a worker reports."""
    resident, count, seconds = OWN_METRICS
    for load in loads:
        labels = (replica, load.digest[:DIGEST_DIGITS])
        yield resident, labels, float(load.resident)
        yield count, labels, float(load.loads)
        for stage in ("disk", "compose", "place"):
            yield seconds, (*labels, stage), getattr(load, f"{stage}_s")


# reception and routing should take less than a millisecond each
ROUTER_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1,
)  # fmt: skip
VALIDATION_BUCKETS_S = (
    0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0,
)  # fmt: skip
LOAD_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0,
)  # fmt: skip

LAG_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0,
)  # fmt: skip


PIPELINE_METRICS = (
    Metric("coterie_connections", "gauge", "Open HTTP and WebSocket connections.", ()),
    Metric(
        "coterie_connections_refused", "counter",
        "Connections that were refused, or ended because they were too slow or too large.",
        ("reason",),
    ),
    Metric(
        "coterie_reception_seconds", "histogram",
        "Time to parse, check and normalise a body of /v1/infer.", (), ROUTER_BUCKETS_S,
    ),
    Metric(
        "coterie_router_seconds", "histogram", "Time to decide who answers.", (), ROUTER_BUCKETS_S
    ),
    Metric(
        "coterie_route_decisions", "counter",
        "Requests by the expert they ran on; `none` = the base alone, `other` = beyond 200 names.",
        ("expert",),
    ),
    Metric(
        "coterie_request_seconds", "counter",
        "Where the time of finished requests went: `queue` (of it `grammar`: checking a response "
        "format, and `adapters`: waiting for them), `prefill`, `decode`; of these two "
        "`moe_stall`, beside them `moe_io`.",
        ("model_name", "phase"),
    ),
    Metric(
        "coterie_expert_wait_seconds", "histogram",
        "How long requests with experts waited for them.", _MODEL, LOAD_BUCKETS_S,
    ),
    Metric(
        "coterie_damaged_experts", "gauge",
        "Installed experts whose files are gone or changed; nothing is routed to them.",
        (),
    ),
    Metric(
        "coterie_degraded", "counter", "Requests that got fewer experts than were chosen.", _MODEL
    ),
    Metric(
        "coterie_validations", "counter", "Answers that were judged.", ("validator", "result")
    ),
    Metric(
        "coterie_validation_seconds", "histogram", "Time to judge an answer.", (),
        VALIDATION_BUCKETS_S,
    ),
    Metric("coterie_feedback", "counter", "Verdicts of callers.", ("verdict",)),
    Metric(
        "coterie_conversation_turns", "counter",
        "Later turns with experts: `hit` = they were foreseen, `miss` = not.", ("result",),
    ),
    Metric(
        "coterie_conversation_preloads", "counter", "Stacks asked for before their turn came.", ()
    ),
    Metric("coterie_conversations", "gauge", "Conversations that are remembered.", ()),
    Metric("coterie_jobs", "gauge", "Open jobs of this server.", ("status",)),
    Metric("coterie_batches", "gauge", "Batches of this server that have not ended.", ("status",)),
    Metric(
        "coterie_batch_requests", "counter",
        "Requests of batches by their end: `succeeded`, `errored`, `canceled`, `expired`.",
        ("state",),
    ),
    Metric(
        "coterie_batch_requests_open", "gauge",
        "Requests of this server's batches: `waiting`, `running`.", ("state",),
    ),
    Metric("coterie_file_bytes", "gauge", "Bytes of all files and results of batches.", ()),
    Metric(
        "coterie_event_loop_lag_seconds", "histogram",
        "How late the gateway's event loop is, looked at four times a second.", (), LAG_BUCKETS_S,
    ),
    Metric(
        "coterie_event_loop_blocks", "counter",
        "Times the gateway's event loop did nothing else for over a second.", (),
    ),
    Metric(
        "coterie_trace_spans", "counter",
        "Spans of traces: `sent`, `dropped` because too many waited, or `lost` because the "
        "receiver did not take them. Only with `tracing.endpoint`.",
        ("result",),
    ),
    Metric("coterie_records_dropped", "counter", "Rows of the log that were lost.", ()),
    Metric(
        "coterie_responses_dropped", "counter", "Responses that were answered but not kept.", ()
    ),
)  # fmt: skip


ENCODER_METRICS = (
    Metric("coterie_encoder_inputs", "counter", "Texts or pairs that encoders read.", _MODEL),
    Metric("coterie_encoder_tokens", "counter", "Tokens that encoders read.", _MODEL),
    Metric(
        "coterie_encoder_request_seconds", "histogram",
        "Time of a request to an encoder, from its tokens to its vectors.", _MODEL, LAG_BUCKETS_S,
    ),
    Metric(
        "coterie_encoder_waiting_tokens", "gauge", "Tokens that wait for an encoder or run on it.",
        _MODEL,
    ),
)  # fmt: skip


ENSEMBLE_METRICS = (
    Metric(
        "coterie_slo_seconds", "gauge",
        "Quantiles of the last 24 hours: `ttft`, `itl` (p50, p95, p99), and `admission` to first "
        "token (p95).",
        ("model_name", "kind", "quantile"),
    ),
    Metric(
        "coterie_slo_kept", "gauge",
        "1 while the promise is kept: `ttft_p95_s`, `itl_p95_s`, `correctness`; absent without one "
        "or if too little is known.",
        ("model_name", "promise"),
    ),
    Metric(
        "coterie_correctness", "gauge",
        "Share of valid answers in the window: `rate`, its 95% interval `low` and `high`, and the "
        "promised `floor`. Absent while too few were judged.",
        ("model_name", "bound"),
    ),
    Metric("coterie_correctness_judged", "gauge", "Answers judged in the window.", _MODEL),
    Metric(
        "coterie_ended_share", "gauge",
        "Share of answers that ended by themselves, of those whose limit left room: `newest`, and "
        "`usual` (those before).",
        ("model_name", "which"),
    ),
    Metric(
        "coterie_breaker_state", "gauge",
        "1 for the state: closed, shadow_only, ejected or draining.", ("model_name", "state"),
    ),
    Metric(
        "coterie_spike_level", "gauge",
        "0 normal, 1 fewer shadows, 2 unsure requests spilled, 3 a priority floor.", _MODEL,
    ),
    Metric(
        "coterie_preempted_share", "gauge",
        "Share of finished requests that lost their KV at least once, in the window.", _MODEL,
    ),
    Metric(
        "coterie_shadows", "counter",
        "Shadows by result: `agreed`, `disagreed`, `judged` (the primary was not), `unjudged`, "
        "`preempted` by primaries, `dropped` because none could start in time, `failed`.",
        ("model_name", "result"),
    ),
    Metric(
        "coterie_broken_checks", "counter",
        "Answers that a check did not judge because the check itself is broken: it fails on a "
        "known good answer.",
        ("validator",),
    ),
    Metric(
        "coterie_cut_answers", "counter",
        "Checked answers that their callers cut, by what they could become: `open` (valid), "
        "`unformed` (nothing of their form has begun), `broken` (never valid).",
        ("model_name", "kind"),
    ),
    Metric(
        "coterie_calibration_labels", "counter",
        "Disagreements of primaries and shadows, by what became of the label: `written`, "
        "`other_checks` (no check found one answer valid and the other not), `unhealthy` (the "
        "primary was, or ran a version under test, or too little was known), `not_kept`.",
        ("model_name", "result"),
    ),
    Metric(
        "coterie_control_changes", "counter",
        "Changes of the ensemble's state by kind, by itself or by an operator; the audit log has "
        "each.",
        ("kind",),
    ),
)  # fmt: skip


FIRST_TOKEN_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
# 1, 2, 5, 10 ... as in vLLM, up to a million
TOKEN_BUCKETS = (*(float(m * 10**e) for e in range(6) for m in (1, 2, 5)), 1e6)
CHOICE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)


ENGINE_GAUGES = frozenset({"running", "waiting", "kv_usage", "cached_blocks", "graphs"})
GRAPH_SERIES: dict[str, tuple[str, ...]] = {
    "graph_bytes": ("coterie_graph_memory_bytes", "used"),
    "graph_reserved_bytes": ("coterie_graph_memory_bytes", "reserved"),
}
# how often a replica recovered from a fault
RECOVERY_SERIES: dict[str, tuple[str, ...]] = {
    "failed_starts": ("coterie_recoveries", "failed_start"),
    "silences": ("coterie_recoveries", "worker_silent"),
    "socket_folders_lost": ("coterie_recoveries", "socket_folder_lost"),
    "requests_continued": ("coterie_recoveries", "request_continued"),
    "requests_alone": ("coterie_recoveries", "request_alone"),
    "deadlines_missed": ("coterie_recoveries", "deadline_missed"),
    "values_refused": ("coterie_recoveries", "value_refused"),
    "requests_resent": ("coterie_recoveries", "request_resent"),
    "moe_updates_failed": ("coterie_recoveries", "experts_stayed"),
    "moe_cpu_silent": ("coterie_recoveries", "cpu_silent"),
    "smaller_steps": ("coterie_recoveries", "smaller_steps"),
}
ENGINE_SERIES = MOE_SERIES | ADAPTER_SERIES | RECOVERY_SERIES | GRAPH_SERIES


METRICS = (
    Metric("vllm:num_requests_running", "gauge", "Requests being computed.", _MODEL),
    Metric("vllm:num_requests_waiting", "gauge", "Requests in the queue.", _MODEL),
    Metric("vllm:kv_cache_usage_perc", "gauge", "Share of KV blocks in use, 0 to 1.", _MODEL),
    Metric("vllm:prefix_cache_queries", "counter", "Prompt tokens looked up.", _MODEL),
    Metric("vllm:prefix_cache_hits", "counter", "Prompt tokens whose KV was reused.", _MODEL),
    Metric("vllm:num_preemptions", "counter", "Times a running request lost its KV.", _MODEL),
    Metric("vllm:prompt_tokens", "counter", "Prompt tokens of started requests.", _MODEL),
    Metric("vllm:generation_tokens", "counter", "Tokens produced.", _MODEL),
    Metric(
        "vllm:request_success", "counter", "Requests that ended in Finished.",
        ("model_name", "finished_reason"),
    ),
    Metric(
        "vllm:time_to_first_token_seconds", "histogram", "Arrival to first token.", _MODEL,
        FIRST_TOKEN_BUCKETS_S,
    ),
    Metric(
        "vllm:inter_token_latency_seconds", "histogram", "Time between a choice's tokens.", _MODEL,
        INTER_TOKEN_BUCKETS_S,
    ),
    Metric(
        "vllm:e2e_request_latency_seconds", "histogram", "Arrival to end.", _MODEL,
        REQUEST_BUCKETS_S,
    ),
    Metric(
        "vllm:request_queue_time_seconds", "histogram", "Time in the queue.", _MODEL,
        REQUEST_BUCKETS_S,
    ),
    Metric(
        "vllm:request_inference_time_seconds", "histogram", "First step to last token.", _MODEL,
        REQUEST_BUCKETS_S,
    ),
    Metric(
        "vllm:request_prefill_time_seconds", "histogram", "First step to first token.", _MODEL,
        REQUEST_BUCKETS_S,
    ),
    Metric(
        "vllm:request_decode_time_seconds", "histogram", "First to last token.", _MODEL,
        REQUEST_BUCKETS_S,
    ),
    Metric(
        "vllm:request_time_per_output_token_seconds", "histogram",
        "Decode time of a request over the tokens behind its first.", _MODEL, INTER_TOKEN_BUCKETS_S,
    ),
    Metric(
        "vllm:request_prompt_tokens", "histogram", "Tokens of a request's prompt.", _MODEL,
        TOKEN_BUCKETS,
    ),
    Metric(
        "vllm:request_generation_tokens", "histogram", "Tokens of a request's answers.", _MODEL,
        TOKEN_BUCKETS,
    ),
    Metric(
        "vllm:request_max_num_generation_tokens", "histogram", "Tokens of its longest choice.",
        _MODEL, TOKEN_BUCKETS,
    ),
    Metric(
        "vllm:request_params_max_tokens", "histogram", "Most tokens that a choice might have.",
        _MODEL, TOKEN_BUCKETS,
    ),
    Metric("vllm:request_params_n", "histogram", "Choices asked for.", _MODEL, CHOICE_BUCKETS),
    Metric(
        "vllm:request_prefill_kv_computed_tokens", "histogram",
        "Prompt tokens that were computed, those of the prefix cache left out.", _MODEL,
        TOKEN_BUCKETS,
    ),
    Metric(
        "vllm:prompt_tokens_cached", "counter", "Prompt tokens whose KV was reused.", _MODEL,
    ),
    Metric(
        "coterie_rejections", "counter", "Requests refused before they started, by code.",
        ("model_name", "code"),
    ),
    Metric(
        "coterie_admissions", "counter",
        "Requests that were sent to a worker: `admitted` at once, `queued`, `preempted_other` of a "
        "lower priority, or `rerouted` from another specialist.",
        ("model_name", "outcome"),
    ),
    Metric(
        "coterie_deadlines", "counter",
        "Requests with a deadline. Those that admission expected to end before it: `met` or "
        "`missed`. Others that it ended: `cut`. Too little was measured, or an idle engine would "
        "have taken longer.",
        ("model_name", "outcome"),
    ),
    Metric(
        "coterie_retries", "counter",
        "Requests that came back when they were told to: `admitted` or `refused` again.",
        ("model_name", "outcome"),
    ),
    Metric(
        "coterie_failures", "counter", "Accepted requests that ended in Failed, by code.",
        ("model_name", "code"),
    ),
    Metric(
        "coterie_config_reloads", "counter",
        "Reloads of the settings: `done`, or `refused` because a file is wrong or changes what "
        "needs a restart.",
        ("result",),
    ),
    Metric(
        "coterie_worker_restarts", "counter",
        "Worker processes started again; remote servers that came back.", ("replica",),
    ),
    Metric(
        "coterie_recoveries", "counter",
        "Faults that nobody noticed: `failed_start` of a worker, `worker_silent` for a "
        "while, `socket_folder_lost` and made again, `request_continued` behind a crash, "
        "`request_alone` because two crashes met it, `deadline_missed` by a worker, "
        "`value_refused` on the way between processes (its request failed), `replanned` onto "
        "another replica, `moved` to another replica when the worker was lost, `rerouted` to an "
        "alternate specialist, `format_left_out`, "
        "`expert_left_out` because its files are damaged, `request_resent` because a remote "
        "server had closed an idle connection, `stood_in` for a remote server that failed before "
        "its first token, `job_taken_up`, `batch_taken_up` and `receipt` read back after a crash, "
        "`experts_stayed` where a move of experts failed, `cpu_silent` where the CPU's part of a "
        "step's experts did not come in time (its requests failed), `smaller_steps` because memory "
        "was refused for one, `child_killed` where a process that checks grammars or answers was "
        "killed from outside and its question asked again.",
        ("where", "kind"),
    ),
    Metric(
        "coterie_remote_cost", "counter",
        "Cost of the answers of a remote specialist, in the unit of its prices.", _MODEL,
    ),
    Metric("coterie_worker_up", "gauge", "1 while the replica can take requests.", ("replica",)),
    Metric(
        "coterie_step_seconds", "counter", "Seconds of engine steps by phase.",
        ("replica", "phase"),
    ),
    Metric("coterie_engine_events", "counter", "Engine counters.", ("replica", "event")),
    Metric("coterie_engine_state", "gauge", "How the engine stands.", ("replica", "state")),
    Metric(
        "coterie_graph_memory_bytes", "gauge",
        "Device memory of captured graphs: measured (`used`), and what they may take.",
        ("replica", "kind"),
    ),
    Metric(
        "coterie_admission_to_first_token_seconds", "histogram",
        "Acceptance of a request to its first token.", _MODEL, FIRST_TOKEN_BUCKETS_S,
    ),
    *PIPELINE_METRICS,
    *ENCODER_METRICS,
    *ENSEMBLE_METRICS,
    *MOE_METRICS,
    *ADAPTER_METRICS,
    Metric(
        "vllm:lora_requests_info", "gauge",
        "Adapters of running and of waiting requests; the value is the time of the reading.",
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    ),
    Metric(
        "vllm:lora_adapter_loaded", "gauge",
        "1 while the adapter is on the device (level `gpu`, whatever the device), in use or not.",
        ("model_name", "adapter_name", "level", "pinned"),
    ),
    Metric("coterie_gateway_cpu_seconds", "counter", "CPU time of the gateway process.", ()),
    Metric("coterie_gateway_open_streams", "gauge", "Requests the gateway is answering.", ()),
)  # fmt: skip
