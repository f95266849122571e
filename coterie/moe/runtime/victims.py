"""lru and active_only inside a step: the device decides which slots its misses take.

The state is on the device (`kernels.triton.expert_victims`) and changes with every step. The host
follows: from the experts that a step used it repeats the same decisions on the strategy's slots, so
that counts, heatmap and table agree without a word from the device. Steps are numbered; if one was
not counted, or a prompt needs the table while steps are under way, the host reads the device's
state instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.kernels.triton import expert_victims as kernels
from coterie.kernels.triton.expert_victims import COUNT_WORDS, FREE, STEPS, VictimState
from coterie.moe.dispatch.active_only import ActiveOnly
from coterie.moe.dispatch.base import place_misses
from coterie.moe.dispatch.lru import Lru
from coterie.moe.dispatch.table import placed_rows

if TYPE_CHECKING:
    from coterie.kernels.batch import AttentionBatch
    from coterie.kernels.triton.expert_gemv import RoutedRows
    from coterie.moe.dispatch.base import MakeRoom, Strategy
    from coterie.moe.store.base import Key


class StepVictims:
    """Only the engine's thread may call it."""

    def __init__(
        self,
        strategy: Strategy,
        places: Tensor,
        tiers: Tensor,
        bank: Tensor,
        slot_units: int,
        record_bytes: int,
    ) -> None:
        """`places`, `tiers` and `bank`: [layers * experts], see `VictimState`."""
        assert isinstance(strategy, Lru | ActiveOnly)
        self._slots, geometry = strategy.context.slots, strategy.context.geometry
        self._geometry, device = geometry, places.device
        self._row = {layer: row for row, layer in enumerate(geometry.layers)}
        self._room: MakeRoom = strategy.decode_room
        self.max_rows = placed_rows(geometry.top_k)
        # steps that were launched, as far as the host knows, and the last one that it has followed
        self.launched = self.followed = 0
        by_layer = isinstance(strategy, ActiveOnly)
        layers, count = len(geometry.layers), self._slots.num_slots
        buffers, shares = [0] * layers, [count]
        if isinstance(strategy, ActiveOnly):
            buffers, shares = strategy.buffers.division()
        words = {name: torch.zeros(n, dtype=torch.int32, device=device) for name, n in (
            ("keys", count), ("free", count), ("counts", COUNT_WORDS), ("sizes", len(shares)),
            ("marks", geometry.num_experts),
        )}  # fmt: skip
        times = {name: torch.zeros(n, dtype=torch.int64, device=device)
                 for name, n in (("stamps", count), ("clock", 1))}  # fmt: skip
        pairs = self.max_rows * geometry.top_k
        self.state = VictimState(
            places=places, tiers=tiers, bank=bank, **words, **times,
            buffers=torch.tensor(buffers, dtype=torch.int32, device=device),
            shares=torch.tensor(shares, dtype=torch.int32, device=device),
            copies=torch.zeros((pairs, 2), dtype=torch.int32, device=device),
            experts=geometry.num_experts, slot_units=slot_units, record_bytes=record_bytes,
            by_layer=by_layer,
        )  # fmt: skip
        self._buffers, self._num_buffers = buffers, len(shares)

    def takes(self, batch: AttentionBatch) -> bool:
        """Whether the device places the experts of such a step: every sequence has one row."""
        return len(batch.positions) == len(batch.context_lens) <= self.max_rows

    def begin(self, batch: AttentionBatch) -> None:
        """Enqueued in front of a step that `takes` allows."""
        kernels.begin(self.state, batch.slots)

    def place(self, arena: Tensor, routed: RoutedRows, row: int) -> None:
        """Behind the gate of layer number `row`: what is missing is brought to slots, and `routed`
        gets the places."""
        kernels.place(self.state, routed.ids, routed.places, row)
        kernels.fetch(self.state, arena, routed.ids.numel())

    def step_launched(self) -> Tensor:
        """A step was enqueued. Returns its number, on its way to the host, in the last word."""
        self.launched += 1
        counts = self.state.counts
        arriving = torch.empty(COUNT_WORDS, dtype=torch.int32, pin_memory=counts.is_cuda)
        return arriving.copy_(counts, non_blocking=True)

    @torch.inference_mode()
    def send(self) -> None:
        """The device gets the host's slots, behind all steps that were launched. No step may be
        under way that the host has not followed."""
        state, slots, width = self.state, self._slots, self._geometry.num_experts
        keys, stamps = np.full(slots.num_slots, -1), np.zeros(slots.num_slots)
        sizes = np.zeros(self._num_buffers)
        for time, key in enumerate(slots.by_age(), 1):
            slot, row = slots.slot_of(key), self._row[key[0]]
            assert slot is not None
            keys[slot], stamps[slot] = row * width + key[1], time
            sizes[self._buffers[row]] += 1
        free = slots.free_slots()
        state.keys.copy_(torch.from_numpy(keys))
        state.stamps.copy_(torch.from_numpy(stamps))
        state.sizes.copy_(torch.from_numpy(sizes))
        state.clock.fill_(slots.num_slots + 1)
        state.free[: len(free)].copy_(torch.tensor(free, dtype=torch.int32))
        state.counts[FREE : FREE + 1].fill_(len(free))

    def follow(self, rows: NDArray[np.int64]) -> tuple[list[tuple[Key, int]], list[Key]]:
        """A step used experts so often, [layers, experts]: repeat what the device has decided.
        Returns what it copied, and to which slots; and what its layers missed."""
        copied, missed = [], []
        for layer, own in zip(self._geometry.layers, rows, strict=True):
            used = [(layer, expert) for expert in np.flatnonzero(own).tolist()]
            missed += [key for key in used if key not in self._slots]
            copied += place_misses(self._slots, used, self._room)
        return copied, missed

    def read(self) -> None:
        """Wait for all steps, and take the slots from the device."""
        state, width, layers = self.state, self._geometry.num_experts, self._geometry.layers
        keys, stamps, counts = (each.tolist() for each in (state.keys, state.stamps, state.counts))
        order = sorted((stamp, slot) for slot, stamp in enumerate(stamps) if keys[slot] >= 0)
        found = [((layers[keys[at] // width], keys[at] % width), at) for _, at in order]
        self._slots.assign(found, state.free[: counts[FREE]].tolist())
        self.launched = self.followed = counts[STEPS]
