"""Where the kernels of a CUDA device find every expert: in its own slots, or in the host's bank.

Kernels find an expert by its place, in units of 16 bytes from the arena's beginning. Only the table
of places changes between steps, by copies in the order of the computing stream, so that captured
steps stay valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.kernels.device_record import UNIT_BYTES, DeviceRecord

if TYPE_CHECKING:
    from coterie.kernels.batch import AttentionBatch
    from coterie.kernels.cpu.expert_mlp import RecordTable
    from coterie.kernels.expert_layout import ExpertLayout
    from coterie.kernels.triton.link_prefetch import LinkPrefetch
    from coterie.moe.runtime.bank_fill import BankFill
    from coterie.moe.runtime.cpu_share import CpuShare
    from coterie.moe.runtime.host_bank import HostBank
    from coterie.moe.runtime.layer_stream import LayerStream
    from coterie.moe.runtime.tiers import DeviceTier
    from coterie.moe.runtime.victims import StepVictims
    from coterie.moe.store.base import ExpertGeometry, Key

# tiers of the table
IN_ARENA, IN_BANK = 0, 1


@dataclass(frozen=True, slots=True)
class ResidentExperts:
    tables: Mapping[int, RecordTable]
    layouts: Mapping[int, ExpertLayout]
    # [layers, experts]: whether the strategy would run it from a device slot
    on_device: NDArray[np.bool_]
    # [layers, experts]: copied ahead of the step; None: nothing was
    copied: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class DevicePool:
    """All experts, for the kernels of one step."""

    # all slots
    arena: Tensor
    # the size of each slot, if every expert is in one; None: places may lead out of the arena
    slot_bytes: int | None
    # on the device, [layers, experts]: places int64, and tiers int8 (IN_ARENA or IN_BANK)
    places: Tensor
    tiers: Tensor
    # by layer
    records: Mapping[int, DeviceRecord]
    # for the counts of steps
    experts: ResidentExperts
    bank: HostBank | None = None
    # takes a part of what is only in the bank, in steps with few rows
    share: CpuShare | None = None
    # copies what is in no slot, layer by layer, while the step runs
    stream: LayerStream | None = None
    # the bank is not yet full: layers wait for what they use
    loading: BankFill | None = None
    # brings what a step misses to slots, inside the step
    victims: StepVictims | None = None
    # reads ahead what is only in the bank, or tells the CPU what to read, in steps with few rows
    prefetch: LinkPrefetch | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every expert is on the device."""
        return self.slot_bytes is not None

    def of_step(self, batch: AttentionBatch) -> DevicePool:
        """For a step that is enqueued now."""
        if self.victims is None:
            return self
        if not self.victims.takes(batch):
            return replace(self, victims=None)
        self.victims.begin(batch)
        # nothing is left for the CPU, or to be read ahead
        return replace(self, share=None, prefetch=None)

    def layer(self, row: int, ids: Tensor | None = None) -> AbstractContextManager[None]:
        """What is enqueued inside reads the experts `ids` (None: any) of the layer with experts
        number `row`."""
        if self.loading is not None:
            used = range(self.places.shape[1]) if ids is None else set(ids.reshape(-1).tolist())
            self.loading.need(tuple(self.records)[row], sorted(used))
        return nullcontext() if self.stream is None else self.stream.layer(row)


class PlaceTable:
    """The table on the device, and the host's copy of it, which is ahead until `send`."""

    def __init__(self, geometry: ExpertGeometry, tier: DeviceTier, bank: HostBank) -> None:
        self._rows = {layer: row for row, layer in enumerate(geometry.layers)}
        self._slot_units, device = tier.slot_bytes // UNIT_BYTES, tier.device
        # kernels need an address, also where there are no slots
        self.arena = tier.arena
        if not len(tier.arena):
            self.arena = torch.zeros(512, dtype=torch.uint8, device=device)
        shape = len(geometry.layers), geometry.num_experts
        self._in_bank = np.zeros(shape, dtype=np.int64)
        address = bank.address
        assert address is not None
        first = address - self.arena.data_ptr()
        assert first % UNIT_BYTES == 0
        for layer, row in self._rows.items():
            for expert in geometry.present(layer):
                place = (first + bank.offset(layer, expert)) // UNIT_BYTES
                self._in_bank[row, expert] = place
        # places in slots, and for a time in buffers; -1: not there
        self._in_slots, self._in_buffers = (np.full(shape, -1, dtype=np.int64) for _ in range(2))
        count = self._in_bank.size
        words = torch.zeros(9 * count, dtype=torch.uint8, device=device)
        self._sender = TableSender(words)
        self.places = words[: 8 * count].view(torch.int64).view(shape)
        self.tiers = words[8 * count :].view(torch.int8).view(shape)
        self.send()

    def in_bank(self) -> Tensor:
        """On the device, [layers * experts]: where each expert is in the bank."""
        return torch.from_numpy(self._in_bank).reshape(-1).to(self.places.device)

    def to_slot(self, key: Key, slot: int) -> None:
        self._in_slots[self._rows[key[0]], key[1]] = slot * self._slot_units

    def to_bank(self, key: Key) -> None:
        self._in_slots[self._rows[key[0]], key[1]] = -1

    def to_buffers(self, places: NDArray[np.int64] | None) -> None:
        """[layers, experts]: where experts are that have no slot, -1 for those in the bank; None:
        all are there."""
        self._in_buffers[:] = -1 if places is None else places

    def send(self) -> None:
        """Change the device's table, behind everything that the current stream was given."""
        tiers = np.where(self.on_device(), IN_ARENA, IN_BANK).astype(np.int8)
        self._sender.send(self.known(), tiers)

    def known(self) -> NDArray[np.int64]:
        """The places that `send` sends."""
        outside = np.where(self._in_buffers >= 0, self._in_buffers, self._in_bank)
        return np.where(self._in_slots >= 0, self._in_slots, outside)

    def on_device(self) -> NDArray[np.bool_]:
        """A copy: which experts are in slots or buffers."""
        return self.in_slots() | (self._in_buffers >= 0)

    def in_slots(self) -> NDArray[np.bool_]:
        here: NDArray[np.bool_] = self._in_slots >= 0
        return here


# tables on their way at one time
_IN_FLIGHT = 4


class TableSender:
    """Copies arrays to one tensor without waiting for the device."""

    def __init__(self, target: Tensor) -> None:
        self._target, self._turn = target, 0
        cuda = target.is_cuda
        self._sent = [
            torch.empty(target.shape, dtype=torch.uint8, pin_memory=cuda) for _ in range(_IN_FLIGHT)
        ]
        self._copied: list[torch.cuda.Event | None] = [None] * _IN_FLIGHT

    def send(self, *arrays: NDArray[np.int64] | NDArray[np.int8]) -> None:
        turn = self._turn = (self._turn + 1) % _IN_FLIGHT
        copied = self._copied[turn]
        if copied is not None:
            copied.synchronize()
        whole = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays])
        self._sent[turn].numpy()[:] = whole
        with torch.inference_mode():
            self._target.copy_(self._sent[turn], non_blocking=True)
        if self._target.is_cuda:
            self._copied[turn] = torch.cuda.current_stream(self._target.device).record_event()
