"""The Grafana dashboard and the Prometheus alert rules, made from the metric table.

An expression is built by functions that look its metric up: a name, a label or a kind that the
table does not have is an error here, not an empty panel. A metric that no panel below names gets
one of its own in the last row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from coterie.obs.tables import METRICS, Metric

TABLE = {metric.name: metric for metric in METRICS}
# what Grafana puts in: the servers and models that are looked at
SERVERS, MODELS = 'job=~"$job",instance=~"$instance"', 'model_name=~"$model"'
GRAFANA_WINDOW = "$__rate_interval"
WIDTH, HEIGHT, PER_ROW = 8, 8, 3


@dataclass(frozen=True, slots=True)
class Query:
    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str
    queries: tuple[Query, ...]
    meaning: str


@dataclass(frozen=True, slots=True)
class Alert:
    """`lasts`: how long the condition holds before somebody is told."""

    name: str
    expression: str
    lasts: str
    severity: str
    summary: str
    advice: str


def found(name: str, kind: str, labels: Sequence[str]) -> Metric:
    metric = TABLE[name]
    if metric.kind != kind:
        raise ValueError(f"{name} is a {metric.kind}, not a {kind}")
    for label in labels:
        if label not in metric.labels:
            raise ValueError(f"{name} has no label {label!r}: {metric.labels}")
    return metric


def selector(name: str, filters: str) -> str:
    return f"{name}{{{filters}}}" if filters else name


def grafana_filters(metric: Metric, **values: str) -> str:
    """The dashboard's own filters, and a value for each of these labels."""
    found(metric.name, metric.kind, list(values))
    own = [f'{label}="{value}"' for label, value in values.items()]
    return ",".join([SERVERS, *([MODELS] if "model_name" in metric.labels else []), *own])


def legend_of(by: Sequence[str]) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in by) or "all"


def rate(name: str, *by: str, **values: str) -> Query:
    metric = found(name, "counter", by)
    chosen = selector(f"{name}_total", grafana_filters(metric, **values))
    expression = f"sum by ({', '.join(by)}) (rate({chosen}[{GRAFANA_WINDOW}]))"
    return Query(expression, legend_of(by))


def gauge(name: str, *by: str, use: str = "sum", **values: str) -> Query:
    metric = found(name, "gauge", by)
    chosen = selector(name, grafana_filters(metric, **values))
    return Query(f"{use} by ({', '.join(by)}) ({chosen})", legend_of(by))


def quantile(share: float, name: str, *by: str) -> Query:
    metric = found(name, "histogram", by)
    chosen = selector(f"{name}_bucket", grafana_filters(metric))
    summed = f"sum by ({', '.join(('le', *by))}) (rate({chosen}[{GRAFANA_WINDOW}]))"
    mark = f"p{share * 100:g}"
    return Query(
        f"histogram_quantile({share}, {summed})", f"{mark} {legend_of(by)}" if by else mark
    )


def quantiles(name: str, *by: str) -> tuple[Query, ...]:
    return tuple(quantile(share, name, *by) for share in (0.5, 0.95, 0.99))


def panel(title: str, unit: str, *queries: Query | tuple[Query, ...], of: str = "") -> Panel:
    """`of`: the metric whose meaning is shown."""
    flat = tuple(q for item in queries for q in (item if isinstance(item, tuple) else (item,)))
    return Panel(title, unit, flat, TABLE[of].doc if of else "")


