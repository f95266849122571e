"""What loading adapters cost since start: in all, and for the adapters loaded last.

Counts and seconds alone; the loader's thread writes, any thread reads.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

# adapters that are told one by one
MAX_TOLD = 64
STAGES = ("disk", "compose", "place")


@dataclass(slots=True)
class LoadTimes:
    """One adapter's loads; a stack's times count for each of its adapters."""

    loads: int = 0
    disk_s: float = 0.0
    compose_s: float = 0.0
    place_s: float = 0.0


class History:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._adapters: OrderedDict[str, LoadTimes] = OrderedDict()

    def read(self, digest: str, seconds: float) -> None:
        self.counts["disk"] += 1
        self.seconds["disk"] += seconds
        self._of(digest).disk_s += seconds

    def found(self) -> None:
        self.counts["host"] += 1

    def loaded(self, digests: Iterable[str], compose_s: float, place_s: float) -> None:
        self.counts["loads"] += 1
        self.seconds["compose"] += compose_s
        self.seconds["place"] += place_s
        for digest in dict.fromkeys(digests):
            times = self._of(digest)
            times.loads += 1
            times.compose_s += compose_s
            times.place_s += place_s

    def told(self) -> dict[str, LoadTimes]:
        """The adapters loaded last."""
        return dict(self._adapters)

    def _of(self, digest: str) -> LoadTimes:
        times = self._adapters.get(digest)
        if times is None:
            times = LoadTimes()
        adapters = OrderedDict(self._adapters)
        adapters[digest] = times
        adapters.move_to_end(digest)
        while len(adapters) > MAX_TOLD:
            adapters.popitem(last=False)
        # replaced whole: a reader never sees it change
        self._adapters = adapters
        return times
