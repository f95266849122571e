"""A stack whose experts are all in memory runs in one call: the same bits, the same counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from coterie.core.moe import MoeSettings, MoeUsage
from coterie.kernels.cpu.compile import find_compiler
from coterie.models.base import CausalLM, load_model
from coterie.moe.runtime.runtime import FILL_AFTER, ExpertRuntime
from coterie.weights.checkpoint import open_checkpoint
from tests.helpers.models.paged_model import Paged, prompt_logits
from tests.helpers.models.tiny import tiny_checkpoint

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

PROMPT = [(7 * i * i + 3) % 380 for i in range(40)]


def opened(kind: str, dtype: str, **settings: object) -> CausalLM:
    checkpoint = open_checkpoint(tiny_checkpoint(kind))
    dispatch = MoeSettings(warmup="none", **settings)  # type: ignore[arg-type]
    return load_model(checkpoint, dtype=dtype, dispatch=dispatch)


def runtime_of(model: CausalLM) -> ExpertRuntime:
    assert isinstance(model.experts, ExpertRuntime)
    return model.experts


def wait_for(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ready()


@pytest.fixture(params=["qwen3_moe", "mixtral", "olmoe"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


PLACES = {
    "fp32": {"strategy": "persistent", "device_budget": "100%"},
    "bf16": {"strategy": "cpu_only", "host_budget": "100%"},
    "int8": {"strategy": "hot_cached_static", "device_budget": "40%", "host_budget": "100%"},
}


def has_residents(runtime: ExpertRuntime) -> bool:
    return runtime.resident("prefill") is not None


@pytest.mark.parametrize("dtype", PLACES)
def test_same_bits_as_the_walk(kind: str, dtype: str) -> None:
    fast, slow = (opened(kind, dtype, **PLACES[dtype]) for _ in range(2))
    for model in (fast, slow):  # all experts are read, whatever the router thinks of them
        runtime = runtime_of(model)
        for _ in range(FILL_AFTER):
            runtime.update()
        wait_for(partial(has_residents, runtime))
        runtime.end_step()
    runtime_of(slow).spans = []  # someone watches layer by layer
    assert runtime_of(slow).resident("prefill") is None
    for chunk in (40, 7, 1):
        fast.chunk_tokens = 16
        got, expected = (prompt_logits(model, PROMPT, chunk) for model in (fast, slow))
        assert torch.equal(got, expected)
        one, other = fast.take_usage(), slow.take_usage()
        assert one is not None and other is not None
        assert counts(one[0]) == counts(other[0])
    fast.close()
    slow.close()


def counts(usage: MoeUsage) -> tuple[int, ...]:
    return usage.device_hits, usage.device_misses, usage.host_runs, usage.host_hits


def test_every_sequence_is_told_its_own_demands() -> None:
    """Two sequences in one step, counted as the walk counts them."""
    results = []
    for watched in (False, True):
        model = opened("qwen3_moe", "fp32", strategy="persistent", device_budget="100%")
        if watched:
            runtime_of(model).spans = []
        Paged(model, 2, 32).step([(0, PROMPT[:9]), (1, PROMPT[9:30])])
        usage = model.take_usage()
        assert usage is not None
        results.append([counts(usage[0]), *map(counts, usage[1])])
        model.close()
    assert results[0] == results[1]
    assert len(results[0]) == 3


def test_the_rest_is_read_in_the_background() -> None:
    """What nobody asked for is read once tokens flow; then the whole stack runs at once."""
    model = opened("qwen3_moe", "fp32", strategy="cpu_only")
    runtime = runtime_of(model)
    prompt_logits(model, PROMPT[:1], 1)
    assert runtime.resident("decode") is None
    for _ in range(FILL_AFTER):
        runtime.update()
    wait_for(lambda: runtime.resident("decode") is not None)
    runtime.end_step()
    total = runtime.telemetry.total()
    assert total.host_misses == runtime.geometry.total
    model.close()


def test_closing_does_not_read_the_rest() -> None:
    """Stopping while experts are read in the background waits for the read under way alone."""
    model = opened("qwen3_moe", "fp32", strategy="cpu_only")
    runtime = runtime_of(model)
    disk, read = runtime.parts.store.disk, runtime.parts.store.disk.pread

    def slow(number: int, view: memoryview, offset: int) -> int:
        time.sleep(0.1)
        return read(number, view, offset)

    disk.pread = slow  # type: ignore[method-assign]
    for _ in range(FILL_AFTER):
        runtime.update()
    begin = time.monotonic()
    model.close()
    assert time.monotonic() - begin < 1.0
    assert runtime.geometry.total * 0.3 > 2.0  # three reads each: all of them would have taken this
