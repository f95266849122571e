"""The installed experts, by name, version and alias; safe to use from several processes.

Each change is one transaction and one new generation. An adapter is identified by its digest; names
only point to it, so a digest that is in use stays while a name gets another version.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from coterie.core.adapters import AdapterCard
from coterie.core.errors import (
    Conflict,
    Forbidden,
    InvalidRequest,
    NotFound,
    Unavailable,
    WeightsError,
)
from coterie.core.private_files import private_folder
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

# imported and removed adapters are kept this long, because a request may still use them
GRACE_S = 24 * 3600.0


class AdapterRegistry:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._registry_files = RegistryFiles(root)
        self._path = root / "registry.db"
        self._connection = connect(self._path)
        self._tables = RegistryTables(self._connection)
        self._mutex = threading.RLock()
        with self._reading() as tables:
            if not tables.prepare():
                raise WeightsError(f"{self._path}: made by a newer Coterie. Update this one.")

    @property
    def library(self) -> Path:
        return self._registry_files.library

    def close(self) -> None:
        self._connection.close()

    # --- installing

    def install(
        self,
        source: Source,
        *,
        trust: TrustStore,
        allow_unsigned: bool = False,
        bases: Sequence[str] = (),
        name: str | None = None,
        version: str | None = None,
        now: bool = False,
        check: Callable[[AdapterCard, Path], None] | None = None,
    ) -> AdapterCard:
        """Checks an `.expert` file (or its bytes) or a PEFT directory and installs it. The first
        version of a name becomes the current one. A later version is staged: it has its full name,
        and the name alone keeps its meaning. `now` makes a later version current too, unless the
        name is pinned. `check` gets the folder of the adapter before anything is changed, and may
        raise."""
        package, signer = self._checked(source, trust, allow_unsigned)
        base_names = [base.name for base in package.manifest.base_models]
        card = with_bases(renamed(card_of(package, signer), name, version), bases, base_names)
        package_files_id = package_id(package)
        with self._registry_files.staged(package) as staged, self._change() as tables:
            self._refuse_other_bytes(tables, card)
            if check is not None:
                check(card, staged / "adapter")
            self._registry_files.place_adapter(staged, card.digest)
            self._registry_files.place_package(staged, package_files_id)
            tables.add(card, package_files_id)
            meaning = tables.meaning(card.name)
            if meaning is None or (now and not meaning.pinned):
                tables.set_alias(card.name, card.name, card.version)
        log("expert installed", model=f"{card.name}@{card.version}", reason=signer or "unsigned")
        return card

    def is_sound(self, digest: str) -> bool:
        """Whether the adapter's files exist and match its digest."""
        return is_sound(self.library / digest, digest)

    def import_directory(self, path: Path) -> AdapterCard:
        """Makes a PEFT directory usable at once; it is not listed, and is removed after a day."""
        return self._imported(open_directory(path))

    def import_package(
        self, path: Path, *, trust: TrustStore, allow_unsigned: bool = False
    ) -> AdapterCard:
        """The same for an `.expert` file; it must still be signed."""
        package, signer = self._checked(path, trust, allow_unsigned)
        return self._imported(package, signer)

    def _imported(self, package: Package, signer: str = "") -> AdapterCard:
        card = card_of(package, signer)
        with self._registry_files.staged(package) as staged, self._change(announce=False) as tables:
            self._registry_files.place_adapter(staged, card.digest)
            tables.add_loose(card.digest, time.time())
        return card

    def _checked(
        self, source: Source, trust: TrustStore, allow_unsigned: bool
    ) -> tuple[Package, str]:
        """The package, and the id of the trusted key that signed it, if any."""
        is_directory = isinstance(source, Path) and os.path.isdir(source)
        package = open_directory(Path(str(source))) if is_directory else inspect(source)
        verdict = trust.verify(package)
        what = f"{package.manifest.name}@{package.manifest.version}"
        verdict.require(what, allow_unsigned=allow_unsigned)
        if not verdict.trusted:
            log("--allow-unsigned used", level="warning", model=what, reason=verdict.reason)
        return package, verdict.key_id if verdict.trusted else ""

    def _refuse_other_bytes(self, tables: RegistryTables, card: AdapterCard) -> None:
        installed = tables.card(card.name, card.version)
        if installed is not None and installed.digest != card.digest:
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

    # --- lookup

    def generation(self) -> int:
        with self._reading() as tables:
            return tables.generation()

    def cards(self) -> list[AdapterCard]:
        """Every installed version, by name and then from old to new."""
        with self._reading() as tables:
            cards = tables.cards()
        return sorted(cards, key=lambda card: (card.name, version_order(card.version)))

    def versions(self, name: str) -> list[AdapterCard]:
        versions = [card for card in self.cards() if card.name == name]
        if not versions:
            raise self._unknown(name)
        return versions

    def meanings(self) -> dict[str, AdapterCard]:
        """Names and aliases -> the version that each means now."""
        with self._reading() as tables:
            return tables.meanings()

    def find(self, name: str, version: str | None = None) -> AdapterCard:
        """By name or alias; without a version, the current one."""
        with self._reading() as tables:
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
        """The folder with the other files of its package: manifest, README, tests, grammar."""
        with self._reading() as tables:
            return self._registry_files.packages / tables.package(card.name, card.version)

    # --- aliases

    def alias(self, alias: str, name: str, version: str | None = None) -> AdapterCard:
        """Makes `alias` mean this version. For the name of an expert, this sets its current
        version."""
        check_name(alias)
        card = self.find(name, version)
        with self._change() as tables:
            if alias != card.name and tables.cards(alias):
                raise InvalidRequest(
                    f"{alias} is the name of an installed expert. Choose another alias.",
                    param="alias",
                )
            tables.set_alias(alias, card.name, card.version)
        log("expert alias set", model=f"{alias} -> {card.name}@{card.version}")
        return card

    def unalias(self, alias: str) -> None:
        """Removes an alias; names of installed experts stay."""
        with self._change() as tables:
            meaning = tables.meaning(alias)
            if meaning is None or meaning.name == alias:
                raise NotFound(f"{alias[:64]!r} is no alias.")
            tables.delete_alias(alias)

    def rollback(self, name: str) -> AdapterCard:
        """Restores what `name` meant before its last change."""
        with self._change() as tables:
            if tables.meaning(name) is None:
                raise self._unknown(name)
            before = tables.pop_history(name)
            card = None if before is None else tables.card(before.name, before.version)
            if card is None:
                raise NotFound(f"{name} meant nothing else before: there is no version to go to.")
            tables.set_alias(name, card.name, card.version, remember=False)
        log("expert rolled back", model=f"{name} -> {card.name}@{card.version}")
        return card

    def pin(self, name: str, on: bool = True) -> AdapterCard:
        """While pinned, a name keeps its version when others are installed, and is not removed."""
        with self._change() as tables:
            if not tables.cards(name):
                raise self._unknown(name)
            tables.pin(name, on)
        return self.find(name)

    # --- removing

    def remove(
        self, name: str, version: str | None = None, keep: Collection[str] = ()
    ) -> list[AdapterCard]:
        """Removes one version, or all. Files are removed with the last version that uses them,
        except digests in `keep`, which a later sweep removes."""
        with self._change() as tables:
            removed = [c for c in tables.cards(name) if version is None or c.version == version]
            if not removed:
                raise self._unknown(name, version)
            # deleted files cannot be restored by a rollback: everything is checked before anything
            # is deleted
            for card in removed:
                if card.pinned:
                    raise Forbidden(f"{name}@{card.version} is pinned. Unpin it first.")
            if version is not None:
                _refuse_last_current(tables, name, version)
            for card in removed:
                package = tables.package(card.name, card.version)
                aliases = tables.drop(card.name, card.version)
                if not tables.is_package_used(package):
                    self._registry_files.remove_package(package)
                self._free(tables, card.digest, keep)
                for alias in aliases:
                    self._restore_alias(tables, alias)
        log("expert removed", model=name, version=version)
        return removed

    def sweep(self, keep: Collection[str] = (), older_than_s: float = GRACE_S) -> list[str]:
        """Removes adapters that belong to no version and were not used lately, and leftovers of a
        crash. Returns the digests of the removed adapters."""
        with self._change(announce=False) as tables:
            tables.date_back(time.time())
            self._registry_files.remove_leftovers(tables.packages(), time.time() - GRACE_S)
            for digest in (
                self._registry_files.adapters()
                - tables.used()
                - set(tables.loose_digests(time.time()))
            ):
                tables.add_loose(digest, time.time())
            old = [d for d in tables.loose_digests(time.time() - older_than_s) if d not in keep]
            removed = [digest for digest in old if not tables.is_used(digest)]
            for digest in old:
                tables.forget(digest)
            for digest in removed:
                self._registry_files.remove_adapter(digest)
        return removed

    def _free(self, tables: RegistryTables, digest: str, keep: Collection[str]) -> None:
        if tables.is_used(digest):
            return
        if digest in keep:
            tables.add_loose(digest, time.time())
        elif not tables.is_loose(digest, time.time() - GRACE_S):
            self._registry_files.remove_adapter(digest)

    def _restore_alias(self, tables: RegistryTables, alias: str) -> None:
        """Restores what an alias meant before. If nothing, it is gone."""
        before = tables.pop_history(alias)
        if before is not None:
            tables.set_alias(alias, before.name, before.version)

    @contextmanager
    def _reading(self) -> Iterator[RegistryTables]:
        with self._mutex, database_errors(self._path):
            yield self._tables

    @contextmanager
    def _change(self, *, announce: bool = True) -> Iterator[RegistryTables]:
        with self._reading() as tables, transaction(self._connection):
            yield tables
            if announce:
                tables.changed()

    def _unknown(self, name: str, version: str | None = None) -> NotFound:
        names = sorted(self.meanings())
        if version is not None and name in names:
            installed = ", ".join(card.version for card in self.versions(self.find(name).name))
            return NotFound(f"{name} has no version {version[:40]!r} here; it has {installed}.")
        if version is None and name in names:
            return NotFound(f"{name} is an alias of {self.find(name).name}: use that name.")
        near = near_names(name, names)
        hint = f" Did you mean {' or '.join(near)}?" if near else " See coterie expert list."
        return NotFound(f"no expert {name[:80]!r} is installed.{hint}")


