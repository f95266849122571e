"""Made-up traffic for the tests: what routers might ask for, in five kinds. Seeded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from coterie.moe.dispatch.base import Demand
from coterie.moe.runtime.trace import Trace
from coterie.moe.store.base import ExpertGeometry

# (step, layer index) -> a preference per expert, in logits
Taste = Callable[[int, int], np.ndarray]


def skewed(geometry: ExpertGeometry, rng: np.random.Generator) -> Taste:
    """A few favourites, more so in later layers."""
    layers, experts = len(geometry.layers), geometry.num_experts
    heat = np.linspace(0.5, 2.0, layers)[:, None] * rng.normal(size=(layers, experts)) * 1.5
    return lambda step, layer: heat[layer]


def drifting(geometry: ExpertGeometry, rng: np.random.Generator) -> Taste:
    """Favourites that wander off over some two hundred tokens."""
    shape = (len(geometry.layers), geometry.num_experts)
    stations = rng.normal(size=(64, *shape)) * 2.0

    def taste(step: int, layer: int) -> np.ndarray:
        at, share = divmod(step / 100, 1)
        near, far = stations[int(at) % 64, layer], stations[(int(at) + 1) % 64, layer]
        return near * (1 - share) + far * share

    return taste


def mixed(geometry: ExpertGeometry, rng: np.random.Generator) -> Taste:
    """Four domains; every forty tokens another one speaks."""
    shape = (len(geometry.layers), geometry.num_experts)
    domains = rng.normal(size=(4, *shape)) * 2.5
    turns = rng.integers(0, 4, size=1000)
    return lambda step, layer: domains[turns[step // 40], layer]


def uniform(geometry: ExpertGeometry, rng: np.random.Generator) -> Taste:
    return lambda step, layer: np.zeros(geometry.num_experts)


def cyclic(geometry: ExpertGeometry, rng: np.random.Generator) -> Taste:
    """Every token asks for the next experts in turn: the worst case of least recent use."""

    def taste(step: int, layer: int) -> np.ndarray:
        first = step * geometry.top_k + layer
        wanted = (np.arange(geometry.top_k) + first) % geometry.num_experts
        heat = np.zeros(geometry.num_experts)
        heat[wanted] = 1e6
        return heat

    return taste


TASTES = {
    "skewed": skewed,
    "drifting": drifting,
    "mixed": mixed,
    "uniform": uniform,
    "cyclic": cyclic,
}


def make(
    kind: str, geometry: ExpertGeometry, tokens: int, seed: int = 0, prompts: int = 0
) -> Trace:
    """`tokens` decode steps; with `prompts`, one prefill of two chunks each so many tokens."""
    rng = np.random.default_rng(seed)
    taste = TASTES[kind](geometry, rng)
    trace = Trace(geometry)
    for step in range(tokens):
        if prompts and step % prompts == 0:
            for _ in range(2):
                _chunk(trace, taste, step, rng, rows=8)
            trace.end_step()
        _chunk(trace, taste, step, rng, rows=1)
        trace.end_step()
    return trace


def _chunk(trace: Trace, taste: Taste, step: int, rng: np.random.Generator, rows: int) -> None:
    geometry = trace.geometry
    for index, layer in enumerate(geometry.layers):
        noise = rng.gumbel(size=(rows, geometry.num_experts))
        order = np.argsort(-(taste(step, index) + noise), axis=1)[:, : geometry.top_k]
        experts, counts = np.unique(order, return_counts=True)
        phase = "prefill" if rows > 1 else "decode"
        demand = Demand(layer, phase, tuple(experts.tolist()), tuple(counts.tolist()))
        trace.record(demand)
