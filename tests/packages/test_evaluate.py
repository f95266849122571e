"""Metrics say yes to what is right in whatever form, and no to all else; bounds are Wilson's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coterie.core.errors import WeightsError
from coterie.packages.evaluate import (
    METRICS,
    EvalComparison,
    judge,
    read_figures,
    read_items,
    score,
    wilson,
)

_SQL = {
    "sql": "SELECT name FROM t WHERE n > 15",
    "setup": "CREATE TABLE t (name TEXT, n INTEGER); INSERT INTO t VALUES ('a', 10), ('b', 20);",
}
_LABEL = {"label": "neutral", "among": ["positive", "negative", "neutral"]}
_HEADER = {"type": "fix", "scope": "parser"}

RIGHT: list[tuple[str, str, Any]] = [
    ("exact", ' "2021-03-04". ', "2021-03-04"),
    ("label", "It is Neutral.", _LABEL),
    (
        "json_fields",
        'Sure:\n```json\n{"Age": "4", "who": "Bo  Li"}\n```',
        {"who": "Bo Li", "age": 4},
    ),
    ("json_fields", '{"price": 12.50}', {"price": "12.5"}),
    ("sql_result", "```sql\nselect name from t where 15 < n;\n```", _SQL),
    ("commit_header", "fix(parser): handle empty input\n\nMore.", _HEADER),
]
WRONG: list[tuple[str, str, Any]] = [
    ("exact", "2021-03-05", "2021-03-04"),
    ("label", "positive, not neutral", _LABEL),
    ("label", "hard to say", _LABEL),
    ("label", "neutrality", _LABEL),
    ("json_fields", '{"who": "Bo Li", "age": 4, "more": 1}', {"who": "Bo Li", "age": 4}),
    ("json_fields", '{"who": ', {"who": "Bo Li"}),
    ("json_fields", "[" * 5000, {"who": "Bo Li"}),
    ("sql_result", "SELECT name FROM t", _SQL),
    ("sql_result", "SELECT nothing FROM t", _SQL),
    ("sql_result", "I do not know.", _SQL),
    ("commit_header", "fix(lexer): handle empty input", _HEADER),
    ("commit_header", "Fix the parser", _HEADER),
]


@pytest.mark.parametrize(("metric", "answer", "expected"), RIGHT)
def test_right(metric: str, answer: str, expected: Any) -> None:
    assert judge(metric, answer, expected)


@pytest.mark.parametrize(("metric", "answer", "expected"), WRONG)
def test_wrong(metric: str, answer: str, expected: Any) -> None:
    assert not judge(metric, answer, expected)


def test_every_metric_is_tried() -> None:
    assert {case[0] for case in RIGHT} == {case[0] for case in WRONG} == set(METRICS)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT load_extension('/tmp/x')",
        "SELECT 1; DROP TABLE t",
        "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT MAX(n) FROM c",
        "SELECT COUNT(*) FROM t a, t b, t c, t d, t e, t f, t g, t h, t i, t j, t k, t l, t m, "
        "t n, t o, t p, t q, t r, t s, t u, t v, t w, t x, t y, t z, t aa, t bb, t cc, t dd",
    ],
)
def test_sql_of_a_model_cannot_harm_or_hang(query: str) -> None:
    assert not judge("sql_result", query, _SQL)


def test_order_counts_where_the_query_orders() -> None:
    expected = {**_SQL, "sql": "SELECT name FROM t ORDER BY n DESC"}
    assert judge("sql_result", "SELECT name FROM t ORDER BY n DESC", expected)
    assert not judge("sql_result", "SELECT name FROM t ORDER BY n ASC", expected)


def test_a_package_cannot_attach_files_in_its_setup(tmp_path: Any) -> None:
    target = tmp_path / "made.db"
    expected = {"sql": "SELECT 1", "setup": f"ATTACH '{target}' AS x; CREATE TABLE x.t (a);"}
    with pytest.raises(WeightsError):
        judge("sql_result", "SELECT 1", expected)
    assert not target.exists()


def test_wilson_bounds() -> None:
    # values of R's prop.test(..., correct = FALSE)
    assert wilson(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    # exactly: no expert is better than a base that has nothing right by having nothing right
    assert wilson(0, 12)[0] == 0.0 and wilson(12, 12)[1] == 1.0
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611252), abs=1e-6)
    assert score([True] * 150).low == pytest.approx(0.9750303, abs=1e-6)


@pytest.mark.parametrize(
    "line",
    [
        b"{", b"[]", b'{"messages": []}', b'{"messages": [], "expected": 1}',
        b'{"messages": [{"role": "user"}], "expected": 1}',
        b'{"messages": [{"role": "user", "content": 3}], "expected": 1}',
        b'{"messages": [{"role": "user", "content": "a"}], "expected": 1, "max_tokens": 0}',
        b'{"messages": [{"role": "user", "content": "a"}], "expected": 1, "max_tokens": true}',
    ],
)  # fmt: skip
def test_items_that_are_none_are_refused(line: bytes) -> None:
    with pytest.raises(WeightsError, match="line 2"):
        good = {"messages": [{"role": "user", "content": "a"}], "expected": 1}
        read_items(json.dumps(good).encode() + b"\n\n" + line)


def test_figures_survive_the_manifest_and_tell_what_differs() -> None:
    base = (False,) * 80 + (True,) * 20
    expert = (True,) * 90 + (False,) * 10
    figures = EvalComparison("exact", base, expert)
    assert read_figures(json.loads(json.dumps(figures.section())), "x") == figures
    assert figures.is_better
    assert not EvalComparison("exact", expert, expert).is_better
    near = EvalComparison("exact", base, expert[3:] + (False,) * 3)
    far = EvalComparison("exact", base, expert[4:] + (False,) * 4)
    assert near.reproduces(figures) and not far.reproduces(figures)
    assert not figures.first(50).reproduces(figures)
    assert figures.first(50).reproduces(figures.first(50))


@pytest.mark.parametrize(
    "change",
    [{"metric": "vibes"}, {"n": 3}, {"tolerance": 0.9}, {"base": {"right": 2, "verdicts": "1000"}}],
)
def test_figures_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    section = EvalComparison("exact", (True, False, False, False), (True,) * 4).section()
    with pytest.raises(WeightsError):
        read_figures({**section, **change}, "x")