def rows() -> dict[str, list[Panel]]:
    """The panels that were chosen, by row."""
    ttft, itl = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
    return {
        "Answers": [
            panel("Requests answered", "reqps", rate("vllm:request_success", "finished_reason")),
            panel("Time to first token", "s", quantiles(ttft, "model_name"), of=ttft),
            panel("Time between tokens", "s", quantiles(itl, "model_name"), of=itl),
            panel("Tokens produced", "short", rate("vllm:generation_tokens", "model_name")),
            panel("Prompt tokens", "short", rate("vllm:prompt_tokens", "model_name")),
            panel("Latency", "s", quantiles("vllm:e2e_request_latency_seconds", "model_name")),
            panel(
                "Where the time goes", "s", rate("coterie_request_seconds", "phase"),
                of="coterie_request_seconds",
            ),
            panel("Failures", "reqps", rate("coterie_failures", "model_name", "code")),
            panel("Refusals", "reqps", rate("coterie_rejections", "model_name", "code")),
        ],
        "Queues and memory": [
            panel("Running", "short", gauge("vllm:num_requests_running", "model_name")),
            panel("Waiting", "short", gauge("vllm:num_requests_waiting", "model_name")),
            panel("KV in use", "percentunit",
                  gauge("vllm:kv_cache_usage_perc", "model_name", use="max")),
            panel(
                "Prompt tokens from the prefix cache", "short",
                rate("vllm:prefix_cache_hits", "model_name"),
            ),
            panel("Preemptions", "short", rate("vllm:num_preemptions", "model_name")),
            panel("Admissions", "reqps", rate("coterie_admissions", "outcome"),
                  of="coterie_admissions"),
            panel("Open streams", "short", gauge("coterie_gateway_open_streams")),
            panel("Gateway CPU", "percentunit", rate("coterie_gateway_cpu_seconds")),
            panel("Event loop lag", "s", quantiles("coterie_event_loop_lag_seconds")),
        ],
        "Ensemble": [
            panel("Promises kept", "short",
                  gauge("coterie_slo_kept", "model_name", "promise", use="min"),
                  of="coterie_slo_kept"),
            panel("Correctness", "percentunit",
                  gauge("coterie_correctness", "model_name", "bound", use="min"),
                  of="coterie_correctness"),
            panel("Breakers", "short",
                  gauge("coterie_breaker_state", "model_name", "state", use="max"),
                  of="coterie_breaker_state"),
            panel("Routed to", "reqps", rate("coterie_route_decisions", "expert"),
                  of="coterie_route_decisions"),
            panel("Time to decide", "s", quantiles("coterie_router_seconds")),
            panel("Shadows", "short", rate("coterie_shadows", "model_name", "result"),
                  of="coterie_shadows"),
        ],
        "Workers": [
            panel("Up", "short", gauge("coterie_worker_up", "replica", use="min")),
            panel("Restarts", "short", rate("coterie_worker_restarts", "replica")),
            panel("Recoveries", "short", rate("coterie_recoveries", "where", "kind")),
            panel("Step time", "s", rate("coterie_step_seconds", "replica", "phase")),
            panel("Expert demands of MoE layers", "short",
                  rate("coterie_moe_demands", "replica", "met"), of="coterie_moe_demands"),
            panel("Bytes of MoE experts moved", "Bps", rate("coterie_moe_bytes", "replica", "way")),
            panel("Adapter stacks", "short", gauge("coterie_adapter_stacks", "replica", "state")),
            panel("Spans of traces", "short", rate("coterie_trace_spans", "result"),
                  of="coterie_trace_spans"),
            panel("Open jobs", "short", gauge("coterie_jobs", "status")),
        ],
    }  # fmt: skip


def unit_of(metric: Metric) -> str:
    for end, unit in (("_seconds", "s"), ("_bytes", "bytes")):
        if metric.name.endswith(end):
            return unit
    return "short"


def own_panel(metric: Metric) -> Panel:
    if metric.kind == "histogram":
        queries = quantiles(metric.name, *metric.labels)
    elif metric.kind == "counter":
        queries = (rate(metric.name, *metric.labels),)
    else:
        queries = (gauge(metric.name, *metric.labels),)
    return Panel(metric.name, unit_of(metric), queries, metric.doc)


def all_rows() -> dict[str, list[Panel]]:
    chosen = rows()
    text = " ".join(q.expression for row in chosen.values() for p in row for q in p.queries)
    rest = [metric for metric in METRICS if not any(name in text for name in wire_names(metric))]
    return chosen | {"All other metrics": [own_panel(metric) for metric in rest]}


def wire_names(metric: Metric) -> tuple[str, ...]:
    """The beginnings of its selectors in an expression."""
    end = {"counter": "_total", "histogram": "_bucket"}.get(metric.kind, "")
    return (f"{metric.name}{end}{{",)


