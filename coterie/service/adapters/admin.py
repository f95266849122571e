"""The changes that an admin can make to the installed adapters: install, alias, pin, remove.

Each change runs completely on the registry's thread and is in the snapshot before the call returns.
Running requests finish with the digest that they started with. The registry logs each change.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.core.adapters import AdapterCard
from coterie.core.errors import Forbidden, InvalidRequest, NotFound, WeightsError

if TYPE_CHECKING:
    from coterie.packages.registry import AdapterRegistry
    from coterie.service.fleet import BaseFingerprints, Fleet


@dataclass(frozen=True, slots=True)
class InstallName:
    """The name and version to install under, if they differ from those in the package."""

    name: str | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class AdapterDetails:
    """One adapter with all its installed versions."""

    card: AdapterCard
    versions: tuple[AdapterCard, ...]
    manifest: dict[str, Any] | None


class AdapterAdmin:
    def __init__(self, fleet: Fleet, trust: Path, allow_unsigned: bool) -> None:
        """`trust` is the file of the trusted keys."""
        self._fleet = fleet
        self._catalog = fleet.catalog
        self._trust = trust
        self._allow_unsigned = allow_unsigned

    def cards(self) -> list[AdapterCard]:
        return self._catalog.cards()

    def current(self) -> dict[str, AdapterCard]:
        """The adapter that each name and alias means."""
        return dict(self._catalog.current())

    async def install(
        self,
        source: Path | bytes,
        install_name: InstallName | None = None,
        base: str | None = None,
        now: bool = False,
    ) -> AdapterCard:
        """Install a `.expert` file, its bytes, or a PEFT directory on this machine. A PEFT
        directory does not name its base model: it is installed for the specialist `base`. The first
        version of a name becomes current, a later one only with `now`."""
        if install_name is not None and install_name.name is not None:
            self._refuse_specialists(install_name.name)
        bases = self._fleet.fingerprints(base)
        return await self._catalog.change(
            lambda registry: self._add(registry, source, bases, install_name or InstallName(), now)
        )

    async def load(self, name: str, path: Path, base: str | None, in_place: bool) -> AdapterCard:
        """Install as vLLM does: under the caller's name, which must be unused unless `in_place`.

        A reload keeps the previous version for a rollback, and removes older unsigned versions that
        no alias means.
        """
        self._refuse_specialists(name)
        bases = self._fleet.fingerprints(base)

        def work(registry: AdapterRegistry) -> AdapterCard:
            before = _current(registry, name)
            if before is not None and not in_place:
                raise InvalidRequest(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the "
                    "adapter in place, set 'load_inplace' to True.",
                    param="lora_name",
                )
            if before is not None and before.pinned:
                raise Forbidden(f"'{name}' is pinned to {before.version}. Unpin it first.")
            card = self._add(registry, path, bases, InstallName(name), now=True)
            if before is not None and before.version != card.version:
                _drop_older(registry, name, {before.version, card.version})
            return card

        return await self._catalog.change(work)

    async def show(self, name: str, version: str | None = None) -> AdapterDetails:
        def question(registry: AdapterRegistry) -> AdapterDetails:
            card = registry.find(name, version)
            versions = tuple(registry.versions(card.name))
            return AdapterDetails(card, versions, _manifest(registry, card))

        return await self._catalog.ask(question)

    async def alias(self, alias: str, name: str, version: str | None) -> AdapterCard:
        """Let `alias` mean this version from now on. If `alias` is the name itself, the version
        becomes the current one."""
        if alias != name:
            self._refuse_specialists(alias)
        return await self._catalog.change(lambda registry: registry.alias(alias, name, version))

    async def pin(self, name: str, on: bool, version: str | None = None) -> AdapterCard:
        """Pin or unpin. With a version, that version also becomes the current one."""

        def work(registry: AdapterRegistry) -> AdapterCard:
            if version is not None:
                # raise before anything changes if the version does not exist
                registry.find(name, version)
            card = registry.pin(name, on)
            if version is not None and card.version != version:
                registry.alias(name, name, version)
                card = registry.find(name)
            return card

        return await self._catalog.change(work)

    async def rollback(self, name: str) -> AdapterCard:
        """Return to the version that was current before."""
        return await self._catalog.change(lambda registry: registry.rollback(name))

    async def remove(self, name: str, version: str | None = None) -> AdapterCard:
        """Remove an adapter: new requests do not find it, and its files are removed when the last
        request that uses them has ended. For an alias, only the alias is removed."""

        def work(registry: AdapterRegistry) -> AdapterCard:
            card = registry.find(name, version)
            if card.name != name and version is None:
                registry.unalias(name)
            else:
                # the catalog removes the files: it knows which requests use them
                digests = [item.digest for item in registry.versions(card.name)]
                registry.remove(card.name, version, keep=digests)
            return card

        return await self._catalog.change(work)

    def _refuse_specialists(self, name: str) -> None:
        if name in self._fleet.names():
            raise InvalidRequest(f"`{name}` is a specialist's name; choose another", param="name")

    def _check(self, card: AdapterCard, folder: Path) -> None:
        """Check that the adapter can be loaded with each of our base models that it is for."""
        from coterie.adapters.check import check_adapter

        infos = self._fleet.adapter_infos(card.bases)
        room = min((info.device_bytes for info in infos.values()), default=None)
        check_adapter(folder, {name: info.modules for name, info in infos.items()}, room)

    def _add(
        self,
        registry: AdapterRegistry,
        source: Path | bytes,
        bases: BaseFingerprints,
        install_name: InstallName,
        now: bool,
    ) -> AdapterCard:
        from coterie.packages.trust import TrustStore

        is_directory = isinstance(source, Path) and os.path.isdir(source)
        try:
            return registry.install(
                source,
                trust=TrustStore(self._trust),
                allow_unsigned=self._allow_unsigned,
                bases=bases.named if is_directory else bases.every,
                name=install_name.name,
                version=install_name.version,
                now=now,
                check=self._check,
            )
        except WeightsError as error:
            # the file came with the request
            raise InvalidRequest(error.message, param=error.param) from error


def _drop_older(registry: AdapterRegistry, name: str, kept: Collection[str]) -> None:
    meant = {card.version for card in registry.meanings().values() if card.name == name}
    for old in registry.versions(name):
        if old.version not in meant.union(kept) and not old.signer:
            registry.remove(name, old.version, keep=[old.digest])


def _current(registry: AdapterRegistry, name: str) -> AdapterCard | None:
    try:
        return registry.find(name)
    except NotFound:
        return None


def _manifest(registry: AdapterRegistry, card: AdapterCard) -> dict[str, Any] | None:
    """None for an adapter that was installed from a plain directory."""
    from coterie.packages.paths import MANIFEST

    if not (registry.files(card) / MANIFEST).is_file():
        return None
    return dict(registry.manifest(card).document)
