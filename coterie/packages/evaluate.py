"""Evaluates an expert's answers: metrics by name, 95% intervals, and the test items of a package.

Every metric is a yes or no per item. Where possible it ignores the form (code fences, text around
the answer), so that a base model that was not trained on the form is judged by content. Runs no
model; SQL runs in an empty in-memory database under an authorizer.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coterie.core.errors import WeightsError

# most items that an expert is evaluated with
MAX_ITEMS = 2000
_MAX_LINE_BYTES = 20_000
_MAX_ANSWER_TOKENS = 512
_MAX_LANGUAGE = 8
_Z_95 = 1.959963984540054

Metric = Callable[[str, Any], bool]


@dataclass(frozen=True, slots=True)
class EvalItem:
    messages: tuple[dict[str, str], ...]
    expected: Any
    max_tokens: int
    # code of the language it is written in; empty = not stated
    language: str = ""


@dataclass(frozen=True, slots=True)
class EvalScore:
    """`low` and `high` are the 95% interval of the share of correct answers (Wilson)."""

    right: int
    n: int
    share: float
    low: float
    high: float


def score(verdicts: Sequence[bool]) -> EvalScore:
    right, n = sum(verdicts), len(verdicts)
    low, high = wilson(right, n)
    return EvalScore(right, n, right / n if n else 0.0, low, high)


def wilson(right: int, n: int) -> tuple[float, float]:
    """The 95% interval for a share of `right` in `n`."""
    if n == 0:
        return 0.0, 1.0
    share, z2 = right / n, _Z_95 * _Z_95
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    # rounding must not move the bounds 0 and 1
    low = 0.0 if right == 0 else max(0.0, middle - half)
    high = 1.0 if right == n else min(1.0, middle + half)
    return low, high


def read_items(data: bytes, file: str = "tests/eval.jsonl") -> list[EvalItem]:
    """The items of a package, one per line; raises WeightsError for a line that is not an item."""
    lines = [line for line in data.splitlines() if line.strip()]
    if len(lines) > MAX_ITEMS:
        raise WeightsError(f"{file}: {len(lines)} items; {MAX_ITEMS} at most")
    return [_item(line, f"{file}, line {number}") for number, line in enumerate(lines, 1)]


def _item(line: bytes, where: str) -> EvalItem:
    if len(line) > _MAX_LINE_BYTES:
        raise WeightsError(f"{where}: longer than {_MAX_LINE_BYTES} bytes")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{where}: not JSON ({error})") from error
    if not isinstance(value, dict) or "expected" not in value:
        raise WeightsError(f"{where}: an item has `messages` and `expected`")
    messages, limit = value.get("messages"), value.get("max_tokens", 64)
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise WeightsError(f"{where}: `messages` is a list of role and content, both text")
    if type(limit) is not int or not 0 < limit <= _MAX_ANSWER_TOKENS:
        raise WeightsError(f"{where}: `max_tokens` is a number from 1 to {_MAX_ANSWER_TOKENS}")
    language = value.get("language", "")
    if not isinstance(language, str) or len(language) > _MAX_LANGUAGE:
        raise WeightsError(f"{where}: `language` is a code such as de")
    return EvalItem(tuple(messages), value["expected"], limit, language)


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and all(isinstance(part, str) for part in value.values())
    )


def judge(metric: str, answer: str, expected: Any) -> bool:
    """Whether an answer is correct. Raises WeightsError for an unknown metric or an invalid
    item."""
    if metric not in METRICS:
        raise WeightsError(f"no metric {metric!r}; there are {', '.join(sorted(METRICS))}")
    try:
        return METRICS[metric](answer, expected)
    except (KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"`expected` does not fit the metric {metric}: {error!r}") from error


def exact(answer: str, expected: str | list[str]) -> bool:
    """The same text, ignoring white space, quotes and a full stop around it; or one of several
    texts."""
    right = [expected] if isinstance(expected, str) else expected
    return _bare(answer) in [_bare(text) for text in right]


def _bare(text: str) -> str:
    return " ".join(text.split()).strip("`\"'* ").removesuffix(".").strip("`\"'* ")


def label(answer: str, expected: dict[str, Any]) -> bool:
    """The first label in `among` that the answer contains is `label`."""
    among = {name.lower() for name in expected["among"]}
    words = re.findall(r"[a-z0-9_-]+", answer.lower())
    first = next((word for word in words if word in among), None)
    return bool(first == expected["label"].lower())


def json_fields(answer: str, expected: dict[str, Any]) -> bool:
    """The first JSON object of the answer has exactly these fields and values."""
    start = answer.find("{")
    if start < 0:
        return False
    try:
        value, _ = json.JSONDecoder().raw_decode(answer[start:])
    except (ValueError, RecursionError):
        return False
    return bool(_plain(value) == _plain(expected))


def _plain(value: Any) -> Any:
    """Makes numbers and texts with the same meaning equal."""
    if isinstance(value, dict):
        return {key.strip().lower(): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    text = " ".join(str(value).split())
    try:
        return float(text)
    except ValueError:
        return text


def commit_header(answer: str, expected: dict[str, str]) -> bool:
    """A conventional commit header with the correct type and scope, and a description after it."""
    line = _bare(answer.strip().split("\n")[0])
    header = re.fullmatch(r"([a-z]+)\(([a-z0-9_./-]+)\): \S.{4,}", line)
    return header is not None and (header[1], header[2]) == (expected["type"], expected["scope"])


def sql_result(answer: str, expected: dict[str, str]) -> bool:
    """Its query returns the rows of the expected query; `setup` makes the table."""
    query = re.search(r"\bselect\b[^;`]*", answer, re.IGNORECASE)
    if query is None:
        return False
    expected_rows = _rows(expected["setup"], expected["sql"])
    rows = _rows(expected["setup"], query[0])
    if expected_rows is None:
        raise WeightsError(f"the expected query does not run: {expected['sql']}")
    if rows is None:
        return False
    if "order by" in expected["sql"].lower():
        return rows == expected_rows
    return sorted(map(repr, rows)) == sorted(map(repr, expected_rows))


_MAX_ROWS, _MAX_SQL_STEPS = 1000, 200
_ALLOWED = frozenset((sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION))


def _rows(setup: str, query: str) -> list[tuple[Any, ...]] | None:
    """None if the query is refused or fails."""
    database = sqlite3.connect(":memory:")
    try:
        database.set_authorizer(_only_tables)
        database.executescript(setup)
        database.set_authorizer(_only_reading)
        # called every thousand operations: stops an endless query
        steps_left = iter(range(_MAX_SQL_STEPS))
        database.set_progress_handler(lambda: next(steps_left, -1) < 0, 1000)
        return database.execute(query).fetchmany(_MAX_ROWS)
    except (sqlite3.Error, sqlite3.Warning, UnicodeError):
        return None
    finally:
        database.close()


def _only_reading(action: int, *_: Any) -> int:
    return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY


def _only_tables(action: int, *_: Any) -> int:
    refused = (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_PRAGMA, sqlite3.SQLITE_CREATE_VTABLE)
    return sqlite3.SQLITE_DENY if action in refused else sqlite3.SQLITE_OK


METRICS: dict[str, Metric] = {
    "exact": exact,
    "label": label,
    "json_fields": json_fields,
    "sql_result": sql_result,
    "commit_header": commit_header,
}


ITEMS = "tests/eval.jsonl"
# items that state their language, and the manifest key of their figures
LANGUAGE_ITEMS = "tests/languages.jsonl"
LANGUAGES = "languages"
# share of items that may have another verdict on another machine: kernels round differently
TOLERANCE = 0.03


@dataclass(frozen=True, slots=True)
class EvalComparison:
    """`base` and `expert`: whether the answer to each item was correct, in the order of the
    items."""

    metric: str
    base: tuple[bool, ...]
    expert: tuple[bool, ...]
    tolerance: float = TOLERANCE

    def first(self, n: int) -> EvalComparison:
        return EvalComparison(self.metric, self.base[:n], self.expert[:n], self.tolerance)

    @property
    def is_better(self) -> bool:
        """Whether the lower 95% bound of the expert is above the score of the base."""
        return score(self.expert).low > score(self.base).share

    def section(self, items: str = ITEMS) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "items": items,
            "n": len(self.base),
            "tolerance": self.tolerance,
            "base": _side(self.base),
            "expert": _side(self.expert),
        }

    def reproduces(self, stated: EvalComparison) -> bool:
        """Whether both scores equal those of `stated`, within its tolerance."""
        allowed = math.ceil(stated.tolerance * len(stated.base))
        return all(
            len(own) == len(their) and abs(sum(own) - sum(their)) <= allowed
            for own, their in ((self.base, stated.base), (self.expert, stated.expert))
        )


def _side(verdicts: Sequence[bool]) -> dict[str, Any]:
    result = score(verdicts)
    return {
        "right": result.right,
        "score": round(result.share, 4),
        "low_95": round(result.low, 4),
        "high_95": round(result.high, 4),
        "verdicts": "".join("1" if right else "0" for right in verdicts),
    }


def read_figures(section: Mapping[str, Any], where: str) -> EvalComparison:
    """Raises WeightsError if the manifest states no figures, or invalid ones."""
    metric, tolerance = section.get("metric"), section.get("tolerance", TOLERANCE)
    if not isinstance(metric, str) or metric not in METRICS:
        raise WeightsError(
            f"{where}: its manifest states no evaluation by a metric that is known "
            f"({', '.join(sorted(METRICS))}), so there is nothing to test."
        )
    if not isinstance(tolerance, int | float) or not 0 <= tolerance <= 0.2:
        raise WeightsError(f"{where}: evaluation.tolerance is no share from 0 to 0.2.")
    base, expert = (_verdicts(section.get(side), where) for side in ("base", "expert"))
    if len(base) != len(expert) or section.get("n") != len(base):
        raise WeightsError(f"{where}: evaluation.n is not the number of its verdicts.")
    return EvalComparison(metric, base, expert, float(tolerance))


def read_languages(section: Mapping[str, Any], where: str) -> dict[str, EvalComparison]:
    """Figures by language, for the languages in the `evaluation` section."""
    stated = section.get(LANGUAGES, {})
    if not isinstance(stated, dict):
        raise WeightsError(f"{where}: evaluation.{LANGUAGES} is no map of figures by language.")
    return {
        code: read_figures(figures, f"{where} ({code})")
        for code, figures in stated.items()
        if isinstance(figures, dict)
    }


def _verdicts(side: Any, where: str) -> tuple[bool, ...]:
    marks = side.get("verdicts") if isinstance(side, dict) else None
    if not isinstance(marks, str) or not marks or set(marks) - {"0", "1"}:
        raise WeightsError(f"{where}: evaluation has no verdicts (a text of 0 and 1 per item).")
    verdicts = tuple(mark == "1" for mark in marks)
    if side.get("right") != sum(verdicts):
        raise WeightsError(f"{where}: evaluation.right is not the number of its verdicts.")
    return verdicts


def shown(result: EvalScore) -> str:
    """`0.93 [0.88, 0.96]`."""
    return f"{result.share:.3f} [{result.low:.3f}, {result.high:.3f}]"
