"""Steps with a prompt while not all experts are in slots: which of the missing ones are copied
ahead of it, and where its kernels find each expert.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from coterie.moe.runtime.device_pool import TableSender
from coterie.moe.runtime.layer_stream import Kept, LayerStream
from coterie.moe.runtime.travel import ExpertChances, LinkRates

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from coterie.kernels.device_record import DeviceRecord
    from coterie.moe.runtime.bank_uploads import Loads
    from coterie.moe.runtime.device_pool import DevicePool, PlaceTable
    from coterie.moe.runtime.host_bank import HostBank
    from coterie.moe.runtime.tiers import DeviceTier
    from coterie.moe.store.base import ExpertGeometry, Key


# experts that are read to measure the link
_MEASURED = 64


class PromptStream:
    """Only the engine's thread may call it. The buffers are the last slots of the tier's arena."""

    def __init__(
        self,
        geometry: ExpertGeometry,
        records: Mapping[int, DeviceRecord],
        tier: DeviceTier,
        table: PlaceTable,
        bank: HostBank,
    ) -> None:
        self._table, self._slot_bytes = table, tier.slot_bytes
        self._sizes = sizes = [records[layer].nbytes for layer in geometry.layers]
        self.stream = LayerStream(
            bank, geometry, sizes, tier.arena, tier.num_slots, tier.slot_bytes
        )
        shape = len(geometry.layers), geometry.num_experts
        self._chances = ExpertChances(*shape, geometry.top_k)
        self._kind = records[geometry.layers[0]].kind
        self._in_buffers = self.stream.places.cpu().numpy()
        self._places = torch.zeros(shape, dtype=torch.int64, device=tier.device)
        self._sender = TableSender(self._places.view(-1).view(torch.uint8))
        # until they are measured: copies are never slower
        self.rates = LinkRates(1.0, 1.0)
        # whether other steps read the buffers
        self._is_read = False
        self._tier = tier
        # what the last step copies to slots
        self.kept: Loads = ()
        self._geometry = geometry
        self._row = {layer: row for row, layer in enumerate(geometry.layers)}
        self._present = np.zeros(shape, dtype=bool)
        for layer, row in self._row.items():
            self._present[row, list(geometry.present(layer))] = True

    @torch.inference_mode()
    def measure(self, pool: DevicePool) -> None:
        """How fast copies are, and how fast kernels read. Experts must be in no slot yet."""
        if not pool.places.is_cuda:
            return
        from coterie.kernels.triton.expert_gemv import ExpertPool
        from coterie.kernels.triton.link_read import measure_reads

        layer = self._geometry.layers[0]
        own = ExpertPool(pool.arena, pool.places[0], pool.records[layer])
        experts = self._geometry.present(layer)[:_MEASURED]
        read, copy = measure_reads(own, experts, self._geometry.top_k), self.stream.measure()
        self.rates = LinkRates(copy, min(read, copy))

    def record(self, key: Key) -> Tensor | None:
        """An expert that is in a buffer."""
        return self.stream.record(self._row[key[0]], key[1])

    def pool(
        self,
        base: DevicePool,
        rows: int,
        keep: Callable[[NDArray[np.bool_]], Loads],
        read: torch.cuda.Event | None = None,
    ) -> DevicePool | None:
        """For a step of so many rows, whose copies begin now; None: its kernels read all that is
        missing from the bank. `keep`: chooses what is also copied to slots, see `kept`, of what is
        copied. `read`: when others have read the buffers."""
        table, in_slots = self._table, self._table.in_slots()
        ahead = self._chances.copied_ahead(rows, self._kind, self.rates) & ~in_slots
        if not ahead.any():
            return None
        if self._is_read:
            # behind the steps that read the buffers
            self._is_read = False
            table.to_buffers(None)
            table.send()
            self.stream.hand_over()
        if read is not None:
            self.stream.wait(read)
        # before the copies, which would delay it
        self._sender.send(np.where(ahead, self._in_buffers, table.known()))
        self.kept = keep(ahead)
        self.stream.start(~ahead, [self._kept(*load) for load in self.kept])
        whole = bool((ahead | in_slots).all())
        return replace(
            base,
            places=self._places,
            slot_bytes=self._slot_bytes if whole else None,
            stream=self.stream,
            # the link is busy with the copies, and what it brings is soon on the device
            share=None,
            experts=replace(base.experts, on_device=in_slots, copied=ahead & self._present),
        )

    def _kept(self, key: Key, slot: int) -> Kept:
        row = self._row[key[0]]
        return row, key[1], self._tier.record(key, slot)[: self._sizes[row]]

    def observe(self, rows: NDArray[np.int64]) -> None:
        """A step of any kind has run, and nobody shall read the buffers."""
        self._chances.observe(rows)

    def ended(self, rows: NDArray[np.int64]) -> bool:
        """A step of any kind has run, with so many rows per expert [layers, experts]. Later steps
        find the layers that are still in the buffers there. Returns whether the table has
        changed."""
        self._chances.observe(rows)
        if self._is_read or not self.stream.held.any():
            return False
        self._is_read = True
        self._table.to_buffers(np.where(self.stream.held, self._in_buffers, -1))
        self._table.send()
        return True

    def close(self) -> None:
        self.stream.close()
