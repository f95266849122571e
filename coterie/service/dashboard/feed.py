"""One snapshot a second for everybody who looks, and none if nobody does.

A listener gets the sections that changed since it was last served, so one that reads slowly skips
what it missed; nothing waits for it and nothing is kept for it. Its frames are server-sent events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from coterie.core.errors import CoterieError, Overloaded
from coterie.obs.log import log
from coterie.service.dashboard.activity import RequestActivity
from coterie.service.dashboard.sections import DashboardSections, Sections
from coterie.service.records.log import InferenceRecords

INTERVAL_S = 1.0
# snapshots without a change after which a listener is told that nothing changed
QUIET_TICKS = 5
MAX_LISTENERS = 64
# of one tenant, so that none can keep the others out
MAX_OF_ONE = 16
# receipts that a new listener gets
MAX_RECEIPTS = 50


@dataclass(slots=True, eq=False)
class DashboardListener:
    """`tenant` is None for the operator. `may_stay`: whether its key is still valid."""

    tenant: str | None
    may_stay: Callable[[], bool]
    # by section: the version it has
    held: dict[str, int] = field(default_factory=dict)
    # number of the newest receipt it has
    newest: int = 0
    quiet: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _View:
    """The sections of one tenant, each with the number of the snapshot that changed it."""

    sections: dict[str, tuple[int, bytes]] = field(default_factory=dict)

    def update(self, sections: Sections, tick: int) -> None:
        before = self.sections
        self.sections = {
            name: before[name] if name in before and before[name][1] == data else (tick, data)
            for name, data in sections.items()
        }


class DashboardFeed:
    """Used from one event loop."""

    def __init__(
        self, sections: DashboardSections, activity: RequestActivity, records: InferenceRecords
    ) -> None:
        self._sections, self._activity, self._records = sections, activity, records
        self._listeners: list[DashboardListener] = []
        self._views: dict[str | None, _View] = {}
        # frames of the current snapshot, by what they contain
        self._frames: dict[tuple[object, ...], bytes] = {}
        # whole frames, by tenant: when they were made, and the frames
        self._whole: dict[str | None, tuple[float, bytes]] = {}
        self._ticking: asyncio.Task[None] | None = None
        self._tick = 0
        self._at = 0.0
        self._is_closed = False

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    @property
    def num_snapshots(self) -> int:
        """Since start."""
        return self._tick

    def listen(self, tenant: str | None, may_stay: Callable[[], bool]) -> DashboardListener:
        """A new listener, to be given to `frames`. Raises Overloaded if there are too many."""
        own = sum(item.tenant == tenant for item in self._listeners)
        if self._is_closed:
            raise Overloaded("the server is shutting down", retry_after_s=5.0)
        if own >= MAX_OF_ONE or len(self._listeners) >= MAX_LISTENERS:
            many = own if own >= MAX_OF_ONE else len(self._listeners)
            raise Overloaded(f"{many} dashboards are open; close one", retry_after_s=30.0)
        listener = DashboardListener(tenant, may_stay)
        self._listeners.append(listener)
        return listener

    async def once(self, tenant: str | None) -> bytes:
        """One whole frame, at most a second old, for those who do not stay."""
        now = time.monotonic()
        self._whole = {key: kept for key, kept in self._whole.items() if now - kept[0] < INTERVAL_S}
        if tenant not in self._whole:
            sections = (await self._sections.read([tenant]))[tenant]
            parts = [_member(name, data) for name, data in sections.items()]
            parts.append(b'"receipts":[' + b",".join(await self._kept_receipts(tenant)) + b"]")
            self._whole[tenant] = now, _frame(time.time(), parts)
        return self._whole[tenant][1]

    async def frames(self, listener: DashboardListener) -> AsyncGenerator[bytes, None]:
        """The frames of a listener until the server drains, or until its key is revoked. To be
        closed."""
        try:
            listener.newest = self._activity.newest
            first = b",".join(await self._kept_receipts(listener.tenant))
            # a snapshot that began before may lack what happened since
            if self._ticking is None or self._ticking.done():
                self._ticking = asyncio.ensure_future(self._run())
            yield _frame(time.time(), [b'"receipts":[' + first + b"]"])
            while not self._is_closed:
                await listener.news.wait()
                listener.news.clear()
                if self._is_closed:
                    break
                if not listener.may_stay():
                    yield b'event: end\ndata: {"reason":"key"}\n\n'
                    return
                if frame := self._next(listener):
                    yield frame
            yield b'event: end\ndata: {"reason":"drain"}\n\n'
        finally:
            self.leave(listener)

    def leave(self, listener: DashboardListener) -> None:
        """May be called twice."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    def close(self) -> None:
        """End all streams; there will be no others."""
        self._is_closed = True
        if self._ticking is not None:
            self._ticking.cancel()
        for listener in self._listeners:
            listener.news.set()

    async def _kept_receipts(self, tenant: str | None) -> list[bytes]:
        try:
            return await self._records.recent_receipts(MAX_RECEIPTS, tenant)
        except CoterieError:
            # the log of inferences cannot be read: those that follow are shown
            return []

    async def _run(self) -> None:
        """A snapshot every second while there are listeners."""
        while self._listeners and not self._is_closed:
            begun = time.monotonic()
            tenants = dict.fromkeys(listener.tenant for listener in self._listeners)
            try:
                found = await self._sections.read(list(tenants))
            except Exception as error:
                # those who look see no news; the server goes on
                log("unhandled error", level="error", error=error)
                found = {}
            self._tick += 1
            self._at = time.time()
            self._frames.clear()
            self._views = {tenant: self._views.get(tenant) or _View() for tenant in tenants}
            for tenant, sections in found.items():
                self._views[tenant].update(sections, self._tick)
            for listener in self._listeners:
                listener.news.set()
            await asyncio.sleep(max(INTERVAL_S - (time.monotonic() - begun), 0.1))

    def _next(self, listener: DashboardListener) -> bytes:
        """What changed since the listener's last frame; empty if nothing did."""
        view = self._views.get(listener.tenant)
        if view is None:
            return b""
        changed = {
            name: version
            for name, (version, _) in view.sections.items()
            if listener.held.get(name) != version
        }
        newest = self._activity.newest
        key = (listener.tenant, *changed, listener.newest, newest)
        frame = self._frames.get(key)
        if frame is None:
            parts = [_member(name, view.sections[name][1]) for name in changed]
            told = self._activity.since(listener.newest, listener.tenant)
            receipts = [item.receipt for item in told]
            if receipts:
                parts.append(b'"receipts":[' + b",".join(receipts) + b"]")
            frame = _frame(self._at, parts) if parts else b""
            self._frames[key] = frame
        listener.held.update(changed)
        listener.newest = newest
        listener.quiet = 0 if frame else listener.quiet + 1
        if listener.quiet >= QUIET_TICKS:
            listener.quiet = 0
            return _frame(self._at, [])
        return frame


def _member(name: str, data: bytes) -> bytes:
    return b'"' + name.encode() + b'":' + data


def _frame(at: float, parts: list[bytes]) -> bytes:
    head = b'event: update\ndata: {"at":%.3f' % at
    return head + b"".join(b"," + part for part in parts) + b"}\n\n"
