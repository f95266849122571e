"""One MoE layer's work in one step: what the gate chose, in the form that a strategy takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from coterie.core.errors import InternalError
from coterie.moe.dispatch.base import Demand, Wave

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.moe.runtime.slot_map import SlotMap
    from coterie.moe.store.base import Key


@dataclass(frozen=True, slots=True)
class ExpertStep:
    layer: int
    # "prefill" when any row of the step is prefill, else "decode"
    phase: str
    hidden: Tensor  # [T, D], the experts' input (after the norm)
    topk_ids: Tensor  # [T, K] int32, on the CPU
    topk_weights: Tensor  # [T, K] fp32, on hidden's device
    # the sequence (index into the step) that each row belongs to; None = one sequence
    owners: Tensor | None = None  # [T] int32, on the CPU


# below this many (row, k) pairs a Python loop counts experts faster than numpy
_FEW_PAIRS = 64


@dataclass(frozen=True, slots=True)
class DemandClasses:
    """How the demands of one layer are met. Each expert is in one of these."""

    # runs from a slot; runs from a slot that a prefetch filled; is moved now; runs on the host
    hits: tuple[int, ...] = ()
    early: tuple[int, ...] = ()
    misses: tuple[int, ...] = ()
    host: tuple[int, ...] = ()


def demand_of(step: ExpertStep) -> Demand:
    ids = step.topk_ids
    if ids.shape[0] == 1:
        experts = tuple(sorted(ids.tolist()[0]))
        return Demand(step.layer, step.phase, experts, (1,) * len(experts))
    if ids.numel() <= _FEW_PAIRS:
        counts: dict[int, int] = {}
        for expert in ids.reshape(-1).tolist():
            counts[expert] = counts.get(expert, 0) + 1
        few = sorted(counts)
        return Demand(step.layer, step.phase, tuple(few), tuple(counts[e] for e in few))
    rows = np.bincount(ids.numpy().reshape(-1))
    used = np.flatnonzero(rows)
    return Demand(step.layer, step.phase, tuple(used.tolist()), tuple(rows[used].tolist()))


def first_uses(slots: SlotMap, demand: Demand) -> set[Key]:
    """The demanded experts that were prefetched and are used now for the first time."""
    early = slots.prefetched
    if not early:
        return set()
    first = early.intersection((demand.layer, expert) for expert in demand.experts)
    early -= first
    return first


def classify(demand: Demand, waves: Sequence[Wave], first: set[Key]) -> DemandClasses:
    """Check also that every demanded expert runs exactly once."""
    if len(waves) == 1 and not waves[0].load and not first:
        classes = DemandClasses(hits=waves[0].device, host=waves[0].host)
        if demand.experts in (classes.hits, classes.host):
            return classes
    else:
        classes = _classes_of(demand.layer, waves, first)
    met = (*classes.hits, *classes.early, *classes.misses, *classes.host)
    if tuple(sorted(met)) != demand.experts:
        raise InternalError(f"layer {demand.layer}: asked for {demand.experts}, would run {met}")
    return classes


def _classes_of(layer: int, waves: Sequence[Wave], first: set[Key]) -> DemandClasses:
    loaded = {key for wave in waves for key, _ in wave.load}
    device = [(layer, expert) for wave in waves for expert in wave.device]
    return DemandClasses(
        hits=tuple(key[1] for key in device if key not in loaded and key not in first),
        early=tuple(key[1] for key in device if key not in loaded and key in first),
        misses=tuple(key[1] for key in device if key in loaded),
        host=tuple(expert for wave in waves for expert in wave.host),
    )
