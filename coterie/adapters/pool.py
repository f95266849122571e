"""Stacks of adapters for one engine: fixed room on the device, a cache in RAM, a library on disk.

The engine's thread calls it and never waits; a loader thread works behind it. A stack is known by
its key (`core.plan.stack_key`), lies still from `take` to `release`, and is composed again whenever
it was pushed out.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from coterie.adapters.compose import upload_for
from coterie.adapters.loader import HostCache, StackLoader
from coterie.adapters.residency import AdapterSlab, Clock, StackEntry, StackFacts, StackResidency
from coterie.core.adapters import MAX_STACK, AdapterSettings
from coterie.core.errors import CoterieError, InternalError, InvalidRequest, NotFound, Overloaded
from coterie.core.plan import AdapterChoice, stack_key

if TYPE_CHECKING:
    import torch

    from coterie.adapters.base import AdaptableModel
    from coterie.adapters.files import AdapterFacts, AdapterLibrary
    from coterie.adapters.residency import LoadTimes
    from coterie.kernels.patch import PatchStack

MAX_STACKS = 128
# stacks and adapters whose facts are remembered
MAX_KNOWN = 4096
# a stack that failed is tried again for whoever asks this much later
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
        """`slab`: room on the device that was set aside before the model took the rest."""
        self.library, self._clock = library, clock
        self._host = HostCache(settings.host_bytes)
        slab = slab or AdapterSlab(settings.device_bytes, device)
        self._residency = StackResidency(slab, MAX_STACKS, clock)
        self._upload = upload_for(device, slab.nbytes)
        self._loader = StackLoader(library, self._host, targets, self._residency, self._upload)
        # least recently asked for first
        self._known: OrderedDict[str, StackFacts] = OrderedDict()
        self._files: OrderedDict[str, AdapterFacts] = OrderedDict()
        # of the residency's version
        self._resident: tuple[int, tuple[str, ...]] = (0, ())
        self._lookups = {"device": 0, "host": 0, "disk": 0}

    def describe(self, adapters: Sequence[AdapterChoice]) -> StackFacts:
        """What a stack is, from its files' headers. Raises when it cannot be run here."""
        key = stack_key(adapters)
        facts = self._known.get(key)
        if facts is None:
            facts = self._known[key] = self._facts(key, tuple(adapters))
            _forget(self._known, MAX_KNOWN)
        self._known.move_to_end(key)
        return facts

    def want(self, adapters: Sequence[AdapterChoice]) -> None:
        """Begin to load a stack that is not here. When too many are being loaded, whoever asks for
        its state later begins it."""
        self._ask(self.describe(adapters))

    def state(self, key: str) -> str:
        """ready, loading, full (in RAM, and no room on the device now) or failed. A stack that was
        pushed out again is wanted again by asking."""
        entry = self._residency.entries.get(key)
        facts = self._known.get(key) if entry is None else entry.facts
        if facts is None:
            return "failed"
        # whoever is asked for is not forgotten
        self._known[key] = facts
        self._known.move_to_end(key)
        if entry is None:
            return self._ask(facts)
        entry.asked_s = self._clock()
        return entry.state

    def prefer(self, key: str) -> None:
        """Of the stacks that find no room, this one is next. The others keep their order."""
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
        """A ready stack; it stays until it was released as often as taken."""
        residency = self._residency
        with residency.changed:
            entry = self._ready(key)
            # whoever it was brought in for found it where it came from
            self._lookups[entry.source if entry.is_new else "device"] += 1
            residency.take(entry)
            event, entry.event = entry.event, None
        if event is not None:
            self._upload.arrived(event)
        assert entry.stack is not None
        return entry.stack

    def release(self, key: str) -> None:
        residency = self._residency
        entry = self._ready(key)
        if entry.users == 1:
            # before anyone may write over what was computed from
            self._upload.fence()
        with residency.changed:
            if residency.release(entry):
                self._loader.retry()

    def stack(self, key: str) -> PatchStack:
        """Of a taken key."""
        stack = self._residency.entries[key].stack
        assert stack is not None
        return stack

    def stack_bytes(self, key: str) -> int:
        """Of a taken key: what it takes on the device."""
        block = self._residency.entries[key].block
        return 0 if block is None else block.nbytes

    def wait(self, timeout_s: float) -> None:
        """Until a load has ended in some way: for an engine that has nothing else to do."""
        self._loader.news.wait(timeout_s)
        self._loader.news.clear()

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
        """What loading cost, of the adapters loaded last."""
        return self._loader.history.told()

    @property
    def version(self) -> int:
        """Changes when `resident` or `loads` may."""
        return self._residency.version

    def stats(self) -> dict[str, float]:
        """Totals since start, and how much is where now."""
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
        """Raises InternalError when the books do not add up."""
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
        files = [self._file(choice) for choice in adapters]
        nbytes = sum(facts.nbytes for facts in files)
        room = self._residency.slab.nbytes
        if nbytes > room:
            raise InvalidRequest(
                f"these adapters take {nbytes} bytes and there is room for {room}: "
                "use fewer, or raise adapters.device_bytes"
            )
        tokens = sum(facts.num_virtual_tokens for facts in files)
        return StackFacts(key, adapters, tokens, nbytes)

    def _file(self, choice: AdapterChoice) -> AdapterFacts:
        facts = self._files.get(choice.digest)
        if facts is None:
            facts = self._files[choice.digest] = self.library.facts(choice.digest)
            _forget(self._files, MAX_KNOWN)
        self._files.move_to_end(choice.digest)
        return facts

    def _want(self, facts: StackFacts) -> StackEntry:
        residency, now_s = self._residency, self._clock()
        with residency.changed:
            entry = residency.entries.get(facts.key)
            if entry is not None and entry.state == "failed":
                if now_s - entry.waits_since_s < RETRY_S:
                    return entry
                entry = None
            if entry is None:
                self._trim()
                here = self._host.holds(facts.key, facts.digests)
                entry = StackEntry(facts, now_s, "host" if here else "disk")
                self._loader.put(entry)
                residency.entries[facts.key] = entry
            entry.asked_s = now_s
            return entry

    def _ask(self, facts: StackFacts) -> str:
        try:
            return self._want(facts).state
        except Overloaded:
            return "loading"

    def _ready(self, key: str) -> StackEntry:
        entry = self._residency.entries.get(key)
        if entry is None or entry.stack is None:
            raise InternalError(f"stack {key[:12]} is not ready")
        return entry

    def _trim(self) -> None:
        """Failures nobody asked about go, the oldest first."""
        entries = self._residency.entries
        failed = [entry for entry in entries.values() if entry.state == "failed"]
        for entry in failed[: max(0, len(failed) - MAX_FAILED)]:
            del entries[entry.key]


def _forget(known: OrderedDict[str, Any], limit: int) -> None:
    while len(known) > limit:
        known.popitem(last=False)
