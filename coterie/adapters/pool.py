"""Stacks of adapters for one engine: fixed device memory, a cache in RAM, a library on disk.

The engine's thread calls it and never waits; a loader thread does the work. A stack is identified
by its key (`core.plan.stack_key`), does not move between `take` and `release`, and is composed
again if it was evicted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from coterie.adapters.compose import upload_for
from coterie.adapters.loader import HostCache, StackLoader
from coterie.adapters.residency import AdapterSlab, Clock, StackEntry, StackFacts, StackResidency
from coterie.core.adapters import MAX_STACK, AdapterSettings
from coterie.core.errors import CoterieError, InternalError, InvalidRequest, NotFound, Overloaded
from coterie.core.lru import LruCache
from coterie.core.plan import AdapterChoice, stack_key

if TYPE_CHECKING:
    import torch

    from coterie.adapters.base import AdaptableModel
    from coterie.adapters.files import AdapterFacts, AdapterLibrary
    from coterie.adapters.residency import LoadTimes
    from coterie.kernels.patch import PatchStack

MAX_STACKS = 128
# stacks and adapters whose facts are cached
MAX_KNOWN = 4096
# a failed stack is tried again if it is requested after this time
RETRY_S = 1.0
MAX_FAILED = 256


class AdapterPool:
    max_stacks = MAX_STACKS

    def __init__(
        self,
        library: AdapterLibrary,
        targets: AdaptableModel,
        settings: AdapterSettings,
        device: torch.device,
        *,
        slab: AdapterSlab | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`slab`: device memory that was reserved before the model took the rest."""
        self.library, self._clock = library, clock
        self._host = HostCache(settings.host_bytes)
        slab = slab or AdapterSlab(settings.device_bytes, device)
        self._residency = StackResidency(slab, MAX_STACKS, clock)
        self._upload = upload_for(device, slab.nbytes)
        self._loader = StackLoader(library, self._host, targets, self._residency, self._upload)
        self._stack_facts: LruCache[str, StackFacts] = LruCache(MAX_KNOWN)
        self._files: LruCache[str, AdapterFacts] = LruCache(MAX_KNOWN)
        # the residency's version, and the digests at that version
        self._resident: tuple[int, tuple[str, ...]] = (0, ())
        self._lookups = {"device": 0, "host": 0, "disk": 0}

    def describe(self, adapters: Sequence[AdapterChoice]) -> StackFacts:
        """The facts of a stack, from the headers of its files. Raises if it cannot run here."""
        key = stack_key(adapters)
        return self._stack_facts.get_or_make(key, lambda: self._facts(key, tuple(adapters)))

    def want(self, adapters: Sequence[AdapterChoice]) -> None:
        """Starts loading a stack that is not here. If too many are being loaded, a later call of
        `state` starts it."""
        self._load_state(self.describe(adapters))

    def state(self, key: str) -> str:
        """ready, loading, full (in RAM, but the device has no memory for it now) or failed. Asking
        for an evicted stack starts its load again."""
        entry = self._residency.entries.get(key)
        facts = self._stack_facts.get(key) if entry is None else entry.facts
        if facts is None:
            return "failed"
        # facts of a stack in use must not leave the cache
        if self._stack_facts.get(key) is None:
            self._stack_facts.put(key, facts)
        if entry is None:
            return self._load_state(facts)
        entry.last_request_s = self._clock()
        return entry.state

    def prefer(self, key: str) -> None:
        """Makes this the next of the stacks that wait for device memory. The others keep their
        order."""
        residency = self._residency
        with residency.changed:
            entry = residency.entries.get(key)
            if entry is not None and entry.state == "full":
                self._loader.prefer(entry)

    def failure(self, key: str) -> CoterieError:
        entry = self._residency.entries.get(key)
        if entry is None:
            return NotFound(f"no stack {key[:12]} was asked for here")
        return entry.error or InternalError(f"stack {key[:12]} has not failed")

    def take(self, key: str) -> PatchStack:
        """A ready stack; it stays until `release` was called as often as `take`."""
        residency = self._residency
        with residency.changed:
            entry = self._ready(key)
            # for the first user after a load, the lookup counts where the stack was before
            self._lookups[entry.source if entry.is_new else "device"] += 1
            residency.take(entry)
            event, entry.event = entry.event, None
        if event is not None:
            self._upload.wait_for_copy(event)
        assert entry.stack is not None
        return entry.stack

    def release(self, key: str) -> None:
        residency = self._residency
        entry = self._ready(key)
        if entry.users == 1:
            # before another copy may overwrite the memory of this stack
            self._upload.fence()
        with residency.changed:
            if residency.release(entry):
                self._loader.retry()

    def stack(self, key: str) -> PatchStack:
        """The stack of a taken key."""
        stack = self._residency.entries[key].stack
        assert stack is not None
        return stack

    def stack_bytes(self, key: str) -> int:
        """Device bytes of a taken key."""
        block = self._residency.entries[key].block
        return 0 if block is None else block.nbytes

    def wait(self, timeout_s: float) -> None:
        """Waits until a load has ended or failed: for an engine that has nothing else to do."""
        self._loader.load_ended.wait(timeout_s)
        self._loader.load_ended.clear()

    def resident(self) -> tuple[str, ...]:
        """Digests whose stacks are ready."""
        residency = self._residency
        if self._resident[0] != residency.version:
            with residency.changed:
                ready = [e for e in residency.entries.values() if e.state == "ready"]
                digests = {digest: None for e in ready for digest in e.facts.digests}
                self._resident = (residency.version, tuple(digests))
        return self._resident[1]

    def loads(self) -> dict[str, LoadTimes]:
        """The load times of the most recently loaded adapters."""
        return self._loader.history.latest()

    @property
    def version(self) -> int:
        """Changes when `resident` or `loads` may."""
        return self._residency.version

    def stats(self) -> dict[str, float]:
        """Totals since start, and current sizes."""
        residency, history = self._residency, self._loader.history
        return {
            **{f"adapter_lookups_{tier}": float(n) for tier, n in self._lookups.items()},
            "adapter_hits": float(sum(self._lookups.values())),
            "adapter_loads": float(history.counts["loads"]),
            "adapter_loads_disk": float(history.counts["disk"]),
            "adapter_loads_host": float(history.counts["host"]),
            "adapter_load_disk_s": history.seconds["disk"],
            "adapter_compose_s": history.seconds["compose"],
            "adapter_place_s": history.seconds["place"],
            "adapter_evictions": float(residency.evictions),
            "adapter_host_evictions": float(self._host.evictions),
            "adapter_resident": float(residency.resident),
            "adapter_resident_bytes": float(residency.slab.used_bytes),
            "adapter_host_bytes": float(self._host.used_bytes),
            "adapter_loading": float(len(self._loader)),
            "adapter_failures": float(history.counts["failed"]),
        }

    def check(self) -> None:
        """Raises InternalError if the bookkeeping is inconsistent."""
        self._residency.check()

    def close(self) -> None:
        self._loader.close()
        self._upload.close()
        self._residency.entries.clear()
        self._host.clear()
        self._residency.slab.close()

    def _facts(self, key: str, adapters: tuple[AdapterChoice, ...]) -> StackFacts:
        if not 1 <= len(adapters) <= MAX_STACK:
            raise InvalidRequest(f"a request takes up to {MAX_STACK} adapters, not {len(adapters)}")
        for choice in adapters:
            if not math.isfinite(choice.weight):
                raise InvalidRequest(f"the weight of {choice.name} is {choice.weight}")
        digests = [choice.digest for choice in adapters]
        files = [self._files.get_or_make(d, partial(self.library.facts, d)) for d in digests]
        nbytes = sum(facts.nbytes for facts in files)
        room = self._residency.slab.nbytes
        if nbytes > room:
            raise InvalidRequest(
                f"these adapters take {nbytes} bytes and there is room for {room}: "
                "use fewer, or raise adapters.device_bytes"
            )
        tokens = sum(facts.num_virtual_tokens for facts in files)
        return StackFacts(key, adapters, tokens, nbytes)

    def _find_or_load(self, facts: StackFacts) -> StackEntry:
        residency, now_s = self._residency, self._clock()
        with residency.changed:
            entry = residency.entries.get(facts.key)
            if entry is not None and entry.state == "failed":
                if now_s - entry.waiting_since_s < RETRY_S:
                    return entry
                entry = None
            if entry is None:
                self._trim()
                is_cached = self._host.holds(facts.key, facts.digests)
                entry = StackEntry(facts, now_s, "host" if is_cached else "disk")
                self._loader.put(entry)
                residency.entries[facts.key] = entry
            entry.last_request_s = now_s
            return entry

    def _load_state(self, facts: StackFacts) -> str:
        try:
            return self._find_or_load(facts).state
        except Overloaded:
            return "loading"

    def _ready(self, key: str) -> StackEntry:
        entry = self._residency.entries.get(key)
        if entry is None or entry.stack is None:
            raise InternalError(f"stack {key[:12]} is not ready")
        return entry

    def _trim(self) -> None:
        """Removes the oldest failures if there are too many."""
        entries = self._residency.entries
        failed = [entry for entry in entries.values() if entry.state == "failed"]
        for entry in failed[: max(0, len(failed) - MAX_FAILED)]:
            del entries[entry.key]
