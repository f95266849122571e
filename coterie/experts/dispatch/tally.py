"""What a decision cost, by one rule for the runtime and for replay.

A demand is a hit when its expert lay in a slot, a prefetch hit when that was its first use since it
was loaded unasked, a miss when it had to be loaded, or a host run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coterie.experts.dispatch.base import Demand, Strategy, Wave


@dataclass(frozen=True, slots=True)
class Tally:
    hits: int
    prefetch_hits: int
    misses: int
    host_runs: int
    # experts moved into slots, asked for or not
    moves: int


def decide(strategy: Strategy, demand: Demand) -> tuple[Sequence[Wave], Tally]:
    """The strategy's waves for this demand, and what they count as."""
    early = strategy.scene.slots.prefetched
    first = {(demand.layer, expert) for expert in demand.experts} & early if early else set()
    waves = strategy.decide(demand)
    early -= first
    loaded = {key for wave in waves for key, _ in wave.load}
    host = sum(len(wave.host) for wave in waves)
    misses = sum((demand.layer, e) in loaded for wave in waves for e in wave.device)
    prefetched = sum(
        key in first and key not in loaded
        for wave in waves
        for key in ((demand.layer, expert) for expert in wave.device)
    )
    hits = len(demand.experts) - host - misses - prefetched
    moves = sum(len(wave.load) for wave in waves)
    return waves, Tally(hits, prefetched, misses, host, moves)
