"""Which experts are installed here, by name, version and alias; safe between processes.

Each change is one transaction and one new generation. The digest is the identity: names only point
to it, so whoever runs a digest keeps it while names move on.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from coterie.core.adapters import AdapterCard
from coterie.core.errors import Forbidden, InvalidRequest, NotFound, Unavailable, WeightsError
from coterie.obs.log import log
from coterie.packages import manifest as manifests
from coterie.packages.archive import Package, Source, inspect, unpack
from coterie.packages.directory import open_directory
from coterie.packages.manifest import Manifest, check_name, check_version, near_names, version_order
from coterie.packages.paths import CONFIG, MANIFEST, WEIGHTS, digest_of
from coterie.packages.registry_tables import RegistryTables
from coterie.packages.signing import package_message
from coterie.packages.sqlite import connect, database_errors, transaction
from coterie.packages.trust import TrustStore

# imported and removed adapters stay this long: someone may still be running them
GRACE_S = 24 * 3600.0


class AdapterRegistry:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._registry_files = RegistryFiles(root)
        self._path = root / "registry.db"
        self._connection = connect(self._path)
        self._tables = RegistryTables(self._connection)
        self._mutex = threading.RLock()
        with self._asking() as tables:
            if not tables.prepare():
                raise WeightsError(f"{self._path}: made by a newer Coterie. Update this one.")

    @property
    def library(self) -> Path:
        return self._registry_files.library

    def close(self) -> None:
        self._connection.close()

    # --- putting experts in

    def install(
        self,
        source: Source,
        *,
        trust: TrustStore,
        allow_unsigned: bool = False,
        bases: Sequence[str] = (),
        name: str | None = None,
        version: str | None = None,
        check: Callable[[AdapterCard, Path], None] | None = None,
    ) -> AdapterCard:
        """Checks an `.expert` file (or its bytes) or a PEFT directory, and makes its version the
        one that its name means, unless the name is pinned. `check` sees the folder of the adapter
        before anything is changed, and may raise."""
        package, signer = self._checked(source, trust, allow_unsigned)
        bases_named = [base.name for base in package.manifest.base_models]
        card = fitted(named(card_of(package, signer), name, version), bases, bases_named)
        came_along = package_id(package)
        with self._registry_files.staged(package) as staged, self._change() as tables:
            self._refuse_other_bytes(tables, card)
            if check is not None:
                check(card, staged / "adapter")
            self._registry_files.place_adapter(staged, card.digest)
            self._registry_files.place_package(staged, came_along)
            tables.add(card, came_along)
            meaning = tables.meaning(card.name)
            if meaning is None or not meaning.pinned:
                tables.point(card.name, card.name, card.version)
        log("expert installed", model=f"{card.name}@{card.version}", reason=signer or "unsigned")
        return card

    def is_sound(self, digest: str) -> bool:
        """The adapter's files are there and are the bytes that its digest names."""
        return is_sound(self.library / digest, digest)

    def import_directory(self, path: Path) -> AdapterCard:
        """A PEFT directory by its content: runnable at once, not listed, swept after a day."""
        return self._imported(open_directory(path))

    def import_package(
        self, path: Path, *, trust: TrustStore, allow_unsigned: bool = False
    ) -> AdapterCard:
        """An `.expert` file in the same way; it must be signed all the same."""
        package, signer = self._checked(path, trust, allow_unsigned)
        return self._imported(package, signer)

    def _imported(self, package: Package, signer: str = "") -> AdapterCard:
        card = card_of(package, signer)
        with self._registry_files.staged(package) as staged, self._change(announce=False) as tables:
            self._registry_files.place_adapter(staged, card.digest)
            tables.loosen(card.digest, time.time())
        return card

    def _checked(
        self, source: Source, trust: TrustStore, allow_unsigned: bool
    ) -> tuple[Package, str]:
        """The package, and the id of the trusted key that signed it, if one did."""
        is_directory = isinstance(source, Path) and os.path.isdir(source)
        package = open_directory(Path(str(source))) if is_directory else inspect(source)
        verdict = trust.verify(package)
        what = f"{package.manifest.name}@{package.manifest.version}"
        verdict.require(what, allow_unsigned=allow_unsigned)
        if not verdict.trusted:
            log("--allow-unsigned used", level="warning", model=what, reason=verdict.reason)
        return package, verdict.key_id if verdict.trusted else ""

    def _refuse_other_bytes(self, tables: RegistryTables, card: AdapterCard) -> None:
        known = tables.card(card.name, card.version)
        if known is not None and known.digest != card.digest:
            raise InvalidRequest(
                f"{card.name}@{card.version} is installed with other weights. Versions do not "
                "change: raise the version, or remove the installed one first.",
                param="version",
            )
        meaning = tables.meaning(card.name)
        if meaning is not None and meaning.name != card.name:
            raise InvalidRequest(
                f"{card.name} is an alias of {meaning.name} here. Choose another name.",
                param="name",
            )

    # --- finding them

    def generation(self) -> int:
        with self._asking() as tables:
            return tables.generation()

    def cards(self) -> list[AdapterCard]:
        """Every installed version, by name and then from old to new."""
        with self._asking() as tables:
            cards = tables.cards()
        return sorted(cards, key=lambda card: (card.name, version_order(card.version)))

    def versions(self, name: str) -> list[AdapterCard]:
        found = [card for card in self.cards() if card.name == name]
        if not found:
            raise self._unknown(name)
        return found

    def meanings(self) -> dict[str, AdapterCard]:
        """Names and aliases -> the version that each means now."""
        with self._asking() as tables:
            return tables.meanings()

    def find(self, name: str, version: str | None = None) -> AdapterCard:
        """By name or alias; without a version, the one that it means now."""
        with self._asking() as tables:
            meaning = tables.meaning(name)
            if meaning is None:
                card = None if version is None else tables.card(name, version)
            else:
                card = tables.card(meaning.name, meaning.version if version is None else version)
        if card is None:
            raise self._unknown(name, version)
        return card

    def manifest(self, card: AdapterCard) -> Manifest:
        path = self.files(card) / MANIFEST
        return manifests.read(path.read_bytes() if path.is_file() else b"", str(path))

    def files(self, card: AdapterCard) -> Path:
        """The folder of what came along with it: manifest, README, tests, grammar."""
        with self._asking() as tables:
            return self._registry_files.packages / tables.package(card.name, card.version)

    # --- changing what names mean

    def alias(self, alias: str, name: str, version: str | None = None) -> AdapterCard:
        """`alias` means this version from now on. For a name itself: which version is current."""
        check_name(alias)
        card = self.find(name, version)
        with self._change() as tables:
            if alias != card.name and tables.cards(alias):
                raise InvalidRequest(
                    f"{alias} is the name of an installed expert. Choose another alias.",
                    param="alias",
                )
            tables.point(alias, card.name, card.version)
        log("expert alias set", model=f"{alias} -> {card.name}@{card.version}")
        return card

    def unalias(self, alias: str) -> None:
        """Takes an alias away; names of installed experts stay."""
        with self._change() as tables:
            meaning = tables.meaning(alias)
            if meaning is None or meaning.name == alias:
                raise NotFound(f"{alias[:64]!r} is no alias.")
            tables.unpoint(alias)

    def rollback(self, name: str) -> AdapterCard:
        """Back to what `name` meant before its last change."""
        with self._change() as tables:
            if tables.meaning(name) is None:
                raise self._unknown(name)
            before = tables.step_back(name)
            card = None if before is None else tables.card(before.name, before.version)
            if card is None:
                raise NotFound(f"{name} meant nothing else before: there is no version to go to.")
            tables.point(name, card.name, card.version, remember=False)
        log("expert rolled back", model=f"{name} -> {card.name}@{card.version}")
        return card

    def pin(self, name: str, on: bool = True) -> AdapterCard:
        """While pinned, a name keeps its version when others are installed, and is not removed."""
        with self._change() as tables:
            if not tables.cards(name):
                raise self._unknown(name)
            tables.pin(name, on)
        return self.find(name)

    # --- taking experts out

    def remove(
        self, name: str, version: str | None = None, keep: Collection[str] = ()
    ) -> list[AdapterCard]:
        """One version, or all. Files go with the last version that has them, unless their digest
        is in `keep`: those go in a later sweep."""
        with self._change() as tables:
            gone = [c for c in tables.cards(name) if version is None or c.version == version]
            if not gone:
                raise self._unknown(name, version)
            # files do not come back with the rows: all is checked before any of it goes
            for card in gone:
                if card.pinned:
                    raise Forbidden(f"{name}@{card.version} is pinned. Unpin it first.")
            for card in gone:
                package = tables.package(card.name, card.version)
                bereft = tables.drop(card.name, card.version)
                if not tables.is_package_used(package):
                    self._registry_files.take_package(package)
                self._free(tables, card.digest, keep)
                for alias in bereft:
                    self._point_again(tables, alias)
        log("expert removed", model=name, version=version)
        return gone

    def sweep(self, keep: Collection[str] = (), older_than_s: float = GRACE_S) -> list[str]:
        """Frees adapters that no version has and nobody asked for lately, and what a crash left.
        Says which adapters."""
        with self._change(announce=False) as tables:
            self._registry_files.tidy(tables.packages(), time.time() - GRACE_S)
            for digest in (
                self._registry_files.adapters() - tables.used() - set(tables.loose(time.time()))
            ):
                tables.loosen(digest, time.time())
            old = [d for d in tables.loose(time.time() - older_than_s) if d not in keep]
            gone = [digest for digest in old if not tables.is_used(digest)]
            for digest in old:
                tables.forget(digest)
            for digest in gone:
                self._registry_files.take_adapter(digest)
        return gone

    def _free(self, tables: RegistryTables, digest: str, keep: Collection[str]) -> None:
        if tables.is_used(digest):
            return
        if digest in keep:
            tables.loosen(digest, time.time())
        elif not tables.is_loose(digest, time.time() - GRACE_S):
            self._registry_files.take_adapter(digest)

    def _point_again(self, tables: RegistryTables, alias: str) -> None:
        """Back to what it meant before; a name, else to its newest version; an alias, else gone."""
        before = tables.step_back(alias)
        if before is not None:
            tables.point(alias, before.name, before.version)
            return
        left = sorted(tables.cards(alias), key=lambda card: version_order(card.version))
        if left:
            tables.point(alias, alias, left[-1].version)

    @contextmanager
    def _asking(self) -> Iterator[RegistryTables]:
        with self._mutex, database_errors(self._path):
            yield self._tables

    @contextmanager
    def _change(self, *, announce: bool = True) -> Iterator[RegistryTables]:
        with self._asking() as tables, transaction(self._connection):
            yield tables
            if announce:
                tables.changed()

    def _unknown(self, name: str, version: str | None = None) -> NotFound:
        known = sorted(self.meanings())
        if version is not None and name in known:
            here = ", ".join(card.version for card in self.versions(self.find(name).name))
            return NotFound(f"{name} has no version {version[:40]!r} here; it has {here}.")
        if version is None and name in known:
            return NotFound(f"{name} is an alias of {self.find(name).name}: use that name.")
        near = near_names(name, known)
        hint = f" Did you mean {' or '.join(near)}?" if near else " See coterie expert list."
        return NotFound(f"no expert {name[:80]!r} is installed.{hint}")


