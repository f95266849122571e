"""What a plan is made for: a recorded trace, or steps drawn from a heatmap.

With neither, experts are drawn by Zipf's law, and the plan says so. Draws are independent from
token to token: a recorded trace also holds a router's habit of asking again. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coterie.moe.dispatch.base import Demand
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.runtime.trace import LayerVisit, Trace, TraceStep
from coterie.moe.store.base import ExpertGeometry

ZIPF = 0.6
PROMPT_TOKENS = 512
# demands of all layers that a plan replays through each strategy: bounds the time it takes
DEMANDS = 1200


@dataclass(frozen=True, slots=True)
class Workload:
    geometry: ExpertGeometry
    steps: tuple[TraceStep, ...]
    # steps that only bring the tiers into their usual state, and are not counted
    warm: int
    # where this comes from, in words
    source: str
    # what a start would know of it
    heatmap: Heatmap

    def shortened(self, demands: int) -> Workload:
        """About so many demands: one prompt to warm up with and one that counts, the first tokens
        of their answers."""
        decodes = max(4, demands // max(1, len(self.geometry.layers)) // 3)
        warm = _cut(self.steps[: self.warm], decodes)
        steps = warm + _cut(self.steps[self.warm :], 2 * decodes)
        return Workload(self.geometry, tuple(steps), len(warm), self.source, self.heatmap)

    def thinned(self, every: int) -> Workload:
        """One layer in `every`."""
        layers = self.geometry.layers[::every]
        absent = frozenset(key for key in self.geometry.absent if key[0] in layers)
        geometry = ExpertGeometry(layers, self.geometry.num_experts, self.geometry.top_k, absent)
        steps = tuple(
            TraceStep(step.phase, tuple(_of(layers, chunk) for chunk in step.chunks))
            for step in self.steps
        )
        heatmap = Heatmap(geometry, self.heatmap.counts[::every])
        return Workload(geometry, steps, self.warm, self.source, heatmap)


def _of(layers: Sequence[int], chunk: Sequence[LayerVisit]) -> tuple[LayerVisit, ...]:
    return tuple(visit for visit in chunk if visit.demand.layer in layers)


def tokens_of(chunk: Sequence[LayerVisit], top_k: int) -> int:
    """Rows of one pass through the layers."""
    return max((sum(visit.demand.counts) for visit in chunk), default=0) // top_k


def workload_from_trace(trace: Trace, source: str, heatmap: Heatmap | None = None) -> Workload:
    """The first half warms up, and is all that a start knows unless `heatmap` is given: counts
    that hold the steps to be predicted would flatter every pin. A prompt has to be among them:
    where the second half has none, the last prompt's request counts; of a single request all."""
    steps = tuple(trace.steps)
    warm = len(steps) // 2
    prompts = [at for at, step in enumerate(steps) if step.phase == "prefill"]
    if prompts and prompts[-1] < warm:
        warm = prompts[-1] if len(prompts) > 1 else 0
    if not warm:
        source = f"{source}, from a cold start (one request)"
    seen = Trace(trace.geometry, max(1, warm))
    seen.steps.extend(steps[:warm])
    return Workload(trace.geometry, steps, warm, source, heatmap or seen.heatmap())


def workload_from_heatmap(
    heatmap: Heatmap, source: str, prompt_tokens: int = PROMPT_TOKENS
) -> Workload:
    """Two requests drawn from the heatmap's shares; the first is for warming up."""
    geometry = heatmap.geometry
    draw = _Draws(geometry, heatmap.counts)
    decodes = max(4, DEMANDS // max(1, len(geometry.layers)) // 3)
    warm = [draw.prefill(prompt_tokens), *draw.decodes(decodes)]
    steps = [*warm, draw.prefill(prompt_tokens), *draw.decodes(2 * decodes)]
    return Workload(geometry, tuple(steps), len(warm), source, heatmap)


def assumed_workload(geometry: ExpertGeometry, prompt_tokens: int = PROMPT_TOKENS) -> Workload:
    """Nothing is known: the e-th favourite of a layer is asked for in proportion to e^-0.6."""
    shares = (1.0 + np.arange(geometry.num_experts)) ** -ZIPF
    order = np.random.default_rng(0)
    counts = np.stack([order.permutation(shares) for _ in geometry.layers])
    source = f"no trace or heatmap: experts assumed to follow Zipf's law with exponent {ZIPF}"
    return workload_from_heatmap(Heatmap(geometry, counts), source, prompt_tokens)


class _Draws:
    """Experts without repetition inside a token, in proportion to `counts` [layers, experts]."""

    def __init__(self, geometry: ExpertGeometry, counts: npt.NDArray[np.float64]) -> None:
        self.geometry = geometry
        self.random = np.random.default_rng(1)
        weights = counts + max(float(counts.max()), 1.0) * 1e-6
        for layer, expert in geometry.absent:
            weights[geometry.layers.index(layer), expert] = 0.0
        self.shares = weights / weights.sum(axis=1, keepdims=True)

    def decodes(self, count: int) -> list[TraceStep]:
        top_k = self.geometry.top_k
        with np.errstate(divide="ignore"):
            scores = np.log(self.shares) + self.random.gumbel(size=(count, *self.shares.shape))
        best = np.argpartition(-scores, top_k - 1, axis=2)[:, :, :top_k]
        ones = (1,) * top_k
        return [
            self._step("decode", [(tuple(experts), ones) for experts in token])
            for token in np.sort(best, axis=2).tolist()
        ]

    def prefill(self, tokens: int) -> TraceStep:
        rows = self.random.multinomial(tokens * self.geometry.top_k, self.shares)
        asked = []
        for counts in rows:
            experts = np.flatnonzero(counts)
            asked.append((tuple(experts.tolist()), tuple(counts[experts].tolist())))
        return self._step("prefill", asked)

    def _step(
        self, phase: str, asked: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    ) -> TraceStep:
        pairs = zip(self.geometry.layers, asked, strict=True)
        visits = [LayerVisit(Demand(layer, phase, *experts)) for layer, experts in pairs]
        return TraceStep(phase, (tuple(visits),))


def _cut(steps: Sequence[TraceStep], decodes: int) -> list[TraceStep]:
    prompt = [step for step in steps if step.phase == "prefill"][:1]
    return prompt + [step for step in steps if step.phase == "decode"][:decodes]
