"""The most demand hits any choice of residents could have had, knowing the future.

The slots start with what is asked for first. After a layer has run they keep those experts, out of
what lay there and what was just asked for, whose next use is nearest (Belady, with the right not to
keep). A bound for every strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from coterie.moe.planner.replay import Counts
from coterie.moe.runtime.trace import Trace
from coterie.moe.store.geometry import Key


def belady(trace: Trace, num_slots: int) -> Counts:
    """Hits and misses of the optimum. A prompt in chunks may walk chunk by chunk or layer by layer;
    the better of the two counts."""
    orders = [_sets(trace, by_layer=False)]
    if any(len(step.chunks) > 1 for step in trace.steps):
        orders.append(_sets(trace, by_layer=True))
    return max((_optimum(order, num_slots) for order in orders), key=lambda counts: counts.hits)


def _sets(trace: Trace, by_layer: bool) -> list[list[Key]]:
    """Experts that are asked for together, in order of time."""
    single = tuple((layer,) for layer in trace.geometry.layers)
    sets = []
    for step in trace.steps:
        for _, visit in step.walk(single if by_layer and step.phase == "prefill" else None):
            layer = visit.demand.layer
            sets.append([(layer, expert) for expert in visit.demand.experts])
    return sets


def _optimum(sets: Sequence[Sequence[Key]], num_slots: int) -> Counts:
    following = _next_uses(sets)
    counts = Counts()
    # the valid next use of every resident; the heap (farthest first) may hold outdated entries
    resident = _first_asked(sets, num_slots)
    farthest = [(-use, key) for key, use in resident.items()]
    heapify(farthest)
    for asked, uses in zip(sets, following, strict=True):
        for key, use in zip(asked, uses, strict=True):
            if key in resident:
                counts.hits += 1
            else:
                counts.misses += 1
            resident[key] = use
            heappush(farthest, (-use, key))
        while len(resident) > num_slots:
            use, key = heappop(farthest)
            if resident.get(key) == -use:
                del resident[key]
    return counts


def _first_asked(sets: Sequence[Sequence[Key]], limit: int) -> dict[Key, int]:
    """The experts that are asked for earliest, with the index of that set."""
    first: dict[Key, int] = {}
    for index, asked in enumerate(sets):
        for key in asked:
            first.setdefault(key, index)
        if len(first) >= limit:
            break
    return dict(list(first.items())[:limit])


def _next_uses(sets: Sequence[Sequence[Key]]) -> list[list[int]]:
    """For every demand, the index of the set that asks for the same expert next."""
    later: dict[Key, int] = {}
    never = len(sets)
    uses: list[list[int]] = []
    for index in range(len(sets) - 1, -1, -1):
        uses.append([later.get(key, never) for key in sets[index]])
        later.update(dict.fromkeys(sets[index], index))
    return uses[::-1]
