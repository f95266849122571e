"""Requests to the toy engine whose answers are held to a grammar."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coterie.core.plan import Admitted, Assignment
from coterie.core.request import ResponseFormat
from tests.helpers.models.toy_model import drain, make_assignment, make_engine, make_lane

# over the toy's alphabet: "B" to "n"
PATTERN = "(CUB|[D-H]{2,5}k)(_[a-e]{1,3}){0,4}[XY]"
REGEX = ResponseFormat("regex", PATTERN)
NESTED = ResponseFormat("lark", 'start: "[" (start | WORD)* "]"\nWORD: /[a-e]+_/')


def constrained(name: str, wanted: ResponseFormat, **changes: Any) -> Assignment:
    given: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "ignore_eos": False, **changes}
    assignment = make_assignment(name, range(1, 20), **given)
    return replace(assignment, sampling=replace(assignment.sampling, constraint=wanted))


def run(*work: Assignment, **lane: Any) -> list[Any]:
    engine = make_engine(make_lane(**lane))
    for assignment in work:
        assert isinstance(engine.add(assignment), Admitted)
    return drain(engine)
