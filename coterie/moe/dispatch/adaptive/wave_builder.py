"""Collects a layer's waves one by one, and notices prompts that come in chunks."""

from __future__ import annotations

from coterie.moe.dispatch.base import Demand, Wave
from coterie.moe.store.geometry import Key


class Turns:
    """Waves in the making. `busy` experts (by number) are used by the open wave."""

    def __init__(self, device: list[int], busy: set[int]) -> None:
        self.busy = busy
        self.host: list[int] = []
        self._device = device
        self._loads: list[tuple[Key, int]] = []
        self._closed: list[Wave] = []

    def load(self, number: int, key: Key, slot: int) -> None:
        self._loads.append((key, slot))
        self._device.append(key[1])
        self.busy.add(number)

    def next_wave(self) -> None:
        """What the open wave holds has run: its slots may be used again."""
        if self._device:
            self._closed.append(Wave(tuple(self._loads), tuple(self._device)))
        self._loads, self._device = [], []
        self.busy.clear()

    def waves(self) -> list[Wave]:
        """All of them; the host works from the first one on."""
        self.next_wave()
        first, *others = self._closed or [Wave()]
        return [Wave(first.load, first.device, tuple(self.host)), *others]


class Walk:
    """Tells whether a prompt's chunks pass through one layer after another."""

    def __init__(self) -> None:
        self._layer = -1
        self._chunked = False

    def chunked(self, demand: Demand) -> bool:
        if demand.phase != "prefill" or demand.layer < self._layer:
            self._chunked = False
        elif demand.layer == self._layer:
            self._chunked = True
        self._layer = demand.layer if demand.phase == "prefill" else -1
        return self._chunked
