"""The loader thread of the pool: disk to host cache, compose, host to device; one stack at a time.

Stacks whose adapters are in RAM are placed before those that must be read. A stack that does not
fit on the device waits in a queue. Free memory goes to the first of the queue; only a stack that
the engine prefers may pass the others. Besides the host cache, RAM is needed only for one stack's
adapters and its composed form.
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
from coterie.weights.shortage import started

if TYPE_CHECKING:
    from coterie.adapters.base import AdaptableModel, Adapter
    from coterie.adapters.compose import StackUpload
    from coterie.adapters.files import AdapterLibrary
    from coterie.adapters.residency import StackEntry, StackResidency

# most loads in progress: far more than an engine's queue holds
MAX_LOADS = 1024
# the first of the queue is dropped if others were requested this much later than it
ABANDONED_S = 2.0
# protection of a stack ends by time alone: try again after this
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
        # set whenever a stack has become ready, full or failed
        self.load_ended = threading.Event()
        self.history = LoadHistory()
        self._reads: deque[StackEntry] = deque()
        self._placements: deque[StackEntry] = deque()
        # the first of the queue does not fit now
        self._blocked = False
        self._retry_at_s = 0.0
        # for the first of the queue: its key, its image, and the seconds to compose it
        self._image: tuple[str, StackImage, float] | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    # the caller holds `residency.changed` for: put, prefer, retry

    def put(self, entry: StackEntry) -> None:
        if len(self._reads) + len(self._placements) >= MAX_LOADS:
            raise Overloaded(f"{MAX_LOADS} adapters are being loaded already", retry_after_s=1.0)
        if self._thread is None:
            [self._thread] = started(self._work, "adapters", 1)
        if self._host.holds(entry.key, entry.facts.digests):
            self._enqueue(entry)
        else:
            self._reads.append(entry)
        self._residency.changed.notify_all()

    def prefer(self, entry: StackEntry) -> None:
        """Makes it the first of the queue; the others keep their order after it. A stack that is
        being placed at this moment is still placed first."""
        placements = self._placements
        if placements and placements[0] is not entry and entry in placements:
            placements.remove(entry)
            placements.appendleft(entry)
            # it may fit where the other did not
            self.retry()

    def retry(self) -> None:
        """Memory was released: try to place the first of the queue again."""
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
        return len(self._reads) + len(self._placements)

    def _enqueue(self, entry: StackEntry) -> None:
        self._placements.append(entry)
        if self._blocked:
            self._wait(entry)

    def _wait(self, entry: StackEntry) -> None:
        if entry.state != "full":
            entry.state, entry.waiting_since_s = "full", self._residency.clock()
            self.load_ended.set()

    def _work(self) -> None:
        # the engine's steps need the other cores, and thread teams that share a core wait for each
        # other
        use_threads_here(max(1, torch.get_num_threads() // 2))
        with torch.inference_mode():
            while (task := self._next()) is not None:
                work, entry = task
                try:
                    work(entry)
                except CoterieError as problem:
                    self._fail(entry, problem)
                except Exception as problem:
                    log("adapter_load_failed", level="error", error=problem)
                    self._fail(entry, WeightsError(f"adapters could not be loaded: {problem!r}"))
                del entry, task

    def _next(self) -> tuple[Callable[[StackEntry], None], StackEntry] | None:
        changed = self._residency.changed
        with changed:
            while not self._closed:
                if self._placements and not self._blocked:
                    return self._place, self._placements[0]
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
        # a stack that RAM cannot hold is read only when there is memory on the device
        if facts.nbytes <= host.budget_bytes and not host.holds(facts.key, facts.digests):
            for digest in facts.digests:
                self._adapter(digest)
        with self._residency.changed:
            self._enqueue(entry)

    def _adapter(self, digest: str) -> Adapter:
        adapter = self._host.adapter(digest)
        if adapter is None:
            started = time.perf_counter()
            adapter = self._library.load(digest)
            self.history.record_read(digest, time.perf_counter() - started)
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
        return self._residency.clock() - entry.waiting_since_s if entry.state == "full" else 0.0

    def _no_room(self, entry: StackEntry) -> None:
        newest_s = max(waiting.last_request_s for waiting in self._placements)
        if newest_s - entry.last_request_s > ABANDONED_S:
            self._placements.remove(entry)
            self._image = None
            del self._residency.entries[entry.key]
            return
        # another stack may have been preferred meanwhile
        self._blocked = self._placements[0] is entry
        self._retry_at_s = time.monotonic() + _RETRY_S
        for waiting in self._placements:
            self._wait(waiting)

    def _fill(self, entry: StackEntry, image: StackImage, slot: int, compose_s: float) -> None:
        residency, block = self._residency, entry.block
        assert block is not None
        started = time.perf_counter()
        try:
            room = residency.slab.view(block)
            event = self._upload.copy(image, room)
            patches, soft = image.views(room)
        except BaseException:
            with residency.changed:
                residency.cancel(entry, slot)
            raise
        with residency.changed:
            self._placements.remove(entry)
            entry.stack = PatchStack(entry.key, slot, patches, soft)
            entry.event, entry.state = event, "ready"
            # before the version: a reader that sees the new version must see this load
            self.history.record_load(entry.facts.digests, compose_s, time.perf_counter() - started)
            residency.version += 1
        self.load_ended.set()

    def _composed(self, entry: StackEntry) -> tuple[StackImage, float]:
        """Keeps the image while the first of the queue waits for memory."""
        facts = entry.facts
        if self._image is None or self._image[0] != facts.key:
            image, started = self._host.image(facts.key), time.perf_counter()
            if image is not None:
                self.history.record_cached()
            else:
                parts = [(self._adapter(choice.digest), choice.weight) for choice in facts.adapters]
                started = time.perf_counter()
                image = StackImage(compose(parts, self._targets))
                self._host.keep_image(facts.key, image, facts.digests)
            self._image = (facts.key, image, time.perf_counter() - started)
        return self._image[1:]

    def _fail(self, entry: StackEntry, problem: CoterieError) -> None:
        self.history.counts["failed"] += 1
        with self._residency.changed:
            if entry in self._placements:
                self._placements.remove(entry)
            entry.error, entry.state = problem, "failed"
            entry.waiting_since_s = self._residency.clock()
            self._image = None
        self.load_ended.set()


class HostCache:
    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        # adapters by digest, images by their stack's key: digests and keys differ in length
        self._cache: LruCache[str, Adapter | StackImage] = LruCache(
            budget_bytes, size=lambda value: value.nbytes
        )

    def __len__(self) -> int:
        return len(self._cache)

    @property
    def used_bytes(self) -> int:
        return self._cache.used

    @property
    def evictions(self) -> int:
        return self._cache.evictions

    def holds(self, key: str, digests: Sequence[str]) -> bool:
        """Whether a stack can be placed without reading the disk."""
        return key in self._cache or all(digest in self._cache for digest in digests)

    def adapter(self, digest: str) -> Adapter | None:
        value = self._cache.get(digest)
        return value if isinstance(value, Adapter) else None

    def image(self, key: str) -> StackImage | None:
        value = self._cache.get(key)
        return value if isinstance(value, StackImage) else None

    def keep(self, adapter: Adapter) -> None:
        """An adapter that alone exceeds the budget is not kept."""
        self._cache.put(adapter.digest, adapter)

    def keep_image(self, key: str, image: StackImage, digests: Sequence[str]) -> None:
        if len(digests) == 1 and image.nbytes <= self.budget_bytes:
            self._cache.pop(digests[0])
        self._cache.put(key, image)

    def clear(self) -> None:
        self._cache.clear()
