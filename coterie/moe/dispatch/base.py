"""The interface of every strategy. Decisions are values; there are no tensors and no I/O here.

The runtime executes a decision, the planner replays it against a recorded trace: both call the
same `decide`. A strategy chooses what to evict and nothing else; `SlotMap` records which expert is
in which slot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from coterie.moe.runtime.slot_map import SlotMap
from coterie.moe.store.base import Key

if TYPE_CHECKING:
    from coterie.moe.runtime.heatmap import Heatmap
    from coterie.moe.store.base import ExpertGeometry


@dataclass(frozen=True, slots=True)
class Demand:
    """The experts that one step needs in one layer."""

    layer: int
    # "prefill" or "decode"
    phase: str
    # unique, ascending; counts[i] rows go to experts[i]
    experts: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wave:
    """One part of a layer's work. `load` fills slots (their old content is lost), then `device`
    experts run from slots while `host` experts run from host memory. Waves run in order; a later
    wave may reuse the slots of an earlier one. Every demanded expert runs in exactly one wave."""

    load: tuple[tuple[Key, int], ...] = ()
    device: tuple[int, ...] = ()
    host: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ExpertCosts:
    """Seconds, measured on this machine (planner/machine.py). With them a strategy decides whether
    an upload pays."""

    # one expert from host memory (or, with no host tier, from disk) to a device slot
    upload_s: float
    # one expert computed from a device slot / from host memory for one row
    device_run_s: float
    host_run_s: float
    # one expert from disk to host memory
    read_s: float = 0.0

    def with_host(self, share: float, shared: bool = False) -> ExpertCosts:
        """The costs when host memory holds this share of all experts. With none of them a miss
        comes from disk. With all of them nothing is read again, and where slots refer to host
        memory (`shared`) nothing is copied."""
        if share >= 1:
            return replace(self, read_s=0.0, upload_s=0.0 if shared else self.upload_s)
        return self if share > 0 else replace(self, upload_s=max(self.upload_s, self.read_s))


@dataclass(frozen=True, slots=True)
class StrategyContext:
    """What a strategy is built with."""

    geometry: ExpertGeometry
    # shared by the prefill and the decode strategy of one engine
    slots: SlotMap
    # counts known at start; None when there is no heatmap yet
    heatmap: Heatmap | None
    costs: ExpertCosts
    # False when the host tier has no slots (a device miss then reads the disk directly), or when
    # the host must not compute experts
    host_can_run: bool = True
    # where an expert runs must not depend on times measured during the run
    deterministic: bool = False
    # bytes of an expert, if the device reads one that is in no slot over the link, in about the
    # time of its upload: nothing has to be moved to run, and an upload only serves later steps
    in_place_bytes: int = 0
    # the N of `NAME:N`, for a strategy that takes a number
    number: int = 0
    # another strategy serves the other phase, with the same slots
    paired: bool = False

    @property
    def known(self) -> Heatmap | None:
        """The heatmap, unless nothing was counted."""
        return self.heatmap if self.heatmap is not None and self.heatmap.counts.any() else None


class Strategy:
    """Base of all strategies. `name` is the file's name, the CLI value and the docs heading."""

    name: ClassVar[str]
    # needs host memory: a host tier without slots is refused
    runs_on_host: ClassVar[bool] = False
    # runs experts from device slots: a device tier without slots is refused
    needs_device: ClassVar[bool] = True
    # may be written `NAME:N`; without `:N`, N is `default_number`
    takes_number: ClassVar[bool] = False
    default_number: ClassVar[int] = 1
    # loads experts that are in slots already, by its definition
    loads_again: ClassVar[bool] = False
    # the strategy that decodes when a user gives this name alone; empty = this one
    decodes_as: ClassVar[str] = ""

    def __init__(self, context: StrategyContext) -> None:
        self.context = context

    @classmethod
    def least_slots(cls, geometry: ExpertGeometry) -> int:
        """The fewest device slots it can run with; with fewer, `fallback` runs instead."""
        return 0

    @classmethod
    def fallback(cls, phase: str, geometry: ExpertGeometry, num_slots: int) -> str:
        """The strategy that serves `phase` with so few slots."""
        return cls.name

    def start(self) -> tuple[tuple[Key, int], ...]:
        """What to load before the first request: (expert, slot)."""
        return ()

    def decide(self, demand: Demand) -> Sequence[Wave]:
        """Place the demanded experts. Called once per MoE layer and step, in layer order."""
        raise TypeError(f"{self.name} does not decide")

    def decide_behind(
        self, rows: npt.NDArray[np.int64], phase: str
    ) -> tuple[tuple[Key, int], ...] | None:
        """Behind a step that read misses in place and used experts so often, [layers, experts]:
        what to load for later steps. None: `decide` is to be called for every layer."""
        return None

    def settled(self) -> bool:
        """Whether no further decision of this strategy can move an expert. (`update` still may,
        between tokens.)"""
        return len(self.context.slots.keys()) >= self.context.geometry.total

    def observe(self, rows: npt.NDArray[np.int64]) -> None:
        """A step ran without a call of `decide`, as `settled` allows: rows [layers, experts]."""

    def worth(self) -> npt.NDArray[np.float64] | None:
        """What each expert is worth in a slot, [layers, experts], 0 or more; None: the more, the
        later it was used."""
        return None

    def groups(self) -> tuple[tuple[int, ...], ...] | None:
        """Groups of MoE layers. All chunks of a prompt run through one group before the next group
        is loaded; None = every chunk runs through all layers."""
        return None

    def load_group(self, index: int) -> Sequence[tuple[Key, int]]:
        """What to load before group `index` runs."""
        return ()

    @property
    def replaced(self) -> int:
        """Experts that replaced another in its slot during a layer, because of a higher score."""
        return 0

    @property
    def updates(self) -> int:
        """Updates made since start."""
        return 0

    def update(self) -> tuple[tuple[Key, int], ...]:
        """Called between tokens: a bounded number of swaps to make now, or none."""
        return ()

    def prefetch(self, layer: int, experts: Sequence[int]) -> tuple[tuple[Key, int], ...]:
        """`layer` will probably need `experts`: what to load while the link is idle."""
        return ()

    def protect(self, layer: int, experts: Sequence[int]) -> None:
        """`layer` will probably need `experts`: do not evict them until it has run."""


