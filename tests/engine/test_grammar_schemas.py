"""Eighty shapes at temperature 1, every answer judged by jsonschema or by its pattern."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.serving.structured import ask, build, judge, run
from benchmarks.serving.structured_schemas import SCHEMAS
from tests.helpers.models.tiny import tiny_checkpoint


def faults(model: Path, count: int, max_tokens: int, threads: int) -> tuple[list[str], set[str]]:
    """What is wrong with any of `count` generations, and how they ended."""
    host = build(model, threads, 16)
    answers, _ = run(host.engine, [ask(host, index, max_tokens) for index in range(count)])
    host.close()
    found = [
        f"{list(SCHEMAS)[index % len(SCHEMAS)]}: {fault}: {answers[f'g{index}'].text!r}"
        for index in range(count)
        if (fault := judge(index, answers[f"g{index}"].text)) is not None
    ]
    return found, {answer.reason for answer in answers.values()}


def test_a_model_that_knows_nothing_keeps_to_eighty_shapes() -> None:
    assert len(SCHEMAS) == 80
    found, reasons = faults(tiny_checkpoint("llama"), 80, 160, threads=1)
    assert not found
    # random weights: many texts have no end of their own
    assert reasons == {"stop", "length"}


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_eight_hundred_answers_of_the_default_model(default_model_path: Path) -> None:
    found, _ = faults(default_model_path, 800, 200, threads=2)
    assert not found
