"""Installed adapters as every request sees them: a snapshot of the registry, in memory.

The registry's rows and files are read on one thread of their own, never on the event loop. What is
installed or removed elsewhere (`coterie expert ...`) shows within `POLL_S`. Files of an adapter
that was removed go when its last request has ended.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
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
from coterie.packages.device_size import device_size
from coterie.packages.profile import read_profile
from coterie.routing.protocols import Matcher
from coterie.service.adapters.matching import MatcherBuilder

if TYPE_CHECKING:
    from coterie.packages.registry import AdapterRegistry

POLL_S = 0.5
# files go this long after their last user at the earliest
SETTLE_S = 0.2
# a damaged row is a ValueError
BROKEN = (CoterieError, OSError, sqlite3.Error, ValueError)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CatalogSnapshot:
    """The registry at one moment. Replaced whole, so that an alias flips at once for everybody."""

    generation: int = -1
    versions: Mapping[tuple[str, str], AdapterCard] = field(default_factory=dict)
    # what names and aliases stand for
    current: Mapping[str, AdapterCard] = field(default_factory=dict)
    by_digest: Mapping[str, AdapterCard] = field(default_factory=dict)
    # what the packages of `versions` say
    profiles: Mapping[tuple[str, str], AdapterProfile] = field(default_factory=dict)
    # those that can be chosen by content, by name
    current_profiles: Mapping[str, AdapterProfile] = field(default_factory=dict)
    usual_quality: float = 0.5


class AdapterCatalog:
    """`root` is the registry's folder; None for a server that runs no adapters."""

    def __init__(self, root: Path | None) -> None:
        self.leases = AdapterLeases(self._idle)
        self._root = root
        self._registry: AdapterRegistry | None = None
        self._thread = ThreadPoolExecutor(1, "registry")
        # of that thread alone
        self._profiles = ProfileCache()
        self._matching = MatcherBuilder()
        self._snapshot = CatalogSnapshot()
        # installed, and not what they were: digests whose files are gone or changed
        self._damaged: frozenset[str] = frozenset()
        self._poller: asyncio.Task[None] | None = None
        # digests that are installed no longer, and whose files may still be there
        self._doomed: set[str] = set()
        self._untidy = asyncio.Event()
        self._tidier: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self._root is None:
            return
        from coterie.packages.registry import AdapterRegistry

        try:
            self._registry = await self._call(AdapterRegistry, self._root)
            await self.refresh()
        except BROKEN as error:
            # a server without experts is better than none
            self._registry = None
            log("registry_unreadable", level="warning", error=error)
            return
        self._poller = asyncio.ensure_future(self._poll())
        self._tidier = asyncio.ensure_future(self._tidy())

    async def close(self) -> None:
        tasks = [task for task in (self._poller, self._tidier) if task is not None]
        self._poller = self._tidier = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._matching.close()
        registry, self._registry = self._registry, None
        if registry is not None:
            # behind what the thread still has to do
            self._thread.submit(registry.close)
        self._thread.shutdown(wait=False)

    # what a request asks: memory only

    def find(self, name: str, version: str) -> AdapterCard | None:
        card = self._snapshot.current.get(name)
        if not version:
            return card
        # an alias may be asked for a version of what it stands for
        return self._snapshot.versions.get((card.name if card else name, version))

    def names(self) -> Iterable[str]:
        return self._snapshot.current.keys()

    def current(self) -> Mapping[str, AdapterCard]:
        """What every name and alias stands for."""
        return self._snapshot.current

    def cards(self) -> list[AdapterCard]:
        """Every installed version."""
        return list(self._snapshot.versions.values())

    def by_digest(self, digest: str) -> AdapterCard | None:
        return self._snapshot.by_digest.get(digest)

    def profile(self, card: AdapterCard) -> AdapterProfile:
        """What its package says; of one that was removed meanwhile, the card alone."""
        found = self._snapshot.profiles.get((card.name, card.version))
        return AdapterProfile(card) if found is None else found

    def current_profiles(self) -> Mapping[str, AdapterProfile]:
        return self._snapshot.current_profiles

    def damaged(self) -> list[AdapterCard]:
        """Installed ones that nothing is routed to until they are installed again."""
        return [card for card in self.cards() if card.digest in self._damaged]

    async def look_over(self, adapters: Sequence[AdapterChoice]) -> list[AdapterChoice]:
        """Those whose files are not what was installed: nothing is routed to them from now on."""
        registry = self._opened()
        digests = [item.digest for item in adapters]
        found = await self._call(_unsound, registry, digests)
        for item in adapters:
            if item.digest in found - self._damaged:
                log("expert_damaged", level="error", model=item.name,
                    reason="its files are gone or changed; nothing is routed to it until it is "
                    "installed again")  # fmt: skip
        if found - self._damaged:
            self._damaged |= found
            await self.refresh()
        return [item for item in adapters if item.digest in found]

    def matcher(self) -> Matcher | None:
        """Of what is installed, or was a moment ago; None while the first is being built."""
        return self._matching.matcher

    def usual_quality(self) -> float:
        return self._snapshot.usual_quality

    async def settled(self) -> None:
        """Returns when what is installed now can be found by content."""
        await self._matching.settled()

    def hold(self, adapters: Sequence[AdapterChoice]) -> AdapterLease:
        """Keeps the files of a plan's adapters. To be called before anything else can run."""
        cards = (self._snapshot.by_digest.get(item.digest) for item in adapters)
        return self.leases.take(adapters, sum(c.num_virtual_tokens for c in cards if c is not None))

    # what an admin does: on the registry's thread

    async def change(self, work: Callable[[AdapterRegistry], T]) -> T:
        """Runs `work`, then shows its outcome to every request from now on."""
        registry = self._opened()

        def whole() -> tuple[T, CatalogSnapshot, CatalogSnapshot]:
            # what another server removed meanwhile is its own to free: it knows who runs on it
            before = self._read(registry)
            return work(registry), before, self._read(registry)

        try:
            done, before, after = await self._call(whole)
        except BROKEN:
            # it may have got half way
            await self.refresh()
            raise
        self._doomed |= before.by_digest.keys() - after.by_digest.keys()
        self._show(after)
        return done

    async def ask(self, question: Callable[[AdapterRegistry], T]) -> T:
        """`question`'s answer, where nothing is changed."""
        return await self._call(question, self._opened())

    async def refresh(self) -> None:
        self._show(await self._call(self._read, self._opened()))

    def _show(self, snapshot: CatalogSnapshot) -> None:
        """The one thread keeps the order: a later reading never comes first."""
        self._doomed -= snapshot.by_digest.keys()
        self._snapshot = snapshot
        self._matching.follow(tuple(snapshot.current_profiles.values()))
        if self._doomed:
            self._untidy.set()

    def _read(self, registry: AdapterRegistry) -> CatalogSnapshot:
        """The number comes first: what another process changes meanwhile is seen by the next
        poll."""
        generation = registry.generation()
        self._damaged = _unsound(registry, self._damaged)
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

    def _idle(self, digests: Collection[str]) -> None:
        if self._doomed.intersection(digests):
            self._untidy.set()

    async def _tidy(self) -> None:
        """Frees the files of removed adapters. One that is neither installed nor held can get no
        new user: requests find adapters in the snapshot alone. At start, what a crash left."""
        registry = self._opened()
        await self._done(registry.sweep)
        while True:
            await self._untidy.wait()
            await asyncio.sleep(SETTLE_S)
            self._untidy.clear()
            idle = self._doomed - self.leases.held()
            self._doomed -= idle
            if idle and (left := await self._done(partial(_free, registry, idle))):
                # too young, or somebody installed them again, which a reading will show
                self._doomed |= set(left) - self._snapshot.by_digest.keys()
                self._untidy.set()

    async def _done(self, work: Callable[[], Collection[str]]) -> Collection[str]:
        try:
            return await self._call(work)
        except BROKEN as error:
            log("registry_unreadable", level="warning", error=error)
            return ()


