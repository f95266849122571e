"""The workload of a plan: a recorded trace, or steps drawn from a heatmap.

With neither, experts are drawn by Zipf's law, and the plan says so. Draws of different tokens are
independent; in a recorded trace, tokens also reuse the experts of the tokens before them. This
module does not import torch.
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
# demands of all layers that a plan replays through each strategy, to limit its time
DEMANDS = 1200


@dataclass(frozen=True, slots=True)
class Workload:
    geometry: ExpertGeometry
    steps: tuple[TraceStep, ...]
    # the first steps, which only fill the tiers and are not counted
    warm: int
    # where the workload comes from, in words
    source: str
    # what is known when the engine starts
    heatmap: Heatmap

    def shortened(self, demands: int) -> Workload:
        """About this many demands: one prompt to warm up and one that counts, each with the first
        tokens of its answer."""
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
    """The first half warms up. Unless `heatmap` is given, the start knows only that half: counts
    of the predicted steps would make pinned strategies look too good. The counted half needs a
    prompt: if it has none, it starts at the last prompt; of a single request all steps count."""
    steps = tuple(trace.steps)
    warm = len(steps) // 2
    prompts = [at for at, step in enumerate(steps) if step.phase == "prefill"]
    if prompts and prompts[-1] < warm:
        warm = prompts[-1] if len(prompts) > 1 else 0
    if not warm:
        source = f"{source}, from a cold start (one request)"
    before = Trace(trace.geometry, max(1, warm))
    before.steps.extend(steps[:warm])
    return Workload(trace.geometry, steps, warm, source, heatmap or before.heatmap())


def workload_from_heatmap(
    heatmap: Heatmap, source: str, prompt_tokens: int = PROMPT_TOKENS
) -> Workload:
    """Two requests drawn from the heatmap's shares; the first one warms up."""
    geometry = heatmap.geometry
    draw = _Draws(geometry, heatmap.counts)
    decodes = max(4, DEMANDS // max(1, len(geometry.layers)) // 3)
    warm = [draw.prefill(prompt_tokens), *draw.decodes(decodes)]
    steps = [*warm, draw.prefill(prompt_tokens), *draw.decodes(2 * decodes)]
    return Workload(geometry, tuple(steps), len(warm), source, heatmap)


def assumed_workload(geometry: ExpertGeometry, prompt_tokens: int = PROMPT_TOKENS) -> Workload:
    """Nothing is known: a layer uses its e-th most used expert in proportion to e^-0.6."""
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