def _refuse_last_current(tables: RegistryTables, name: str, version: str) -> None:
    """Refuse to remove the current version if only staged ones would be left: nobody has said
    that one of them may answer."""
    meaning = tables.meaning(name)
    staged = [card.version for card in tables.cards(name) if card.version != version]
    is_current = meaning is not None and meaning.version == version
    if is_current and staged and not tables.meant_before(name, version):
        raise Conflict(
            f"{name}@{version} is current, and the others ({', '.join(staged)}) are staged: "
            f"promote one of them first, or remove {name} as a whole."
        )


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


def renamed(card: AdapterCard, name: str | None, version: str | None) -> AdapterCard:
    """With another name or version, if given."""
    if name is not None:
        card = replace(card, name=check_name(name))
    if version is not None:
        card = replace(card, version=check_version(version))
    return card


def with_bases(card: AdapterCard, bases: Sequence[str], names: Sequence[str]) -> AdapterCard:
    """The card with the base models it is used with (fingerprints). Raises InvalidRequest if it was
    made for another model, and names that model (`names`).

    An adapter that states no fingerprint is assumed to fit all of them.
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
        """The package's files in a private folder, which is removed when the block ends."""
        private = self._private_folder()
        try:
            for folder in ("adapter", "package"):
                private_folder(private / folder)
            unpack(package, private / "adapter", lambda name: name in _ADAPTER)
            unpack(package, private / "package", lambda name: name not in _ADAPTER)
            yield private
        except OSError as error:
            # the package is not at fault
            raise Unavailable(f"installing failed: {error.strerror}. Check the disk.") from error
        finally:
            shutil.rmtree(private, ignore_errors=True)

    def place_adapter(self, staged: Path, digest: str) -> None:
        """Moves the adapter to the library, unless the same bytes are already there."""
        target = self.library / digest
        if _is_own_folder(target) and is_sound(target, digest):
            return
        self._discard(target)
        private_folder(self.library)
        (staged / "adapter").rename(target)

    def place_package(self, staged: Path, package: str) -> None:
        target = self.packages / package
        if not _is_own_folder(target):
            self._discard(target)
            private_folder(self.packages)
            (staged / "package").rename(target)

    def remove_adapter(self, digest: str) -> None:
        self._discard(self.library / digest)

    def remove_package(self, package: str) -> None:
        self._discard(self.packages / package)

    def adapters(self) -> set[str]:
        """The digests in the library."""
        return {path.name for path in _inside(self.library)}

    def remove_leftovers(self, packages: set[str], before: float) -> None:
        """Removes leftovers of a crash: packages without a version, and old private folders."""
        leftovers = [path for path in _inside(self.packages) if path.name not in packages]
        leftovers += [path for path in _inside(self._staging) if _is_older(path, before)]
        for path in leftovers:
            _remove(path)

    def _discard(self, target: Path) -> None:
        """Removes a folder in one step; open files stay readable for those who have opened them."""
        if not os.path.lexists(target):
            return
        away = self._private_folder()
        target.rename(away / "gone")
        shutil.rmtree(away, ignore_errors=True)

    def _private_folder(self) -> Path:
        try:
            private_folder(self._staging)
            return Path(tempfile.mkdtemp(dir=self._staging))
        except OSError as error:
            raise Unavailable(f"{self._staging}: cannot be written ({error.strerror}).") from error


def package_id(package: Package) -> str:
    """Identifies the other files of a package: different files or another signature give another
    id."""
    signature = str(package.manifest.integrity.get("signature", ""))
    return hashlib.sha256(package_message(package) + signature.encode()).hexdigest()[:32]


def _is_own_folder(path: Path) -> bool:
    """A link is not: what it points to belongs to somebody else and may change."""
    return path.is_dir() and not path.is_symlink()


def _is_older(path: Path, before: float) -> bool:
    """False for what another process has just removed."""
    try:
        return path.lstat().st_mtime < before
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    """A link is removed, never what it points to."""
    if _is_own_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _inside(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def is_sound(target: Path, digest: str) -> bool:
    try:
        return digest_of(target) == digest
    except WeightsError:
        return False
