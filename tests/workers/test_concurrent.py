"""Eight streams, aborts and a kill -9, over worker processes, for every kind of model.

A slice runs always; `full` is every strategy. Crash continuation must not hide a fault: a worker
dies only when it was killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coterie.moe.dispatch.table import STRATEGIES
from tests.helpers.models.gguf_conversion import write_stored_bits
from tests.helpers.serving.concurrent_requests import (
    COLD,
    model_copy,
    spec_of,
    storm,
    with_adapters,
)

SLICE = {("qwen3_moe", "adaptive")}
ALL = [*STRATEGIES, "auto", "layer_grouped+lru", "lru+hot_cached_static"]
MATRIX = [
    *(("qwen3_moe", strategy) for strategy in ALL),
    *(("deepseek_v2", strategy) for strategy in ("adaptive", "lru", "hot_cached_static", "auto")),
    *(("dwr", strategy) for strategy in ("auto", "lru", "adaptive")),
    *((architecture, "lru") for architecture in ("mixtral", "olmoe")),
]


def sliced(cases: Iterable[tuple[str, str]]) -> list[Any]:
    return [pytest.param(*case, marks=() if case in SLICE else pytest.mark.full) for case in cases]


@pytest.mark.parametrize(("architecture", "strategy"), sliced(MATRIX))
def test_eight_streams_of_a_moe(architecture: str, strategy: str, tmp_path: Path) -> None:
    dispatch = replace(COLD, strategy=strategy)
    together = asyncio.run(storm(spec_of(model_copy(architecture, tmp_path), dispatch)))
    assert len(together) == 8
    for listener in together:
        cost = listener.end.moe  # type: ignore[union-attr]
        assert cost is not None and cost.demands > 0


@pytest.mark.full
@pytest.mark.parametrize("predict", ["off", "protect", "prefetch"])
@pytest.mark.parametrize("warmup", ["none", "hybrid"])
def test_eight_streams_however_experts_are_foreseen(
    predict: str, warmup: str, tmp_path: Path
) -> None:
    dispatch = replace(COLD, strategy="adaptive", predict=predict, warmup=warmup)
    asyncio.run(storm(spec_of(model_copy("qwen3_moe", tmp_path), dispatch)))


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3"])
def test_eight_streams_of_a_dense_model(architecture: str, tmp_path: Path) -> None:
    asyncio.run(storm(spec_of(model_copy(architecture, tmp_path))))


@pytest.mark.parametrize(
    "architecture", ["qwen3_moe", pytest.param("qwen3", marks=pytest.mark.full)]
)
def test_eight_streams_of_a_gguf_in_its_stored_bits(architecture: str, tmp_path: Path) -> None:
    file, _ = write_stored_bits(architecture, tmp_path)
    spec = spec_of(file, COLD if architecture == "qwen3_moe" else None)
    asyncio.run(storm(replace(spec, dtype="auto")))


@pytest.mark.parametrize(
    "architecture",
    ["llama", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("qwen3", "qwen3_moe"))],
)
def test_eight_streams_with_adapters(architecture: str, tmp_path: Path) -> None:
    dispatch = COLD if architecture == "qwen3_moe" else None
    spec = spec_of(model_copy(architecture, tmp_path), dispatch)
    asyncio.run(storm(*with_adapters(spec, architecture, tmp_path / "library")))