def card_of(package: Package, signer: str = "") -> AdapterCard:
    manifest = package.manifest
    return AdapterCard(
        name=manifest.name,
        version=manifest.version,
        digest=package.digest,
        kind=package.config.kind,
        bases=manifest.fingerprints,
        num_virtual_tokens=package.config.num_virtual_tokens,
        nbytes=package.files[WEIGHTS].size,
        installed_at=time.time(),
        signer=signer,
        description=manifest.description,
    )


def named(card: AdapterCard, name: str | None, version: str | None) -> AdapterCard:
    """Under other words, where they were given."""
    if name is not None:
        card = replace(card, name=check_name(name))
    if version is not None:
        card = replace(card, version=check_version(version))
    return card


def fitted(card: AdapterCard, bases: Sequence[str], names: Sequence[str]) -> AdapterCard:
    """For one of these base models (fingerprints), or a refusal that says which it is for (names).

    An adapter that names no fingerprint is taken to be for all of them.
    """
    if not bases:
        return card
    if not card.bases:
        return replace(card, bases=tuple(sorted(set(bases))))
    if not set(bases) & set(card.bases):
        made_for = ", ".join(base[:12] for base in card.bases)
        called = f"{', '.join(dict.fromkeys(names))} " if names else ""
        raise InvalidRequest(
            f"{card.name}@{card.version} was made for another base model: for {called}"
            f"(fingerprint {made_for}), not for the one with {bases[0][:12]}. Use that model, or "
            "pack the adapter again with --base for this one.",
            param="base",
        )
    return card