# Make a slot free for `key` without evicting a busy expert. False when that is not possible.
MakeRoom = Callable[[Key, Collection[Key]], bool]


def place_in_waves(slots: SlotMap, demand: Demand, room: MakeRoom) -> list[Wave]:
    """Residents and as many misses as fit run in the first wave; later waves may evict them.

    An expert that still has no slot (all are pinned) runs on the host.
    """
    layer = demand.layer
    misses = slots.use((layer, expert) for expert in demand.experts)
    if not misses:
        return [Wave(device=demand.experts)]
    absent = {expert for _, expert in misses}
    device = [expert for expert in demand.experts if expert not in absent]
    busy = {(layer, expert) for expert in device}
    waves: list[Wave] = []
    load: list[tuple[Key, int]] = []
    host: list[int] = []
    for key in misses:
        fits = room(key, busy)
        if not fits and busy:
            waves.append(Wave(tuple(load), tuple(device)))
            load, device = [], []
            busy.clear()
            fits = room(key, busy)
        if not fits:
            host.append(key[1])
            continue
        load.append((key, slots.place(key)))
        device.append(key[1])
        busy.add(key)
    waves.append(Wave(tuple(load), tuple(device), tuple(host)))
    return waves


def place_misses(slots: SlotMap, used: Sequence[Key], room: MakeRoom) -> list[tuple[Key, int]]:
    """As a CUDA device does inside a step, which has no waves: each missing expert of `used`, all
    of one layer, takes a slot that the layer does not use. One without a slot is read where it
    lies. Returns what is copied, and to which slots."""
    absent = slots.use(used)
    busy, copied = set(used).difference(absent), []
    for key in absent:
        if room(key, busy):
            copied.append((key, slots.place(key)))
            busy.add(key)
    return copied


def evict_oldest(slots: SlotMap) -> MakeRoom:
    """Evicts the least recently used expert of all layers."""

    def room(_: Key, busy: Collection[Key]) -> bool:
        if slots.free():
            return True
        victim = next((key for key in slots.by_age() if key not in busy), None)
        if victim is not None:
            slots.evict(victim)
        return victim is not None

    return room


def load_early(slots: SlotMap, keys: Collection[Key], room: MakeRoom) -> list[tuple[Key, int]]:
    """Load the absent ones of `keys` before they are needed, as far as there is room."""
    wanted = set(keys)
    return [
        (key, slots.place(key, early=True))
        for key in keys
        if key not in slots and room(key, wanted)
    ]