def dashboard() -> str:
    """ops/grafana.json"""
    panels, at, number = list[dict[str, Any]](), 0, 1
    for title, members in all_rows().items():
        is_last = title == "All other metrics"
        row: dict[str, Any] = {
            "type": "row", "title": title, "id": number, "collapsed": is_last, "panels": [],
            "gridPos": {"h": 1, "w": 24, "x": 0, "y": at},
        }  # fmt: skip
        panels.append(row)
        at, number = at + 1, number + 1
        shown = [written(one, number + i, i, at) for i, one in enumerate(members)]
        # of a collapsed row the panels are its own
        (row["panels"] if is_last else panels).extend(shown)
        number += len(shown)
        at += HEIGHT * ((len(shown) + PER_ROW - 1) // PER_ROW)
    return json.dumps(described(panels), indent=1, ensure_ascii=False) + "\n"


def written(one: Panel, number: int, index: int, top: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    place = {
        "h": HEIGHT, "w": WIDTH,
        "x": WIDTH * (index % PER_ROW), "y": top + HEIGHT * (index // PER_ROW),
    }  # fmt: skip
    return {
        "type": "timeseries",
        "id": number,
        "title": one.title,
        "description": one.meaning,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": one.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": source,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for place, query in enumerate(one.queries)
        ],
    }


def described(panels: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "title": "Coterie",
        "uid": "coterie",
        "tags": ["coterie"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": list(variables())},
        "panels": panels,
    }


def variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    up = f"{found('coterie_gateway_cpu_seconds', 'counter', ()).name}_total"
    model = found("vllm:generation_tokens", "counter", ("model_name",)).name + "_total"
    for name, query in (
        ("job", f"label_values({up}, job)"),
        ("instance", f'label_values({up}{{job=~"$job"}}, instance)'),
        ("model", f'label_values({model}{{job=~"$job"}}, model_name)'),
    ):
        yield {
            "name": name, "type": "query", "query": query, "label": name.capitalize(),
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "multi": True, "includeAll": True, "refresh": 2, "sort": 1,
            "current": {"text": "All", "value": "$__all"},
        }  # fmt: skip


# alerts

# other servers have metrics of vLLM's names too
JOB = 'job="coterie"'


def chosen(name: str, kind: str, /, **values: str) -> str:
    """A selector; a value that begins with `!` must not be."""
    found(name, kind, list(values))
    marks = [
        f'{label}!="{value[1:]}"' if value.startswith("!") else f'{label}="{value}"'
        for label, value in values.items()
    ]
    end = {"counter": "_total", "histogram": "_bucket"}.get(kind, "")
    return selector(name + end, ",".join([JOB, *marks]))


def grown(name: str, window: str, /, **values: str) -> str:
    return f"increase({chosen(name, 'counter', **values)}[{window}])"


def rate_by(name: str, by: str, /, window: str = "5m", **values: str) -> str:
    found(name, "counter", (by,))
    return f"sum by ({by}) (rate({chosen(name, 'counter', **values)}[{window}]))"


def share_of(part: str, rest: str) -> str:
    """A model without a series of the rest has a rest of 0."""
    return f"{part} / ({part} + ({rest} or 0 * {part}))"


def alerts() -> tuple[Alert, ...]:
    model = "{{ $labels.model_name }}"
    replica = "{{ $labels.replica }}"
    return (*_health_alerts(model, replica), *_quality_alerts(model), *_loss_alerts(replica))


def _health_alerts(model: str, replica: str) -> tuple[Alert, ...]:
    failed = rate_by("coterie_failures", "model_name")
    answered = rate_by("vllm:request_success", "model_name")
    refused = rate_by("coterie_rejections", "model_name", code="overloaded")
    admitted = rate_by("coterie_admissions", "model_name")
    lag = chosen("coterie_event_loop_lag_seconds", "histogram")
    late = f"histogram_quantile(0.99, sum by (le, instance) (rate({lag}[5m])))"
    return (
        Alert("CoterieDown", f"up{{{JOB}}} == 0", "1m", "critical",
              "{{ $labels.instance }} cannot be scraped",
              "Look whether the server runs, and at the end of its log."),
        Alert("CoterieReplicaDown", f"{chosen('coterie_worker_up', 'gauge')} == 0", "2m",
              "critical", f"{replica} takes no requests",
              "The log says worker_died with an exit code, or remote_down with a reason."),
        Alert("CoterieReplicaRestarts", f"{grown('coterie_worker_restarts', '15m')} > 3", "0m",
              "warning", f"{replica} was started again several times",
              "Look for the same request before each worker_died; memory may be short."),
        Alert("CoterieRequestsFail", f"{share_of(failed, answered)} > 0.05", "5m",
              "critical", f"more than 5% of the requests to {model} fail",
              "coterie_failures_total has the codes."),
        Alert("CoterieRequestsRefused", f"{share_of(refused, admitted)} > 0.1", "10m",
              "warning", f"{model} has no room for more than 10% of its requests",
              "Add a replica, or lower what tenants may send."),
        Alert("CoterieEventLoopLate", f"{late} > 0.25", "5m", "warning",
              "the gateway of {{ $labels.instance }} is late for everybody",
              "Another program may have its core; look for event_loop_blocked in the log."),
        Alert("CoterieEventLoopBlocked", f"{grown('coterie_event_loop_blocks', '10m')} > 0", "0m",
              "warning", "the gateway of {{ $labels.instance }} stood still for over a second",
              "The log has where."),
        Alert("CoterieKvFull", f"{chosen('vllm:kv_cache_usage_perc', 'gauge')} > 0.95", "10m",
              "warning", f"the KV memory of {model} is full",
              "Raise engine.kv_bytes, or lower max_sequences."),
        Alert("CoterieQueueLong",
              f"min_over_time({chosen('vllm:num_requests_waiting', 'gauge')}[10m]) > 10", "0m",
              "warning", f"more than 10 requests have waited for {model} for 10 minutes",
              "Add a replica; /v1/slo has what its callers get."),
    )  # fmt: skip


def _quality_alerts(model: str) -> tuple[Alert, ...]:
    missed = rate_by("coterie_deadlines", "model_name", outcome="missed")
    deadlines = rate_by("coterie_deadlines", "model_name")
    return (
        Alert("CoteriePromiseBroken", f"{chosen('coterie_slo_kept', 'gauge')} == 0", "10m",
              "warning", f"{model} does not keep its {{{{ $labels.promise }}}}",
              "The receipts of slow requests say what took the time."),
        Alert("CoterieBreakerOpen",
              f"{chosen('coterie_breaker_state', 'gauge', state='!closed')} == 1", "1m", "critical",
              f"{model} is {{{{ $labels.state }}}}",
              "coterie ensemble audit says why; coterie ensemble restore ends it."),
        Alert("CoterieSpike", f"{chosen('coterie_spike_level', 'gauge')} >= 2", "10m", "warning",
              f"{model} has been under a spike for 10 minutes", "Add a replica."),
        Alert("CoterieDeadlinesMissed", f"{missed} / {deadlines} > 0.05", "10m", "warning",
              f"{model} misses deadlines that admission had promised",
              "Its speed changes faster than it is measured: look at preemptions and adapters."),
        Alert("CoteriePreemptions", f"{chosen('coterie_preempted_share', 'gauge')} > 0.1", "10m",
              "warning", f"more than 10% of the requests of {model} lose their KV",
              "Raise engine.kv_bytes, or lower max_sequences."),
        Alert("CoterieExpertsDamaged", f"{chosen('coterie_damaged_experts', 'gauge')} > 0", "0m",
              "warning", "files of installed experts are gone or changed",
              "damaged_experts in /health names them; install them again."),
    )  # fmt: skip


def _loss_alerts(replica: str) -> tuple[Alert, ...]:
    reduced = chosen("coterie_moe_fallbacks", "counter", kind="reduced")
    return (
        Alert("CoterieMoeReduced", f"{reduced} > 0", "10m", "warning",
              f"{replica} has fewer MoE experts in memory than was asked for",
              "Another program may have the memory; /health has the budgets."),
        Alert("CoterieAdapterLoadsFail", f"{grown('coterie_adapter_failures', '15m')} > 0", "0m",
              "warning", f"{replica} cannot load adapters", "The log names their files."),
        Alert("CoterieConfigRefused",
              f"{grown('coterie_config_reloads', '10m', result='refused')} > 0", "0m", "warning",
              "a reload of the settings was refused", "coterie config check says why."),
        Alert("CoterieConnectionsRefused", f"{grown('coterie_connections_refused', '10m')} > 100",
              "0m", "warning", "many connections are refused: {{ $labels.reason }}",
              "Look for one address in front; behind a proxy raise max_connections_per_address."),
        Alert("CoterieRecordsDropped", f"{grown('coterie_records_dropped', '10m')} > 0", "0m",
              "warning", "rows of the log of inferences are lost", "The disk is full or slow."),
        Alert("CoterieSpansDropped",
              f"{grown('coterie_trace_spans', '10m', result='!sent')} > 0", "10m", "info",
              "spans of traces are {{ $labels.result }}",
              "The receiver is down or slow; no request is."),
    )  # fmt: skip


def rules() -> str:
    """ops/alerts.yml; texts are written as JSON has them, which YAML reads alike."""
    lines = [
        "# Made from the metric table by scripts/generate_docs.py. The scrape's job is `coterie`.",
        "groups:", "  - name: coterie", "    rules:",
    ]  # fmt: skip
    for alert in alerts():
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expression)}",
            f"        for: {alert.lasts}",
            f"        labels: {{severity: {alert.severity}}}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          description: {json.dumps(alert.advice)}",
        ]
    return "\n".join(lines) + "\n"
