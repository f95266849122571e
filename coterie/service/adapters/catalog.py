"""The installed adapters as requests see them: a snapshot of the registry, in memory.

One separate thread reads the registry's rows and files, never the event loop. Changes by another
process (`coterie expert ...`) are seen within `POLL_S`. The files of a removed adapter are removed
when its last request has ended.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, TypeVar

from coterie.core.adapters import AdapterCard, AdapterProfile
from coterie.core.errors import CoterieError, Unavailable, UnsupportedFeature
from coterie.core.plan import AdapterChoice
from coterie.obs.log import log
from coterie.packages.adapter_kinds import device_size
from coterie.packages.profile import read_profile
from coterie.routing.protocols import Matcher
from coterie.service.adapters.matching import MatcherBuilder

if TYPE_CHECKING:
    from coterie.packages.registry import AdapterRegistry

POLL_S = 0.5
# files are removed at the earliest this long after their last use
SETTLE_S = 0.2
# errors of a registry that cannot be used; a damaged row raises ValueError
BROKEN = (CoterieError, OSError, sqlite3.Error, ValueError)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CatalogSnapshot:
    """The registry at one moment. Replaced as a whole: an alias changes for all at once."""

    generation: int = -1
    versions: Mapping[tuple[str, str], AdapterCard] = field(default_factory=dict)
    # name or alias -> the adapter that it means
    current: Mapping[str, AdapterCard] = field(default_factory=dict)
    by_digest: Mapping[str, AdapterCard] = field(default_factory=dict)
    # the profiles in the packages of `versions`
    profiles: Mapping[tuple[str, str], AdapterProfile] = field(default_factory=dict)
    # profiles of the adapters that the router can choose, by name
    current_profiles: Mapping[str, AdapterProfile] = field(default_factory=dict)
    usual_quality: float = 0.5


class AdapterCatalog:
    """`root` is the registry's folder; None for a server without adapters."""

    def __init__(self, root: Path | None) -> None:
        self.leases = AdapterLeases(self._on_idle)
        self._root = root
        self._registry: AdapterRegistry | None = None
        self._thread = ThreadPoolExecutor(1, "registry")
        # used only on that thread
        self._profiles = ProfileCache()
        self._matcher_builder = MatcherBuilder()
        self._snapshot = CatalogSnapshot()
        # digests of installed adapters whose files are missing or changed
        self._damaged: frozenset[str] = frozenset()
        self._poller: asyncio.Task[None] | None = None
        # digests that are no longer installed, but whose files may still exist
        self._removed: set[str] = set()
        # adapters that specialists always run with, by digest: kept even if they are removed
        self._fixed: Mapping[str, AdapterProfile] = {}
        self._cleanup_due = asyncio.Event()
        self._cleaner: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self._root is None:
            return
        from coterie.packages.registry import AdapterRegistry

        try:
            self._registry = await self._call(AdapterRegistry, self._root)
            await self.refresh()
        except BROKEN as error:
            # serve without experts rather than not at all
            self._registry = None
            log("registry_unreadable", level="warning", error=error)
            return
        self._poller = asyncio.ensure_future(self._poll())
        self._cleaner = asyncio.ensure_future(self._clean_up())

    def read_once(self) -> None:
        """Read what is installed, for a command: no poller, no matcher, nothing to close. Raises
        an error of the registry."""
        if self._root is None:
            return
        from coterie.packages.registry import AdapterRegistry

        registry = AdapterRegistry(self._root)
        try:
            self._snapshot = self._read(registry)
        finally:
            registry.close()

    async def close(self) -> None:
        tasks = [task for task in (self._poller, self._cleaner) if task is not None]
        self._poller = self._cleaner = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._matcher_builder.close()
        registry, self._registry = self._registry, None
        if registry is not None:
            # the thread closes it after its other work
            self._thread.submit(registry.close)
        self._thread.shutdown(wait=False)

    # for requests: reads only memory

    def find(self, name: str, version: str) -> AdapterCard | None:
        card = self._snapshot.current.get(name)
        if not version:
            return card
        # alias@version means a version of the adapter that the alias means
        return self._snapshot.versions.get((card.name if card else name, version))

    def names(self) -> Iterable[str]:
        return self._snapshot.current.keys()

    def current(self) -> Mapping[str, AdapterCard]:
        """The adapter that each name and alias means."""
        return self._snapshot.current

    def cards(self) -> list[AdapterCard]:
        """Every installed version."""
        return list(self._snapshot.versions.values())

    def by_digest(self, digest: str) -> AdapterCard | None:
        card = self._snapshot.by_digest.get(digest)
        if card is None and digest in self._fixed:
            card = self._fixed[digest].card
        return card

    def profile(self, card: AdapterCard) -> AdapterProfile:
        """The profile in its package; only the card if it was removed in the meantime."""
        profile = self._snapshot.profiles.get((card.name, card.version))
        if profile is None:
            profile = self._fixed.get(card.digest)
        return AdapterProfile(card) if profile is None else profile

    def is_damaged(self, digest: str) -> bool:
        return digest in self._damaged

    def keep(self, profiles: Iterable[AdapterProfile]) -> None:
        """Keep the files of these adapters from now on, and no longer those of the last call."""
        before, self._fixed = self._fixed, {item.card.digest: item for item in profiles}
        if self._removed.intersection(before):
            self._cleanup_due.set()

    def current_profiles(self) -> Mapping[str, AdapterProfile]:
        return self._snapshot.current_profiles

    def damaged(self) -> list[AdapterCard]:
        """Installed adapters with damaged files. No request is routed to them until they are
        installed again."""
        return [card for card in self.cards() if card.digest in self._damaged]

    async def find_damaged(self, adapters: Sequence[AdapterChoice]) -> list[AdapterChoice]:
        """Check the files of these adapters. Returns those whose files have changed or are missing;
        from now on no request is routed to them."""
        registry = self._opened()
        digests = [item.digest for item in adapters]
        damaged = await self._call(_damaged_of, registry, digests)
        for item in adapters:
            if item.digest in damaged - self._damaged:
                log("expert_damaged", level="error", model=item.name,
                    reason="its files are gone or changed; nothing is routed to it until it is "
                    "installed again")  # fmt: skip
        if damaged - self._damaged:
            self._damaged |= damaged
            await self.refresh()
        return [item for item in adapters if item.digest in damaged]

    def matcher(self) -> Matcher | None:
        """The matcher for what is installed, or was installed a moment ago; None while the first
        one is being built."""
        return self._matcher_builder.matcher

    def usual_quality(self) -> float:
        return self._snapshot.usual_quality

    async def settled(self) -> None:
        """Returns when the router can choose among the adapters that are installed now."""
        await self._matcher_builder.settled()

    def hold(self, adapters: Sequence[AdapterChoice]) -> AdapterLease:
        """Keep the files of a plan's adapters. Must be called before any other code can run."""
        cards = (self.by_digest(item.digest) for item in adapters)
        return self.leases.take(adapters, sum(c.num_virtual_tokens for c in cards if c is not None))

    # for admins: runs on the registry's thread

    async def change(self, work: Callable[[AdapterRegistry], T]) -> T:
        """Run `work`, then show its result to all new requests."""
        registry = self._opened()

        def whole() -> tuple[T, CatalogSnapshot, CatalogSnapshot]:
            # adapters that another server removed are left to that server: it knows who uses them
            before = self._read(registry)
            return work(registry), before, self._read(registry)

        try:
            done, before, after = await self._call(whole)
        except BROKEN:
            # part of the change may have been made
            await self.refresh()
            raise
        self._removed |= before.by_digest.keys() - after.by_digest.keys()
        self._show(after)
        return done

    async def ask(self, question: Callable[[AdapterRegistry], T]) -> T:
        """The result of `question`, which must not change anything."""
        return await self._call(question, self._opened())

    async def refresh(self) -> None:
        self._show(await self._call(self._read, self._opened()))

    async def refresh_if_open(self) -> None:
        """The same; a server without a readable registry goes on without."""
        if self._registry is not None:
            await self.refresh()

    def _show(self, snapshot: CatalogSnapshot) -> None:
        """Make `snapshot` the current one. All snapshots come from one thread, so in order."""
        self._removed -= snapshot.by_digest.keys()
        self._snapshot = snapshot
        self._matcher_builder.update_profiles(tuple(snapshot.current_profiles.values()))
        if self._removed:
            self._cleanup_due.set()

    def _read(self, registry: AdapterRegistry) -> CatalogSnapshot:
        """Read a snapshot. The generation is read first: the next poll then sees changes that
        another process makes during this read."""
        generation = registry.generation()
        self._damaged = _damaged_of(registry, self._damaged)
        cards, current = registry.cards(), registry.meanings()
        profiles = self._profiles.read(registry, cards)
        return CatalogSnapshot(
            generation=generation,
            versions={(card.name, card.version): card for card in cards},
            current=current,
            by_digest={card.digest: card for card in (*cards, *current.values())},
            profiles=profiles,
            current_profiles=current_profiles(current, profiles, self._damaged),
            usual_quality=usual_quality(profiles.values()),
        )

    def _opened(self) -> AdapterRegistry:
        if self._root is None:
            raise UnsupportedFeature("this server runs no experts: adapters.device_bytes is 0")
        if self._registry is None:
            raise Unavailable("the registry of experts is closed or cannot be opened; see the log")
        return self._registry

    async def _call(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def _poll(self) -> None:
        registry = self._opened()
        while True:
            await asyncio.sleep(POLL_S)
            try:
                if await self._call(registry.generation) != self._snapshot.generation:
                    await self.refresh()
            except BROKEN as error:
                log("registry_unreadable", level="warning", error=error)

    def _on_idle(self, digests: Collection[str]) -> None:
        if self._removed.intersection(digests):
            self._cleanup_due.set()

    async def _clean_up(self) -> None:
        """Remove the files of removed adapters, and at start those that a crash left. An adapter
        that is neither installed nor in use cannot get a new user, because requests find adapters
        only in the snapshot."""
        registry = self._opened()
        await self._done(registry.sweep)
        while True:
            await self._cleanup_due.wait()
            await asyncio.sleep(SETTLE_S)
            self._cleanup_due.clear()
            idle = self._removed - self.leases.digests_in_use() - self._fixed.keys()
            self._removed -= idle
            if idle and (left := await self._done(partial(_free, registry, idle))):
                # too new, or installed again, which the next snapshot will show
                self._removed |= set(left) - self._snapshot.by_digest.keys()
                self._cleanup_due.set()

    async def _done(self, work: Callable[[], Collection[str]]) -> Collection[str]:
        try:
            return await self._call(work)
        except BROKEN as error:
            log("registry_unreadable", level="warning", error=error)
            return ()


def _damaged_of(registry: AdapterRegistry, digests: Iterable[str]) -> frozenset[str]:
    """The digests that do not match their files in the library. Reads all the files."""
    return frozenset(digest for digest in digests if not registry.is_sound(digest))


def _free(registry: AdapterRegistry, digests: Collection[str]) -> list[str]:
    """Remove the files of these digests only: other processes may use others, also such that appear
    while this runs. Returns the digests whose files still exist."""
    if registry.library.is_dir():
        others = {path.name for path in registry.library.iterdir()} - set(digests)
        registry.sweep(others, older_than_s=SETTLE_S / 2)
    return [digest for digest in digests if (registry.library / digest).exists()]


# the usual quality if no installed package has evaluation results
UNJUDGED = 0.5


class ProfileCache:
    """Keeps the profiles of installed packages. The files of a package never change."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, Path], AdapterProfile] = {}

    def read(
        self, registry: AdapterRegistry, cards: Sequence[AdapterCard]
    ) -> dict[tuple[str, str], AdapterProfile]:
        """Profiles by name and version; the same object as before if nothing changed."""
        known: dict[tuple[str, str, Path], AdapterProfile] = {}
        profiles: dict[tuple[str, str], AdapterProfile] = {}
        for card in cards:
            folder = registry.files(card)
            key = (card.name, card.version, folder)
            profile = self._known.get(key) or _read(registry, card, folder)
            if profile.card != card:
                profile = replace(profile, card=card)
            known[key] = profiles[card.name, card.version] = profile
        self._known = known
        return profiles


def current_profiles(
    meanings: Mapping[str, AdapterCard],
    profiles: Mapping[tuple[str, str], AdapterProfile],
    damaged: Collection[str] = (),
) -> dict[str, AdapterProfile]:
    """The profiles that the router can choose, sorted by name."""
    return {
        name: profiles[name, card.version]
        for name, card in sorted(meanings.items())
        if (name, card.version) in profiles and card.digest not in damaged
    }


def usual_quality(profiles: Iterable[AdapterProfile]) -> float:
    """The quality that is assumed for a package without evaluation results: the mean of those that
    have results."""
    judged = [profile.quality for profile in profiles if profile.quality is not None]
    return fmean(judged) if judged else UNJUDGED


def _read(registry: AdapterRegistry, card: AdapterCard, folder: Path) -> AdapterProfile:
    try:
        size = device_size(registry.library / card.digest)
        return replace(
            read_profile(card, registry.manifest(card), folder),
            device_bytes=size.wide,
            narrow_bytes=size.narrow,
            shift_bytes=size.shifts,
        )
    except (CoterieError, OSError, ValueError) as error:
        log("manifest_unreadable", level="warning", model=f"{card.name}@{card.version}",
            error=error)  # fmt: skip
        return AdapterProfile(card)


class AdapterLease:
    """Keeps the adapters of one request until it ends.

    If a stream is never read, it is garbage-collected with its lease, and the lease ends.
    """

    __slots__ = ("_adapters", "_counts", "_leases", "virtual_tokens")

    def __init__(
        self, leases: AdapterLeases, adapters: Sequence[AdapterChoice], virtual_tokens: int
    ) -> None:
        self._leases = leases
        self._adapters = adapters
        self._counts: defaultdict[str, int] | None = None
        self.virtual_tokens = virtual_tokens
        self._move(leases.waiting)

    def start(self) -> None:
        """Note that the request runs now; before, it waited."""
        if self._counts is self._leases.waiting:
            self._move(self._leases.running)

    def end(self) -> None:
        adapters, self._adapters = self._adapters, ()
        if adapters and self._counts is not None:
            _count(self._counts, adapters, -1)
            self._leases.ended(adapters)

    __del__ = end

    def __enter__(self) -> AdapterLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _move(self, counts: defaultdict[str, int]) -> None:
        if self._counts is not None:
            _count(self._counts, self._adapters, -1)
        _count(counts, self._adapters, 1)
        self._counts = counts


class AdapterLeases:
    """All leases that have not ended. `on_idle` gets digests without users."""

    def __init__(self, on_idle: Callable[[Collection[str]], None]) -> None:
        self.waiting: defaultdict[str, int] = defaultdict(int)
        self.running: defaultdict[str, int] = defaultdict(int)
        self._users: defaultdict[str, int] = defaultdict(int)
        self._on_idle = on_idle

    def take(self, adapters: Sequence[AdapterChoice], virtual_tokens: int) -> AdapterLease:
        for item in adapters:
            self._users[item.digest] += 1
        return AdapterLease(self, adapters, virtual_tokens)

    def digests_in_use(self) -> frozenset[str]:
        return frozenset(self._users)

    def ended(self, adapters: Sequence[AdapterChoice]) -> None:
        idle = []
        for item in adapters:
            self._users[item.digest] -= 1
            if not self._users[item.digest]:
                del self._users[item.digest]
                idle.append(item.digest)
        if idle:
            self._on_idle(idle)


def _count(counts: defaultdict[str, int], adapters: Sequence[AdapterChoice], step: int) -> None:
    """Count by name without version, as requests name them. Names with count 0 are removed."""
    for item in adapters:
        name = item.name.partition("@")[0]
        counts[name] += step
        if not counts[name]:
            del counts[name]
