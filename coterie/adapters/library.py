"""Adapters on disk, by the digest of their bytes: `<root>/<digest>/` holds one PEFT directory.

What is read is checked against its digest every time. Knows no names, versions or signatures.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from coterie.adapters.base import Adapter
from coterie.adapters.files import CONFIG, WEIGHTS, AdapterFacts, describe, parse_adapter
from coterie.core.errors import NotFound, WeightsError
from coterie.packages.digest import adapter_digest

_DIGEST = re.compile(r"[0-9a-f]{64}")


class AdapterLibrary:
    """Reads only; `packages.registry` writes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def facts(self, digest: str) -> AdapterFacts:
        """Cheap: the config and a file's header."""
        return describe(self._directory(digest))

    def load(self, digest: str) -> Adapter:
        """The very bytes that were checked, in memory of their own."""
        directory = self._directory(digest)
        config, weights = bytes(_read_whole(directory / CONFIG)), _read_whole(directory / WEIGHTS)
        found = adapter_digest(_sha256(config), _sha256(weights))
        if found != digest:
            raise WeightsError(
                f"adapter {digest[:12]}: the bytes in {directory} are not those it is named by "
                f"(they are {found[:12]}). Install it again."
            )
        try:
            return parse_adapter(config, weights, digest)
        except WeightsError as error:
            raise WeightsError(f"adapter {digest[:12]}: {error.message}") from error

    def _directory(self, digest: str) -> Path:
        # it becomes part of a path
        if _DIGEST.fullmatch(digest) is None:
            raise NotFound(f"{digest[:80]!r} is no adapter's digest")
        directory = self.root / digest
        if not directory.is_dir():
            raise NotFound(f"adapter {digest[:12]} is not in the library; install it again")
        return directory


def _read_whole(path: Path) -> bytearray:
    try:
        with path.open("rb", buffering=0) as file:
            data = bytearray(path.stat().st_size)
            # one call reads at most 2 GiB
            view, filled = memoryview(data), 0
            while count := file.readinto(view[filled:]):
                filled += count
            view.release()
            del data[filled:]
            return data
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}. Install the adapter again.") from error


def _sha256(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()
