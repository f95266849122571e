"""ops/: every expression of the dashboard and of the alert rules, against a live scrape."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from coterie.obs.tables import METRICS
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Served, chat, own_home

OPS = Path(__file__).resolve().parents[2] / "ops"
# labels that the scrape adds, and the series that Prometheus makes of it
SCRAPED = {"job", "instance"}
SETTINGS = """
[engine]
kv_bytes = "8MB"
[ensemble]
min_judged = 1
[tracing]
endpoint = "http://127.0.0.1:9"
[[specialists]]
name = "dense"
model = "{dense}"
checks = ["json"]
[specialists.slo]
ttft_p95_s = 10.0
itl_p95_s = 10.0
correctness = 0.1
[[specialists]]
name = "mixture"
model = "{mixture}"
[specialists.moe]
strategy = "lru"
cache_capacity = 4
host_budget = "0"
"""
NUMBER = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"type": "integer", "minimum": 1, "maximum": 9}},
}


def use(served: Served) -> None:
    """Requests of many kinds, so that most metrics have a series."""
    dense, mixture = chat(model="dense"), chat(model="mixture")
    for body in (dense, mixture, chat(model="auto"), chat(model="dense", stream=True)):
        assert served.post("/v1/chat/completions", body).status == 200
    judged = chat("a number", model="dense", response_format=NUMBER)
    assert served.post("/v1/chat/completions", judged).status == 200
    infer = served.post("/v1/infer", {"prompt": "hello", "max_tokens": 4})
    assert infer.status == 200
    feedback = {"job_id": infer.json["job_id"], "verdict": "good"}
    assert served.post("/v1/feedback", feedback).status == 200
    long = chat("word " * 5000, model="dense")
    assert served.post("/v1/chat/completions", long).status == 400
    job = served.post("/v1/infer", {"prompt": "hello", "max_tokens": 4}, prefer="respond-async")
    assert job.status == 202
    assert served.post("/v1/chat/completions", dense, x_deadline_ms="60000").status == 200


@pytest.fixture(scope="module")
def scrape(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The families of a real server by name."""
    folder = tmp_path_factory.mktemp("ops")
    file = folder / "coterie.toml"
    # a copy: what is served leaves its heatmap beside the model
    mixture = shutil.copytree(tiny_checkpoint("qwen3_moe"), folder / "moe")
    dense = tiny_checkpoint("llama")
    file.write_text(SETTINGS.format(dense=dense, mixture=mixture))
    served = Served("--config", str(file), COTERIE_HOME=str(own_home(folder / "home")))
    try:
        use(served)
        text = served.get("/metrics").body.decode()
    finally:
        served.stop()
    yield {family.name: family for family in text_string_to_metric_families(text)}


@pytest.fixture(scope="module")
def live(scrape: Any) -> dict[str, set[str]]:
    """Labels by the name of a series: those that were scraped, for the few metrics without any
    sample those of the table."""
    table = {metric.name: metric for metric in METRICS}
    assert set(scrape) == set(table)
    names: dict[str, set[str]] = {"up": set()}
    num_seen = 0
    for name, family in scrape.items():
        metric = table[name]
        ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
        for end in ends[metric.kind]:
            names[name + end] = set(metric.labels) | ({"le"} if end == "_bucket" else set())
        for sample in family.samples:
            # what is scraped is what the table promises
            assert set(sample.labels) == names[sample.name], sample
        num_seen += bool(family.samples)
    assert num_seen >= 86, sorted(n for n, f in scrape.items() if not f.samples)
    return names


def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((OPS / "grafana.json").read_text())
    return read


def panels() -> list[dict[str, Any]]:
    outer = dashboard()["panels"]
    return [p for p in [*outer, *(q for o in outer for q in o.get("panels", ()))] if "targets" in p]


