"""Moves experts from the bank to slots beside the steps that run.

An expert whose slot is taken is read from the bank from the next step on. Its slot is written, on a
stream of its own, once all steps that may read it have ended; the new expert is read from there
only behind its copy. A step in flight never reads a slot that is being written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from coterie.moe.runtime.device_pool import PlaceTable
    from coterie.moe.runtime.host_bank import HostBank
    from coterie.moe.runtime.tiers import DeviceTier
    from coterie.moe.store.base import Key

Loads = Sequence[tuple["Key", int]]

# records that are copied to measure the link
_MEASURED = 16


@dataclass(frozen=True, slots=True)
class _Batch:
    number: int
    loads: Loads
    # behind the copies; None without CUDA
    done: torch.cuda.Event | None


class BankUploads:
    """Called by the engine's thread, whose current stream computes."""

    def __init__(
        self, bank: HostBank, tier: DeviceTier, table: PlaceTable, sizes: Mapping[int, int]
    ) -> None:
        """`sizes`: the bytes of a layer's records."""
        self._bank, self._tier, self._table, self._sizes = bank, tier, table, sizes
        self._cuda = tier.device.type == "cuda"
        self._stream = torch.cuda.Stream(tier.device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._batches: list[_Batch] = []
        self._number = 0
        # by slot: the last batch that writes it
        self._writer: dict[int, int] = {}
        # where the device has a record outside of its slots for now; it may be overwritten behind
        # `near_read`, once that is set
        self.near: Callable[[Key], torch.Tensor | None] = lambda key: None
        self.near_read: torch.cuda.Event | None = None

    def start(self, loads: Loads, superseded: Loads = ()) -> None:
        """Begin to copy these experts into their slots, whose experts lose them. `superseded` are
        copied before, and lost."""
        if not loads and not superseded:
            return
        tier, table = self._tier, self._table
        self._number += 1
        for _, slot in superseded:
            if (lost := tier.key_at(slot)) is not None:
                table.to_bank(lost)
                tier.vacate(slot, evicted=True)
        self._take(loads)
        table.send()
        self._batches.append(_Batch(self._number, loads, self._copy(superseded, loads)))

    @property
    def is_busy(self) -> bool:
        """Whether copies may still write slots."""
        return bool(self._batches)

    def begin(self, loads: Loads) -> None:
        """Their slots are filled by others, in the order of the computing stream, before `end`."""
        if loads:
            self._number += 1
            self._take(loads)
            self._table.send()

    def end(self, loads: Loads) -> None:
        """Let the next steps read what was filled; not where a slot has another expert by now."""
        for key, slot in loads:
            if self._tier.slot_of(key) == slot:
                self._place(key, slot)
        self._table.send()

    def follow(self, loads: Loads) -> None:
        """The device has filled these slots itself, in this order, and knows it."""
        for load in loads:
            self._take((load,))
            self._place(*load)

    def undo(self, loads: Loads) -> None:
        """Nobody has filled them."""
        for key, slot in loads:
            if self._tier.slot_of(key) == slot:
                self._tier.vacate(slot)

    def vacate(self, slots: Sequence[int]) -> None:
        """Their experts are read from the bank from now on. Nothing may be on its way to them."""
        assert not self._batches
        for slot in slots:
            key = self._tier.key_at(slot)
            if key is not None:
                self._table.to_bank(key)
                self._tier.vacate(slot, evicted=True)
        self._table.send()

    def _take(self, loads: Loads) -> None:
        """These experts have the slots from now on, and nobody reads them there yet."""
        tier, table = self._tier, self._table
        for key, slot in loads:
            for one in (tier.key_at(slot), key):
                if one is not None and tier.slot_of(one) is not None:
                    table.to_bank(one)
            tier.begin(key, slot)
            self._writer[slot] = self._number

    def _place(self, key: Key, slot: int) -> None:
        self._table.to_slot(key, slot)
        self._tier.filled(key, slot, self._tier.record(key, slot))

    def _copy(self, superseded: Loads, loads: Loads) -> torch.cuda.Event | None:
        # a prompt that overwrites what is near waits for no more than that
        first = [*superseded, *(load for load in loads if self.near(load[0]) is not None)]
        others = [load for load in loads if self.near(load[0]) is None]
        if self._stream is None:
            self._copy_records([*first, *others])
            return None
        steps = torch.cuda.current_stream(self._tier.device).record_event()
        self._stream.wait_event(steps)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if self._copy_records(first):
                self.near_read = self._stream.record_event()
            self._copy_records(others)
            done: torch.cuda.Event = self._stream.record_event()
            return done

    def _copy_records(self, loads: Loads) -> bool:
        """Returns whether a record was near."""
        found = False
        for key, slot in loads:
            size, near = self._sizes[key[0]], self.near(key)
            target, source = self._tier.record(key, slot), self._bank.record(*key)
            found = found or near is not None
            target[:size].copy_((source if near is None else near)[:size], non_blocking=True)
        return found

    def publish(self) -> bool:
        """Let the next steps read what was copied; they wait for copies that still run. Returns
        whether the table has changed."""
        if not self._batches:
            return False
        tier = self._tier
        for batch in self._batches:
            if batch.done is not None:
                torch.cuda.current_stream(tier.device).wait_event(batch.done)
            for key, slot in batch.loads:
                if self._writer[slot] == batch.number and tier.slot_of(key) == slot:
                    self._place(key, slot)
        self._batches = []
        self._table.send()
        return True

    def measure_link(self, keys: Sequence[Key]) -> float:
        """Bytes per second from the bank to the device, by copies one after another."""
        if self._stream is None or not keys:
            return float("inf")
        target = torch.empty(self._bank.slot_bytes, dtype=torch.uint8, device=self._tier.device)
        sources = [self._bank.record(*key) for key in keys[:: max(1, len(keys) // _MEASURED)]]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            target.copy_(sources[0], non_blocking=True)
            begin.record(self._stream)
            for source in sources:
                target.copy_(source, non_blocking=True)
            end.record(self._stream)
        end.synchronize()
        seconds: float = begin.elapsed_time(end) / 1e3
        return len(sources) * len(target) / max(1e-9, seconds)

    def close(self) -> None:
        """Wait for everything that reads the bank."""
        if self._stream is not None:
            torch.cuda.synchronize(self._tier.device)
