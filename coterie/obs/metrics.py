"""Counters, gauges and histograms of the tables, and their Prometheus text. One thread writes and
reads them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping

from coterie.obs.tables import ENGINE_GAUGES, ENGINE_SERIES, METRICS, Metric


class MetricValue:
    """One series of a counter or gauge; use `set` on a counter only for totals counted
    elsewhere."""

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


class MetricRegistry:
    """All series that have been used. Code that runs often should keep a reference to its
    series."""

    def __init__(self, metrics: tuple[Metric, ...] = METRICS) -> None:
        self._metrics = {metric.name: metric for metric in metrics}
        self._values: dict[str, dict[tuple[str, ...], MetricValue]] = {}
        self._histograms: dict[str, dict[tuple[str, ...], Histogram]] = {}

    def value(self, name: str, *labels: str) -> MetricValue:
        series = self._values.get(name)
        found = None if series is None else series.get(labels)
        if found is None:
            self._check(name, labels, histogram=False)
            found = self._values.setdefault(name, {})[labels] = MetricValue()
        return found

    def histogram(self, name: str, *labels: str) -> Histogram:
        series = self._histograms.get(name)
        found = None if series is None else series.get(labels)
        if found is None:
            metric = self._check(name, labels, histogram=True)
            found = self._histograms.setdefault(name, {})[labels] = Histogram(metric.buckets)
        return found

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
        """Removes all series of these metrics, whose label values change over time."""
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
        "`GET /metrics`, Prometheus text. Counters carry `_total` on the wire. "
        "[ops/grafana.json](../ops/grafana.json) shows all of them, "
        "[ops/alerts.yml](../ops/alerts.yml) has rules for Prometheus.",
    ]
    lines += ["", "| Name | Kind | Labels | Meaning |", "|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.doc} |")
    return "\n".join(lines) + "\n"
