"""Guesses at the next layer's experts in a running runtime: useful ones stay, others end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from coterie.moe.runtime.runtime import ExpertRuntime
from coterie.moe.runtime.step import ExpertStep
from tests.helpers.moe.dispatched_model import DispatchedModel, Setting
from tests.helpers.moe.tiny_moe import EXPERTS, LAYERS, checkpoint_of

Ids = list[int]


@pytest.fixture
def runtime() -> Iterator[ExpertRuntime]:
    """Half of the experts have slots, the others are on disk."""
    setting = Setting(checkpoint_of("qwen3_moe"), "adaptive", LAYERS * EXPERTS // 2, "0")
    with DispatchedModel(setting) as dispatched:
        yield dispatched.runtime


def decode(runtime: ExpertRuntime, tokens: int, guess: Callable[[Ids], Ids]) -> None:
    """Every layer of every token asks for experts at random; guesses are made of the truth. Reads
    end before the next layer, as they would beside attention."""
    draw = np.random.default_rng(5)
    geometry = runtime.geometry
    hidden = torch.zeros(1, runtime.parts.store.layout(0).hidden)
    weights = torch.full((1, geometry.top_k), 1.0 / geometry.top_k)
    for _ in range(tokens):
        routes = [draw.permutation(EXPERTS)[: geometry.top_k].tolist() for _ in geometry.layers]
        for layer, route in zip(geometry.layers, routes, strict=True):
            if layer + 1 < LAYERS and runtime.wants_hints:
                runtime.hint(layer + 1, torch.tensor([guess(routes[layer + 1])]))
            ids = torch.tensor([route], dtype=torch.int32)
            runtime.run(ExpertStep(layer, "decode", hidden, ids, weights, None))
            for arrival in list(runtime.parts.device.pending.values()):
                arrival.settle()
        runtime.end_step()
        runtime.update()


def test_right_guesses_stay_in_use(runtime: ExpertRuntime) -> None:
    decode(runtime, 300, lambda truth: truth)
    found = runtime.report()["prediction"]
    assert found["slot_overlap"] == 1.0 and found["exact_match"] == 1.0
    assert found["protecting"] and found["prefetching"] and found["why_off"] == ""
    assert found["prefetched"] > 0
    assert found["useful_prefetches"] >= 0.9 * found["prefetched"]


def test_wrong_guesses_end_and_say_why(runtime: ExpertRuntime) -> None:
    decode(runtime, 300, lambda truth: [e for e in range(EXPERTS) if e not in truth][:2])
    found = runtime.report()["prediction"]
    assert not found["protecting"] and not found["prefetching"]
    assert "slot overlap 0%" in found["why_off"]
    before = found["prefetched"]
    decode(runtime, 20, lambda truth: truth)
    assert runtime.report()["prediction"]["prefetched"] == before, "it rests"


def test_a_link_that_is_never_idle_is_left_alone(runtime: ExpertRuntime) -> None:
    release = threading.Event()

    def wait() -> None:
        release.wait()

    runtime._transfer._workers.put(wait, urgent=False)
    try:
        decode(runtime, 300, lambda truth: truth)
        found = runtime.report()["prediction"]
    finally:
        release.set()
    assert found["protecting"] and not found["prefetching"] and found["prefetched"] == 0
    assert "idle link 0%" in found["why_off"]