def _unsound(registry: AdapterRegistry, digests: Iterable[str]) -> frozenset[str]:
    """Those whose files in the library are not their bytes. Reads them all."""
    return frozenset(digest for digest in digests if not registry.is_sound(digest))


def _free(registry: AdapterRegistry, digests: Collection[str]) -> list[str]:
    """Removes the files of these digests and of no others, which other processes may be using: not
    even of those that come while this runs. Says which are still there."""
    if registry.library.is_dir():
        others = {path.name for path in registry.library.iterdir()} - set(digests)
        registry.sweep(others, older_than_s=SETTLE_S / 2)
    return [digest for digest in digests if (registry.library / digest).exists()]


# of a fleet in which nobody was judged
UNJUDGED = 0.5


class ProfileCache:
    """Keeps what it read while it is installed: a package's files never change."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, Path], AdapterProfile] = {}

    def read(
        self, registry: AdapterRegistry, cards: Sequence[AdapterCard]
    ) -> dict[tuple[str, str], AdapterProfile]:
        """By name and version. The same object as before where nothing changed."""
        known: dict[tuple[str, str, Path], AdapterProfile] = {}
        found: dict[tuple[str, str], AdapterProfile] = {}
        for card in cards:
            folder = registry.files(card)
            key = (card.name, card.version, folder)
            profile = self._known.get(key) or _read(registry, card, folder)
            if profile.card != card:
                profile = replace(profile, card=card)
            known[key] = found[card.name, card.version] = profile
        self._known = known
        return found


def current_profiles(
    meanings: Mapping[str, AdapterCard],
    profiles: Mapping[tuple[str, str], AdapterProfile],
    damaged: Collection[str] = (),
) -> dict[str, AdapterProfile]:
    """Those that can be chosen by content, by what they are called, in the names' order."""
    return {
        name: profiles[name, card.version]
        for name, card in sorted(meanings.items())
        if (name, card.version) in profiles and card.digest not in damaged
    }


