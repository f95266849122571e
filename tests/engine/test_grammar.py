"""Answers held to a grammar while they are drawn: over the toy engine, every road to a token."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from toy import drain, make_assignment, make_engine, texts

from coterie.core.plan import Admitted, Assignment
from coterie.core.request import ResponseFormat

pytest.importorskip("llguidance")

# over the toy's alphabet, "B" to "m"
PATTERN = "(CAB|[D-H]{2,5}k)(_[a-e]{1,3}){0,4}[XY]"


def constrained(name: str, wanted: ResponseFormat, **changes: object) -> Assignment:
    given: dict[str, object] = {"max_tokens": 40, "temperature": 1.0, "seed": 7, **changes}
    assignment = make_assignment(name, range(1, 20), **given)  # type: ignore[arg-type]
    return replace(assignment, sampling=replace(assignment.sampling, constraint=wanted))


REGEX = ResponseFormat("regex", PATTERN)


def run(*work: Assignment) -> dict[tuple[str, int], str]:
    engine = make_engine()
    for assignment in work:
        assert isinstance(engine.add(assignment), Admitted)
    return texts(drain(engine))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_every_answer_matches(temperature: float) -> None:
    work = [constrained(f"r{i}", REGEX, seed=i, temperature=temperature) for i in range(12)]
    found = run(*work)
    assert len(found) == 12
    for text in found.values():
        assert re.fullmatch(PATTERN, text), text
    assert len(set(found.values())) > (1 if temperature else 0)
