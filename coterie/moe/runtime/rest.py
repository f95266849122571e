"""Reads experts that nobody has asked for yet, while nobody waits for anything.

So that a model that fits in RAM starts at once and is whole a little later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coterie.moe.runtime.transfer import Transfer
    from coterie.moe.runtime.usage import Telemetry
    from coterie.moe.store.geometry import Key


class Rest:
    def __init__(self, transfer: Transfer, telemetry: Telemetry) -> None:
        self._transfer, self._telemetry = transfer, telemetry
        # read by the crew, not counted yet
        self._read: SimpleQueue[tuple[Key, int]] = SimpleQueue()

    def start(self, keys: Iterator[Key], elsewhere: Callable[[Key], bool]) -> None:
        """All but those that lie elsewhere for good."""
        wanted = (key for key in keys if not elsewhere(key))
        self._transfer.fill(wanted, lambda key, size: self._read.put((key, size)))

    def sweep(self) -> None:
        """Count what has come, for the layers: no request asked for it."""
        while not self._read.empty():
            key, size = self._read.get()
            tally = self._telemetry.layers[key[0]]
            tally.host_misses += 1
            tally.read_bytes += size
