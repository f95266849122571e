"""Counters, gauges and histograms, and their Prometheus text. One thread writes and reads them.

Owns the names (vLLM's where one exists, so that its dashboards and autoscalers work; `coterie_`
otherwise). Refuses to know where a value comes from.

An engine's `stats()` uses free names: a key that ends in `_s` is seconds spent in that phase since
start (`schedule_s`, `run_s`, `commit_s`) and becomes `coterie_step_seconds_total`; those in
`ENGINE_GAUGES` say how things stand now; those in `ENGINE_SERIES` are about experts and adapters;
any other key counts events (`steps`, `preemptions`) and becomes `coterie_engine_events_total`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping

from coterie.obs.adapter_metrics import ADAPTER_METRICS, ADAPTER_SERIES
from coterie.obs.expert_metrics import EXPERT_METRICS, EXPERT_SERIES
from coterie.obs.metric import Metric
from coterie.obs.pipeline_metrics import PIPELINE_METRICS

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
# 1, 2, 5, 10 ... as vLLM's, up to a million
TOKEN_BUCKETS = (*(float(m * 10**e) for e in range(6) for m in (1, 2, 5)), 1e6)
CHOICE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)


ENGINE_GAUGES = frozenset({"running", "waiting", "kv_usage", "cached_blocks"})
# how often a replica recovered from something
RECOVERY_SERIES: dict[str, tuple[str, ...]] = {
    "failed_starts": ("coterie_recoveries", "failed_start"),
    "silences": ("coterie_recoveries", "worker_silent"),
    "socket_folders_lost": ("coterie_recoveries", "socket_folder_lost"),
    "requests_continued": ("coterie_recoveries", "request_continued"),
    "requests_alone": ("coterie_recoveries", "request_alone"),
    "deadlines_missed": ("coterie_recoveries", "deadline_missed"),
    "values_refused": ("coterie_recoveries", "value_refused"),
    "expert_updates_failed": ("coterie_recoveries", "experts_stayed"),
}
ENGINE_SERIES = EXPERT_SERIES | ADAPTER_SERIES | RECOVERY_SERIES

_MODEL = ("model_name",)

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
        "coterie_failures", "counter", "Accepted requests that ended in Failed, by code.",
        ("model_name", "code"),
    ),
    Metric("coterie_worker_restarts", "counter", "Worker processes started again.", ("replica",)),
    Metric(
        "coterie_recoveries", "counter",
        "Faults that nobody noticed: `failed_start` of a worker, `worker_silent` for a "
        "while, `socket_folder_lost` and made again, `request_continued` behind a crash, "
        "`request_alone` because two crashes met it, `deadline_missed` by a worker, "
        "`value_refused` on the way between processes (its request failed), `replanned` onto "
        "another replica, `format_left_out`, `expert_left_out` because its "
        "files are damaged, `job_taken_up` after a crash, `experts_stayed` where "
        "a move of experts failed.",
        ("where", "kind"),
    ),
    Metric("coterie_worker_up", "gauge", "1 while the replica can take requests.", ("replica",)),
    Metric(
        "coterie_step_seconds", "counter", "Seconds of engine steps by phase.",
        ("replica", "phase"),
    ),
    Metric("coterie_engine_events", "counter", "Engine counters.", ("replica", "event")),
    Metric("coterie_engine_state", "gauge", "How the engine stands.", ("replica", "state")),
    *PIPELINE_METRICS,
    *EXPERT_METRICS,
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


class Value:
    """One series of a counter or gauge; `set` on a counter is for totals counted elsewhere."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value


class Histogram:
    """One series of a histogram. `counts` are per bucket; they are summed when written."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Registry:
    """Every series that has been touched. Hold on to a series where it is hot."""

    def __init__(self, metrics: tuple[Metric, ...] = METRICS) -> None:
        self._metrics = {metric.name: metric for metric in metrics}
        self._values: dict[str, dict[tuple[str, ...], Value]] = {}
        self._histograms: dict[str, dict[tuple[str, ...], Histogram]] = {}

    def value(self, name: str, *labels: str) -> Value:
        self._check(name, labels, histogram=False)
        return self._values.setdefault(name, {}).setdefault(labels, Value())

    def histogram(self, name: str, *labels: str) -> Histogram:
        metric = self._check(name, labels, histogram=True)
        series = self._histograms.setdefault(name, {})
        return series.setdefault(labels, Histogram(metric.buckets))

    def engine_stats(self, replica: str, stats: Mapping[str, float]) -> None:
        for name, amount in stats.items():
            if name in ENGINE_SERIES:
                metric, *labels = ENGINE_SERIES[name]
                self.value(metric, replica, *labels).set(amount)
            elif name.endswith("_s"):
                self.value("coterie_step_seconds", replica, name[:-2]).set(amount)
            elif name in ENGINE_GAUGES:
                self.value("coterie_engine_state", replica, name).set(amount)
            else:
                self.value("coterie_engine_events", replica, name).set(amount)

    def forget(self, names: Iterable[str]) -> None:
        """Drops the series of metrics whose labels come and go."""
        for name in names:
            self._values.pop(name, None)

    def render(self) -> str:
        """Prometheus text format 0.0.4."""
        lines: list[str] = []
        for metric in self._metrics.values():
            name = metric.name + ("_total" if metric.kind == "counter" else "")
            lines += [f"# HELP {name} {metric.doc}", f"# TYPE {name} {metric.kind}"]
            for labels, value in self._values.get(metric.name, {}).items():
                lines.append(f"{name}{_labels(metric.labels, labels)} {value.value!r}")
            for labels, histogram in self._histograms.get(metric.name, {}).items():
                lines += _histogram_lines(metric, labels, histogram)
        return "\n".join(lines) + "\n"

    def _check(self, name: str, labels: tuple[str, ...], *, histogram: bool) -> Metric:
        metric = self._metrics[name]
        if len(labels) != len(metric.labels) or (metric.kind == "histogram") != histogram:
            raise ValueError(f"{name} is a {metric.kind} with labels {metric.labels}")
        return metric


def _histogram_lines(
    metric: Metric, labels: tuple[str, ...], histogram: Histogram
) -> Iterator[str]:
    names = (*metric.labels, "le")
    running = 0
    for bound, count in zip((*histogram.bounds, None), histogram.counts, strict=True):
        running += count
        le = "+Inf" if bound is None else repr(bound)
        yield f"{metric.name}_bucket{_labels(names, (*labels, le))} {running}"
    yield f"{metric.name}_sum{_labels(metric.labels, labels)} {histogram.total!r}"
    yield f"{metric.name}_count{_labels(metric.labels, labels)} {running}"


def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    pairs = ",".join(
        f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True)
    )
    return f"{{{pairs}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def reference() -> str:
    """docs/metrics.md: every metric with its kind and labels."""
    lines = [
        "# Metrics",
        "",
        "`GET /metrics`, Prometheus text. Counters carry `_total` on the wire.",
    ]
    lines += ["", "| Name | Kind | Labels | Meaning |", "|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.doc} |")
    return "\n".join(lines) + "\n"
