"""What every strategy answers, and from what: decisions as values, no tensors, no I/O.

The runtime carries a decision out, the planner replays it against a recorded trace: both call the
same `decide`. A strategy owns its choice of victims and nothing else; which expert lies in which
slot is `Residency`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from coterie.moe.runtime.heatmap import Heatmap
    from coterie.moe.runtime.slot_map import Residency
    from coterie.moe.store.geometry import Geometry, Key


@dataclass(frozen=True, slots=True)
class Demand:
    """What one step asks of one layer."""

    layer: int
    # "prefill" or "decode"
    phase: str
    # unique, ascending; counts[i] rows go to experts[i]
    experts: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wave:
    """One turn of a layer. `load` fills slots (their old content is gone), then `device` experts
    run from slots while `host` experts run from host memory. Waves run in order; a later wave may
    reuse the slots of an earlier one. Every demanded expert runs in exactly one wave."""

    load: tuple[tuple[Key, int], ...] = ()
    device: tuple[int, ...] = ()
    host: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, measured on this machine (machine.py); what a pay-back test needs."""

    # one expert from host memory (or, with no host tier, from disk) to a device slot
    upload_s: float
    # one expert computed from a device slot / from host memory for one row
    device_run_s: float
    host_run_s: float
    # one expert from disk to host memory
    read_s: float = 0.0

    def with_host(self, share: float, shared: bool = False) -> Costs:
        """The same where host memory holds this share of all experts: with none of them a miss
        comes from disk, with all nothing is ever read again, and where slots refer to host memory
        (`shared`) nothing is copied."""
        if share >= 1:
            return replace(self, read_s=0.0, upload_s=0.0 if shared else self.upload_s)
        return self if share > 0 else replace(self, upload_s=max(self.upload_s, self.read_s))


@dataclass(frozen=True, slots=True)
class Scene:
    """What a strategy is given for life."""

    geometry: Geometry
    # shared by the prefill and the decode strategy of one engine
    slots: Residency
    # counts known at start; None when there is no heatmap yet
    heatmap: Heatmap | None
    costs: Costs
    # False when the host tier holds nothing (a device miss then reads the disk directly), or when
    # computing on the host is not wanted
    host_can_run: bool = True
    # fix where each expert runs: no choice may depend on time measured during the run
    deterministic: bool = False


class Strategy:
    """Base of all strategies. `name` is the file's name, the CLI value and the docs heading."""

    name: ClassVar[str]
    # what lies in a slot is computed from there
    uses_slots: ClassVar[bool] = True

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    def start(self) -> tuple[tuple[Key, int], ...]:
        """What to load before the first request: (expert, slot)."""
        return ()

    def decide(self, demand: Demand) -> Sequence[Wave]:
        """Place the demanded experts. Called once per MoE layer and step, in layer order."""
        raise TypeError(f"{self.name} does not decide")

    def settled(self) -> bool:
        """Whether no decision of this strategy could move anything any more. (Between tokens
        `update` still may.)"""
        return len(self.scene.slots.keys()) >= self.scene.geometry.total

    def observe(self, rows: npt.NDArray[np.int64]) -> None:
        """A step ran without asking `decide`, which `settled` allowed: rows [layers, experts]."""

    def groups(self) -> tuple[tuple[int, ...], ...] | None:
        """Groups of MoE layers through which all chunks of a prompt walk before the next group is
        loaded; None = every chunk runs through all layers."""
        return None

    def load_group(self, index: int) -> Sequence[tuple[Key, int]]:
        """What to load before group `index` is walked."""
        return ()

    @property
    def replaced(self) -> int:
        """Experts that took another's place while a layer waited, because they lead it."""
        return 0

    @property
    def updates(self) -> int:
        """Rounds in which it looked at its slots again, since start."""
        return 0

    def update(self) -> tuple[tuple[Key, int], ...]:
        """Between tokens: swaps worth making now (bounded), or nothing."""
        return ()

    def prefetch(self, layer: int, experts: Sequence[int]) -> tuple[tuple[Key, int], ...]:
        """`layer` will probably ask for `experts`: what to load into idle link time."""
        return ()

    def protect(self, layer: int, experts: Sequence[int]) -> None:
        """`layer` will probably ask for `experts`: do not evict them until it has run."""
