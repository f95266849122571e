"""The thread behind the pool: disk to host cache, compose, host to device; one stack at a time.

Stacks whose adapters are in RAM go before those that must be read. What finds no room on the device
waits in the order it came, and nobody passes it but the one that the engine prefers: room that
appears is for the first in line. RAM beside the host cache is bounded by one stack's adapters and
its composed form.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from coterie.adapters.base import Adapter
from coterie.adapters.compose import StackImage, compose
from coterie.adapters.residency import LoadHistory
from coterie.core.errors import CoterieError, InvalidRequest, Overloaded, WeightsError
from coterie.core.lru import LruCache
from coterie.kernels.cpu.build import use_threads_here
from coterie.kernels.patch import PatchStack
from coterie.obs.log import log

if TYPE_CHECKING:
    from coterie.adapters.base import AdaptableModel, Adapter
    from coterie.adapters.compose import StackUpload
    from coterie.adapters.files import AdapterLibrary
    from coterie.adapters.residency import StackEntry, StackResidency

# loads under way at most: far more than an engine's queue holds
MAX_LOADS = 1024
# the first in line that nobody asked for while others were asked for this much later makes way
ABANDONED_S = 2.0
# the guard lets go with time alone: look again this often
_RETRY_S = 0.05


class StackLoader:
    def __init__(
        self,
        library: AdapterLibrary,
        host: HostCache,
        targets: AdaptableModel,
        residency: StackResidency,
        upload: StackUpload,
    ) -> None:
        self._library, self._host, self._targets = library, host, targets
        self._residency, self._upload = residency, upload
        # set whenever a stack became ready, full or failed
        self.news = threading.Event()
        self.history = LoadHistory()
        self._reads: deque[StackEntry] = deque()
        self._places: deque[StackEntry] = deque()
        # the first in line found no room
        self._blocked = False
        self._retry_at_s = 0.0
        # of the first in line: its key, and the seconds it took
        self._image: tuple[str, StackImage, float] | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    # with `residency.changed` held: put, prefer, retry

    def put(self, entry: StackEntry) -> None:
        if len(self._reads) + len(self._places) >= MAX_LOADS:
            raise Overloaded(f"{MAX_LOADS} adapters are being loaded already", retry_after_s=1.0)
        if self._host.holds(entry.key, entry.facts.digests):
            self._line_up(entry)
        else:
            self._reads.append(entry)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="adapters", daemon=True)
            self._thread.start()
        self._residency.changed.notify_all()

    def prefer(self, entry: StackEntry) -> None:
        """It is the first in line; the others stay in their order behind it. What is being placed
        at this moment is placed before."""
        places = self._places
        if places and places[0] is not entry and entry in places:
            places.remove(entry)
            places.appendleft(entry)
            # it may fit where the other did not
            self.retry()

    def retry(self) -> None:
        """Somebody let go of room."""
        if self._blocked:
            self._blocked = False
            self._residency.changed.notify_all()

    def close(self) -> None:
        with self._residency.changed:
            self._closed = True
            self._residency.changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._image = None

    def __len__(self) -> int:
        return len(self._reads) + len(self._places)

    def _line_up(self, entry: StackEntry) -> None:
        self._places.append(entry)
        if self._blocked:
            self._wait(entry)

    def _wait(self, entry: StackEntry) -> None:
        if entry.state != "full":
            entry.state, entry.waits_since_s = "full", self._residency.clock()
            self.news.set()

    def _work(self) -> None:
        # the engine's steps need the other cores, and teams that share a core wait for each other
        use_threads_here(max(1, torch.get_num_threads() // 2))
        with torch.inference_mode():
            while (found := self._next()) is not None:
                work, entry = found
                try:
                    work(entry)
                except CoterieError as problem:
                    self._fail(entry, problem)
                except Exception as problem:
                    log("adapter_load_failed", level="error", error=problem)
                    self._fail(entry, WeightsError(f"adapters could not be loaded: {problem!r}"))
                del entry, found

    def _next(self) -> tuple[Callable[[StackEntry], None], StackEntry] | None:
        changed = self._residency.changed
        with changed:
            while not self._closed:
                if self._places and not self._blocked:
                    return self._place, self._places[0]
                if self._reads:
                    return self._read, self._reads.popleft()
                pause_s = self._retry_at_s - time.monotonic() if self._blocked else None
                if pause_s is not None and pause_s <= 0:
                    self._blocked = False
                    continue
                changed.wait(pause_s)
        return None

    def _read(self, entry: StackEntry) -> None:
        facts, host = entry.facts, self._host
        # what RAM cannot keep is read when there is room on the device
        if facts.nbytes <= host.budget_bytes and not host.holds(facts.key, facts.digests):
            for digest in facts.digests:
                self._adapter(digest)
        with self._residency.changed:
            self._line_up(entry)

    def _adapter(self, digest: str) -> Adapter:
        adapter = self._host.adapter(digest)
        if adapter is None:
            begun = time.perf_counter()
            adapter = self._library.load(digest)
            self.history.read(digest, time.perf_counter() - begun)
            self._host.keep(adapter)
        return adapter

    def _place(self, entry: StackEntry) -> None:
        residency = self._residency
        image, compose_s = self._composed(entry)
        if image.nbytes > residency.slab.nbytes:
            raise InvalidRequest(
                f"these adapters take {image.nbytes} bytes together and there is room for "
                f"{residency.slab.nbytes}; raise adapters.device_bytes"
            )
        with residency.changed:
            slot = residency.make_room(entry, image.nbytes, self._waited_s(entry))
            if slot is None:
                self._no_room(entry)
                return
        self._image = None
        self._fill(entry, image, slot, compose_s)

    def _waited_s(self, entry: StackEntry) -> float:
        return self._residency.clock() - entry.waits_since_s if entry.state == "full" else 0.0

    def _no_room(self, entry: StackEntry) -> None:
        newest_s = max(waiting.asked_s for waiting in self._places)
        if newest_s - entry.asked_s > ABANDONED_S:
            self._places.remove(entry)
            self._image = None
            del self._residency.entries[entry.key]
            return
        # another one may have been preferred meanwhile
        self._blocked = self._places[0] is entry
        self._retry_at_s = time.monotonic() + _RETRY_S
        for waiting in self._places:
            self._wait(waiting)

    def _fill(self, entry: StackEntry, image: StackImage, slot: int, compose_s: float) -> None:
        residency, block = self._residency, entry.block
        assert block is not None
        begun = time.perf_counter()
        try:
            room = residency.slab.view(block)
            event = self._upload.copy(image, room)
            patches, soft = image.views(room)
        except BaseException:
            with residency.changed:
                residency.cancel(entry, slot)
            raise
        with residency.changed:
            self._places.remove(entry)
            entry.stack = PatchStack(entry.key, slot, patches, soft)
            entry.event, entry.state = event, "ready"
            # before the version: whoever sees the new one sees what it stands for
            self.history.loaded(entry.facts.digests, compose_s, time.perf_counter() - begun)
            residency.version += 1
        self.news.set()

    def _composed(self, entry: StackEntry) -> tuple[StackImage, float]:
        """Kept while the first in line waits for room."""
        facts = entry.facts
        if self._image is None or self._image[0] != facts.key:
            image, begun = self._host.image(facts.key), time.perf_counter()
            if image is not None:
                self.history.found()
            else:
                parts = [(self._adapter(choice.digest), choice.weight) for choice in facts.adapters]
                begun = time.perf_counter()
                image = StackImage(compose(parts, self._targets))
                self._host.keep_image(facts.key, image, facts.digests)
            self._image = (facts.key, image, time.perf_counter() - begun)
        return self._image[1:]

    def _fail(self, entry: StackEntry, problem: CoterieError) -> None:
        self.history.counts["failed"] += 1
        with self._residency.changed:
            if entry in self._places:
                self._places.remove(entry)
            entry.error, entry.state = problem, "failed"
            entry.waits_since_s = self._residency.clock()
            self._image = None
        self.news.set()


class HostCache:
    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        # adapters by digest, images by their stack's key: the two differ in length
        self._held: LruCache[str, Adapter | StackImage] = LruCache(
            budget_bytes, size=lambda held: held.nbytes
        )

    def __len__(self) -> int:
        return len(self._held)

    @property
    def used_bytes(self) -> int:
        return self._held.used

    @property
    def evictions(self) -> int:
        return self._held.evictions

    def holds(self, key: str, digests: Sequence[str]) -> bool:
        """A stack can be placed without reading the disk."""
        return key in self._held or all(digest in self._held for digest in digests)

    def adapter(self, digest: str) -> Adapter | None:
        held = self._held.get(digest)
        return held if isinstance(held, Adapter) else None

    def image(self, key: str) -> StackImage | None:
        held = self._held.get(key)
        return held if isinstance(held, StackImage) else None

    def keep(self, adapter: Adapter) -> None:
        """What alone is over the budget is not kept."""
        self._held.put(adapter.digest, adapter)

    def keep_image(self, key: str, image: StackImage, digests: Sequence[str]) -> None:
        if len(digests) == 1 and image.nbytes <= self.budget_bytes:
            self._held.pop(digests[0])
        self._held.put(key, image)

    def clear(self) -> None:
        self._held.clear()