def grafana_expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def alert_rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((OPS / "alerts.yml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def labels_of(node: Any, live: dict[str, set[str]], used: list[tuple[str, str, str]]) -> set[str]:
    """The labels that the value of an expression has. Fails at a name or label that no series has;
    `used` gets (series, label, value) of every matcher."""
    match node:
        case promql.VectorSelector():
            assert node.name in live, f"no server has {node.name}"
            known = live[node.name] | SCRAPED
            for matcher in node.matchers.matchers:
                assert matcher.name in known, f"{node.name} has no label {matcher.name}"
                used.append((node.name, matcher.name, matcher.value))
            return known
        case promql.MatrixSelector():
            return labels_of(node.vector_selector, live, used)
        case promql.AggregateExpr():
            inner = labels_of(node.expr, live, used)
            by = set(node.modifier.labels) if node.modifier is not None else set()
            assert by <= inner, f"{by - inner} is no label of {node.expr.prettify()}"
            return by
        case promql.Call():
            found = [labels_of(argument, live, used) for argument in node.args]
            if node.func.name == "histogram_quantile":
                assert "le" in found[-1]
            return set().union(*found) - ({"le"} if "quantile" in node.func.name else set())
        case promql.BinaryExpr():
            left, right = labels_of(node.lhs, live, used), labels_of(node.rhs, live, used)
            if not isinstance(node.rhs, promql.NumberLiteral) and not isinstance(
                node.lhs, promql.NumberLiteral
            ):
                assert left == right, f"the two sides of {node.prettify()} never match"
            return left | right
        case promql.ParenExpr():
            return labels_of(node.expr, live, used)
        case promql.NumberLiteral():
            return set()
    raise AssertionError(f"not read: {type(node).__name__}")


def checked(expression: str, live: dict[str, set[str]]) -> list[tuple[str, str, str]]:
    used: list[tuple[str, str, str]] = []
    labels_of(promql.parse(expression.replace("$__rate_interval", "5m")), live, used)
    return used


@pytest.mark.full
def test_a_wrong_expression_is_found(live: dict[str, set[str]]) -> None:
    for wrong in (
        "coterie_unheard_of",
        "coterie_failures",  # a counter has _total on the wire
        "rate(vllm:time_to_first_token_seconds[5m])",
        'coterie_worker_up{model_name="a"}',
        "sum by (replica) (coterie_spike_level)",
        "histogram_quantile(0.5, sum by (model_name) (vllm:time_to_first_token_seconds_bucket))",
        "coterie_spike_level + coterie_worker_up",
    ):
        with pytest.raises(AssertionError):
            checked(wrong, live)
    with pytest.raises(ValueError):
        checked("rate(coterie_failures_total[5m", live)


@pytest.mark.full
def test_every_expression_of_the_dashboard_finds_its_series(live: dict[str, set[str]]) -> None:
    expressions = grafana_expressions()
    for expression in expressions:
        used = checked(expression, live)
        assert {label for _, label, _ in used} >= SCRAPED
    # no metric is left out
    text = " ".join(expressions)
    for name in live:
        if name != "up" and not name.endswith(("_sum", "_count")):
            assert f"{name}{{" in text, name


def test_the_dashboard_is_whole() -> None:
    read, shown = dashboard(), panels()
    numbers = [panel["id"] for panel in shown]
    assert len(set(numbers)) == len(numbers)
    places = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in shown}
    assert len(places) == len(shown)
    defined = {variable["name"] for variable in read["templating"]["list"]}
    text = json.dumps(read)
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval", "__all"}
    assert used == defined, (used, defined)
    for panel in shown:
        for target in panel["targets"]:
            by = re.search(r"sum by \(([^)]*)\)", target["expr"])
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert by is None or label in by[1], target
    for query in (v["query"] for v in read["templating"]["list"] if v["type"] == "query"):
        assert re.match(r"label_values\((coterie_|vllm:)\w+_total(\{.*\})?, \w+\)$", query), query


@pytest.mark.full
def test_every_alert_finds_its_series(scrape: Any, live: dict[str, set[str]]) -> None:
    rules = alert_rules()
    assert len(rules) > 15 and len({rule["alert"] for rule in rules}) == len(rules)
    docs = {metric.name: metric.doc for metric in METRICS}
    for rule in rules:
        used = checked(rule["expr"], live)
        assert used, rule
        for name, label, value in used:
            if name == "up" or label in SCRAPED:
                continue
            family = re.sub("_(total|bucket)$", "", name)
            seen = {sample.labels[label] for sample in scrape[family].samples}
            # a code of an error need not have happened
            assert value in seen or value in docs[family] or label == "code", (name, label, value)
        tree = promql.parse(rule["expr"])
        known = labels_of(tree, live, [])
        for text in rule["annotations"].values():
            for label in re.findall(r"\$labels\.(\w+)", text):
                assert label in known, (rule["alert"], label)
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert re.fullmatch(r"\d+m", rule["for"])


def test_the_files_are_those_of_the_table() -> None:
    sys.path.insert(0, str(OPS.parent / "scripts"))
    try:
        ops_files = import_module("ops_files")
    finally:
        sys.path.pop(0)
    assert (OPS / "grafana.json").read_text() == ops_files.dashboard()
    assert (OPS / "alerts.yml").read_text() == ops_files.rules()
    for wrong in (
        lambda: ops_files.rate("coterie_unheard_of"),
        lambda: ops_files.rate("coterie_spike_level", "model_name"),
        lambda: ops_files.gauge("coterie_spike_level", "replica"),
        lambda: ops_files.chosen("coterie_worker_up", "gauge", state="up"),
    ):
        with pytest.raises((KeyError, ValueError)):
            wrong()
