"""Where installed files lie: library/<digest>/ for adapters, packages/<id>/ for what came along.

Files appear in one rename, from a private folder of the same disk, and are never changed after.
Knows no name and no version: the registry does.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coterie.core.errors import Unavailable, WeightsError
from coterie.packages.archive import Package, unpack
from coterie.packages.digest import CONFIG, WEIGHTS, digest_of
from coterie.packages.signing import package_message

_ADAPTER = (CONFIG, WEIGHTS)


class Shelf:
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
