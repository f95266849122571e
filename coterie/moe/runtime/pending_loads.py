"""Loads into device slots that are under way: begun, awaited, and counted once when they end.

One thread (the engine's) uses it. Knows no layer and no wave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from coterie.moe.runtime.tiers import DeviceTier
    from coterie.moe.runtime.transfer import Arrival, Transfer
    from coterie.moe.runtime.usage import Tally
    from coterie.moe.store.geometry import Key


class Loads:
    def __init__(self, device: DeviceTier, transfer: Transfer) -> None:
        self.device, self._transfer = device, transfer
        # hears of every load that ended, and of the layer that was running (None between steps)
        self.retired: Callable[[Arrival, Tally | None], None] = lambda arrival, tally: None
        # the device holds it for good: no second copy in RAM
        self.sole: Callable[[Key], bool] = lambda key: False
        self.hurry = transfer.hurry

    def start(self, key: Key, slot: int, tally: Tally | None, *, urgent: bool = True) -> Arrival:
        """Fill `slot` once what is under way to it has ended."""
        old = self.device.pending.get(slot)
        if old is not None:
            if not self._transfer.cancel(old):
                self._transfer.hurry(old)
                old.settle()
            self.retire(old, tally)
        return self._transfer.to_device(key, slot, urgent=urgent, sole=self.sole(key))

    def retire(self, arrival: Arrival, tally: Tally | None) -> None:
        """A load has ended: count it, and let the computing stream see its bytes."""
        slot = arrival.slot
        if slot is not None and self.device.pending.get(slot) is arrival:
            del self.device.pending[slot]
            if arrival.event is not None:
                torch.cuda.current_stream(self.device.device).wait_event(arrival.event)
            self.retired(arrival, tally)

    def sweep(self) -> None:
        """Count loads that have ended and that nobody waited for."""
        for arrival in list(self.device.pending.values()):
            if arrival.done:
                self.retire(arrival, None)

    def settle(self) -> list[Arrival]:
        """Wait for all loads under way; answers those that failed."""
        ended = [arrival.settle() for arrival in list(self.device.pending.values())]
        for arrival in ended:
            self.retire(arrival, None)
        return [arrival for arrival in ended if arrival.error is not None]