def usual_quality(profiles: Iterable[AdapterProfile]) -> float:
    """What a package without figures is taken to reach: the mean of those with some."""
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
    """One request's hold on its adapters.

    A stream that is never read is dropped together with its lease, which then ends by itself.
    """

    __slots__ = ("_adapters", "_counts", "_leases", "virtual_tokens")

    def __init__(
        self, leases: AdapterLeases, adapters: Sequence[AdapterChoice], virtual_tokens: int
    ) -> None:
        self._leases = leases
        self._adapters = adapters
        self._counts: Counter[str] | None = None
        self.virtual_tokens = virtual_tokens
        self._move(leases.waiting)

    def start(self) -> None:
        """The request runs now; it waited until here."""
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

    def _move(self, counts: Counter[str]) -> None:
        if self._counts is not None:
            _count(self._counts, self._adapters, -1)
        _count(counts, self._adapters, 1)
        self._counts = counts


class AdapterLeases:
    """Every lease that has not ended. `on_idle` is told of digests that lost their last user."""

    def __init__(self, on_idle: Callable[[Collection[str]], None]) -> None:
        self.waiting: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self._users: Counter[str] = Counter()
        self._on_idle = on_idle

    def take(self, adapters: Sequence[AdapterChoice], virtual_tokens: int) -> AdapterLease:
        for item in adapters:
            self._users[item.digest] += 1
        return AdapterLease(self, adapters, virtual_tokens)

    def held(self) -> frozenset[str]:
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


def _count(counts: Counter[str], adapters: Sequence[AdapterChoice], step: int) -> None:
    """By name without version, as requests ask for them. Names that nobody asks for are dropped."""
    for item in adapters:
        name = item.name.partition("@")[0]
        counts[name] += step
        if not counts[name]:
            del counts[name]