_ADAPTER = (CONFIG, WEIGHTS)


class RegistryFiles:
    def __init__(self, root: Path) -> None:
        self.library = root / "library"
        self.packages = root / "packages"
        self._staging = root / "staging"

    @contextmanager
    def staged(self, package: Package) -> Iterator[Path]:
        """The package's files in a folder that nobody else sees; gone when the block ends."""
        made = self._private_folder()
        try:
            for folder in ("adapter", "package"):
                (made / folder).mkdir()
            unpack(package, made / "adapter", lambda name: name in _ADAPTER)
            unpack(package, made / "package", lambda name: name not in _ADAPTER)
            yield made
        except OSError as error:
            # nothing is wrong with the package
            raise Unavailable(f"installing failed: {error.strerror}. Check the disk.") from error
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def place_adapter(self, staged: Path, digest: str) -> None:
        """Puts the adapter in its place, unless the same bytes are there already."""
        target = self.library / digest
        if target.exists() and is_sound(target, digest):
            return
        self._discard(target)
        self.library.mkdir(parents=True, exist_ok=True)
        (staged / "adapter").rename(target)

    def place_package(self, staged: Path, package: str) -> None:
        target = self.packages / package
        if not target.exists():
            self.packages.mkdir(parents=True, exist_ok=True)
            (staged / "package").rename(target)

    def take_adapter(self, digest: str) -> None:
        self._discard(self.library / digest)

    def take_package(self, package: str) -> None:
        self._discard(self.packages / package)

    def adapters(self) -> set[str]:
        """The digests that are here."""
        return {path.name for path in _inside(self.library)}

    def tidy(self, packages: set[str], before: float) -> None:
        """Takes away what a crash left: packages without a version, and old private folders."""
        lost = [path for path in _inside(self.packages) if path.name not in packages]
        lost += [path for path in _inside(self._staging) if path.stat().st_mtime < before]
        for path in lost:
            shutil.rmtree(path, ignore_errors=True)

    def _discard(self, target: Path) -> None:
        """Gone at once for everyone; those who have the files open keep what they opened."""
        if not target.exists():
            return
        away = self._private_folder()
        target.rename(away / "gone")
        shutil.rmtree(away, ignore_errors=True)

    def _private_folder(self) -> Path:
        try:
            self._staging.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(dir=self._staging))
        except OSError as error:
            raise Unavailable(f"{self._staging}: cannot be written ({error.strerror}).") from error


def package_id(package: Package) -> str:
    """Names what came along with an adapter: other files or another signature, another id."""
    signature = str(package.manifest.integrity.get("signature", ""))
    return hashlib.sha256(package_message(package) + signature.encode()).hexdigest()[:32]


def _inside(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def is_sound(target: Path, digest: str) -> bool:
    try:
        return digest_of(target) == digest
    except WeightsError:
        return False
