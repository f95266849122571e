"""obs/metrics.py: what Prometheus' own parser reads back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coterie.obs.metrics import MetricRegistry, reference
from coterie.obs.tables import METRICS


def parsed(registry: MetricRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(registry.render())
        for sample in family.samples
    }


def test_counters_gauges_and_odd_labels() -> None:
    registry = MetricRegistry()
    name = 'a "quoted"\\ name\nwith a line'
    registry.value("vllm:prompt_tokens", name).add(3)
    registry.value("vllm:prompt_tokens", name).add(4)
    registry.value("vllm:kv_cache_usage_perc", "m").set(0.25)
    registry.value("coterie_gateway_cpu_seconds").set(1.5)
    samples = parsed(registry)
    assert samples["vllm:prompt_tokens_total", (("model_name", name),)] == 7
    assert samples["vllm:kv_cache_usage_perc", (("model_name", "m"),)] == 0.25
    assert samples["coterie_gateway_cpu_seconds_total", ()] == 1.5


def test_histogram_buckets_are_cumulative_and_inclusive() -> None:
    registry = MetricRegistry()
    series = registry.histogram("vllm:inter_token_latency_seconds", "m")
    for value in (0.001, 0.01, 0.011, 1e9):
        series.observe(value)
    series.observe(0.05, times=2)
    samples = parsed(registry)

    def bucket(le: str) -> float:
        key = (("le", le), ("model_name", "m"))
        return samples["vllm:inter_token_latency_seconds_bucket", key]

    # a value equal to a bound belongs to it
    assert [bucket("0.01"), bucket("0.025"), bucket("0.05"), bucket("+Inf")] == [2, 3, 5, 6]
    assert samples["vllm:inter_token_latency_seconds_count", (("model_name", "m"),)] == 6
    total = samples["vllm:inter_token_latency_seconds_sum", (("model_name", "m"),)]
    assert total == pytest.approx(1e9 + 0.122)


def test_memory_of_graphs_is_shown() -> None:
    registry = MetricRegistry()
    stats = {"graphs": 12, "graph_bytes": 3e8, "graph_reserved_bytes": 1e9}
    registry.engine_stats("r0", stats)
    text = registry.render()
    assert 'coterie_graph_memory_bytes{replica="r0",kind="used"} 300000000.0' in text
    assert 'coterie_graph_memory_bytes{replica="r0",kind="reserved"} 1000000000.0' in text
    assert 'coterie_engine_state{replica="r0",state="graphs"} 12' in text


def test_engine_stats_are_split_by_phase() -> None:
    registry = MetricRegistry()
    registry.engine_stats("r0", {"run_s": 2.0, "steps": 7.0})
    registry.engine_stats("r0", {"run_s": 3.0, "steps": 9.0, "running": 2})
    samples = parsed(registry)
    assert samples["coterie_step_seconds_total", (("phase", "run"), ("replica", "r0"))] == 3.0
    assert samples["coterie_engine_events_total", (("event", "steps"), ("replica", "r0"))] == 9.0
    assert samples["coterie_engine_state", (("replica", "r0"), ("state", "running"))] == 2


def test_wrong_use_is_refused() -> None:
    registry = MetricRegistry()
    with pytest.raises(ValueError, match="labels"):
        registry.value("vllm:prompt_tokens")
    with pytest.raises(ValueError, match="histogram"):
        registry.value("vllm:time_to_first_token_seconds", "m")
    with pytest.raises(KeyError):
        registry.value("vllm:unheard_of", "m")


def test_every_metric_is_rendered_and_documented() -> None:
    registry = MetricRegistry()
    for metric in METRICS:
        labels = ["x"] * len(metric.labels)
        if metric.kind == "histogram":
            registry.histogram(metric.name, *labels).observe(1.0)
        else:
            registry.value(metric.name, *labels).add(1)
    families = {f.name: f.type for f in text_string_to_metric_families(registry.render())}
    text = reference()
    for metric in METRICS:
        assert families[metric.name] == metric.kind
        assert f"`{metric.name}`" in text


def test_documents_name_labels_that_exist() -> None:
    known = {metric.name: set(metric.labels) for metric in METRICS}
    documents = [*Path("docs").glob("*.md"), Path("README.md")]
    found = [
        (name, label)
        for path in documents
        for name, labels in re.findall(r"`((?:coterie_|vllm:)\w+)\{([^}]*)\}", path.read_text())
        for label in re.findall(r"(\w+)=", labels)
    ]
    assert found
    for name, label in found:
        assert label in known[name.removesuffix("_total")], (name, label)
